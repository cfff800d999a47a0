"""The adapter for cuda.core: it stores programs of any kind, and bakes them without a GPU."""

from __future__ import annotations

import importlib
import os
from typing import Any

from preheat.adapters.base import Adapter, NotKeyableError, RequiredEntries, Row, require_version
from preheat.adapters.cuda_core import compile as compiling
from preheat.adapters.cuda_core.nvrtc import compile_to_ptx
from preheat.adapters.cuda_core.request import CompileInputs, Identified
from preheat.adapters.cuda_core.rows import archs_of, changes, inputs_of_row
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
            inputs = inputs_of_row(row, each)
            found = _identified(inputs)
            entries.append(found.request)
            notes += [note for note in changes(row, inputs, found) if note not in notes]
            if make:
                _make(inputs)
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


def _identified(inputs: CompileInputs) -> Identified:
    try:
        return inputs.identified()
    except NotKeyableError as why:
        raise AdapterError(f"it cannot be stored: {why}", hint="record again") from None


def _make(inputs: CompileInputs) -> None:
    def compile_program(log: Any) -> compiling.Compiled:
        import cuda.core

        if inputs.code_type == "c++" and inputs.target == "ptx":
            # `Program` asks the driver for its version.
            return compiling.Compiled(compile_to_ptx(inputs, log))
        program = cuda.core.Program(inputs.code, inputs.code_type, inputs.options)
        return compiling.compile_with_ptx(program, inputs, log)

    compiling.obtain_code(default_builder().foreign, inputs, compile_program)
