"""Libraries that compile code of a program inside themselves, and the hooks that see them do it.

A process that maps a library without a hook may have compiled anything. The report lists the library as
not seen, and the verdict is not positive.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from preheat.audit.events import Event, EventLog
from preheat.errors import InputError
from preheat.process.messages import did_you_mean

__all__ = [
    "COMPILER_LIBRARIES",
    "CompilerLibrary",
    "MappedLibrary",
    "SeenBy",
    "file_patterns",
    "library_at",
    "mapped_libraries",
    "require_names",
]


class SeenBy(Enum):
    """What sees the compiles of a library."""

    NOTHING = "nothing"
    FUNCTIONS = "functions"  # its own, which `compile_hooks.py` wraps when Python imports them
    AUDIT_LIBRARY = "audit library"  # it calls NVRTC and the like, or starts compilers


@dataclass(frozen=True)
class CompilerLibrary:
    """A library with a compiler inside.

    `files` are patterns of names, or of the ends of paths, with at most one star. `compiles` says what
    it makes. `shown_by` names the program that showed that it compiles in the process, or the other
    evidence.
    """

    name: str
    files: tuple[str, ...]
    compiles: str
    shown_by: str
    seen_by: SeenBy = SeenBy.NOTHING

    def has(self, path: str) -> bool:
        """Return whether a file is this library."""
        return any(fnmatchcase(f"/{path}", f"*/{pattern}") for pattern in self.files)


#: The first row that has a file is the one that counts.
COMPILER_LIBRARIES = (
    CompilerLibrary(
        "CuTe",
        ("_cutlass_ir*.so",),
        "CuTe DSL: GPU code, and the host code that launches it",
        "`cute.compile`, nvidia-cutlass-dsl 4.8.1",
        SeenBy.FUNCTIONS,
    ),
    CompilerLibrary(
        "Warp",
        ("warp.so", "warp-clang.so"),
        "GPU code by its own NVRTC, host code by its own clang",
        "`wp.launch` on the CPU and `wp.compile_aot_module`, warp-lang 1.19.0",
        SeenBy.FUNCTIONS,
    ),
    CompilerLibrary(
        "Numba",
        ("libllvmlite.so",),
        "host code of `@njit` by its LLVM; libNVVM compiles its GPU code",
        "`@njit`, numba 0.68",
        SeenBy.FUNCTIONS,
    ),
    CompilerLibrary(
        "TileLang",
        ("tilelang/lib/libtvm_compiler.so",),
        "CUDA source, which nvcc, NVRTC or g++ compile",
        "symbols of tilelang 0.1.15, whose TVM has no LLVM; not run",
        SeenBy.AUDIT_LIBRARY,
    ),
    CompilerLibrary(
        "torch",
        ("libcaffe2_nvrtc.so",),
        "GPU code by NVRTC, against which it is linked",
        "a call of the compile function in the table of functions of torch 2.15.0",
        SeenBy.AUDIT_LIBRARY,
    ),
    CompilerLibrary(
        "libmathdx",
        ("libmathdx.so*",),
        "GPU code by NVRTC, against which it is linked",
        "symbols of nvidia-libmathdx-cu13 0.4; not run",
        SeenBy.AUDIT_LIBRARY,
    ),
    CompilerLibrary(
        "XLA",
        (
            "libjax_common.so", "xla_extension.so", "xla_cuda_plugin.so", "_mosaic_gpu_ext.so",
            "libtensorflow_cc.so*", "_pywrap_tensorflow_internal.so", "_XLAC*.so",
        ),
        "JAX, TensorFlow and torch_xla: GPU and host code",
        "`jax.jit` on the CPU, jaxlib 0.10.2; its other files were not run",
    ),
    CompilerLibrary(
        "TVM",
        ("libtvm_compiler.so", "libtvm.so"),
        "GPU and host code by its own LLVM",
        '`tvm.compile(…, target="llvm")`, apache-tvm 0.27',
    ),
    CompilerLibrary(
        "Taichi",
        ("taichi_python*.so", "libtaichi_c_api.so"),
        "GPU and host code by its own LLVM",
        "a kernel on `ti.cpu`, taichi 1.7.4",
    ),
    CompilerLibrary(
        "Halide",
        ("libHalide.so*",),
        "GPU and host code by its own LLVM",
        "`Func.realize`, halide 21.0",
    ),
    CompilerLibrary(
        "IREE",
        ("libIREECompiler.so*",),
        "GPU and host code by its own LLVM",
        "`iree.compiler.api.Session`, iree-base-compiler 3.13",
    ),
    CompilerLibrary(
        "DrJit",
        ("libdrjit-core.so*",),
        "host code by libLLVM; its GPU code is PTX, which the driver compiles",
        "`drjit.llvm.Float`, drjit 1.5",
    ),
    CompilerLibrary(
        "Cling",
        ("libCling.so*", "libclangInterpreter.so*"),
        "host and CUDA code of cppyy and ROOT",
        "`cppyy.cppdef`, cppyy-cling 6.32",
    ),
    CompilerLibrary(
        "Julia",
        ("libjulia-codegen.so*",),
        "host code, and GPU code of CUDA.jl, by its own LLVM",
        "the documentation of Julia; not run",
    ),
    CompilerLibrary(
        "MAX",
        ("libmax.so*", "libMGPRT.so*"),
        "GPU and host code of MAX graphs and Mojo by its own LLVM",
        "symbols of max-core 26.7; not run",
    ),
    CompilerLibrary(
        "cuDNN",
        ("libcudnn_engines_runtime_compiled.so*", "libcudnn_engines_tensor_ir.so*"),
        "GPU code of fused operations by its own ptxas; cuDNN loads these files when it needs them",
        "symbols of nvidia-cudnn-cu13 9.27; not run",
    ),
    CompilerLibrary(
        "TensorRT",
        ("libnvinfer.so*", "libtensorrt_rtx.so*"),
        "GPU code of the engines that it builds",
        "the documentation of TensorRT; not run",
    ),
    CompilerLibrary(
        "OptiX",
        ("libnvoptix.so*",),
        "GPU code of `optixModuleCreate`",
        "the documentation of OptiX; not run",
    ),
    CompilerLibrary(
        "OpenCL",
        ("libnvidia-opencl.so*", "libpocl.so*"),
        "GPU or host code of `clBuildProgram`",
        "the documentation of OpenCL; not run",
    ),
)  # fmt: skip


def library_at(path: str) -> CompilerLibrary | None:
    """Return the row of a file, or None."""
    return next((row for row in COMPILER_LIBRARIES if row.has(path)), None)


def file_patterns() -> str:
    """Return the patterns of the names of all files, separated by colons, for the audit library."""
    patterns = (os.path.basename(pattern) for row in COMPILER_LIBRARIES for pattern in row.files)
    return ":".join(dict.fromkeys(patterns))


def require_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names as the table has them. Raises `InputError` for one that it does not have."""
    known = {row.name.lower(): row.name for row in COMPILER_LIBRARIES}
    for name in names:
        if name.lower() not in known:
            raise InputError(
                f"preheat knows no compiler inside a library that is named {name!r}",
                hint=did_you_mean(name, tuple(known.values())),
            )
    return tuple(dict.fromkeys(known[name.lower()] for name in names))


