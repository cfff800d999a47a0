"""Graphs of the emulator: work with its dependencies, which each replay executes.

Where work is deferred, each replay executes the pieces in another order that their dependencies allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from preheat.devices import base
from preheat.emulator.graph_work import (
    EventWork,
    GraphWork,
    Work,
    expand,
    find_foreign_frees,
    find_unfreed,
    run_all,
)
from preheat.emulator.schedule import Scheduler

__all__ = ["EmulatorExecutable", "EmulatorGraph"]


class EmulatorExecutable:
    """Work, executed in an order that its dependencies allow. It keeps owners alive."""

    def __init__(
        self,
        graph: GraphWork,
        scheduler: Scheduler | None,
        *,
        free_on_launch: bool,
    ) -> None:
        self._scheduler = scheduler
        self._free_on_launch = free_on_launch
        self._closed = False
        self.renew(graph)

    def renew(self, graph: GraphWork) -> None:
        """Let later replays do other work with the same dependencies. Queued replays keep theirs."""
        self._pieces = pieces = expand(graph)
        self._has_events = any(isinstance(piece, EventWork) for piece in pieces.work)
        self._claims = _claims(pieces.work, free=self._free_on_launch)

    def upload(self, stream: base.Stream) -> None:
        """Do nothing: there is nothing to upload."""

    def prepare(
        self, stream: base.Stream, *, unless_captured: bool = False, mark: base.Event | None = None
    ) -> base.Replay:
        """Return a function that executes the work or queues it."""
        replay = partial(self._replay, stream, mark)
        if unless_captured:
            return lambda: replay() if stream.capture_status() == "none" else base.NOT_SUBMITTED
        return replay

    def _replay(self, stream: base.Stream, mark: base.Event | None) -> tuple[int, ...]:
        if self._closed:
            return (400,)
        if not all(claim(stream) for claim in self._claims):
            return (1,)
        pieces = self._pieces
        scheduler = self._scheduler
        order = range(len(pieces.work)) if scheduler is None else scheduler.shuffled(pieces.after)
        if self._has_events:
            self._submit_with_events(stream, order)
        else:
            self._submit(stream, order)
        if mark is not None:
            stream.record(reuse=mark)
        return (0,)

    def _submit(self, stream: base.Stream, order: Sequence[int]) -> None:
        """Execute pieces, or queue them as one item, which keeps them and the owners alive."""
        pieces = self._pieces
        if self._scheduler is None:
            run_all(pieces.work, order)
        else:
            self._scheduler.submit(stream.id, lambda: run_all(pieces.work, order))

    def _submit_with_events(self, stream: base.Stream, order: Sequence[int]) -> None:
        """Execute or queue pieces, and record and wait for events between them."""
        work = self._pieces.work
        for is_event, places in groupby(order, lambda at: isinstance(work[at], EventWork)):
            if is_event:
                for piece in map(work.__getitem__, places):
                    assert isinstance(piece, EventWork)
                    piece.submit(stream)
            else:
                self._submit(stream, list(places))

    def close(self) -> None:
        """Release the work and the owners. A queued replay keeps them alive."""
        self._closed = True
        self.renew(GraphWork([], []))


class EmulatorGraph:
    """The work captured from a stream."""

    def __init__(
        self,
        nodes: list[base.GraphNode],
        captured: GraphWork,
        scheduler: Scheduler | None,
    ) -> None:
        self._nodes = nodes
        self._captured = captured
        self._scheduler = scheduler

    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self._nodes)

    def nodes(self) -> list[base.GraphNode]:
        """Return its nodes, oldest first."""
        return list(self._nodes)

    def dependencies(self) -> list[tuple[int, ...]]:
        """Return, for each node, the positions of the nodes that it depends on."""
        return list(self._captured.after)

    def instantiate(self, *, free_on_launch: bool = False) -> base.Executable:
        """Return an executable."""
        return EmulatorExecutable(self._captured, self._scheduler, free_on_launch=free_on_launch)

    def close(self) -> None:
        """Release the work and the owners."""
        self._nodes = []
        self._captured = GraphWork([], [])


def _claims(work: Sequence[Work], *, free: bool) -> list[Callable[[base.Stream], bool]]:
    """Return functions that count the memory of a replay, one for each device that it belongs to."""
    made, freed = find_unfreed(work), find_foreign_frees(work)
    owners = dict.fromkeys(each.claim for each in (*made, *freed))
    return [
        partial(
            claim,
            [each for each in made if each.claim == claim],
            [each for each in freed if each.claim == claim],
            free=free,
        )
        for claim in owners
    ]
