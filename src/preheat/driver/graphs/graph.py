"""Graphs with their nodes, and executables of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from preheat.driver.calls import CallError
from preheat.driver.status import INVALID_VALUE
from preheat.emulator.capture import Capture
from preheat.emulator.graph import EmulatorExecutable
from preheat.emulator.graph_work import (
    ChildGraph,
    GraphAllocation,
    GraphFree,
    GraphWork,
    Work,
    do_nothing,
)

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = [
    "CycleError", "Executable", "Graph", "Holder", "Node", "clone", "executable_of", "graph_of",
    "node_of", "work_of",
]  # fmt: skip

T = TypeVar("T")

_numbers = itertools.count(1)  # of graphs


class Holder(Protocol):
    """A reference of a graph to an object of the program, which ends with the last copy of it."""


class Node:
    """One node of a graph.

    Attributes:
        number: Its number in its graph.
        before: The nodes that it depends on directly.
        ports: The data of the edges that do not wait for the whole node before, by that node.
        parameters: What the program gave, for a node whose work does not have all of it.
        attributes: Attributes of a kernel node that the program has set, by their number.
        enabled: False if an executable does not do its work.
        kept: What keeps the parameters that the program was told.
    """

    def __init__(self, graph: Graph, kind: str, name: str, work: Work, before: Iterable[Node]) -> None:
        self.handle = 0
        self.number = 0
        self.graph = graph
        self.kind = kind
        self.name = name
        self.work = work
        self.before = list(before)
        self.ports: dict[Node, bytes] = {}
        self.parameters = b""
        self.attributes: dict[int, bytes] = {}
        self.enabled = True
        self.kept: object = None

    @property
    def child(self) -> Graph | None:
        """The graph of a node that executes another graph."""
        owner = self.work.owner if isinstance(self.work, ChildGraph) else None
        return owner if isinstance(owner, Graph) else None

    def take(self, other: Node) -> None:
        """Do the same work as another node of this kind."""
        self.name, self.work = other.name, other.work
        self.parameters, self.attributes = other.parameters, dict(other.attributes)

    def needed_work(self, driver: Driver) -> Work:
        """Return what a replay does for this node."""
        if not self.enabled:
            return do_nothing
        return self.work if self.child is None else ChildGraph(work_of(driver, self.child), self.child)


class Graph:
    """A graph. One that is being captured gets its nodes from the capture.

    Attributes:
        parent: The node whose work this graph is, or None.
        moved: True if the program gave the graph to that node.
        executable: The handle of the last executable.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self.handle = 0
        self.number = next(_numbers)
        self.capture = capture
        self.parent: Node | None = None
        self.moved = False
        self.executable = 0
        self.holders: list[Holder] = []
        self.told: object = None  # what keeps the dependencies that the program was told
        self.copies: dict[Node, Node] = {}  # The nodes of the graph that this is a clone of.
        self._nodes: list[Node] = []
        self._own: int | None = None  # the nodes that it had before its capture, which only adds some
        self._made = 0  # the number of nodes that it ever had

    def continue_in(self, capture: Capture) -> None:
        """Get more nodes from a capture, which has the graph's nodes already."""
        self.capture = capture
        self._own = len(self._nodes)

    def abandon(self, driver: Driver) -> None:
        """End the capture of the graph without a result."""
        self.capture = None
        if self._own is None:
            self.close(driver)
        else:
            for node in self._nodes[self._own :]:
                self.remove(driver, node)

    def nodes(self, driver: Driver) -> list[Node]:
        """Return the nodes in the order in which they were made."""
        if self.capture is not None:
            captured = self.capture.captured()
            for at in range(len(self._nodes), len(self.capture.nodes)):
                kind, name = self.capture.nodes[at]
                before = [self._nodes[number] for number in captured.after[at]]
                self._add(driver, Node(self, kind, name, captured.work[at], before))
        return self._nodes

    def add(self, driver: Driver, kind: str, name: str, work: Work, before: list[Node]) -> Node:
        """Add a node that depends on others of this graph."""
        mine = self.nodes(driver)
        if len(set(before)) != len(before) or any(each.graph is not self for each in before):
            raise CallError(INVALID_VALUE)
        if self.capture is not None:
            positions = [mine.index(each) for each in before]
            self.capture.set_apart([self.capture.add(kind, name, work, positions)])
        return self._add(driver, Node(self, kind, name, work, before))

    def _add(self, driver: Driver, node: Node) -> Node:
        node.handle = driver.handles.add(node)
        node.number = self._made
        self._made += 1
        self._nodes.append(node)
        if node.child is not None:
            node.child.parent = node
        return node

    def remove(self, driver: Driver, node: Node) -> None:
        """Remove a node and the edges from and to it."""
        self._nodes.remove(node)
        for other in self._nodes:
            other.before = [each for each in other.before if each is not node]
            other.ports.pop(node, None)
        _forget(driver, node)

    def close(self, driver: Driver) -> None:
        """Forget the graph and its nodes. Executables of it have what they need."""
        for node in self._nodes:
            _forget(driver, node)
        self._nodes = []
        self.holders = []
        self.copies = {}
        driver.handles.remove(self.handle)

    def around(self) -> Iterator[Graph]:
        """Yield this graph and the graphs that it is a part of."""
        yield self
        if self.parent is not None:
            yield from self.parent.graph.around()

    def walk(self, driver: Driver) -> Iterator[Node]:
        """Yield the nodes of this graph and of the graphs in its nodes."""
        for node in self.nodes(driver):
            yield node
            if node.child is not None:
                yield from node.child.walk(driver)

    def allocates(self, driver: Driver) -> bool:
        """Return whether it allocates or frees memory, which some functions do not allow."""
        return any(isinstance(node.work, GraphAllocation | GraphFree) for node in self.walk(driver))

    def all_holders(self, driver: Driver) -> list[Holder]:
        """Return the references of this graph and of the graphs in its nodes."""
        children = [node.child for node in self.walk(driver) if node.child is not None]
        return [*self.holders, *(holder for child in children for holder in child.holders)]


