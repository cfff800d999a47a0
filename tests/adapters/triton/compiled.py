"""Compile kernels with Triton, without a GPU, and launch their PTX on the emulator."""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

from triton import compile as compile_with_triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from preheat import Gpu

# What Triton assumes of a pointer that is a multiple of 16: it may load and store vectors.
ALIGNED = [["tt.divisibility", 16]]


class CompiledKernel(NamedTuple):
    """The PTX of a kernel, and how it has to be launched."""

    ptx: str
    name: str
    threads: int
    shared: int
    scratch_pointers: (
        int  # How many follow the parameters of the source; their number depends on Triton.
    )


class Compiler:
    """Compiles each kernel once."""

    def __init__(self) -> None:
        self._compiled: dict[str, CompiledKernel] = {}

    def __call__(
        self,
        function: Any,
        types: str,
        arch: int,
        aligned: bool,
        options: dict[str, Any],
        constants: dict[str, Any],
    ) -> CompiledKernel:
        """Return `function` compiled for constants and for other parameters of these types."""
        key = repr((function.fn, types, arch, aligned, options, constants))
        if key not in self._compiled:
            self._compiled[key] = _compile(function, types, arch, aligned, options, constants)
        return self._compiled[key]


def _compile(
    function: Any,
    types: str,
    arch: int,
    aligned: bool,
    options: dict[str, Any],
    constants: dict[str, Any],
) -> CompiledKernel:
    names = [name for name in function.arg_names if name not in constants]
    variable = dict(zip(names, types.split(), strict=True))
    signature = {name: variable.get(name, "constexpr") for name in function.arg_names}
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    attributes = {(i,): ALIGNED for i in pointers if aligned}
    made = compile_with_triton(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        # Versions of Triton differ in whether they fuse unless told.
        options={**options, "enable_fp_fusion": True},
    )
    assert made.asm["cubin"] == b"", "the assembler is not needed"
    metadata, ptx = made.metadata, made.asm["ptx"]
    assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
    scratch_pointers = _count_parameters(ptx) - len(names)
    return CompiledKernel(
        ptx, metadata.name, 32 * metadata.num_warps, metadata.shared, scratch_pointers
    )


def _count_parameters(ptx: str) -> int:
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    return entry[1].count(".param")


def without_assembling(*arguments: Any) -> tuple[str, str] | None:
    """Replace the last stage of Triton's pipeline, which runs ptxas, by one that makes nothing.

    Triton calls this hook with the stages of each compilation, and newer versions call it without
    arguments for what it adds to the key of Triton's cache.
    """
    if not arguments:
        key = "without assembling"
        return key, hashlib.sha256(key.encode()).hexdigest()
    stages = arguments[1]
    stages["cubin"] = lambda *_: b""
    return None


class Launcher(NamedTuple):
    """Compiles kernels and launches them. NumPy arrays are passed to the emulator without a copy."""

    compiler: Compiler
    gpu: Gpu
    arch: int

    def __call__(
        self,
        function: Any,
        types: str,
        grid: int | tuple[int, ...],
        *arguments: Any,
        aligned: bool = True,
        warps: int = 4,
        debug: bool = False,
        **constants: Any,
    ) -> None:
        """Launch `function`, whose parameters that are not constant have these types."""
        options = {"num_warps": warps, "debug": debug}
        compiled = self.compiler(function, types, self.arch, aligned, options, constants)
        kernel = self.gpu.kernel(compiled.ptx, compiled.name)
        scratch = [None] * compiled.scratch_pointers
        kernel.launch(*arguments, *scratch, grid=grid, block=compiled.threads, shared=compiled.shared)
