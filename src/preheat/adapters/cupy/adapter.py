"""The adapter for CuPy: it stores and bakes raw kernels, ufuncs, reductions and fused kernels."""

from __future__ import annotations

from preheat.adapters.base import Adapter, RequiredEntries, Row, require_version
from preheat.adapters.cupy.request import KIND
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.errors import AdapterError

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
        from preheat.adapters.cupy.connection import connect

        connect(builder.foreign)

    def bake(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Compile a recorded request for `arch` into the store."""
        del coverage  # A request of CuPy has one variant.
        from preheat.adapters.cupy.compile import compiler_identity, forgo_device
        from preheat.adapters.cupy.connection import connection, request_of

        used = connection()
        forgo_device()
        request = request_of(row, arch)
        entry = used.store.obtain(
            request.entry(compiler_identity(request.backend)), lambda: used.make(request, None)
        )
        used.point_at(request, entry)
        return RequiredEntries((request.pointer, entry.request))

    def count(self, row: Row, coverage: str) -> int:
        """Return 1: a request of CuPy has one variant."""
        del row, coverage
        return 1

    def keys(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Return the entry that a sealed process looks for first. Nothing is compiled."""
        del coverage
        import cupy

        from preheat.adapters.cupy.connection import request_of

        recorded = row["recorded"].get("cupy", cupy.__version__)
        note = f"recorded with CuPy {recorded}, and this is {cupy.__version__}"
        notes = () if recorded == cupy.__version__ else (note,)
        return RequiredEntries((request_of(row, arch).pointer,), notes)
