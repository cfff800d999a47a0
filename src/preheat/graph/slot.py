"""One slot: a graph with what its body returned, replayed for calls that are like the captured one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from preheat.errors import BakedError, GraphError
from preheat.graph import trees
from preheat.graph.compare import Inside, Names, Returned, generations, written
from preheat.graph.graph import Graph, State
from preheat.graph.nodes import Node, diff
from preheat.runtime.memory import newest

__all__ = ["USABLE", "Body", "Slot"]

R = TypeVar("R")
Body = Callable[[Sequence[Any]], R]  # a step, given the arrays that a slot has copies of
USABLE = (State.CAPTURED, State.READY)


class Slot:
    """A graph with what its body returned, and the arrays that calls copy theirs into.

    `since` is the newest memory from before the capture, where that is known: what is newer was handed
    out inside.
    """

    def __init__(
        self, graph: Graph, outputs: Any = None, inputs: Sequence[Any] = (), since: int | None = None
    ) -> None:
        self.graph, self.outputs, self.inputs, self.since = graph, outputs, inputs, since
        self.lock = threading.Lock()  # from the copies in to the copies out

    @classmethod
    def captured(cls, new: Callable[[], Graph], body: Body[Any], given: Sequence[Any]) -> Slot:
        """What `body` does, as a graph that is ready to replay."""
        inputs = [trees.private(array) for array in given]
        graph, since = new(), newest()
        try:
            with graph:
                outputs = body(inputs)
            graph.upload()
        except BaseException:
            if graph.state in USABLE:  # captured, but it cannot be made ready
                graph.close()
            raise
        return cls(graph, outputs, inputs, since)

    @property
    def usable(self) -> bool:
        """Whether its graph can be replayed; whoever installed it may have closed it."""
        return self.graph.usable

    def require_unwritten(self) -> None:
        """Raise where the graph writes into an array that calls only copy into."""
        spans = [trees.span(array) for array in self.inputs]
        for node in self.graph.nodes if spans else ():
            for position, argument in written(node):
                address = int.from_bytes(argument.value, "little")
                if any(address in span for span in spans):
                    raise GraphError(
                        f"{self.graph}: {node.name or node.kind} ({node.where}) writes argument "
                        f"{position} ({argument.type}), which is only a copy of what the step is given",
                        hint="pass arrays that the step writes without copy_inputs, or keep them "
                        "outside its arguments; declare const what a kernel only reads",
                    )

    def step(self, given: Sequence[Any], *, copy: bool) -> Any:
        """Replay with new content in the arrays; what the body returned, or copies of it."""
        with self.lock:
            for array, other in zip(self.inputs, given, strict=True):
                trees.refill(array, other)
            self.graph.replay()
            return trees.copies(self.outputs) if copy else trees.fresh(self.outputs)

    def check(self, new: Graph, body: Body[Any]) -> None:
        """Raise where `body` would do something else now, captured as `new`, than this graph does."""
        with self.lock:
            changes = self._changes(self._again(new, body))
            new.close()
        if changes:
            raise BakedError(
                f"{self.graph} was captured for another call; this one would bake other values:",
                changes,
                hint="put what changes into the key, or into a gpu.scalar",
            )

    def _again(self, new: Graph, body: Body[Any]) -> Slot:
        """What `body` does now, captured as `new` and not made ready."""
        since = newest()
        new.begin()
        try:
            outputs = body(self.inputs)
        except BaseException as error:
            new.__exit__(type(error), error, error.__traceback__)
            raise
        return Slot(new.end(), outputs, since=since)

    def _changes(self, new: Slot) -> list[str]:
        """What `new` does or returns differently, in words."""
        names = Names({}, generations(self.graph) & generations(new.graph))
        (nodes, outputs), (others, returned) = self._described(names), new._described(names)
        rows = diff(nodes, others)
        for path in dict.fromkeys((*outputs, *returned)):
            before, after = (side.get(path, Returned("nothing")) for side in (outputs, returned))
            if before != after:
                rows.append(f"returned{path}: {before.became(after)}")
        return rows

    def _described(self, names: Names) -> tuple[list[Node], dict[str, Returned]]:
        """Nodes and outputs, with memory from inside the capture told by its order."""
        inside = Inside(self.since, names)
        nodes = [inside.node(node) for node in self.graph.nodes]
        device, foreign = self.graph.context.device, bool(self.graph.foreign)
        outputs = {
            path: inside.returned(item, trees.memory(item, device), foreign=foreign)
            for path, item in trees.leaves(self.outputs)
        }
        return nodes, outputs
