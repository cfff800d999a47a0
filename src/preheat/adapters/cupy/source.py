"""The source of a `RawKernel` or `RawModule`, and how preheat compiles and loads it."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from preheat.adapters.cupy.errors import MissingFileError, compile_errors, load_errors
from preheat.errors import InputError
from preheat.gpu import Gpu
from preheat.linked_program import BinaryPart, LinkedProgram
from preheat.program import Program
from preheat.runtime.kernel import Kernel
from preheat.runtime.module import Module

__all__ = ["RawSource"]

_STANDARD = "--std=c++17"
# CuPy passes these to every compile; a program that is moved over computes the same numbers.
_FLUSH = "-ftz=true"
_DEVICE = "--device-as-default-execution-space"
_CUCOMPLEX = re.compile(r"^\s*#\s*include\s*<\s*cuComplex\.h\s*>.*$", re.M)
_BRIDGE = "cupy/cuComplex_bridge.h"
_COMPILED = (b"\x7fELF", b"\x50\xed\x55\xba")  # the first bytes of a cubin and of a fatbin
# Options for code that is linked with the device runtime, so that kernels can launch kernels.
_RDC = ("--device-c", "-dc", "-rdc=true", "--relocatable-device-code=true")
_DEVICE_RUNTIME = "libcudadevrt.a"
# Jitify has headers of the C++ standard library. Here those of libcu++ take their place.
_STD_HEADERS = ("cstddef", "cstdint", "limits", "tuple", "type_traits", "utility")


@dataclass(frozen=True, kw_only=True)
class RawSource:
    """CUDA C++ text or the path of a compiled file, with the arguments that CuPy's classes take."""

    code: str | None = None
    path: str | None = None
    options: tuple[str, ...] = ()
    translate_cucomplex: bool = False
    names: tuple[str, ...] | None = None
    jitify: bool = False

    def module(self, gpu: Gpu) -> Module:
        """Return the module, compiled at most once, ever, and loaded once on each device."""
        if self.path is not None:
            with load_errors():
                return gpu.module(_read(self.path))
        options = _assembled(tuple(each for each in self.options if each not in _RDC))
        with compile_errors(self.code or "", jitify=self.jitify):
            program = Program.of(
                self._text(),
                options=options,
                names=self.names,
                headers=_std_headers() if self.jitify else None,
            )
            return gpu.module(_linked(program) if {*_RDC} & {*self.options} else program)

    def kernel(self, gpu: Gpu, name: str) -> Kernel:
        """Return a kernel of the module."""
        module = self.module(gpu)
        with load_errors():
            return module[name]

    def _text(self) -> str:
        code = self.code or ""
        if not self.translate_cucomplex:
            return code
        core = _core()
        if core is None:
            raise InputError(
                "translate_cucomplex=True needs the headers of CuPy", hint="import cupy before"
            )
        # The list grows while CuPy itself translates programs.
        headers = [name for name in core._cupy_header_list if name != _BRIDGE]
        first = "".join(f"#include <{name}>\n" for name in headers)
        return first + _CUCOMPLEX.sub(f"#include <{_BRIDGE}>", code)


def _assembled(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options that CuPy would pass, with the directories of its headers if it is there."""
    core = _core()
    if core is not None:
        options = core.assemble_cupy_compiler_options(tuple(options))
    elif not any("-std=" in option for option in options):
        options = (*options, _STANDARD)
    if not any(option.lstrip("-").startswith("ftz") for option in options):
        options = (*options, _FLUSH)
    given = {option.lstrip("-") for option in options}
    if not given & {_DEVICE.lstrip("-"), "default-device"}:
        options = (*options, _DEVICE)
    return options


def _linked(program: Program) -> LinkedProgram:
    """Return a program that is linked with the device runtime of CUDA, as CuPy links it."""
    for directory in program.include:
        for name in ("lib64", "lib"):
            path = os.path.join(os.path.dirname(directory), name, _DEVICE_RUNTIME)
            if os.path.isfile(path):
                return LinkedProgram.of([program, BinaryPart.from_file(path)], label=program.label)
    raise InputError(
        f"linked code needs {_DEVICE_RUNTIME}, which is in no directory beside the CUDA headers",
        hint="pip install nvidia-cuda-runtime, and import cupy before",
    )


def _core() -> Any:
    """Return CuPy's `_core.core`, or None if the program has not imported CuPy."""
    return sys.modules.get("cupy._core.core") if "cupy" in sys.modules else None


def _std_headers() -> dict[str, str]:
    """Return headers of the standard library that include those of libcu++."""
    text = "#include <cuda/std/{}>\nnamespace std {{ using namespace cuda::std; }}\n"
    return {name: text.format(name) for name in _STD_HEADERS}


def _read(path: str) -> Any:
    """Return the content of a compiled file: a program of PTX, or the bytes of a cubin."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError as missing:
        raise MissingFileError(f"cannot read {path}: {missing.strerror}") from None
    if content.startswith(_COMPILED):
        return content
    return Program.of(content.decode(errors="replace").rstrip("\0"), language="ptx")
