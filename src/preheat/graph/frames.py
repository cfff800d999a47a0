"""Frames of a pool: scratch memory that every frame hands out from the beginning.

The scratch memory of a pool is a stack. A frame takes bytes from its top, and the end of the frame
moves the top back to where it was. The next frame hands out the same addresses, so graphs that were
captured in different frames share memory. Three rules keep that safe:

1. Uses are ordered. All scratch memory of a pool has one record of uses, so that every launch and
   replay waits for the one before, whichever frame it belongs to.
2. Arrays end with their frame. From then on they raise. Graphs that use the memory stay valid, because
   each replay writes what it reads.
3. A replay does not overwrite live arrays. The arrays of a frame that is open outside a capture hold
   data that the program still reads. While there is such a frame, each replay of a graph that uses
   scratch memory is checked (`ScratchStack.check_replay`), and one that uses the same bytes raises
   `GraphError`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from preheat.devices.array import NO_RIGHTS, Array
from preheat.devices.memory import Buffer
from preheat.devices.order import Order
from preheat.devices.uses import Uses
from preheat.errors import GraphError
from preheat.graph.arena import PoolBuffer, ReturnedSpan, Span

__all__ = ["Frame", "ScratchBuffer", "ScratchStack"]

_ENDED = "the frame of its pool has ended"
_NOT_RETURNED: deque[ReturnedSpan] = deque(maxlen=0)  # Scratch memory comes back with its frame.


class ScratchBuffer(PoolBuffer):
    """A part of the scratch memory. Arrays in it end with the frame, graphs that use it do not.

    `captured` means that the buffer was handed out inside a capture.
    """

    __slots__ = ("_arrays", "_captured", "_ended", "stack")

    def __init__(self, span: Span, size: int, stack: ScratchStack, *, captured: bool) -> None:
        self._ended = False
        self._captured = captured
        self._arrays: weakref.WeakSet[Array] = weakref.WeakSet()
        self.stack = stack
        super().__init__(span, size, _NOT_RETURNED)

    def _new_uses(self) -> Uses:
        return self.stack.uses

    def uses_for(self, array: Array) -> Uses:
        """Return the uses that launches of `array` test, until the end of the frame."""
        self.stack.order.run_locked(lambda: self._arrays.add(array))
        return NO_RIGHTS if self.lost is not None else self.uses

    def _close_uses(self) -> None:
        """End the arrays and invalidate prepared work. The uses stay open: other buffers share them."""
        for array in self._arrays:
            array.uses = NO_RIGHTS
        self.uses.invalidate_dependents()

    @property
    def lost(self) -> str | None:
        """Why this memory cannot be used, or None while it can."""
        return _ENDED if self._ended else super().lost

    def overwrites(self, live: ScratchBuffer) -> bool:
        """Return True if a graph that uses this buffer would overwrite an array of an open frame.

        A graph may write to an array that existed before its capture.
        """
        operand = not self._captured and self.generation == live.generation
        return self._ended and not operand and self.span.overlaps(live.span)

    def end(self) -> None:
        """Let arrays in this buffer raise from now on: the frame has ended."""
        self._ended = True
        self.stack.order.run_locked(self._close_uses)


@dataclass(eq=False)
class Frame:
    """An open frame of one thread, and the buffers it has handed out."""

    thread: int
    start: tuple[int, int]  # the top of the stack when the frame began
    captured: bool  # True if it began inside a capture, where nothing runs
    buffers: list[ScratchBuffer] = field(default_factory=list)
    exited: bool = False  # True if it was left before a later frame, with which it ends


class ScratchStack:
    """The scratch memory of a pool, and its open frames.

    The caller serialises the calls, apart from those for graphs, which other threads replay.
    """

    def __init__(self, order: Order, uses: Uses) -> None:
        self.order = order
        self.uses = uses
        self.spans: list[Span] = []
        self.frames: list[Frame] = []  # The frame that began last is the last one.
        self._top = (0, 0)  # the span that is used next, and how many bytes of it are in use
        # The same location has the same generation in every frame, so that two captures compare equal.
        self._generations: dict[tuple[int, int], int] = {}

    # Memory

    @property
    def size(self) -> int:
        """Bytes of all scratch memory."""
        return sum(span.size for span in self.spans)

    @property
    def unused(self) -> int:
        """Bytes at the end of the last span that are not handed out."""
        at, used = self._top
        last = len(self.spans) - 1
        return self.spans[last].size - (used if at == last else 0)

    def extend(self, span: Span) -> None:
        """Add memory, which may lengthen the last span."""
        if self.spans and self.spans[-1].precedes(span):
            self.spans[-1] = self.spans[-1].join_with(span)
        else:
            self.spans.append(span)

    def take(self, frame: Frame, need: int, size: int, *, captured: bool) -> ScratchBuffer | None:
        """Hand out a buffer of `size` bytes, which occupies `need`; None without enough memory."""
        at, used = self._top
        for span in self.spans[at:]:
            if used + need <= span.size:
                self._top = (at, used + need)
                return self._buffer(frame, Span(span.address + used, need, span.block), size, captured)
            at += 1
            used = 0
        return None

    def _buffer(self, frame: Frame, span: Span, size: int, captured: bool) -> ScratchBuffer:
        buffer = ScratchBuffer(span, size, self, captured=captured)
        buffer.generation = self._generations.setdefault((span.address, size), buffer.generation)
        frame.buffers.append(buffer)
        return buffer

    # Frames

    def current(self) -> Frame | None:
        """Return the frame that this thread is in."""
        frame = self.frames[-1] if self.frames else None
        return frame if frame is not None and frame.thread == threading.get_ident() else None

    def begin(self, *, captured: bool) -> Frame:
        """Begin a frame. Unless it is captured, graphs are checked before each replay until its end."""
        if self.frames and self.current() is None:
            raise GraphError(
                "another thread is inside a frame of this pool, which would share its memory",
                hint="give each thread its own pool",
            )
        frame = Frame(threading.get_ident(), self._top, captured)
        self.frames.append(frame)
        if not captured:
            self.order.run_locked(self.uses.invalidate_dependents)
        return frame

    def end(self, frame: Frame) -> None:
        """End a frame and move the top of the stack back to where it began."""
        frame.exited = True
        while self.frames and self.frames[-1].exited:
            ended = self.frames.pop()
            self._top = ended.start
            for buffer in ended.buffers:
                buffer.end()
        if frame in self.frames:
            raise GraphError(
                "a frame cannot end before a later frame: frames must end in the reverse order",
                hint="leave the later frame first; this one ends with it",
            )

    # Graphs

    @property
    def in_use(self) -> bool:
        """True while a frame is open outside a capture, so that replays have to be checked."""
        return any(not frame.captured for frame in list(self.frames))

    def check_replay(self, title: str, buffers: Sequence[Buffer]) -> None:
        """Raise if a replay of the graph `title`, with these `buffers`, would overwrite live arrays."""
        frames = [frame for frame in list(self.frames) if not frame.captured]
        if not frames:
            return
        used = [buffer for buffer in buffers if isinstance(buffer, ScratchBuffer)]
        live = {buffer for frame in frames for buffer in list(frame.buffers)}.difference(used)
        if any(buffer.overwrites(other) for buffer in used for other in live):
            raise GraphError(
                f"{title} cannot be replayed now: it shares scratch memory with a frame that is open",
                hint="replay it outside `with pool.frame()`",
            )
