"""What the adapter replaces in CuPy: the function that finds or compiles the code of a module."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import cupy
from cupy.cuda import compiler, device

from preheat.adapters.base import Connection as BaseConnection
from preheat.adapters.base import Row, replace_everywhere
from preheat.adapters.cupy import compile as cupy_compile
from preheat.adapters.cupy.request import KIND, CompileRequest, portable_options, variables_in_force
from preheat.build.foreign_store import ForeignStore
from preheat.model.arch import Arch
from preheat.model.config import SealMode
from preheat.model.foreign import ForeignEntry

__all__ = ["Connection", "connect", "connection", "request_of"]

_FUNCTION = "_compile_with_cache_cuda"  # Everything that CuPy compiles for CUDA goes through it.
_COMPILER = "compiler"  # the file of an entry that names the compiler

_connected: Connection | None = None


def connect(store: ForeignStore) -> None:
    """Let CuPy find and store its code in `store`."""
    global _connected
    made = Connection(store, getattr(compiler, _FUNCTION))
    replace_everywhere(("cupy",), _FUNCTION, made.stock, made.wrapped())
    _connected = made


def connection() -> Connection:
    """Return the connection of this process. The adapter is installed."""
    assert _connected is not None
    return _connected


def request_of(row: Row, arch: Arch) -> CompileRequest:
    """Return the request of a recorded row, for an architecture."""
    return CompileRequest.of_row(row, arch, cupy_compile.shipped_headers())


class Connection(BaseConnection):
    """The store, CuPy's own function `stock`, and the function that replaces it."""

    def __init__(self, store: ForeignStore, stock: Callable[..., Any]) -> None:
        super().__init__(store, cupy)
        self.stock = stock

    def wrapped(self) -> Callable[..., Any]:
        """Return a function with the arguments of CuPy's own, on the store."""

        @functools.wraps(self.stock)
        def compile_with_cache(
            source: str,
            options: tuple[str, ...],
            arch: str | None = None,
            extra_source: str | None = None,
            backend: str = "nvrtc",
            enable_cooperative_groups: bool = False,
            name_expressions: Any = None,
            log_stream: Any = None,
            cache_in_memory: bool = False,
            jitify: bool = False,
            to_ltoir: bool = False,
        ) -> Any:
            # `extra_source` is for CuPy's key, which here has the checksum of its headers instead. The
            # store has a tier in memory, and decides itself what is written to disk.
            del extra_source, cache_in_memory
            request = CompileRequest(
                source=source,
                options=portable_options(options, cupy_compile.places()),
                arch=arch or self._arch(),
                backend=backend,
                cooperative=bool(enable_cooperative_groups),
                names=tuple(name_expressions or ()),
                jitify=bool(jitify),
                lto=bool(to_ltoir),
                headers=cupy_compile.shipped_headers(),
                variables=variables_in_force(),
                release=cupy.__version__,
            )
            return cupy_compile.load(request, self.find(request, log_stream).files)

        return compile_with_cache

    def find(self, request: CompileRequest, log_stream: Any = None) -> ForeignEntry:
        """Return the entry of a request, compiled at most once in all processes."""
        request = replace(request, compiler=self._compiler(request))
        entry = self.obtain(request.identity, lambda: self.make(request, log_stream), request.row)
        if request.needs_device:  # A bake cannot repeat it, so the recording keeps both of its entries.
            names = functools.partial(_naming, entry.variant)
            self.obtain(request.pointer, names, lambda: None)
        return entry

    def bake(self, row: Row, arch: Arch) -> ForeignEntry:
        """Make the entry of a recorded row without a device."""
        cupy_compile.forgo_device()
        request = request_of(row, arch)
        request = replace(request, compiler=cupy_compile.compiler_identity(request.backend))
        entry = self.store.obtain(request.identity, lambda: self.make(request, None))
        self.point_at(request, entry)
        return entry

    def make(self, request: CompileRequest, log_stream: Any) -> Mapping[str, bytes]:
        """Compile a request, and name its compiler for processes that have none."""
        files = cupy_compile.compile_files(self.stock, request, log_stream)
        identity = cupy_compile.compiler_identity(request.backend)
        self.point_at(request, ForeignEntry(KIND, request.key, files, identity))
        return files

    def point_at(self, request: CompileRequest, entry: ForeignEntry) -> None:
        """Store which compiler made the code of a request."""
        pointer = request.pointer
        self.store.put(
            ForeignEntry(
                KIND, pointer.key, _naming(entry.variant), label=pointer.label, arch=pointer.arch
            )
        )

    def _compiler(self, request: CompileRequest) -> str:
        """Return the compiler whose code is used.

        A sealed process takes the stored code, whoever compiled it, and loads no compiler.
        """
        if self.store.sealed is not SealMode.OFF:
            found = self.store.get(request.pointer)
            if found is not None and _COMPILER in found.files:
                return str(json.loads(found.files[_COMPILER]))
        if self.store.sealed is SealMode.ERROR:
            return ""  # Then there is no code either.
        return cupy_compile.compiler_identity(request.backend)

    def _arch(self) -> str:
        """Return the architecture that CuPy compiles for on the current device."""
        if self.store.sealed is SealMode.ERROR:  # The function of CuPy would load NVRTC.
            return str(device.Device().compute_capability)
        return str(compiler._get_arch())


def _naming(identity: str) -> dict[str, bytes]:
    """Return the files of an entry that names a compiler."""
    return {_COMPILER: json.dumps(identity).encode()}
