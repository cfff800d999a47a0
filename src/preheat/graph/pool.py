"""Memory for captures: allocated before the capture, handed out inside it without a driver call.

Pool             what users hold: arrays, room for captures, frames
  Arena            blocks of device memory, and the spans of them that are free (arena.py)
    PoolBuffer       a span that an array has; it comes back when the array is dropped or closed
  ScratchStack     memory that every frame hands out from the beginning (frames.py)
    ScratchBuffer    a span that the arrays of a frame have
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from preheat.devices.active_capture import ALLOCATE, FREE, FROM_HOST, MEASURE_POOL, ActiveCapture
from preheat.devices.array import Array
from preheat.devices.context import Context
from preheat.devices.host import host_array, integer, shape_of
from preheat.errors import CaptureError, InputError, OutOfMemoryError, PoolSealedError
from preheat.graph.arena import Arena, PoolBuffer, Span
from preheat.graph.frames import Frame, ScratchStack
from preheat.model.dtypes import dtype_of
from preheat.model.tracebacks import short_methods
from preheat.process import fork
from preheat.process.callsite import caller

__all__ = ["Pool"]

_RECREATE = "make the pool again: gpu.pool(…)"
_ALIGN = 256
_MIN_BLOCK = 2 << 20  # the least that a pool grows by when it grows by itself


@short_methods(without={"admit_capture", "after_fork", "frame"})
class Pool:
    """Device memory that is allocated before a capture and handed out inside it. See `gpu.pool`.

    With `gpu.capture(pool=pool)` all new arrays of the body come from the pool, including those of
    `gpu.empty(…)`. Dropping or closing an array returns its memory to the pool. The pool frees its
    blocks once neither the pool nor an array from it is left. A request gets the first place where it
    fits, so the same requests get the same addresses again.

    Outside a capture the pool grows by itself. Inside a capture it cannot grow: a request that does not
    fit raises `CaptureError`, and the pool makes more room for the next try. Memory that was used in
    another stream is handed out again in order with that use. Pools are safe from any thread.

    Examples:
        >>> pool = gpu.pool()
        >>> def step():
        ...     return pool.empty(1024).fill(1)
        >>> size = pool.measure(step)  # runs step() once, and makes room for a capture of it
        >>> with gpu.capture() as graph:
        ...     result = step()
        >>> graph.replay()
        >>> result[:2].numpy()
        array([1., 1.], dtype=float32)
    """

    def __init__(self, context: Context, size: int | None = None) -> None:
        context.require_alive()
        self.context = self._context = context
        self._lock = threading.Lock()
        self._arena = Arena(context)
        self._scratch = ScratchStack(context.order, context.order.new_uses(context.stream))
        self._buffers: weakref.WeakSet[PoolBuffer] = weakref.WeakSet()
        self._taken = 0  # bytes handed out, including returned bytes that are not reclaimed
        self._peak = 0
        self._measuring = 0  # calls of `measure` that are running
        self._requested: weakref.WeakKeyDictionary[ActiveCapture, int] = weakref.WeakKeyDictionary()
        self._missing = 0  # contiguous bytes that the last capture lacked
        self._sealed = False
        self._closed = False
        fork.register(self)
        if size is not None:
            self.reserve(size)

    def after_fork(self) -> None:
        """Renew the lock in a forked child, where no thread is inside the pool."""
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes allocated from the device."""
        with self._lock:
            return self._arena.size

    @property
    def used(self) -> int:
        """Bytes handed out and not returned. Scratch memory counts from its first frame on."""
        with self._lock:
            return self._used()

    @property
    def peak(self) -> int:
        """The largest value that `used` has had."""
        return self._peak

    @property
    def sealed(self) -> bool:
        """True while the pool hands out nothing."""
        return self._sealed

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ", sealed" if self._sealed else ""
        return f"<Pool {self.used:,} of {self.size:,} bytes on {self._context.device.name}{state}>"

    # Handing out

    def empty(self, shape: object, dtype: object = "float32") -> Array:
        """Return an array from the pool, with undefined contents.

        Raises:
            CaptureError: The array does not fit, and a capture is open.
            PoolSealedError: The pool is sealed.

        Examples:
            >>> gpu.pool().empty((2, 3)).shape
            (2, 3)
        """
        extents = shape_of(shape)
        kind = dtype_of(dtype)
        size = math.prod(extents) * kind.size
        self._context.require_alive(_RECREATE)
        capture = self._context.active_capture()
        with nullcontext() if capture is None else capture.operation():
            return Array(self._buffer(size, capture), kind, extents)

    def zeros(self, shape: object, dtype: object = "float32") -> Array:
        """Return an array of zeros. Inside a capture, every replay sets it to zero again.

        Raises:
            CaptureError: The array does not fit, and a capture is open.
            PoolSealedError: The pool is sealed.

        Examples:
            >>> gpu.pool().zeros(2).numpy()
            array([0., 0.], dtype=float32)
        """
        return self.empty(shape, dtype).fill(0)

    def array(self, data: object, dtype: object = None) -> Array:
        """Return a copy of an array of this device or, outside a capture, of host data.

        Raises:
            CaptureError: The array does not fit, or is on the host, and a capture is open.
            PoolSealedError: The pool is sealed.

        Examples:
            >>> gpu.pool().array([1, 2], "float32").numpy()
            array([1., 2.], dtype=float32)
        """
        wanted = None if dtype is None else dtype_of(dtype)
        if isinstance(data, Array):
            if wanted not in (None, data.dtype):
                raise InputError(f"{data!r} cannot be copied as {wanted}")
            return self.empty(data.shape, data.dtype).copy_from(data)
        self._context.refuse_in_capture(FROM_HOST)
        host = host_array(data, wanted)
        return self.empty(host.shape, wanted or dtype_of(host.dtype)).write(host)

    def _buffer(self, size: int, capture: ActiveCapture | None) -> PoolBuffer:
        need = _aligned(size)
        with self._lock:
            self._require_unsealed(f"{need:,} bytes were requested")
            self._reclaim()
            self._add_missing()
            frame = self._scratch.current()
            buffer = (
                PoolBuffer(self._take(need, capture), size, self._arena.returned)
                if frame is None
                else self._scratch_buffer(frame, need, size, capture)
            )
            self._buffers.add(buffer)
            return buffer

    def _scratch_buffer(
        self, frame: Frame, need: int, size: int, capture: ActiveCapture | None
    ) -> PoolBuffer:
        captured = capture is not None
        while (buffer := self._scratch.take(frame, need, size, captured=captured)) is None:
            self._scratch.extend(self._more_scratch(need, capture))
            # The pool's stream has waited for earlier uses of the span; scratch memory waits for it.
            self._context.order.add_pending_reader(self._scratch.uses, self._context.stream)
        return buffer

    def _more_scratch(self, need: int, capture: ActiveCapture | None) -> Span:
        """Take what the last span of scratch memory lacks, if that is free, or a whole new span."""
        if self._scratch.spans:
            lacking = need - self._scratch.unused
            span = self._arena.free.take(lacking, after=self._scratch.spans[-1])
            if span is not None:
                self._count_taken(lacking, capture)
                return span
        return self._take(need, capture)

    def _take(self, size: int, capture: ActiveCapture | None) -> Span:
        span = self._arena.free.take(size)
        if span is None and capture is not None:
            raise self._no_room_error(size, capture)
        if span is None:
            self._arena.grow(max(size, _MIN_BLOCK))
            return self._take(size, capture)
        self._count_taken(size, capture)
        return span

    def _count_taken(self, size: int, capture: ActiveCapture | None) -> None:
        if capture is not None:
            self._requested[capture] = self._requested.get(capture, 0) + size
        self._taken += size
        self._peak = max(self._peak, self._used())

    def _used(self) -> int:
        return self._taken - self._arena.returned_bytes

    def _no_room_error(self, size: int, capture: ActiveCapture) -> CaptureError:
        # It is unknown how much more the body needs, so the next attempt gets twice as much.
        self._missing = max(self._missing, 2 * (self._requested.get(capture, 0) + size))
        free = self._arena.free
        return CaptureError(
            f"the pool has no room: {size:,} bytes were requested inside a capture, "
            f"and {free.largest:,} of {free.size:,} free bytes are contiguous",
            where=caller(),
            hint=f"right before each capture: pool.measure(body), or pool.reserve({size})",
        )

    def _require_unsealed(
        self, wanted: str, *, hint: str = "take it before pool.seal(), or pool.unseal()"
    ) -> None:
        self._require_open(wanted)
        if self._sealed:
            raise PoolSealedError(f"the pool is sealed: {wanted}", hint=hint)

    def _require_open(self, wanted: str) -> None:
        self._context.require_alive(_RECREATE)
        if self._closed:
            raise InputError(f"this pool is closed: {wanted}")

    # Room

    def admit_capture(self) -> None:
        """Raise if a capture with this pool cannot begin; make the room that an earlier one lacked."""
        with self._lock:
            self._require_unsealed(
                "a capture that allocates from it cannot begin",
                hint="pool.unseal() before the capture; without pool=, a capture may use arrays that "
                "the pool has handed out already",
            )
            self._reclaim()
            self._add_missing()

    def reserve(self, nbytes: int) -> None:
        """Make sure that this many contiguous bytes are free. Unused blocks are freed to make room.

        Raises:
            OutOfMemoryError: The device does not have enough memory.

        Examples:
            >>> pool = gpu.pool()
            >>> pool.reserve(1 << 20)
            >>> pool.size >= 1 << 20
            True
        """
        need = _aligned(integer(nbytes, "a number of bytes", least=0))
        with self._lock:
            self._require_unsealed(f"{need:,} bytes cannot be reserved")
            self._reclaim()
            if self._arena.free.largest >= need:
                return
            self._context.refuse_in_capture(ALLOCATE)
            self._arena.shrink()
            self._arena.grow(need)

    def _reclaim(self) -> None:
        """Reuse returned memory, except while a body is measured: a graph would keep the memory."""
        if not self._measuring:
            self._taken -= self._arena.reclaim()

    def _add_missing(self) -> None:
        """Outside captures, make the room that an earlier capture lacked, as far as memory permits."""
        if self._missing and not self._context.captures_by_thread:
            missing = self._missing
            self._missing = 0
            if missing > self._arena.free.largest:
                self._arena.shrink()
                with suppress(OutOfMemoryError):  # Then the next capture raises again.
                    self._arena.grow(missing)

    def measure(self, body: Callable[[], object]) -> int:
        """Run `body` once, make room for a capture of it, and return the bytes that it took.

        The room is for the next capture: measure another body after that. As in a capture with this
        pool, all new arrays of `body` come from the pool. Memory that `body` drops is not handed out
        again while it runs, because a graph would keep it. Memory that other threads take meanwhile is
        counted too.

        Examples:
            >>> pool = gpu.pool()
            >>> pool.measure(lambda: gpu.empty(1024).fill(1)) >= 4096
            True
        """
        self._context.refuse_in_capture(MEASURE_POOL)
        with self._lock:
            self._require_unsealed("a body cannot be measured")
            self._reclaim()
            self._measuring += 1
            taken = self._taken
            scratch = self._scratch.size
        of_thread = self._context.thread_state
        before = of_thread.allocator
        of_thread.allocator = self
        try:
            body()
        finally:
            of_thread.allocator = before
            with self._lock:
                self._measuring -= 1
                taken = self._taken - taken
                scratch = self._scratch.size - scratch
        if taken > scratch:
            self.reserve(taken - scratch)
        return taken

    def seal(self) -> None:
        """Let requests raise `PoolSealedError` from here on. Existing arrays stay valid.

        This is independent of the seal of the process, which is about compiling.

        Examples:
            >>> pool = gpu.pool(4096)
            >>> pool.seal()
            >>> pool.empty(4)
            Traceback (most recent call last):
            preheat.errors.PoolSealedError: ...
        """
        self._sealed = True

    def unseal(self) -> None:
        """Hand out memory again.

        Examples:
            >>> pool = gpu.pool(4096)
            >>> pool.seal()
            >>> pool.unseal()
            >>> pool.sealed
            False
        """
        self._sealed = False

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Hand out scratch memory to this thread. Every frame begins at the same address.

        Graphs captured in frames share that memory, so graphs for many shapes need no more than the
        largest one, which is best captured first. The graphs stay valid and keep the memory. Arrays
        expire at the end of their frame, and their content does not survive from one replay to the
        next. A frame may be inside a capture or around it. A frame inside another frame does not use
        the memory of the outer frame. While a frame is open outside a capture, replays of graphs that
        would overwrite its arrays raise `GraphError`.

        Examples:
            >>> pool, out = gpu.pool(1 << 16), gpu.zeros(4)
            >>> with gpu.capture() as graph, pool.frame():
            ...     out = out.copy_from(pool.empty(4).fill(2))
            >>> graph.replay()
            >>> out.numpy()
            array([2., 2., 2., 2.], dtype=float32)
        """
        with self._lock:
            self._require_open("a frame cannot begin")
            frame = self._scratch.begin(captured=self._context.active_capture() is not None)
        try:
            yield
        finally:
            with self._lock:
                self._scratch.end(frame)

    # End

    def close(self) -> None:
        """Free everything after the work that is queued now. Closing a pool twice is allowed.

        Arrays from the pool are closed with it, and graphs that use them become stale.

        Examples:
            >>> pool = gpu.pool(4096)
            >>> pool.close()
        """
        if not self._closed:
            self._context.refuse_in_capture(FREE)
        with self._lock:
            self._closed = True
            buffers = [*self._buffers, *self._arena.blocks]
            self._arena = Arena(self._context)
            self._scratch = ScratchStack(self._context.order, self._scratch.uses)
        for buffer in buffers:
            buffer.close()
        self._taken = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _aligned(size: int) -> int:
    return max(-(-size // _ALIGN), 1) * _ALIGN
