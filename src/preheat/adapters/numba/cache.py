"""Numba's cache of one function on the store of preheat.

`CUDADispatcher.compile` asks a cache for a kernel by `load_overload`. On a miss it compiles, and calls
`save_overload`. Each dispatcher gets this cache when it first compiles, with and without `cache=True`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from types import FrameType, FunctionType
from typing import Any

import numba
import numba_cuda
from numba.cuda.core.caching import _Cache
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.dispatcher import CUDADispatcher

from preheat.adapters.base import directory_of
from preheat.adapters.numba import states
from preheat.adapters.numba.request import KIND, KernelRequest, current_arch
from preheat.adapters.numba.rows import row_of
from preheat.adapters.numba.signature import UnkeyableError
from preheat.build.compile_lock import CompileLock
from preheat.build.foreign_store import ABSENT, ForeignStore, created_now
from preheat.callsite import call_site, format_site
from preheat.config import SealMode
from preheat.foreign import ForeignEntry, ForeignRequest

__all__ = ["StoreCache", "install"]


class StoreCache(_Cache):  # type: ignore[misc]
    """Finds the kernels of one function in the store, and stores them.

    A call of `compile` is between `begin` and `end`, with the lock of Numba's compiler.
    """

    def __init__(self, store: ForeignStore, function: FunctionType, options: Mapping[str, Any]) -> None:
        self._store = store
        self._function = function
        self._options = options
        self._owner: FrameType | None = None
        self._compile_lock: CompileLock | None = None
        self._started = 0.0

    def begin(self, owner: FrameType) -> None:
        """Let the next lock belong to the call of the frame `owner`."""
        self._owner = owner

    def end(self) -> None:
        """Release the lock that was taken since `begin`."""
        lock, self._compile_lock, self._owner = self._compile_lock, None, None
        if lock is not None:
            lock.release()

    def give_up(self) -> None:
        """Give up the lock that was taken since `begin`, because there will be no entry."""
        if self._compile_lock is not None:
            self._compile_lock.give_up()

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
        except UnkeyableError as error:
            self._report_uncached(request, str(error))
        except Exception as error:
            self._report_uncached(request, f"it cannot be written to files: {error!r:.200}")

    def _report_uncached(self, request: KernelRequest, reason: str) -> None:
        unkeyed = request.unkeyed
        self._store.events.emit("uncached", program=unkeyed.title, arch=unkeyed.target, reason=reason)
        self.give_up()

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
        except UnkeyableError as error:
            reason = f"unkeyable: {error}"
            self._store.permit(request.unkeyed, reason, called_by=_caller)
            self._begin_compile(request.unkeyed, reason)
            return None
        kernel = self._decoded(request, self._store.get(identity))
        if kernel is not None:
            return kernel
        nearest, differences = self._nearest(request)
        self._store.permit(
            identity, ABSENT, called_by=_caller, nearest=nearest, differences=differences
        )
        self._compile_lock, entry = self._store.lock(identity, self._owner or sys._getframe())
        kernel = self._decoded(request, entry)
        if kernel is None:
            self._begin_compile(identity, ABSENT)
        return kernel

    def _begin_compile(self, request: ForeignRequest, reason: str) -> None:
        self._store.missed(request, reason, called_by=_caller)
        self._started = time.perf_counter()

    def _decoded(self, request: KernelRequest, entry: ForeignEntry | None) -> Any:
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
        self._report(request, entry)
        return kernel

    def keep(self, request: KernelRequest, kernel: Any) -> None:
        """Store a kernel. Raises `UnkeyableError` when its key does not describe it."""
        identity = request.identity
        request.require_described(kernel)
        entry = ForeignEntry(
            KIND, identity.key, states.encode(kernel, request.argument_types), label=identity.label,
            arch=identity.arch, properties=request.properties,
            provenance=created_now(time.perf_counter() - self._started),
        )  # fmt: skip
        self._store.made(entry)
        self._report(request, entry)

    def _report(self, request: KernelRequest, entry: ForeignEntry) -> None:
        if self._store.events.has_sink("foreign_request"):
            site = call_site(*_libraries())
            self._store.events.emit("foreign_request", entry=entry, row=row_of(request), site=site)

    def _nearest(self, request: KernelRequest) -> tuple[str | None, tuple[str, ...]]:
        """Return the stored kernel of the function that differs least, and how it differs."""
        if self._store.sealed is not SealMode.ERROR:
            return None, ()
        wanted = {"arch": str(request.arch), **request.properties}
        there = [
            {"arch": entry.target, **entry.properties}
            for entry in self._store.all(KIND)
            if entry.label == request.identity.label
        ]
        if not there:
            return None, ()
        best = min(there, key=lambda each: (_distance(each, wanted), sorted(each.items())))
        return f"{best.get('signature')} for {best['arch']}", tuple(_differences(best, wanted))


def _distance(there: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[int, int]:
    """Return in how many parts two kernels differ, and in how many types of arguments."""
    types = (each.get("signature", "").split(", ") for each in (there, wanted))
    differing = sum(one != other for one, other in zip_longest(*types))
    return len([*_differences(there, wanted)]), differing


def _differences(there: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for name in {**there, **wanted}:
        if there.get(name) != wanted.get(name):
            yield f"{name}: {there.get(name, 'nothing')} became {wanted.get(name, 'nothing')}"


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the directories of Numba, whose lines are not those of the program."""
    return directory_of(numba), directory_of(numba_cuda)


def _caller() -> str:
    return format_site(call_site(*_libraries()))


def install(store: ForeignStore) -> None:
    """Give every dispatcher a cache on the store when it compiles."""
    stock: Callable[..., Any] = CUDADispatcher.compile

    @functools.wraps(stock)
    def compile(self: Any, sig: Any) -> Any:
        with global_compiler_lock:
            if not isinstance(self._cache, StoreCache):
                self.enable_caching()
            self._cache.begin(sys._getframe())
            try:
                return stock(self, sig)
            except Exception:
                self._cache.give_up()
                raise
            finally:
                self._cache.end()

    def enable_caching(self: Any) -> None:
        self._cache = StoreCache(store, self.py_func, self.targetoptions)

    CUDADispatcher.compile = compile
    CUDADispatcher.enable_caching = enable_caching
