"""Device memory of a pool: blocks that the device allocated, and the parts of them that are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from preheat.devices import base
from preheat.devices.context import Context
from preheat.devices.memory import Buffer
from preheat.devices.uses import Uses
from preheat.errors import CaptureError

__all__ = ["Arena", "FreeList", "PoolBuffer", "ReturnedSpan", "Span"]


class Span(NamedTuple):
    """Contiguous bytes of one block."""

    address: int
    size: int
    block: Buffer

    @property
    def end(self) -> int:
        """The first address behind the span."""
        return self.address + self.size

    def precedes(self, other: Span) -> bool:
        """Return True if `other` begins where this span ends, in the same block."""
        return self.block is other.block and self.end == other.address

    def overlaps(self, other: Span) -> bool:
        """Return True if both have bytes in common."""
        return self.address < other.end and other.address < self.end

    def join_with(self, other: Span) -> Span:
        """Return this span and the one that follows it as one."""
        return Span(self.address, self.size + other.size, self.block)


class FreeList:
    """Free spans, by address. Adjacent ones are joined."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @property
    def size(self) -> int:
        """Bytes of all free spans."""
        return sum(span.size for span in self.spans)

    @property
    def largest(self) -> int:
        """Bytes of the largest free span."""
        return max((span.size for span in self.spans), default=0)

    def take(self, size: int, *, after: Span | None = None) -> Span | None:
        """Remove `size` bytes from the first span that has them, or from the one right `after`."""
        for at, span in enumerate(self.spans):
            if span.size >= size and (after is None or after.precedes(span)):
                rest = Span(span.address + size, span.size - size, span.block)
                self.spans[at : at + 1] = [rest] if rest.size else []
                return Span(span.address, size, span.block)
        return None

    def put(self, *spans: Span) -> None:
        """Add free spans."""
        joined: list[Span] = []
        for span in sorted([*self.spans, *spans], key=lambda each: each.address):
            if joined and joined[-1].precedes(span):
                joined[-1] = joined[-1].join_with(span)
            else:
                joined.append(span)
        self.spans = joined


ReturnedSpan = tuple[Span, Uses]  # a returned span, and the uses that its next user waits for


class PoolBuffer(Buffer):
    """A span that an array uses. It returns to the arena when the buffer is dropped or closed."""

    __slots__ = ("_returned", "span")

    def __init__(self, span: Span, size: int, returned: deque[ReturnedSpan]) -> None:
        self.span = span
        self._returned = returned
        super().__init__(span.block.context, size, span.block.home)

    def _allocate(self) -> int:
        return self.span.address

    def export(self) -> None:
        """Keep the whole block, because another library gets the memory."""
        self.span.block.export()
        self._exported_memory = self.span.block._exported_memory

    def _deallocator(self) -> Callable[[], None]:
        span = self.span
        uses = self.uses
        returned = self._returned

        def return_to_arena() -> None:
            # Freeing the block must wait for these uses as well.
            span.block.uses.freed_parts[id(uses)] = uses
            returned.append((span, uses))

        return return_to_arena

    def __del__(self) -> None:
        if self.open or self._exported_memory:
            self._deallocator()()


class Arena:
    """Blocks of device memory, their free spans, and returned spans that may still be in use.

    The caller serialises the calls. Finalizers append to `returned` and do nothing else.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.blocks: list[Buffer] = []
        self.free = FreeList()
        self.returned: deque[ReturnedSpan] = deque()

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in self.blocks)

    @property
    def returned_bytes(self) -> int:
        """Bytes that were returned and are not free yet."""
        return sum(span.size for span, _ in list(self.returned))

    def grow(self, size: int) -> None:
        """Allocate one more block."""
        block = Buffer(self._context, size, self._context.stream)
        self.blocks.append(block)
        self.free.put(Span(block.address, block.size, block))

    def shrink(self) -> None:
        """Free the blocks of which no span is in use."""
        for span in [span for span in self.free.spans if span.size == span.block.size]:
            span.block.close()
            self.blocks.remove(span.block)
            self.free.spans.remove(span)

    def reclaim(self) -> int:
        """Make returned spans free if later users can be ordered after the earlier ones.

        Return the number of bytes that became free.
        """
        # Finalizers may append meanwhile.
        returned = [self.returned[at] for at in range(len(self.returned))]
        ordered = [self._wait_for_uses(uses, span.block.home) for span, uses in returned]
        for _ in returned:  # Removed last, so that an error above loses no span.
            self.returned.popleft()
        reclaimed = 0
        for (span, uses), is_ordered in zip(returned, ordered, strict=True):
            if is_ordered:
                span.block.uses.freed_parts.pop(id(uses), None)
                self.free.put(span)
                reclaimed += span.size
            else:
                self.returned.append((span, uses))
        return reclaimed

    def _wait_for_uses(self, uses: Uses, home: base.Stream) -> bool:
        """Let the stream of a block wait for these uses; return False if a capture prevents it."""
        order = self._context.order
        if self._context.captures_by_thread:
            return uses.is_ordered_by(order.timeline(home))
        try:
            order.section(home, {uses: True}).enter()
        except CaptureError:  # Another library that took the memory is capturing.
            return False
        return True
