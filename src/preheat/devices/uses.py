"""Which streams used a piece of memory, and which may use it without waiting.

Timeline   one stream: the marks in it, and the marks of other streams that it has waited for
Uses       one allocation: the streams that may use it without waiting, and the last uses in the others

Open memory is in one of four states.

    exclusive   One stream of ours may read and write it without waiting. Launches of that stream need
                no bookkeeping: this is the short path, and `Uses.writer` is the one thing it tests.
    read        Streams of ours may read it without waiting. `Uses.readers` has them.
    free        No stream has a right to it, and the next use in a stream of ours acquires one.
    exported    Another library holds it and may use it at any time. No stream has a right to it: each
                use waits for the current streams of the other libraries, and they wait for each use.

A stream that has no right acquires it: it waits for the uses that it has not waited for yet. A read
waits only for writes. A write waits for reads and writes. Before a stream loses a right, an event is
recorded in it for the others to wait for. Its next use of the memory acquires a right again.

    what happens                      exclusive (A)   read          free            exported
    our stream B reads                read (A, B)     read (+ B)    exclusive (B) * exported
    our stream B writes               exclusive (B)   exclusive (B) exclusive (B)   exported
    a foreign stream reads            read (A)        read          free            exported
    a foreign stream writes           free            free          free            exported
    `add_pending_reader`              read (A)        read          free            exported
    export to another library         exported        exported      exported        exported
    release of the last export                                                      free

    * read (B) if other streams have read the memory since the last write: a write waits for them.

A new allocation is exclusive to its home stream. A use in stream A itself leaves `exclusive (A)` as it
is. A foreign stream is one of another library; it never gets a right. `close` ends every state.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from preheat.devices import base
from preheat.devices.libraries import StreamHandle

__all__ = ["Dependent", "Timeline", "Uses", "add_use"]

_positions = itertools.count(1)  # the numbers of marks in all streams: a later mark has a larger one
_MAX_WAITED_FOR = 256  # streams whose waits a timeline remembers; forgetting one costs a wait
_MANY_READS = 16  # reads of other libraries' streams after which completed ones are dropped


class Dependent(Protocol):
    """A bound launch or a graph, which skips checks as long as nothing happens to its memory."""

    def invalidate(self) -> None:
        """Make the next use check everything. The caller holds the lock of the device's `Order`."""


class Timeline:
    """The order of work in one stream, as far as memory is concerned.

    A mark is an event recorded after everything submitted so far; `position` is the number of the
    latest one. A stream of ours is marked when another stream has to wait for it. A stream of another
    library may be destroyed at any time, so it is marked right after each use. `waited_for` has, by
    stream id, the latest mark that this stream waited for.
    """

    __slots__ = ("__weakref__", "_defer", "_event", "owned", "position", "stream", "waited_for")

    def __init__(self, stream: base.Stream, defer: Callable[[Callable[[], None]], None], owned: bool):
        self.stream = stream
        self.owned = owned
        self._defer = defer
        self.position = 0
        self.waited_for: dict[int, int] = {}
        self._event: base.Event | None = None

    @property
    def event(self) -> base.Event:
        """The event that every mark records again."""
        assert self._event is not None, "the stream was never marked"
        return self._event

    def mark(self, *, recorded: bool = False) -> int:
        """Record the event after everything submitted so far and return the position of this mark.

        `recorded` means that the work itself has just recorded `event`.
        """
        if not recorded:
            self._event = self.stream.record(reuse=self._event)
        self.position = next(_positions)
        return self.position

    def wait(self, other: Timeline, position: int) -> None:
        """Let later work of this stream wait for `other` up to `position`, unless it already does."""
        if other is self or self.waited_for.get(other.stream.id, 0) >= position:
            return
        reached = other.position
        self.stream.wait(other.event)
        if len(self.waited_for) >= _MAX_WAITED_FOR:
            self.waited_for.clear()
        self.waited_for[other.stream.id] = reached

    def wait_for_all(self, other: Timeline) -> None:
        """Let later work of this stream wait for everything submitted to `other` so far."""
        if other is not self:
            self.wait(other, other.mark())

    def done(self) -> bool:
        """Return True once everything before the latest mark has completed."""
        return self._event is None or self._event.done()

    def close(self) -> None:
        """Destroy the event; the device is closed."""
        event = self._event
        self._event = None
        if event is not None:
            event.close()

    def __del__(self) -> None:
        if self._event is not None:
            self._defer(self._event.close)


LastUses = dict[int, tuple[Timeline, int]]  # the last use in each stream and its mark, by stream id


