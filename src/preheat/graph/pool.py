"""Memory for captures: allocated before the capture, handed out inside it without a driver call.

Pool       blocks of device memory, and who has which part of them
  Room       the parts that nobody has
  Scratch    the parts that frames hand out, each frame from the beginning
  Sharing    the frames and graphs that use the same scratch memory
    Piece      a part that an array has; it comes back when the array is dropped or closed
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from preheat import fork
from preheat.callsite import caller
from preheat.dtypes import dtype_of
from preheat.errors import CaptureError, GraphError, InputError, OutOfMemoryError, PoolSealedError
from preheat.graph.graph import Graph
from preheat.graph.room import Room, Scratch, Stretch
from preheat.runtime.active_capture import ALLOCATE, FREE, FROM_HOST, ActiveCapture, Operation
from preheat.runtime.array import NO_RIGHTS, Array
from preheat.runtime.context import Context
from preheat.runtime.host import host_array, shape_of
from preheat.runtime.memory import Buffer, Dependent
from preheat.runtime.uses import Uses

__all__ = ["Piece", "Pool"]

_AGAIN = "make the pool again: gpu.pool(…)"
_ALIGN = 256
_BLOCK = 2 << 20  # a pool that grows by itself does so by at least this much
_MEASURE = Operation("measuring a pool", "measure before the capture: it runs the body for real")


class Returned(NamedTuple):
    """A stretch that came back, with the uses that its next user has to wait for."""

    stretch: Stretch
    uses: Uses


class Piece(Buffer):
    """A part of a pool's block, which it keeps: dropped or closed, it goes back to the pool."""

    __slots__ = ("_returns", "stretch")

    def __init__(self, stretch: Stretch, size: int, returns: deque[Returned]) -> None:
        self.stretch, self._returns = stretch, returns
        super().__init__(stretch.block.context, size, stretch.block.home)

    def _allocate(self) -> int:
        return self.stretch.address

    def export(self) -> None:
        """Keep what the memory is part of: another library gets it."""
        self.stretch.block.export()
        self._backing = self.stretch.block._backing

    def _give_back(self) -> Callable[[], None]:
        back, stretch, uses, returns = self._back, self.stretch, self.uses, self._returns
        return lambda: back(stretch, uses, returns)

    @staticmethod
    def _back(
        stretch: Stretch,
        uses: Uses,
        returns: deque[Returned],
        returned: type[Returned] = Returned,  # which finalizers need, and so no global name
    ) -> None:
        """Give a stretch back to its pool; its block is freed after these uses, whatever is first."""
        stretch.block.uses.inherited[id(uses)] = uses
        returns.append(returned(stretch, uses))

    def __del__(self) -> None:
        if self.open or self._backing:
            self._give_back()()


_ENDED = "the frame of its pool has ended"
_NOWHERE: deque[Returned] = deque(maxlen=0)  # Scratch memory returns with its frame.


class Scrap(Piece):
    """A piece of scratch memory: arrays of it end with the frame, graphs that use it do not.

    All scratch memory of a pool has its uses in common, because frames hand out the same places again.
    """

    __slots__ = ("_ended", "_inside", "_sharing")

    def __init__(self, stretch: Stretch, size: int, sharing: Sharing, *, inside: bool) -> None:
        self._ended, self._inside, self._sharing = False, inside, sharing
        super().__init__(stretch, size, _NOWHERE)

    def _new_uses(self) -> Uses:
        return self._sharing.uses

    def uses_of(self, array: Dependent) -> Uses:
        """Return the uses that launches of `array` test; it is told when the frame ends."""
        self.tell(array)
        return NO_RIGHTS if self.lost is not None else self.uses

    def _close_uses(self) -> None:
        """Do nothing: other arrays use the same memory, and `expire` has told the closed ones."""

    @property
    def lost(self) -> str | None:
        """Why this memory cannot be used, or None while it can."""
        return _ENDED if self._ended else super().lost

    def tell(self, dependent: Dependent) -> None:
        """Let `dependent` know when this memory is closed or, unless a graph, when the frame ends."""
        super().tell(dependent)
        if isinstance(dependent, Graph):
            self._sharing.join(dependent)
        elif self._ended:
            dependent.expire(_ENDED)

    def harms(self, live: Scrap) -> bool:
        """Whether a graph that uses this, of a frame that ended, would overwrite a live frame's array.

        Not where the capture was given the array that was at that very place: that is its operand.
        """
        operand = not self._inside and self.generation == live.generation
        return self._ended and not operand and self.stretch.overlaps(live.stretch)

    def end(self) -> None:
        """The frame is over."""
        self._ended = True
        for dependent in self.dependents():
            if not isinstance(dependent, Graph):
                dependent.expire(_ENDED)


