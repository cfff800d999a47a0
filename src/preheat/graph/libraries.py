"""Other libraries inside a capture: their work goes to the captured stream, and their memory is kept.

A `SharedPool` is memory that they allocate inside captures, and that the graphs of these captures
share.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from preheat.devices import base
from preheat.devices.context import Context
from preheat.devices.libraries import LIBRARIES, Library, PoolId, StreamHandle, Torch, current_streams
from preheat.errors import InputError
from preheat.graph.captured_streams import check_stream, take_stream
from preheat.graph.pool import Pool
from preheat.process import fork

__all__ = ["CaptureMemory", "RedirectedLibraries", "SharedPool", "TorchPool", "capture_memory"]

_PAUSE = 0.001  # seconds between two checks whether another capture has ended


class SharedPool:
    """Memory of torch and CuPy, which graphs captured with it share. See `gpu.shared_pool`.

    A capture may use the memory that the captures before it have freed, so all graphs together need
    about as much as the largest. Therefore results are valid until the next replay of any graph of the
    pool. Replays are ordered with one another, whichever streams they are in. A capture waits until no
    other thread captures with the pool. The pool lives as long as a graph that uses it.

    Examples:
        >>> graphs = gpu.graphs(16, pool=gpu.shared_pool())
    """

    def __init__(self, context: Context, given: Any = None) -> None:
        context.require_alive()
        self.context = context
        self.uses = context.order.new_uses(context.stream)
        self._given = given  # a pool of torch, or the id of one
        self._pools: dict[Library, Any] = {}
        self._stream: base.Stream | None = take_stream(context)
        self._turn: dict[None, object] = {}  # the capture that uses the pool now
        fork.register(self)

    def redirect(self, library: Library, stack: ExitStack, index: int) -> None:
        """Send the work of a library to the stream of the pool, and its allocations to the pool."""
        pool = self._pools.get(library)
        if pool is None and isinstance(library, Torch) and self._given is not None:
            pool = library.open_pool(self._given, index)
        self._pools[library] = library.redirect(stack, StreamHandle(self.stream.handle), index, pool)

    def ranges(self) -> list[range]:
        """Return the addresses of the memory in this pool, as far as its libraries report them."""
        index = self.context.device.dlpack[1]
        pools = self._pools.items()
        return [each for library, pool in pools for each in library.pool_ranges(pool, index)]

    def record_read(self) -> None:
        """Let the next replay with this pool wait for what libraries have done in current streams.

        Examples:
            >>> pool = gpu.shared_pool()
            >>> pool.record_read()
        """
        order = self.context.order
        for handle in current_streams(self.context.device):
            with order.section(order.adopt(handle), {self.uses: True}):
                pass

    # Captures take turns.

    @property
    def stream(self) -> base.Stream:
        """The stream of its captures: torch and CuPy reuse memory only in the stream that freed it."""
        if self._stream is None:
            self._stream = take_stream(self.context)
        return self._stream

    def begin_turn(self, capture: object) -> None:
        """Wait until no other capture uses the pool."""
        while self._turn.setdefault(None, capture) is not capture:
            self.context.active_captures()  # Aborts captures that nothing can end any more.
            time.sleep(_PAUSE)

    def end_turn(self, capture: object) -> None:
        """Let other captures use the pool, if this one did."""
        if self._turn.get(None) is capture:
            if self._stream is not None and not check_stream(self.context, self._stream):
                self._stream = None  # The next capture takes another one.
            del self._turn[None]

    def after_fork(self) -> None:
        """Forget the captures of threads that a forked child does not have."""
        self._turn.clear()

    def __repr__(self) -> str:
        names = ", ".join(library.name for library in self._pools) or "no library"
        return f"<SharedPool of {names} on {self.context.device.name}>"

    def __del__(self) -> None:
        if hasattr(self, "_turn"):
            # Another library may wait for the device when its pool ends, which would invalidate
            # captures.
            held = [self._given, self._pools]
            self.context.deferred_cleanups.append(held.clear)
            if self._stream is not None:
                self.context.idle_capture_streams.append(self._stream)


class TorchPool(Protocol):
    """A `torch.cuda.MemPool`."""

    @property
    def id(self) -> PoolId:
        """The id by which torch knows the pool."""


#: What a capture may allocate from, as the caller gives it.
CaptureMemory = Pool | SharedPool | TorchPool | PoolId

_by_torch_pool: WeakKeyDictionary[Context, WeakValueDictionary[PoolId, SharedPool]] = (
    WeakKeyDictionary()
)


def capture_memory(pool: Any, context: Context) -> Pool | SharedPool | None:
    """Return what captures of `context` allocate from; `InputError` if they cannot.

    A pool of torch, or its id, is always represented by the same `SharedPool`.
    """
    if pool is None:
        return None
    if isinstance(pool, Pool | SharedPool):
        if pool.context is not context:
            raise InputError(
                f"{pool!r} does not belong to {context.device.name}, or was made before its reset",
                hint="make one on this device: gpu.pool() or gpu.shared_pool()",
            )
        return pool
    number = _torch_pool_id(pool)
    if number is None:
        raise InputError(
            f"pool={pool!r} is not a pool of memory",
            hint="pass gpu.pool(), gpu.shared_pool(), a torch.cuda.MemPool or "
            "torch.cuda.graph_pool_handle()",
        )
    known = _by_torch_pool.setdefault(context, WeakValueDictionary())
    shared_pool = known.get(number)
    if shared_pool is None:
        shared_pool = known[number] = SharedPool(context, pool)
    return shared_pool


def _torch_pool_id(pool: Any) -> PoolId | None:
    """Return the id of a pool of torch, given as the pool or as its id; None for anything else."""
    number = pool if isinstance(pool, tuple) else getattr(pool, "id", None)
    if isinstance(number, tuple) and len(number) == 2 and all(type(each) is int for each in number):
        return number
    return None


class RedirectedLibraries:
    """Directs torch and CuPy to the captured stream during a capture.

    Each library allocates from its own memory pool meanwhile, or from a `shared_pool` one. Memory that
    was allocated inside is not handed out again as long as the pool is kept, except to captures that
    share it. CuPy can allocate only in a relaxed capture.
    """

    def __init__(
        self, device: base.Device, stream: base.Stream, shared_pool: SharedPool | None = None
    ) -> None:
        self.pools: dict[Library, object] = {}
        self.shared_pool = shared_pool
        self._redirected: set[Library] = set()
        self._device = device.dlpack
        self._handle = stream.handle
        self._stack = ExitStack()

    @property
    def names(self) -> set[str]:
        """Return the names of the libraries that were directed to the captured stream."""
        return {library.name for library in self._redirected}

    def enter(self) -> None:
        """Direct every loaded library of this device to the captured stream."""
        place, index = self._device
        for library in LIBRARIES.values():
            if library.can_redirect and library.device_type == place and library.is_initialized():
                self._redirected.add(library)
                if self.shared_pool is not None:
                    self.shared_pool.redirect(library, self._stack, index)
                else:
                    pool = library.redirect(self._stack, StreamHandle(self._handle), index)
                    self.pools[library] = pool

    def leave(self) -> None:
        """Let the libraries work in their own streams again."""
        self._stack.close()

    def take_pools(self) -> tuple[object, ...]:
        """Return the pools. From here on the caller keeps them."""
        pools = tuple(self.pools.values()) if self.shared_pool is None else (self.shared_pool,)
        self.pools = {}
        return pools

    def return_pools(self) -> None:
        """Return unused pools to their libraries, for the next capture."""
        for library, pool in self.pools.items():
            if isinstance(library, Torch):
                library.keep_unused_pool(pool, self._device[1])
        self.pools = {}