class Uses:
    """The uses of one piece of memory.

    Rights and recorded uses change under the lock of the device's `Order`. Exports
    (`preheat.devices.dlpack`) and parts that end (`preheat.graph.arena`) are added without it, because
    finalizers take no lock.

    `writer` is our stream with the exclusive right, and `readers` are the streams with the right
    to read, by id. Both are empty while the memory is exported, and stay empty once it is closed.
    """

    __slots__ = (
        "_dependents", "_last_reads", "_last_writes", "_pending_readers", "_writer_timeline", "closed",
        "dlpack_exports", "exported_by_interface", "freed_parts", "readers", "released_streams",
        "writer",
    )  # fmt: skip

    def __init__(self, writer: Timeline | None = None) -> None:
        self._writer_timeline = writer
        self.writer = None if writer is None else writer.stream
        self.readers: dict[int, Timeline] = {}
        self._pending_readers: dict[int, Timeline] = {}  # streams of ours that may still submit a read
        self._last_writes: LastUses = {}  # the last writes of streams without a right
        self._last_reads: LastUses = {}  # their reads since then
        self._dependents: weakref.WeakSet[Dependent] | None = None
        self.dlpack_exports: dict[int, Sequence[StreamHandle]] = {}  # current streams, by number
        self.exported_by_interface = False  # Nobody releases such an export.
        self.released_streams: dict[int, StreamHandle] = {}  # of consumers that are done, by handle
        self.freed_parts: dict[int, Uses] = {}  # of parts that ended before the whole, by id()
        self.closed = False

    @property
    def exported(self) -> bool:
        """Return True while another library may use this memory without notice."""
        return self.exported_by_interface or bool(self.dlpack_exports)

    @property
    def allows_rights(self) -> bool:
        """Return True while a stream of ours may get a right to this memory.

        A release in another thread adds to `released_streams` before it ends the export.
        """
        return not self.closed and not self.exported and not self.released_streams

    def with_freed_parts(self) -> Iterator[Uses]:
        """Yield these uses, and the uses of the parts that have ended."""
        yield self
        for part in list(self.freed_parts.values()):
            yield from part.with_freed_parts()

    def release_export(self, number: int, streams: Iterable[StreamHandle]) -> None:
        """End an export by DLPack. A finalizer calls this: it takes no lock and makes no driver call.

        The next use waits for `streams` and for the streams that were current at the export.
        """
        for stream in (*streams, *self.dlpack_exports[number]):
            self.released_streams[stream.handle] = stream
        del self.dlpack_exports[number]

    # The following run under the lock of the device's `Order`.

    def has_right(self, timeline: Timeline, *, write: bool) -> bool:
        """Return True when `timeline` has the right to this use."""
        if self.closed or self.freed_parts:
            return False
        return self._writer_timeline is timeline or (not write and timeline.stream.id in self.readers)

    def wait_for_uses(self, timeline: Timeline, *, write: bool, marks: dict[Timeline, int]) -> None:
        """Let `timeline` wait for the uses that come before this one.

        `marks` has the marks made for this section so far: one mark serves all memory in it.
        """
        if self._writer_timeline is not None:
            self._wait_for(timeline, self._writer_timeline, marks)
        for last in self._last_writes.values():
            timeline.wait(*last)
        if write:
            for reader in self._pending_readers.values():
                self._wait_for(timeline, reader, marks)
            for last in self._last_reads.values():
                timeline.wait(*last)
        for part in list(self.freed_parts.values()):
            part.wait_for_uses(timeline, write=True, marks=marks)

    @staticmethod
    def _wait_for(timeline: Timeline, other: Timeline, marks: dict[Timeline, int]) -> None:
        if other is timeline:
            return
        if other not in marks:
            marks[other] = other.mark()
        timeline.wait(other, marks[other])

    def grant(self, timeline: Timeline, *, write: bool) -> None:
        """Give `timeline`, which has waited, the right to this use and to later ones like it."""
        if self.has_right(timeline, write=write):
            return
        other_readers = (self._pending_readers.keys() | self._last_reads.keys()) - {timeline.stream.id}
        if write or (self._writer_timeline is None and not other_readers):
            self._replace_state(writer=timeline)
            return
        if self._writer_timeline is not None:  # `wait_for_uses` has just marked it.
            self._make_writer_a_reader(self._writer_timeline.position)
        # A stream whose right ended stays in `_pending_readers` and leaves `readers`: it has to wait
        # before it reads again.
        self._pending_readers = {**self._pending_readers, timeline.stream.id: timeline}
        self.readers = {**self.readers, timeline.stream.id: timeline}

    def record_use(self, timeline: Timeline, position: int, *, write: bool) -> None:
        """Record a use that ended at the mark `position`. The stream gets no right."""
        if self._has_only_written(timeline) and write:
            self.repeat_use(timeline, position, write=True)  # Nothing changes for prepared work.
            return
        if write:
            self._replace_state(last_writes={timeline.stream.id: (timeline, position)})
            return
        if self._writer_timeline is not None:
            self._make_writer_a_reader(self._writer_timeline.mark())
        if timeline.stream.id not in self._last_reads:
            self.invalidate_dependents()  # A `RepeatedUse` that writes would have to wait for it.
        self._last_reads[timeline.stream.id] = (timeline, position)
        if len(self._last_reads) > _MANY_READS:
            recent = self._last_reads.items()
            self._last_reads = {number: last for number, last in recent if not last[0].done()}

    def _has_only_written(self, timeline: Timeline) -> bool:
        """Return True if the only known earlier use is a write of this stream, which has no right."""
        others = self._last_reads or self._pending_readers or self.readers
        known = self._writer_timeline is not None or self.freed_parts or others
        return not known and self._last_writes.keys() == {timeline.stream.id}

    def needs_no_wait(self, timeline: Timeline, *, write: bool) -> bool:
        """Return True if such a use by `timeline`, which has no right, would wait for nothing."""
        if not self.allows_rights or self.freed_parts or self._writer_timeline is not None:
            return False
        only = {timeline.stream.id}
        if not write:  # It has waited for the writes, and a new write invalidates dependents.
            return True
        return not self._pending_readers and only >= self._last_writes.keys() | self._last_reads.keys()

    def repeat_use(self, timeline: Timeline, position: int, *, write: bool) -> None:
        """Record one more use by the stream that used the memory last."""
        if write:
            self._last_writes[timeline.stream.id] = (timeline, position)
        else:
            self._last_reads[timeline.stream.id] = (timeline, position)

    def add_pending_reader(self, timeline: Timeline) -> None:
        """Make the next write wait for all work in our stream `timeline` before that write."""
        if self._writer_timeline is timeline:
            return
        self.invalidate_dependents()
        if self._writer_timeline is not None:
            self._make_writer_a_reader(self._writer_timeline.mark())
        self._pending_readers = {**self._pending_readers, timeline.stream.id: timeline}

    def record_foreign_write(self, timeline: Timeline) -> None:
        """Record that a stream of another library may have written until now."""
        self._last_writes[timeline.stream.id] = (timeline, timeline.mark())

    def _make_writer_a_reader(self, position: int) -> None:
        """Turn the exclusive right of a stream, marked at `position`, into the right to read."""
        writer = self._writer_timeline
        assert writer is not None
        self._replace_state(
            last_writes={writer.stream.id: (writer, position)},
            pending_readers={writer.stream.id: writer},
            readers={writer.stream.id: writer},
        )

    def end_rights(self) -> None:
        """End every right, because another library may use the memory from here on.

        Another thread may have tested a right and submit its read only now, so the next write waits
        for these streams once more.
        """
        if self._writer_timeline is not None:
            self._make_writer_a_reader(self._writer_timeline.mark())
        self._replace_state(
            last_writes=self._last_writes,
            last_reads=self._last_reads,
            pending_readers=self._pending_readers,
        )

    def _replace_state(
        self,
        writer: Timeline | None = None,
        last_writes: LastUses | None = None,
        last_reads: LastUses | None = None,
        pending_readers: dict[int, Timeline] | None = None,
        readers: dict[int, Timeline] | None = None,
    ) -> None:
        """Replace everything that is known of earlier uses. Omitted arguments are reset."""
        self.invalidate_dependents()
        self._writer_timeline = writer
        self.writer = None if writer is None or self.closed else writer.stream
        self._last_writes = last_writes or {}
        self._last_reads = last_reads or {}
        self._pending_readers = pending_readers or {}
        self.readers = {} if readers is None or self.closed else readers
        if writer is not None:
            self.freed_parts.clear()

    def add_dependent(self, dependent: Dependent) -> None:
        """Invalidate `dependent` once, when a right is lost or the memory is closed."""
        if self._dependents is None:
            self._dependents = weakref.WeakSet()
        self._dependents.add(dependent)

    def invalidate_dependents(self) -> None:
        """Let all prepared work that relies on this memory check everything before its next use."""
        for dependent in self._dependents or ():
            dependent.invalidate()
        self._dependents = None

    def close(self) -> None:
        """End every right for good, and keep the uses that the release has to wait for."""
        self.closed = True
        self.writer = None
        self.readers = {}
        self.invalidate_dependents()

    def is_ordered_by(self, home: Timeline) -> bool:
        """Return True if only the order of `home` decides when this memory can be used again."""
        if self._last_writes or self._last_reads or self._pending_readers or self.released_streams:
            return False
        return not self.freed_parts and not self.exported and self._writer_timeline in (home, None)


def add_use(uses: dict[Uses, bool], one: Uses, *, write: bool) -> None:
    """Add a use to a piece of work, which writes the memory if any of its uses does."""
    uses[one] = write or uses.get(one, False)
