"""A cached graph: the capture of one call of a step, replayed for calls with the same key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from preheat.devices.memory import new_generation_limit
from preheat.errors import BakedError, GraphError
from preheat.graph import trees
from preheat.graph.difference import (
    CaptureMemory,
    MemoryNames,
    Returned,
    diff,
    generations,
    written_arguments,
)
from preheat.graph.graph import Graph, State
from preheat.graph.nodes import Node
from preheat.process.locks import DictLock, run_locked

__all__ = ["CAPTURED", "Body", "CachedGraph", "Step"]

R = TypeVar("R")
CAPTURED = (State.CAPTURED, State.READY)
Body = Callable[[Sequence[Any]], R]  # what a step does with its arrays


class Step(NamedTuple):
    """One call: its key, what it does, and the arrays of which a cached graph has copies."""

    key: Hashable
    body: Body[Any]
    arrays: Sequence[Any] = ()


class CachedGraph:
    """A graph with what its body returned, and the arrays that calls copy theirs into.

    Memory with a generation above `generation_limit` was allocated inside the capture. None means that
    the limit is unknown. `last_use` orders the graphs of a cache: the larger it is, the later was the
    last use.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: Any = None,
        inputs: Sequence[Any] = (),
        generation_limit: int | None = None,
    ) -> None:
        self.graph = graph
        self.outputs = outputs
        self.inputs = inputs
        self.generation_limit = generation_limit
        self.last_use = 0
        self.lock: DictLock = {0: True}  # held from the copies of inputs to the copies of outputs
        # True if the outputs have no list or dict, of which each call returns a new one.
        self._outputs_are_fixed = trees.copy_containers(outputs) is outputs

    @classmethod
    def capture(cls, new: Callable[[], Graph], step: Step) -> CachedGraph:
        """Capture a step into a graph that `new` makes, ready to replay."""
        inputs = [trees.clone_detached(array) for array in step.arrays]
        graph = new()
        limit = new_generation_limit()
        try:
            with graph:
                outputs = step.body(inputs)
            graph.upload()
        except BaseException:
            if graph.state in CAPTURED:  # It was captured and cannot be uploaded.
                graph.close()
            raise
        return cls(graph, outputs, inputs, limit)

    @property
    def usable(self) -> bool:
        """True if the graph can be replayed. The code that installed it may have closed it."""
        return self.graph.usable

    def require_unwritten(self) -> None:
        """Raise if the graph writes into an array that calls only copy into."""
        spans = [trees.address_range(array) for array in self.inputs]
        for node in self.graph.nodes if spans else ():
            for position, argument in written_arguments(node):
                address = int.from_bytes(argument.value, "little")
                if any(address in span for span in spans):
                    raise GraphError(
                        f"{self.graph}: {node.name or node.kind} ({node.where}) writes argument "
                        f"{position} ({argument.type}), which is a copy of an argument of the step",
                        hint="pass arrays that the step writes without copy_inputs, or keep them "
                        "outside its arguments; declare const what a kernel only reads",
                    )

    def run(self, arrays: Sequence[Any], copy: bool) -> Any:
        """Replay with the content of `arrays`; return what the body returned, or copies of it."""
        if self._outputs_are_fixed and not arrays and not copy:
            run_locked(self.lock, self.graph.replay)
            return self.outputs
        return run_locked(self.lock, partial(self._run, arrays, copy))

    def _run(self, arrays: Sequence[Any], copy: bool) -> Any:
        for own, given in zip(self.inputs, arrays, strict=True):
            trees.copy_into(own, given)
        self.graph.replay()
        if not copy:
            return trees.copy_containers(self.outputs)
        copies = trees.copy_arrays(self.outputs)
        self.graph.record_read()
        return copies

    def check(self, new: Graph, body: Body[Any]) -> None:
        """Capture `body` as `new`, and raise if it does something other than this graph."""
        changes = run_locked(self.lock, partial(self._changes_as, new, body))
        if changes:
            raise BakedError(
                f"{self.graph} was captured for another call; "
                "a replay would use the values of that call, not of this one:",
                changes,
                hint="put what changes into the key, or into a gpu.scalar",
            )

    def _changes_as(self, new: Graph, body: Body[Any]) -> list[str]:
        changes = self._changes(self._recapture(new, body))
        new.close()
        return changes

    def _recapture(self, new: Graph, body: Body[Any]) -> CachedGraph:
        """Capture `body` with the same inputs, without instantiating the graph."""
        limit = new_generation_limit()
        new.begin()
        try:
            outputs = body(self.inputs)
        except BaseException as error:
            new.__exit__(type(error), error, error.__traceback__)
            raise
        return CachedGraph(new.end(), outputs, generation_limit=limit)

    def _changes(self, new: CachedGraph) -> list[str]:
        """Describe what `new` does or returns differently."""
        names = MemoryNames({}, generations(self.graph) & generations(new.graph))
        nodes, outputs = self._describe(names)
        new_nodes, new_outputs = new._describe(names)
        rows = diff(nodes, new_nodes)
        for path in dict.fromkeys((*outputs, *new_outputs)):
            before = outputs.get(path, Returned("nothing"))
            after = new_outputs.get(path, Returned("nothing"))
            if before != after:
                rows.append(f"returned{path}: {before.became(after)}")
        return rows

    def _describe(self, names: MemoryNames) -> tuple[list[Node], dict[str, Returned]]:
        """Return nodes and outputs, with memory from inside the capture named by its order."""
        memory = CaptureMemory(self.generation_limit, names)
        nodes = [memory.node(node) for node in self.graph.nodes]
        device = self.graph.context.device
        foreign = bool(self.graph.foreign)
        outputs = {
            path: memory.describe_returned(item, trees.memory_of(item, device), foreign=foreign)
            for path, item in trees.leaves(self.outputs)
        }
        return nodes, outputs
