"""Error classes that inherit from preheat's and from CuPy's. Importing this module imports CuPy."""

from __future__ import annotations

from typing import Any, TypeVar

from cupy.cuda.compiler import CompileException, JitifyException
from cupy_backends.cuda.api.driver import CUDADriverError

from preheat.adapters.cupy.errors import MissingFileError
from preheat.errors import CompileError, DriverError, PreheatError, UnknownEntryError

__all__ = [
    "RawCompileError",
    "RawDriverError",
    "RawFileError",
    "RawJitifyError",
    "RawNameError",
    "RawNotFoundError",
    "compile_error",
    "driver_error",
]

E = TypeVar("E", bound=PreheatError)
_NO_SYMBOL = "CUDA_ERROR_NOT_FOUND: named symbol not found"
_NO_FILE = "CUDA_ERROR_FILE_NOT_FOUND: file not found"
_NO_NAME = "Error in parsing name expression"


class RawCompileError(CompileError, CompileException):  # type: ignore[misc]
    """The compiler rejected the source of a raw kernel."""


class RawJitifyError(RawCompileError, JitifyException):  # type: ignore[misc]
    """The compiler rejected the source of a raw kernel with `jitify=True`."""


class RawNameError(UnknownEntryError, CompileException):  # type: ignore[misc]
    """The compiler rejected a name expression of a raw module."""


class RawNotFoundError(UnknownEntryError, CUDADriverError):  # type: ignore[misc]
    """A raw module has no such kernel."""


class RawFileError(MissingFileError, CUDADriverError):  # type: ignore[misc]
    """A compiled file does not exist."""


class RawDriverError(DriverError, CUDADriverError):  # type: ignore[misc]
    """The driver refused to load a raw module."""


def compile_error(
    error: CompileError | UnknownEntryError, source: str, *, jitify: bool
) -> CompileException:
    """Return a failed compile as an error that also has CuPy's attributes."""
    made: Any
    if isinstance(error, UnknownEntryError):
        made = _as(RawNameError, error)
        made._msg, made.options = f"{_NO_NAME}: {error}", ()
    else:
        made = _as(RawJitifyError if jitify else RawCompileError, error)
        made._msg = str(error)
    made.source, made.backend = source, "nvrtc"
    made.name = error.name if isinstance(error, UnknownEntryError) else error.program
    return made


def driver_error(error: MissingFileError | UnknownEntryError | DriverError) -> CUDADriverError:
    """Return an error of a file, kernel or module as an error that is also CuPy's driver error."""
    made: Any
    if isinstance(error, DriverError):
        made = _as(RawDriverError, error)
        made.status = error.code
    elif isinstance(error, UnknownEntryError):
        made = _as(RawNotFoundError, error, _NO_SYMBOL)
        made.status = 500
    else:
        made = _as(RawFileError, error, _NO_FILE)
        made.status = 301
    return made


def _as(kind: type[E], error: PreheatError, more: str = "") -> E:
    """Return `error` as an instance of `kind`, with `more` at the end of its message."""
    made = kind.__new__(kind)
    made.args = (f"{error.args[0]} ({more})",) if more else error.args
    made.__dict__.update(error.__dict__)
    return made
