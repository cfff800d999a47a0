"""The adapter for CuPy: it stores and bakes raw kernels, ufuncs, reductions and fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.adapters.base import Adapter, RequiredEntries, Row, require_version, version_note
from preheat.adapters.cupy.request import KIND
from preheat.build.builder import Builder
from preheat.errors import AdapterError
from preheat.model.arch import Arch
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.adapters.cupy import connection
else:
    connection = LazyModule("preheat.adapters.cupy.connection")  # It imports CuPy.

__all__ = ["CupyAdapter"]

_OLDEST, _NEWEST = (14, 1), (14, 2)  # of the versions that the adapter accepts; both are tested


class CupyAdapter(Adapter):
    """Replaces the function of CuPy that finds or compiles the code of a module."""

    name = KIND
    module = "cupy"
    package = "cupy-cuda13x"

    def install(self, builder: Builder) -> None:
        """Connect CuPy. Nothing here initializes CUDA: a process may import CuPy and fork later."""
        import cupy

        require_version("CuPy", cupy.__version__, _OLDEST, _NEWEST)
        if cupy.cuda.runtime.is_hip:
            raise AdapterError("CuPy for ROCm is not supported")
        connection.connect(builder.foreign)

    def required(self, row: Row, arch: Arch, coverage: str, *, make: bool) -> RequiredEntries:
        """Return the entry that a sealed process looks for first. With `make`, compile the request."""
        del coverage  # A request of CuPy has one variant.
        import cupy

        request = connection.request_of(row, arch)
        if make:
            return RequiredEntries((request.pointer, connection.connection().bake(row, arch).request))
        recorded = row["recorded"].get("cupy", cupy.__version__)
        notes = version_note("CuPy", recorded, cupy.__version__)
        return RequiredEntries((request.pointer,), tuple(notes))
