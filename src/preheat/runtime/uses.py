"""Which streams used a piece of memory, and which may use it without waiting.

Timeline   one stream: the marks in it, and the marks of other streams that it has waited for
Uses       one allocation: the streams that may use it without waiting, and the last uses in the others

A piece of memory is in one of three states.

    exclusive   One stream of ours may read and write it without waiting. Launches of that stream need
                no bookkeeping: this is the short path, and `Uses.stream` is the one thing it tests.
    read        Several streams of ours may read it without waiting. `Uses.readers` has them.
    shared      Another library holds it and may use it at any time. No stream has a right to it: each
                use waits for the current streams of the other libraries, and they wait for each use.

A stream that has no right acquires it: it waits for the uses that it has not waited for yet. A read
waits for writes alone, a write waits for reads as well. A stream that loses a right is marked with an
event when another stream has to wait for it, so that its later uses are noticed again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from preheat.devices import base
from preheat.runtime.libraries import StreamHandle

__all__ = ["Dependent", "Timeline", "Uses", "add_use"]

_positions = itertools.count(1)  # of marks, in all streams together: later marks have larger numbers
_MOST_SEEN = 256  # streams a timeline remembers to have waited for; forgetting one costs a wait
_MANY_READS = 16  # reads of other libraries' streams after which completed ones are dropped


class Dependent(Protocol):
    """A bound launch or a graph, which skips checks as long as nothing happens to its memory."""

    def invalidate(self) -> None:
        """Check everything before the next use. This runs under the lock of the device's `Order`."""


class Timeline:
    """The order of work in one stream, as far as memory is concerned.

    A mark is an event recorded after everything submitted so far; `position` is the number of the
    latest one. A stream of ours is marked when another stream has to wait for it. A stream of another
    library may be destroyed at any time, so it is marked right after each use. `seen` has, by stream
    id, the latest mark that this stream waited for.
    """

    __slots__ = ("__weakref__", "_discard", "_event", "own", "position", "seen", "stream")

    def __init__(self, stream: base.Stream, discard: Callable[[Callable[[], None]], None], own: bool):
        self.stream = stream
        self.own = own
        self._discard = discard
        self.position = 0
        self.seen: dict[int, int] = {}
        self._event: base.Event | None = None

    def mark(self) -> int:
        """Record an event after everything submitted so far and return its position."""
        self._event = self.stream.record(again=self._event)
        self.position = next(_positions)
        return self.position

    def wait(self, other: Timeline, position: int) -> None:
        """Let later work of this stream wait for `other` up to `position`, unless it already does."""
        if other is self or self.seen.get(other.stream.id, 0) >= position:
            return
        reached, event = other.position, other._event
        assert event is not None, "a position belongs to a mark"
        self.stream.wait(event)
        if len(self.seen) >= _MOST_SEEN:
            self.seen.clear()
        self.seen[other.stream.id] = reached

    def join(self, other: Timeline) -> None:
        """Let later work of this stream wait for everything submitted to `other` so far."""
        if other is not self:
            self.wait(other, other.mark())

    def done(self) -> bool:
        """Return True once everything before the latest mark has completed."""
        return self._event is None or self._event.done()

    def close(self) -> None:
        """Destroy the event; the device is closed."""
        event, self._event = self._event, None
        if event is not None:
            event.close()

    def __del__(self) -> None:
        if self._event is not None:
            self._discard(self._event.close)


Last = dict[int, tuple[Timeline, int]]  # the last use in each stream and its mark, by stream id


