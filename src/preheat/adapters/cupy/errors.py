"""Errors of raw kernels: they are errors of preheat and, if CuPy is imported, of CuPy as well.

A program that catches `cupy.cuda.compiler.CompileException` or `cupy.cuda.driver.CUDADriverError` keeps
working. Without CuPy, they are only errors of preheat.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from preheat.errors import CompileError, DriverError, InputError, UnknownEntryError

__all__ = ["MissingFileError", "compile_errors", "load_errors"]


@contextmanager
def compile_errors(source: str, *, jitify: bool) -> Iterator[None]:
    """Raise a failed compile as an error that is also CuPy's `CompileException` or Jitify error."""
    try:
        yield
    except (CompileError, UnknownEntryError) as error:
        kinds = _cupy_kinds()
        if kinds is None:
            raise
        raise kinds.compile_error(error, source, jitify=jitify) from None


@contextmanager
def load_errors() -> Iterator[None]:
    """Raise errors of files, kernels and the driver as errors that are `CUDADriverError` as well."""
    try:
        yield
    except (MissingFileError, UnknownEntryError, DriverError) as error:
        kinds = _cupy_kinds()
        if kinds is None:
            raise
        raise kinds.driver_error(error) from None


class MissingFileError(InputError):
    """A compiled file does not exist."""


def _cupy_kinds() -> Any:
    """Return the module with the combined classes; None if the program has not imported CuPy."""
    if "cupy" not in sys.modules:
        return None
    from preheat.adapters.cupy import cupy_errors

    return cupy_errors
