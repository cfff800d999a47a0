"""Graphs with their nodes, and executables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from preheat.devices.emulator.capture import Capture
from preheat.devices.emulator.graph import EmulatorExecutable, GraphWork
from preheat.driver.calls import CallError
from preheat.driver.status import INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = [
    "CHILD", "Executable", "Graph", "Holder", "Node", "Work", "graph_of", "node_of", "ordered",
    "work_of",
]  # fmt: skip

Work = Callable[[], object]

#: The kind of a node that executes another graph. The other kinds are those of captured work.
CHILD = "graph"


class Holder(Protocol):
    """A reference of a graph to an object of the program, which ends with the last copy of it."""


class Node:
    """One node of a graph.

    Attributes:
        before: The nodes that it depends on directly.
        kept: What keeps the parameters that the program was told.
    """

    def __init__(self, graph: Graph, kind: str, name: str, work: Work, before: Iterable[Node]) -> None:
        self.handle = 0
        self.graph = graph
        self.kind = kind
        self.name = name
        self.work = work
        self.before = list(before)
        self.child: Graph | None = None
        self.kept: object = None


class Graph:
    """A graph. One that is being captured gets its nodes from the capture."""

    def __init__(self, capture: Capture | None = None) -> None:
        self.handle = 0
        self.capture = capture
        self.holders: list[Holder] = []
        self.told: object = None  # what keeps the dependencies that the program was told
        self.copies: dict[Node, Node] = {}  # The nodes of the graph that this is a clone of.
        self._nodes: list[Node] = []

    def nodes(self, driver: Driver) -> list[Node]:
        """Return the nodes in the order in which they were made."""
        if self.capture is not None:
            captured = self.capture.captured()
            for at in range(len(self._nodes), len(self.capture.nodes)):
                kind, name = self.capture.nodes[at]
                before = [self._nodes[number] for number in captured.after[at]]
                self._add(driver, Node(self, kind, name, captured.work[at], before))
        return self._nodes

    def add(self, driver: Driver, kind: str, name: str, work: Work, before: Sequence[Node]) -> Node:
        """Add a node that depends on others of this graph."""
        mine = self.nodes(driver)
        if len(set(before)) != len(before) or any(each.graph is not self for each in before):
            raise CallError(INVALID_VALUE)
        if self.capture is not None:
            positions = [mine.index(each) for each in before]
            self.capture.add(kind, name, work, positions)
        return self._add(driver, Node(self, kind, name, work, before))

    def _add(self, driver: Driver, node: Node) -> Node:
        node.handle = driver.handles.add(node)
        self._nodes.append(node)
        return node

    def remove(self, driver: Driver, node: Node) -> None:
        """Remove a node and the edges from and to it."""
        self._nodes.remove(node)
        for other in self._nodes:
            other.before = [each for each in other.before if each is not node]
        driver.handles.remove(node.handle)
        if node.child is not None:
            node.child.close(driver)

    def close(self, driver: Driver) -> None:
        """Forget the graph and its nodes. Executables of it have what they need."""
        for node in self._nodes:
            driver.handles.remove(node.handle)
            if node.child is not None:
                node.child.close(driver)
        self._nodes = []
        self.holders = []
        driver.handles.remove(self.handle)

    def all_holders(self, driver: Driver) -> list[Holder]:
        """Return the references of this graph and of the graphs in its nodes."""
        found = list(self.holders)
        for node in self.nodes(driver):
            if node.child is not None:
                found += node.child.all_holders(driver)
        return found


class Executable:
    """An instantiated graph.

    Attributes:
        places: The position of the work of each node, also of the nodes of graphs that updated it.
        kinds: The kinds of the nodes, by position.
        disabled: The positions of nodes that a launch leaves out.
    """

    def __init__(
        self, flags: int, nodes: list[Node], work: GraphWork, emulated: EmulatorExecutable
    ) -> None:
        self.handle = 0
        self.flags = flags
        self.kinds = [node.kind for node in nodes]
        self.places = {node: place for place, node in enumerate(nodes)}
        self.disabled: set[int] = set()
        self.emulated = emulated
        self._work = work

    @property
    def work(self) -> list[Work]:
        """What each node does."""
        return self._work.work

    @property
    def after(self) -> list[tuple[int, ...]]:
        """The positions of the nodes that each one depends on."""
        return self._work.after

    def renew(self, nodes: list[Node], work: GraphWork) -> None:
        """Do the work of other nodes in later launches."""
        self.places |= {node: place for place, node in enumerate(nodes)}
        self._work = work._replace(owners=(*self._work.owners, *work.owners))
        self._prepare()

    def set_work(self, place: int, work: Work) -> None:
        """Do other work in the place of one node in later launches."""
        self._work = self._work._replace(work=[*self.work[:place], work, *self.work[place + 1 :]])
        self._prepare()

    def set_enabled(self, place: int, *, enabled: bool) -> None:
        """Execute a node in later launches, or leave it out."""
        if enabled:
            self.disabled.discard(place)
        else:
            self.disabled.add(place)
        self._prepare()

    def _prepare(self) -> None:
        done = [_nothing if at in self.disabled else each for at, each in enumerate(self.work)]
        self.emulated.renew(self._work._replace(work=done))


def _nothing() -> None:
    """Do nothing, in the place of a node that is disabled."""


def ordered(driver: Driver, graph: Graph) -> tuple[list[Node], list[tuple[int, ...]]]:
    """Return the nodes, each after those that it depends on, and the positions of those.

    Raises `CallError` for a graph with a cycle.
    """
    remaining = list(graph.nodes(driver))
    place: dict[Node, int] = {}
    while remaining:
        later = []
        for node in remaining:
            if all(each in place for each in node.before):
                place[node] = len(place)
            else:
                later.append(node)
        if len(later) == len(remaining):
            raise CallError(INVALID_VALUE)
        remaining = later
    return list(place), [tuple(sorted(place[each] for each in node.before)) for node in place]


def work_of(driver: Driver, graph: Graph) -> GraphWork:
    """Return what a replay of a graph does."""
    nodes, after = ordered(driver, graph)
    work = [
        node.work if node.child is None else partial(_run_all, work_of(driver, node.child).work)
        for node in nodes
    ]
    return GraphWork(work, after, tuple(graph.all_holders(driver)))


def _run_all(work: list[Work]) -> None:
    for each in work:
        each()


def graph_of(driver: Driver, handle: int) -> Graph:
    """Return the graph with this handle."""
    return driver.handles.get(handle, Graph)


def node_of(driver: Driver, handle: int) -> Node:
    """Return the node with this handle."""
    return driver.handles.get(handle, Node)