class Uses:
    """The uses of one piece of memory. Only `Order` changes it.

    `stream` is the stream of ours with the exclusive right, and `readers` are the ones with the right
    to read, by id. Both are empty while the memory is shared, and stay empty once it is closed.
    """

    __slots__ = (
        "_dependents", "_owner", "_reading", "_reads", "_writes", "by_interface", "closed", "inherited",
        "leases", "readers", "released", "stream",
    )  # fmt: skip

    def __init__(self, owner: Timeline | None = None) -> None:
        self._owner = owner
        self.stream = None if owner is None else owner.stream
        self.readers: dict[int, Timeline] = {}
        self._reading: dict[int, Timeline] = {}  # streams of ours that may still submit a read
        self._writes: Last = {}  # the last writes of streams without a right
        self._reads: Last = {}  # their reads since then
        self._dependents: weakref.WeakSet[Dependent] | None = None
        self.leases: dict[int, Sequence[StreamHandle]] = {}  # exports by DLPack, by number
        self.by_interface = False  # An array interface exported it. Such an export is never released.
        self.released: dict[int, StreamHandle] = {}  # streams of consumers that released it, by handle
        self.inherited: dict[int, Uses] = {}  # of parts that ended before the whole, by identity
        self.closed = False

    @property
    def shared(self) -> bool:
        """Return True while another library may use this memory without telling us."""
        return self.by_interface or bool(self.leases)

    @property
    def grantable(self) -> bool:
        """Return True while a stream of ours may get a right to this memory.

        A release in another thread adds to `released` before it ends the lease.
        """
        return not self.closed and not self.shared and not self.released

    def parts(self) -> Iterator[Uses]:
        """Yield these uses, and those of the parts that have ended."""
        yield self
        for part in list(self.inherited.values()):
            yield from part.parts()

    def release(self, lease: int, streams: Iterable[StreamHandle]) -> None:
        """End an export. A finalizer calls this: it takes no lock and makes no driver call.

        The next use waits for `streams` and for the streams that were current at the export.
        """
        for stream in (*streams, *self.leases[lease]):
            self.released[stream.handle] = stream
        del self.leases[lease]

    # The following run under the lock of the device's `Order`.

    def allows(self, line: Timeline, *, write: bool) -> bool:
        """Return True when `line` has the right to this use."""
        if self.closed or self.inherited:
            return False
        return self._owner is line or (not write and line.stream.id in self.readers)

    def await_all(self, line: Timeline, *, write: bool, marks: dict[Timeline, int]) -> None:
        """Let `line` wait for the uses that come before this one.

        `marks` has the marks made for this section so far: one mark serves all memory in it.
        """
        if self._owner is not None:
            self._await(line, self._owner, marks)
        for last in self._writes.values():
            line.wait(*last)
        if write:
            for reader in self._reading.values():
                self._await(line, reader, marks)
            for last in self._reads.values():
                line.wait(*last)
        for part in list(self.inherited.values()):
            part.await_all(line, write=True, marks=marks)

    @staticmethod
    def _await(line: Timeline, other: Timeline, marks: dict[Timeline, int]) -> None:
        if other is line:
            return
        if other not in marks:
            marks[other] = other.mark()
        line.wait(other, marks[other])

    def grant(self, line: Timeline, *, write: bool) -> None:
        """Give `line`, which has waited, the right to this use and to later ones like it."""
        if self.allows(line, write=write):
            return
        others = (self._reading.keys() | self._reads.keys()) - {line.stream.id}
        if write or (self._owner is None and not others):
            self._become(owner=line)
            return
        if self._owner is not None:  # `await_all` has just marked it.
            self._keep_reading(self._owner.position)
        # Streams whose right ended earlier may be in `_reading` alone: they have not waited.
        self._reading = {**self._reading, line.stream.id: line}
        self.readers = {**self.readers, line.stream.id: line}

    def note(self, line: Timeline, position: int, *, write: bool) -> None:
        """Remember a use by a stream that gets no right: it ended at a mark."""
        if write:
            self._become(writes={line.stream.id: (line, position)})
            return
        if self._owner is not None:
            self._keep_reading(self._owner.mark())
        self._reads[line.stream.id] = (line, position)
        if len(self._reads) > _MANY_READS:
            self._reads = {key: last for key, last in self._reads.items() if not last[0].done()}

    def expect(self, line: Timeline) -> None:
        """Let the next write wait for what `line`, a stream of ours, has done until then."""
        if self._owner is line:
            return
        if self._owner is not None:
            self._keep_reading(self._owner.mark())
        self._reading = {**self._reading, line.stream.id: line}

    def written_by(self, line: Timeline) -> None:
        """Remember that a stream of another library may have written until now."""
        self._writes[line.stream.id] = (line, line.mark())

    def _keep_reading(self, position: int) -> None:
        """Turn the exclusive right of a stream, marked at `position`, into the right to read."""
        owner = self._owner
        assert owner is not None
        alone = {owner.stream.id: owner}
        self._become(writes={owner.stream.id: (owner, position)}, reading=alone, readers=dict(alone))

    def expose(self) -> None:
        """End every right, because another library may use the memory from here on.

        Another thread may have tested a right and submit its read only now, so the next write waits
        for these streams once more.
        """
        writes, reading = self._writes, dict(self._reading)
        owner = self._owner
        if owner is not None:
            writes = {owner.stream.id: (owner, owner.mark())}
            reading = {owner.stream.id: owner}
        self._become(writes=writes, reading=reading, reads=self._reads)

    def _become(
        self,
        owner: Timeline | None = None,
        writes: Last | None = None,
        reads: Last | None = None,
        reading: dict[int, Timeline] | None = None,
        readers: dict[int, Timeline] | None = None,
    ) -> None:
        """Replace the state in one step, so that a concurrent finalizer finds a consistent one."""
        self.invalidate_dependents()
        stream = None if owner is None or self.closed else owner.stream
        writes, reads, reading = writes or {}, reads or {}, {} if reading is None else reading
        readers = {} if readers is None or self.closed else readers
        self._owner, self.stream, self._writes, self._reads = owner, stream, writes, reads
        self._reading, self.readers = reading, readers
        if owner is not None:
            self.inherited.clear()

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
        self.stream = None
        self.readers = {}
        self.invalidate_dependents()

    def at_rest(self, home: Timeline) -> bool:
        """Return True when the order of `home` alone decides when this memory can be used again."""
        left = self._writes or self._reads or self._reading or self.released or self.inherited
        return not left and not self.shared and self._owner in (home, None)


def add_use(uses: dict[Uses, bool], one: Uses, *, write: bool) -> None:
    """Add a use to those of a piece of work, which writes the memory if any of its uses does."""
    uses[one] = write or uses.get(one, False)