@dataclass(eq=False)
class Frame:
    """A frame under way: whose it is, where it began, what it handed out."""

    thread: int
    began: tuple[int, int]
    captured: bool  # it began inside a capture, where nothing runs
    scraps: list[Scrap] = field(default_factory=list)
    over: bool = False  # and yet under way, because of a later one


class Sharing:
    """Frames under way, the last one last, and the graphs whose replays use the same memory."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses
        self.frames: list[Frame] = []
        self.lock = threading.Lock()
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def begin(self, frame: Frame) -> None:
        """One more frame; until it ends, graphs ask before they are replayed."""
        self.frames.append(frame)
        with self.lock:
            graphs = [] if frame.captured else list(self._graphs)
        for graph in graphs:
            graph.doubt(self.ask)

    def join(self, graph: Graph) -> None:
        """One more graph."""
        with self.lock:
            self._graphs.add(graph)
        graph.doubt(self.ask)

    def ask(self, graph: Graph) -> None:
        """Raise where a replay would overwrite arrays of a frame; ask again while there are frames."""
        frames = [frame for frame in list(self.frames) if not frame.captured]
        if not frames:
            return
        graph.doubt(self.ask)
        mine = [buffer for buffer in graph._buffers if isinstance(buffer, Scrap)]
        live = {scrap for frame in frames for scrap in list(frame.scraps)}.difference(mine)
        if any(scrap.harms(other) for scrap in mine for other in live):
            raise GraphError(
                f"{graph} cannot be replayed now: it shares scratch memory with a frame that is open",
                hint="replay it outside `with pool.frame()`",
            )


class Pool:
    """Memory for captures: really allocated before, handed out inside, and sealed if you like.

        pool = gpu.pool()
        pool.measure(step)                  # runs step() once, and makes room for capturing it
        with gpu.capture() as graph:
            step()                          # whose pool.empty(…) now needs no driver

    With `gpu.capture(pool=pool)` all new arrays of the body come from the pool, those of `gpu.empty(…)`
    included.
    Arrays from a pool are arrays like any other. Dropping or closing one gives its memory back to the
    pool; the pool gives its blocks back to the device once neither it nor such an array is left.
    Requests get the first place where they fit, so the same requests get the same addresses again.
    Outside a capture a pool grows by itself, inside it refuses what it has no room for, and makes
    more of it for the next try. Memory that was used in another stream is handed out again only
    behind that use. Safe from any thread.
    """

    def __init__(self, context: Context, size: int | None = None) -> None:
        context.require()
        self._context = context
        self._lock = threading.Lock()
        self._blocks: list[Buffer] = []
        self._room, self._scratch = Room(), Scratch()
        self._returns: deque[Returned] = deque()  # finalizers append to it, and do nothing else
        self._pieces: weakref.WeakSet[Piece] = weakref.WeakSet()
        self._sharing = Sharing(context.order.uses(context.stream))
        self._taken = self._peak = self._measuring = 0
        self._asked: weakref.WeakKeyDictionary[ActiveCapture, int] = weakref.WeakKeyDictionary()
        self._wanted = 0  # by a capture that found no room
        self._sealed = self._closed = False
        fork.register(self)
        if size is not None:
            self.reserve(size)

    def after_fork(self) -> None:
        """Renew the locks in a forked child, where no thread is inside the pool."""
        self._lock = threading.Lock()
        self._sharing.lock = threading.Lock()

    # What it is

    @property
    def size(self) -> int:
        """Bytes allocated from the device."""
        with self._lock:
            return sum(block.size for block in self._blocks)

    @property
    def used(self) -> int:
        """Bytes handed out and not given back; scratch memory counts from its first frame on."""
        with self._lock:
            return self._used()

    @property
    def peak(self) -> int:
        """The most that was ever used."""
        return self._peak

    @property
    def sealed(self) -> bool:
        """Whether it refuses to hand out."""
        return self._sealed

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ", sealed" if self._sealed else ""
        return f"<Pool {self.used:,} of {self.size:,} bytes on {self._context.device.name}{state}>"

    # Handing out

    def empty(self, shape: object, dtype: object = "float32") -> Array:
        """An array from the pool, holding nothing in particular."""
        extents, kind = shape_of(shape), dtype_of(dtype)
        size = math.prod(extents) * kind.size
        self._context.require(_AGAIN)
        capture = self._context.active_capture()
        with nullcontext() if capture is None else capture.note_errors():
            return Array(self._piece(size, capture), kind, extents)

    def zeros(self, shape: object, dtype: object = "float32") -> Array:
        """An array of zeros; inside a capture every replay makes it so again."""
        return self.empty(shape, dtype).fill(0)

    def array(self, data: object, dtype: object = None) -> Array:
        """A copy of `data`: of an array of this device, or outside a capture from the host."""
        wanted = None if dtype is None else dtype_of(dtype)
        if isinstance(data, Array):
            if wanted not in (None, data.dtype):
                raise InputError(f"{data!r} cannot be copied as {wanted}")
            return self.empty(data.shape, data.dtype).copy_from(data)
        self._context.forbid(FROM_HOST)
        host = host_array(data, wanted)
        return self.empty(host.shape, wanted or dtype_of(host.dtype)).write(host)

    def _piece(self, size: int, capture: ActiveCapture | None) -> Piece:
        need = _rounded(size)
        with self._lock:
            self._require(f"{need:,} bytes were asked for")
            self._collect()
            self._catch_up()
            frame = self._frame()
            piece = (
                Piece(self._take(need, capture), size, self._returns)
                if frame is None
                else self._scrap(frame, need, size, capture)
            )
            self._pieces.add(piece)
            return piece

    def admit_capture(self) -> None:
        """Raise where a capture with this pool cannot begin; make room that an earlier one lacked."""
        with self._lock:
            self._require(
                "a capture that allocates from it cannot begin",
                hint="pool.unseal() before the capture; without pool=, a capture may use arrays that "
                "the pool has handed out already",
            )
            self._collect()
            self._catch_up()

    def _require(
        self, wanted: str, *, hint: str = "take it before pool.seal(), or pool.unseal()"
    ) -> None:
        self._require_open(wanted)
        if self._sealed:
            raise PoolSealedError(f"the pool is sealed: {wanted}", hint=hint)

    def _require_open(self, wanted: str) -> None:
        self._context.require(_AGAIN)
        if self._closed:
            raise InputError(f"this pool is closed: {wanted}")

    def _collect(self) -> None:
        """Have again what came back; what others may be using only where it can be ordered."""
        if self._measuring or not self._returns:
            return
        back = [self._returns[at] for at in range(len(self._returns))]
        ready = list(map(self._await_uses, back))
        for _ in back:  # only now: what raised above has lost nothing
            self._returns.popleft()
        for each, waited in zip(back, ready, strict=True):
            if waited:
                each.stretch.block.uses.inherited.pop(id(each.uses), None)
                self._taken -= each.stretch.size
                self._room.put(each.stretch)
            else:
                self._returns.append(each)

    def _await_uses(self, back: Returned) -> bool:
        """Let the pool's stream wait for the uses of a stretch; False where a capture is in the way."""
        order, home = self._context.order, back.stretch.block.home
        if self._context.captures_by_thread:
            return back.uses.at_rest(order.timeline(home))
        try:
            order.section(home, {back.uses: True}).enter()
        except CaptureError:  # of another library that took the memory
            return False
        return True

    def _take(self, size: int, capture: ActiveCapture | None) -> Stretch:
        found = self._room.take(size)
        if found is None and capture is not None:
            raise self._no_room(size, capture)
        if found is None:
            self._grow(max(size, _BLOCK))
            return self._take(size, capture)
        self._count(size, capture)
        return found

    def _count(self, size: int, capture: ActiveCapture | None) -> None:
        if capture is not None:
            self._asked[capture] = self._asked.get(capture, 0) + size
        self._taken += size
        self._peak = max(self._peak, self._used())

    def _used(self) -> int:
        return self._taken - sum(each.stretch.size for each in list(self._returns))

    def _no_room(self, size: int, capture: ActiveCapture) -> CaptureError:
        # How much more it would have asked for nobody knows: each try gets twice what the last one had.
        self._wanted = max(self._wanted, 2 * (self._asked.get(capture, 0) + size))
        free = sum(each.size for each in self._room.stretches)
        return CaptureError(
            f"the pool has no room: {size:,} bytes were asked for inside a capture, "
            f"and of {free:,} free ones {self._room.largest:,} are side by side",
            where=caller(),
            hint=f"right before each capture: pool.measure(body), or pool.reserve({size})",
        )

    # Growing

    def reserve(self, nbytes: int) -> None:
        """Have so many free bytes side by side; blocks that nobody uses are exchanged for them."""
        need = _rounded(_count_of_bytes(nbytes))
        with self._lock:
            self._require(f"{need:,} bytes were to be reserved")
            self._collect()
            if self._room.largest >= need:
                return
            self._context.forbid(ALLOCATE)
            self._shrink()
            self._grow(need)

    def _catch_up(self) -> None:
        """Outside captures, make room for the next try of one that had too little, if there is any."""
        if self._wanted and not self._context.captures_by_thread:
            wanted, self._wanted = self._wanted, 0
            if wanted > self._room.largest:
                self._shrink()
                with suppress(OutOfMemoryError):  # that capture will say again that there is no room
                    self._grow(wanted)

    def _grow(self, size: int) -> None:
        block = Buffer(self._context, size, self._context.stream)
        self._blocks.append(block)
        self._room.put(Stretch(block.address, block.size, block))

    def _shrink(self) -> None:
        unused = [each for each in self._room.stretches if each.size == each.block.size]
        for each in unused:
            each.block.close()
            self._blocks.remove(each.block)
            self._room.stretches.remove(each)

    def measure(self, body: Callable[[], object]) -> int:
        """Run `body` once, for real, and make room for a capture of it; returns the bytes it took.

        The room is for the next capture: measure another body after that. As in a capture with this
        pool, all new arrays of `body` come from it. As in a capture, whose graph keeps what it uses,
        nothing that `body` drops is handed out again while it runs. What other threads take meanwhile
        is counted with it.
        """
        self._context.forbid(_MEASURE)
        with self._lock:
            self._require("a body was to be measured")
            self._collect()
            self._measuring += 1
            taken, scratch = self._taken, self._scratch.size
        of_thread = self._context.of_thread
        before, of_thread.allocator = of_thread.allocator, self
        try:
            body()
        finally:
            of_thread.allocator = before
            with self._lock:
                self._measuring -= 1
                taken, scratch = self._taken - taken, self._scratch.size - scratch
        if taken > scratch:
            self.reserve(taken - scratch)
        return taken

    # Sealing

    def seal(self) -> None:
        """Hand out nothing from here on: `PoolSealedError`. What was handed out works on."""
        self._sealed = True

    def unseal(self) -> None:
        """Hand out again."""
        self._sealed = False

    # Scratch

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Scratch memory: what this thread takes inside comes from the same place in every frame.

        Graphs captured inside share that memory, so many shapes need no more than the largest, which
        is best captured first; they stay valid and keep it. Arrays expire at the frame's end. What is
        in them does not survive from one replay to the next. A frame may be inside a capture or around
        it, and inside another frame, whose memory it leaves alone. While it is open outside a capture,
        graphs of earlier frames that would overwrite what it has handed out are not replayed:
        `GraphError`.
        """
        with self._lock:
            frame = self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._end(frame)

    def _begin(self) -> Frame:
        self._require_open("a frame was to begin")
        if self._sharing.frames and self._frame() is None:
            raise GraphError(
                "another thread is inside a frame of this pool, which would share its memory",
                hint="give each thread a pool of its own",
            )
        captured = self._context.active_capture() is not None
        frame = Frame(threading.get_ident(), self._scratch.at, captured)
        self._sharing.begin(frame)
        return frame

    def _end(self, frame: Frame) -> None:
        frames, frame.over = self._sharing.frames, True
        while frames and frames[-1].over:
            self._finish(frames.pop())
        if frame in frames:
            raise GraphError(
                "a frame was to end before one that began later: frames end last first",
                hint="leave the later frame first; this one ends with it",
            )

    def _finish(self, frame: Frame) -> None:
        self._scratch.at = frame.began
        for scrap in frame.scraps:
            scrap.end()

    def _frame(self) -> Frame | None:
        frames = self._sharing.frames
        return frames[-1] if frames and frames[-1].thread == threading.get_ident() else None

    def _scrap(self, frame: Frame, need: int, size: int, capture: ActiveCapture | None) -> Scrap:
        found = self._scratch.take(need)
        while found is None:
            self._scratch.put(self._more(need, capture))
            found = self._scratch.take(need)
        scrap = Scrap(found, size, self._sharing, inside=capture is not None)
        places = self._scratch.generations
        scrap.generation = places.setdefault((found.address, size), scrap.generation)
        frame.scraps.append(scrap)
        return scrap

    def _more(self, need: int, capture: ActiveCapture | None) -> Stretch:
        """More scratch memory: what the last stretch lacks, where that is free, else a new one."""
        if self._scratch.stretches:
            lacks = need - self._scratch.left()
            found = self._room.take(lacks, after=self._scratch.stretches[-1])
            if found is not None:
                self._count(lacks, capture)
                return self._as_scratch(found)
        return self._as_scratch(self._take(need, capture))

    def _as_scratch(self, stretch: Stretch) -> Stretch:
        """Order scratch memory behind the pool's stream, which waited for the uses of the stretch."""
        self._context.order.expect(self._sharing.uses, self._context.stream)
        return stretch

    # Life

    def close(self) -> None:
        """Give everything back after the work now queued. Twice is fine.

        Arrays from it are closed with it, and graphs that use them are stale.
        """
        if not self._closed:
            self._context.forbid(FREE)
        with self._lock:
            self._closed = True
            pieces, blocks = list(self._pieces), self._blocks
            self._blocks, self._room, self._scratch = [], Room(), Scratch()
        for buffer in (*pieces, *blocks):
            buffer.close()
        self._returns, self._taken = deque(), 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rounded(size: int) -> int:
    return max(-(-size // _ALIGN), 1) * _ALIGN


def _count_of_bytes(given: Any) -> int:
    try:
        size = operator.index(given)
    except TypeError:
        raise InputError(f"{given!r} is not a number of bytes") from None
    if size < 0:
        raise InputError(f"{size} is not a number of bytes: it is negative")
    return size
