"""Branches of a capture: the order of work in the streams that take part in it.

Branches are ordered like streams outside a capture: a use of memory waits for the earlier uses in
other branches, a read waits for writes, and a write waits for all uses. In a capture, the order is more
exact. Outside, a stream waits for all work that was submitted to the other one. Here each use has its
own event, so that a branch depends on the work that used the memory and on nothing after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from preheat.devices import base
from preheat.devices.uses import Uses
from preheat.process.callsite import CallSite

__all__ = ["Branch", "BranchOrder", "Mark"]

_numbers = itertools.count(1)  # of branches


class Mark:
    """A point in a branch, after its first `position` marks.

    `seen` has, by the number of each other branch, how many of its marks are before this point.
    """

    __slots__ = ("branch", "event", "position", "seen")

    def __init__(self, branch: Branch, event: base.Event, seen: Mapping[int, int]) -> None:
        self.branch = branch
        self.event = event
        self.position = branch.position
        self.seen = seen


class Branch:
    """A stream of the capture `capture`. The program calls it `title` and forked it at `site`."""

    def __init__(self, stream: base.Stream, capture: object, title: str, site: CallSite) -> None:
        self.stream = stream
        self.capture = capture
        self.title = title
        self.site = site
        self._number = next(_numbers)
        self.position = 0  # the number of marks
        self.worked = 0  # the position after the last work
        self._seen: dict[int, int] = {}  # how far it has waited for other branches, by their numbers

    def mark(self) -> Mark:
        """Mark the point after everything captured in this branch so far."""
        event = self.stream.record()
        self.position += 1
        return Mark(self, event, dict(self._seen))

    def wait(self, mark: Mark) -> None:
        """Let later work of this branch depend on the work before `mark`, unless it already does."""
        if mark.branch is self or self.has_seen(mark.branch, mark.position):
            return
        self.stream.wait(mark.event)
        for number, position in (*mark.seen.items(), (mark.branch._number, mark.position)):
            self._seen[number] = max(position, self._seen.get(number, 0))

    def has_seen(self, other: Branch, position: int) -> bool:
        """Return True if later work of this branch depends on `other` up to `position`."""
        return self._seen.get(other._number, 0) >= position


class _BranchUses:
    """The uses of one piece of memory inside a capture: the last write, and the reads since then."""

    __slots__ = ("_last_write", "_reads")

    def __init__(self, first: Mark) -> None:
        self._last_write = first
        self._reads: list[Mark] = []

    def before(self, *, write: bool) -> Sequence[Mark]:
        """Return the uses that the next one, a write or a read, has to wait for."""
        return (self._last_write, *self._reads) if write else (self._last_write,)

    def add(self, mark: Mark, *, write: bool) -> None:
        """Record a use that ended at `mark`."""
        if write:
            self._last_write = mark
            self._reads = []
        else:
            self._reads = [*(each for each in self._reads if each.branch is not mark.branch), mark]


class BranchOrder:
    """The uses of memory in the branches of one capture.

    Until `begin`, all work is in the branch `main`, and no use is recorded. Memory of which no use was
    recorded since then counts as written by `main` before.
    """

    def __init__(self, main: Branch) -> None:
        self._main = main
        self._uses: dict[Uses, _BranchUses] = {}
        self._first: Mark | None = None
        self._events: list[base.Event] = []

    @property
    def begun(self) -> bool:
        """True once uses are recorded."""
        return self._first is not None

    def begin(self) -> None:
        """Record uses from here on."""
        if self._first is None:
            self._first = self._mark(self._main)

    def _mark(self, branch: Branch) -> Mark:
        mark = branch.mark()
        self._events.append(mark.event)
        return mark

    @contextmanager
    def section(
        self, branch: Branch, uses: Mapping[Uses, bool], others: Sequence[Branch]
    ) -> Iterator[None]:
        """Order work in `branch` with the uses of its memory in other branches.

        `others` are branches in which another library may use the memory unseen. They are ordered as a
        whole, before and after the work.
        """
        for other in others:
            branch.wait(self._mark(other))
        self.wait_for_uses(branch, uses)
        yield
        mark = self._mark(branch)
        branch.worked = mark.position
        for each, write in uses.items():
            self._uses_of(each).add(mark, write=write)
        for other in others:
            other.wait(mark)

    def wait_for_uses(self, branch: Branch, uses: Mapping[Uses, bool]) -> None:
        """Let later work of `branch` depend on the earlier uses of this memory."""
        for each, write in uses.items():
            for mark in self._uses_of(each).before(write=write):
                branch.wait(mark)

    def _uses_of(self, uses: Uses) -> _BranchUses:
        assert self._first is not None
        return self._uses.setdefault(uses, _BranchUses(self._first))

    def join(self, branch: Branch) -> None:
        """Let later work of the main branch depend on everything in `branch`."""
        self._main.wait(self._mark(branch))

    def close(self) -> None:
        """Destroy the events, after the end of the capture."""
        events = self._events
        self._events = []
        for event in events:
            event.close()
