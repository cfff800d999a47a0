"""Functions that create, clone and destroy graphs, and tell their nodes and edges."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.captures import read_nodes
from preheat.driver.graphs.graph import Graph, Node, graph_of, node_of
from preheat.driver.raw import I32, get, put, text
from preheat.driver.status import INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["NODE_TYPES", "clone"]

#: The number of each kind of node.
NODE_TYPES = {
    "kernel": 0, "copy": 1, "fill": 2, "host": 3, "graph": 4, "empty": 5, "wait": 6, "record": 7,
    "allocation": 10, "free": 11,
}  # fmt: skip


# Graphs


def add_graph(driver: Driver, graph: Graph) -> int:
    """Return the handle of a new graph."""
    graph.handle = driver.handles.add(graph)
    return graph.handle


def clone(driver: Driver, graph: Graph) -> Graph:
    """Return a copy of a graph, whose nodes know which nodes they are copies of."""
    copy = Graph()
    add_graph(driver, copy)
    for node in graph.nodes(driver):
        before = [copy.copies[each] for each in node.before]
        made = copy.add(driver, node.kind, node.name, node.work, before)
        made.child = None if node.child is None else clone(driver, node.child)
        copy.copies[node] = made
    copy.holders = list(graph.holders)
    return copy


@entry("cuGraphCreate")
def _create(driver: Driver, out: int, flags: int) -> None:
    if not out or flags:
        raise CallError(INVALID_VALUE)
    put(out, add_graph(driver, Graph()))


@entry("cuGraphDestroy")
def _destroy(driver: Driver, handle: int) -> None:
    graph_of(driver, handle).close(driver)


@entry("cuGraphClone")
def _clone(driver: Driver, out: int, handle: int) -> None:
    put(out, clone(driver, graph_of(driver, handle)).handle)


@entry("cuGraphNodeFindInClone")
def _find_in_clone(driver: Driver, out: int, node: int, handle: int) -> None:
    found = graph_of(driver, handle).copies.get(node_of(driver, node))
    if found is None:
        raise CallError(INVALID_VALUE)
    put(out, found.handle)


@entry("cuGraphDebugDotPrint")
def _print(driver: Driver, handle: int, path: int, flags: int) -> None:
    del flags
    nodes = graph_of(driver, handle).nodes(driver)
    place = {node: at for at, node in enumerate(nodes)}
    lines = [f'"{at}" [label="{node.kind} {node.name}"]' for node, at in place.items()]
    lines += [f'"{place[before]}" -> "{at}"' for node, at in place.items() for before in node.before]
    try:
        Path(text(path)).write_text("\n".join(["digraph dot {", *lines, "}", ""]))
    except OSError as fault:
        raise CallError(INVALID_VALUE) from fault


# Nodes and edges


def _write(driver: Driver, nodes: Iterable[Node], out: int, count: int) -> None:
    """Write handles into an array of `count` items; without an array, write the number alone."""
    del driver
    handles = [node.handle for node in nodes]
    if out:
        room = get(count)
        for at in range(room):
            put(out + 8 * at, handles[at] if at < len(handles) else 0)
        put(count, min(room, len(handles)))
    else:
        put(count, len(handles))


@entry("cuGraphGetNodes")
def _nodes(driver: Driver, handle: int, out: int, count: int) -> None:
    _write(driver, graph_of(driver, handle).nodes(driver), out, count)


@entry("cuGraphGetRootNodes")
def _roots(driver: Driver, handle: int, out: int, count: int) -> None:
    nodes = graph_of(driver, handle).nodes(driver)
    _write(driver, [node for node in nodes if not node.before], out, count)


def _write_plain_edges(out: int, count: int) -> None:
    """Describe edges that wait for the whole node before them."""
    if out and count:
        ctypes.memset(out, 0, 8 * get(count))


@entry("cuGraphGetEdges", 10000)
def _edges(driver: Driver, handle: int, sources: int, targets: int, count: int) -> None:
    nodes = graph_of(driver, handle).nodes(driver)
    edges = [(before, node) for node in nodes for before in node.before]
    room = get(count)
    _write(driver, [before for before, _ in edges], sources, count)
    if targets:
        put(count, room)
        _write(driver, [node for _, node in edges], targets, count)


@entry("cuGraphGetEdges", 12030)
def _edges_with_data(
    driver: Driver, handle: int, sources: int, targets: int, data: int, count: int
) -> None:
    _edges(driver, handle, sources, targets, count)
    _write_plain_edges(data, count)


@entry("cuGraphNodeGetDependencies", 10000)
def _dependencies(driver: Driver, handle: int, out: int, count: int) -> None:
    _write(driver, node_of(driver, handle).before, out, count)


@entry("cuGraphNodeGetDependencies", 12030)
def _dependencies_with_data(driver: Driver, handle: int, out: int, data: int, count: int) -> None:
    _dependencies(driver, handle, out, count)
    _write_plain_edges(data if out else 0, count)


@entry("cuGraphNodeGetDependentNodes", 10000)
def _dependents(driver: Driver, handle: int, out: int, count: int) -> None:
    node = node_of(driver, handle)
    _write(driver, [each for each in node.graph.nodes(driver) if node in each.before], out, count)


@entry("cuGraphNodeGetDependentNodes", 12030)
def _dependents_with_data(driver: Driver, handle: int, out: int, data: int, count: int) -> None:
    _dependents(driver, handle, out, count)
    _write_plain_edges(data if out else 0, count)


def _pairs(driver: Driver, handle: int, of: int, to: int, count: int) -> list[tuple[Node, Node]]:
    graph = graph_of(driver, handle)
    pairs = list(zip(read_nodes(driver, of, count), read_nodes(driver, to, count), strict=True))
    if graph.capture is not None or any(node.graph is not graph for pair in pairs for node in pair):
        raise CallError(INVALID_VALUE)
    return pairs


@entry("cuGraphAddDependencies", 10000)
def _add_edges(driver: Driver, handle: int, of: int, to: int, count: int) -> None:
    pairs = _pairs(driver, handle, of, to, count)
    if any(before in node.before for before, node in pairs):
        raise CallError(INVALID_VALUE)
    for before, node in pairs:
        node.before.append(before)


@entry("cuGraphAddDependencies", 12030)
def _add_edges_with_data(driver: Driver, handle: int, of: int, to: int, data: int, count: int) -> None:
    del data
    _add_edges(driver, handle, of, to, count)


@entry("cuGraphRemoveDependencies", 10000)
def _remove_edges(driver: Driver, handle: int, of: int, to: int, count: int) -> None:
    pairs = _pairs(driver, handle, of, to, count)
    if any(before not in node.before for before, node in pairs):
        raise CallError(INVALID_VALUE)
    for before, node in pairs:
        node.before.remove(before)


@entry("cuGraphRemoveDependencies", 12030)
def _remove_edges_with_data(
    driver: Driver, handle: int, of: int, to: int, data: int, count: int
) -> None:
    del data
    _remove_edges(driver, handle, of, to, count)


@entry("cuGraphNodeGetType")
def _type(driver: Driver, handle: int, out: int) -> None:
    put(out, NODE_TYPES[node_of(driver, handle).kind], I32)


@entry("cuGraphNodeGetContainingGraph")
def _containing(driver: Driver, handle: int, out: int) -> None:
    put(out, node_of(driver, handle).graph.handle)


@entry("cuGraphDestroyNode")
def _destroy_node(driver: Driver, handle: int) -> None:
    node = node_of(driver, handle)
    if node.graph.capture is not None:
        raise CallError(INVALID_VALUE)
    node.graph.remove(driver, node)