@dataclass(frozen=True)
class MappedLibrary:
    """A file with a compiler that processes have mapped. `why` is empty if its compiles were seen."""

    name: str
    path: str
    why: str
    processes: tuple[int, ...]

    def __str__(self) -> str:
        number = len(self.processes)
        where = f"process {self.processes[0]}" if number == 1 else f"{number:,} processes"
        return f"compiles by {self.name}: {where} loaded {os.path.basename(self.path)}, and {self.why}"

    def json(self, allowed: Collection[str]) -> dict[str, Any]:
        """Return it as JSON values. `allowed` has the names of libraries that need not be seen."""
        return {
            "name": self.name,
            "path": self.path,
            "processes": list(self.processes),
            "seen": not self.why,
            "why": self.why,
            "allowed": self.name in allowed,
        }


def mapped_libraries(log: EventLog) -> tuple[MappedLibrary, ...]:
    """Return the libraries of the table that the processes of a command have mapped."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for event in log.named("library"):
        path = event.text("path")
        row = library_at(path) or library_at(event.text("name"))
        if row is not None:
            found.setdefault((row.name, path, _why_unseen(row, event, log)), set()).add(event.pid)
    return tuple(MappedLibrary(*key, tuple(sorted(pids))) for key, pids in sorted(found.items()))


def _why_unseen(row: CompilerLibrary, mapped: Event, log: EventLog) -> str:
    """Return why nothing sees the compiles of a library that a process has mapped; empty if it is seen.

    Functions may be wrapped after the library is mapped. A process may also wrap them and fork, and its
    child maps the library.
    """
    if row.seen_by is SeenBy.AUDIT_LIBRARY:
        return ""
    if row.seen_by is SeenBy.NOTHING:
        return "there is no hook for it"
    for failed in _of_program(mapped, row, "unhooked", log):
        return f"its functions were not wrapped: {failed.text('why')}"
    if row.name in mapped.text("hooks").split(",") or any(_of_program(mapped, row, "hooked", log)):
        return ""
    return "its functions were not wrapped in that process"


def _of_program(mapped: Event, row: CompilerLibrary, name: str, log: EventLog) -> Iterator[Event]:
    """Yield the events about a library from the program that has mapped it."""
    started = _start_of(mapped, log)
    for event in log.named(name):
        is_mine = event.pid == mapped.pid and event.text("compiler") == row.name
        if is_mine and _start_of(event, log) == started:
            yield event


def _start_of(event: Event, log: EventLog) -> float:
    """Return when the program started that wrote an event. A process may execute several programs."""
    return max(
        (
            each.time
            for each in log.named("process")
            if each.pid == event.pid and each.time <= event.time
        ),
        default=0.0,
    )