def _forget(driver: Driver, node: Node) -> None:
    driver.handles.remove(node.handle)
    if node.child is not None:
        node.child.close(driver)


class Executable:
    """An instantiated graph.

    Attributes:
        template: A clone of the graph, with the parameters that later launches have.
        nodes: The node of the template by the node of the graph, in child graphs too.
    """

    def __init__(self, flags: int, template: Graph, emulated: EmulatorExecutable) -> None:
        self.handle = 0
        self.number = next(_numbers)
        self.flags = flags
        self.template = template
        self.nodes = _all_copies(template)
        self._emulated = emulated
        self._changed = False

    def node(self, node: Node) -> Node:
        """Return the node of the template for a node of the graph that was instantiated."""
        found = self.nodes.get(node)
        if found is None:
            raise CallError(INVALID_VALUE)
        return found

    def change(self) -> None:
        """Let later launches have the parameters that the template has now."""
        self._changed = True

    def emulated(self, driver: Driver) -> EmulatorExecutable:
        """Return what is launched."""
        if self._changed:
            self._emulated.renew(work_of(driver, self.template))
            self._changed = False
        return self._emulated

    def close(self, driver: Driver) -> None:
        """Release what the executable keeps. Queued launches keep what they need."""
        self._emulated.close()
        self.template.close(driver)
        self.nodes = {}
        driver.handles.remove(self.handle)


def clone(driver: Driver, graph: Graph) -> Graph:
    """Return a copy of a graph, whose nodes know which nodes they are copies of."""
    copy = Graph()
    copy.handle = driver.handles.add(copy)
    for node in graph.nodes(driver):
        child = node.child
        work = node.work if child is None else ChildGraph(GraphWork([], []), clone(driver, child))
        made = copy.copies[node] = copy.add(driver, node.kind, node.name, work, [])
        made.parameters, made.attributes = node.parameters, dict(node.attributes)
        made.enabled = node.enabled
    for node, made in copy.copies.items():
        made.before = [copy.copies[each] for each in node.before]
        made.ports = {copy.copies[each]: data for each, data in node.ports.items()}
    copy.holders = list(graph.holders)
    return copy


def _all_copies(graph: Graph) -> dict[Node, Node]:
    copies = dict(graph.copies)
    for node in graph.copies.values():
        if node.child is not None:
            copies |= _all_copies(node.child)
    return copies


class CycleError(CallError):
    """A node comes before itself."""

    def __init__(self, node: Node) -> None:
        super().__init__(INVALID_VALUE)
        self.node = node


def _sort(driver: Driver, graph: Graph) -> list[Node]:
    """Return the nodes, each after those that it depends on. `CycleError` for a graph with a cycle."""
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
            raise CycleError(later[0])
        remaining = later
    return list(place)


def work_of(driver: Driver, graph: Graph) -> GraphWork:
    """Return what a replay of a graph does."""
    nodes = _sort(driver, graph)
    place = {node: at for at, node in enumerate(nodes)}
    work = [node.needed_work(driver) for node in nodes]
    after = [tuple(sorted(place[each] for each in node.before)) for node in nodes]
    return GraphWork(work, after, tuple(graph.all_holders(driver)))


def graph_of(driver: Driver, handle: int) -> Graph:
    """Return the graph with this handle."""
    return _require(driver.handles.find(handle, Graph))


def node_of(driver: Driver, handle: int) -> Node:
    """Return the node with this handle."""
    return _require(driver.handles.find(handle, Node))


def executable_of(driver: Driver, handle: int) -> Executable:
    """Return the executable with this handle."""
    return _require(driver.handles.find(handle, Executable))


def _require(found: T | None) -> T:
    if found is None:
        raise CallError(INVALID_VALUE)
    return found
