"""Numba's cache of one function on the store of preheat.

`CUDADispatcher.compile` asks a cache for a kernel by `load_overload`. On a miss it compiles, and calls
`save_overload`. Each dispatcher gets this cache when it first compiles, with and without `cache=True`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from types import FunctionType
from typing import Any

from numba.cuda.core.caching import _Cache
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.dispatcher import CUDADispatcher

from preheat.adapters.base import Compile, Connection, NotKeyableError
from preheat.adapters.numba import states
from preheat.adapters.numba.request import KernelRequest, current_arch
from preheat.build.foreign_store import ABSENT
from preheat.model.config import SealMode
from preheat.model.foreign import ForeignEntry

__all__ = ["StoreCache", "install"]


class StoreCache(_Cache):  # type: ignore[misc]
    """Finds the kernels of one function in the store, and stores them.

    A call of `compile` is in a block of `making.owned_by`, with the lock of Numba's compiler.
    """

    def __init__(
        self, connection: Connection, function: FunctionType, options: Mapping[str, Any]
    ) -> None:
        self._connection = connection
        self._store = connection.store
        self._function = function
        self._options = options
        self.making = Compile(connection)

    # What a dispatcher calls

    @property
    def cache_path(self) -> None:
        """None: the kernels of a function have no directory of their own."""
        return

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored kernel, loaded on the device; None when Numba has to compile it.

        Raises `SealedError` in a sealed process that does not have it.
        """
        del target_context  # It is needed to compile, and takes time to prepare.
        request = self.request_for(sig)
        kernel = self.find(request)
        if kernel is not None:
            kernel.bind()
        return kernel

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a kernel that Numba has compiled. If it cannot be stored, it is used nevertheless."""
        request = self.request_for(sig)
        try:
            self.keep(request, data)
        except NotKeyableError as error:
            self._report_uncached(request, str(error))
        except Exception as error:
            self._report_uncached(request, f"it cannot be written to files: {error!r:.200}")

    def _report_uncached(self, request: KernelRequest, reason: str) -> None:
        self._connection.uncached(request.unkeyed, reason)
        self.making.give_up()

    def enable(self) -> None:
        """Do nothing: the cache is in use."""

    def disable(self) -> None:
        """Do nothing: the cache stays in use."""

    def flush(self) -> None:
        """Do nothing: entries are verified and removed by the store."""

    # The store

    def request_for(self, sig: Any) -> KernelRequest:
        """Return the request for the kernel with a signature."""
        argument_types, _ = normalize_signature(sig)
        return KernelRequest(self._function, self._options, tuple(argument_types), current_arch())

    def find(self, request: KernelRequest) -> Any:
        """Return a stored kernel. On a miss, take the right to make it, and return None."""
        try:
            identity = request.identity
        except NotKeyableError as error:
            reason = f"unkeyable: {error}"
            self._connection.permit(request.unkeyed, reason)
            self.making.begin(request.unkeyed, reason)
            return None
        kernel = self._decode(request, self._store.get(identity))
        if kernel is not None:
            return kernel
        nearest, differences = self._nearest(request)
        self._connection.permit(identity, ABSENT, nearest=nearest, differences=differences)
        entry = self.making.lock(identity)
        kernel = self._decode(request, entry)
        if kernel is None:
            self.making.begin(identity)
        return kernel

    def _decode(self, request: KernelRequest, entry: ForeignEntry | None) -> Any:
        """Return the kernel of an entry, and report its use; None for an entry that holds no kernel."""
        if entry is None:
            return None
        extensions = self._options.get("extensions") or []
        try:
            kernel = states.decode(entry.files, request.argument_types, extensions)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"not a kernel of Numba: {error!r:.200}"
            self._store.events.emit("damaged", tier="store", key=entry.digest, reason=reason)
            return None
        self._connection.report(entry, request.row)
        return kernel

    def keep(self, request: KernelRequest, kernel: Any) -> None:
        """Store a kernel. Raises `NotKeyableError` when its key does not describe it."""
        identity = request.identity
        request.require_described(kernel)
        files = states.encode(kernel, request.argument_types)
        entry = self.making.made(identity, files, request.properties)
        self._connection.report(entry, request.row)

    def _nearest(self, request: KernelRequest) -> tuple[str | None, tuple[str, ...]]:
        """Return the stored kernel of the function that differs least, and how it differs."""
        if self._store.sealed is not SealMode.ERROR:
            return None, ()
        return self._connection.nearest(
            request, _signature_of, absent="nothing", distance=_differing_types
        )


def _signature_of(entry: ForeignEntry) -> str:
    return f"{entry.properties.get('signature')} for {entry.target}"


def _differing_types(there: Mapping[str, str], wanted: Mapping[str, str]) -> int:
    """Return in how many types of arguments two kernels differ."""
    types = (each.get("signature", "").split(", ") for each in (there, wanted))
    return sum(one != other for one, other in zip_longest(*types))


def install(connection: Connection) -> None:
    """Give every dispatcher a cache on the store when it compiles."""
    stock: Callable[..., Any] = CUDADispatcher.compile

    @functools.wraps(stock)
    def compile(self: Any, sig: Any) -> Any:
        with global_compiler_lock:
            if not isinstance(self._cache, StoreCache):
                self.enable_caching()
            with self._cache.making.owned_by(sys._getframe()):
                return stock(self, sig)

    def enable_caching(self: Any) -> None:
        self._cache = StoreCache(connection, self.py_func, self.targetoptions)

    CUDADispatcher.compile = compile
    CUDADispatcher.enable_caching = enable_caching
