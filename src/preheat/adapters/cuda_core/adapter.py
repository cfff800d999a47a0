"""The adapter for cuda.core: it stores programs of any kind, and bakes them without a GPU."""

from __future__ import annotations

import importlib
import os
from typing import Any

from preheat.adapters.base import (
    Adapter,
    NotKeyableError,
    RequiredEntries,
    Row,
    require_version,
)
from preheat.adapters.cuda_core import compile as compiling
from preheat.adapters.cuda_core.nvrtc import compile_to_ptx
from preheat.adapters.cuda_core.request import CompileRequest
from preheat.adapters.cuda_core.rows import archs_of, changes, request_of
from preheat.build.builder import Builder
from preheat.build.default import default_builder
from preheat.errors import AdapterError, InputError
from preheat.model.arch import Arch

__all__ = ["CudaCoreAdapter", "require_cuda_core"]

_OLDEST, _NEWEST = (1, 0), (1, 2)  # of the versions that the adapter accepts; both are tested


def require_cuda_core() -> None:
    """Import cuda.core. Raises unless it is installed, in a version that the adapter knows."""
    try:
        library = importlib.import_module("cuda.core")
    except ModuleNotFoundError as missing:
        raise InputError(
            f"cuda.core is not installed: {missing}", hint="pip install cuda-core"
        ) from None
    require_version("cuda.core", library.__version__, _OLDEST, _NEWEST)


class CudaCoreAdapter(Adapter):
    """Lets every `Program.compile` of cuda.core use the store."""

    name = "cuda_core"
    module = "cuda.core"
    package = "cuda-core"

    def install(self, builder: Builder) -> None:
        """Connect cuda.core. Programs that exist already are included."""
        require_cuda_core()
        compiling.use_for_programs(builder.foreign)

    def required(self, row: Row, arch: Arch, coverage: str, *, make: bool) -> RequiredEntries:
        """Return the entries of a recorded program for `arch`, and compile it. It has no variants."""
        del coverage
        _enter(row["root"])
        entries, notes = [], []
        for each in archs_of(row, arch):
            request = request_of(row, each)
            try:
                entries.append(request.identity)
            except NotKeyableError as error:
                raise AdapterError(f"it cannot be stored: {error}", hint="record again") from None
            notes += [note for note in changes(row, request) if note not in notes]
            if make:
                _make(request)
        return RequiredEntries(tuple(entries), tuple(notes))


def _enter(root: str) -> None:
    """Make the directory of the recording the current one: includes may be relative to it."""
    if not root:
        return
    try:
        os.chdir(root)
    except OSError as fault:
        raise AdapterError(
            f"the program includes files from {root}: {fault.strerror}",
            hint="put the headers beside the manifest, in the place that they have in the recording",
        ) from None


def _make(request: CompileRequest) -> None:
    def compile_program(log: Any) -> compiling.Compiled:
        import cuda.core

        if request.code_type == "c++" and request.target == "ptx":
            # `Program` asks the driver for its version.
            return compiling.Compiled(compile_to_ptx(request, log))
        program = cuda.core.Program(request.code, request.code_type, request.options)
        return compiling.compile_with_ptx(program, request, log)

    compiling.obtain_code(default_builder().foreign, request, compile_program)
