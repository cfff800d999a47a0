"""The source of a `RawKernel` or `RawModule`, and how preheat compiles and loads it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from preheat.adapters.cupy.errors import MissingFileError, compile_errors, load_errors
from preheat.errors import InputError
from preheat.gpu import Gpu
from preheat.program import Program
from preheat.runtime.kernel import Kernel, Module

__all__ = ["RawSource"]

_STANDARD = "--std=c++17"
# CuPy passes these to every compile; a program that is moved over computes the same numbers.
_FLUSH = "-ftz=true"
_DEVICE = "--device-as-default-execution-space"
_CUCOMPLEX = re.compile(r"^\s*#\s*include\s*<\s*cuComplex\.h\s*>.*$", re.M)
_BRIDGE = "cupy/cuComplex_bridge.h"
_COMPILED = (b"\x7fELF", b"\x50\xed\x55\xba")  # the first bytes of a cubin and of a fatbin
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
        with compile_errors(self.code or "", jitify=self.jitify):
            return gpu.module(
                self._text(),
                options=_assembled(self.options),
                names=self.names,
                headers=_std_headers() if self.jitify else None,
            )

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


def _core() -> Any:
    """Return CuPy's `_core.core`, or None where the program has not imported CuPy."""
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
