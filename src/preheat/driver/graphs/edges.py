"""The edges of graphs.

The data of an edge says on which part of the node before it waits. Here it waits for the whole node,
which is one of the orders that the data allows; a program reads the data that it has given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.graph import Graph, Node, graph_of, node_of
from preheat.driver.raw import U64, get, put, read, write
from preheat.driver.status import INVALID_VALUE, LOSSY_QUERY

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["read_edges", "read_nodes", "write_nodes"]

_SIZE = 8
_PLAIN = bytes(_SIZE)
_PROGRAMMATIC = 1  # the type of an edge between kernels, which begins at one of the ports 1 and 2

Edge = tuple[Node, Node]


# Arrays of the program


def read_nodes(driver: Driver, address: int, count: int) -> list[Node]:
    """Return the nodes of an array of handles."""
    if count and not address:
        raise CallError(INVALID_VALUE)
    return [node_of(driver, get(address + 8 * at, U64)) for at in range(count)]


def read_edges(
    driver: Driver, graph: Graph, nodes: int, edges: int, count: int, kind: str
) -> dict[Node, bytes]:
    """Return the nodes that a new node of a graph depends on, with the data of these edges."""
    found = read_nodes(driver, nodes, count)
    if len(set(found)) != count or any(node.graph is not graph for node in found):
        raise CallError(INVALID_VALUE)
    return {
        node: _check_data(node.kind, data, kind)
        for node, data in zip(found, _read_data(edges, count), strict=True)
    }


def _read_data(address: int, count: int) -> list[bytes]:
    if not address:
        return [_PLAIN] * count
    return [read(address + _SIZE * at, _SIZE) for at in range(count)]


def _check_data(source: str, data: bytes, target: str) -> bytes:
    """Return the data of an edge between nodes of these kinds; `CallError` if they cannot have it."""
    from_port, to_port, kind = data[:3]
    plain = kind == from_port == 0
    programmatic = kind == _PROGRAMMATIC and from_port in (1, 2) and source == target == "kernel"
    if to_port or any(data[3:]) or not (plain or programmatic):
        raise CallError(INVALID_VALUE)
    return data


def write_nodes(nodes: Iterable[Node], out: int, count: int) -> None:
    """Write handles into an array of `count` items; without an array, write the number alone."""
    if not count:
        raise CallError(INVALID_VALUE)
    handles = [node.handle for node in nodes]
    if out:
        room = get(count)
        for at in range(room):
            put(out + 8 * at, handles[at] if at < len(handles) else 0)
        put(count, min(room, len(handles)))
    else:
        put(count, len(handles))


def _write(edges: Sequence[Edge], places: Mapping[int, int], data: int, count: int) -> None:
    """Write the nodes at the ends 0 or 1 of edges into arrays, and the data of the edges."""
    wanted = all(places.values())
    ports = [node.ports.get(source, _PLAIN) for source, node in edges]
    if not count or (data and not wanted):
        raise CallError(INVALID_VALUE)
    if wanted and not data and any(map(any, ports)):
        raise CallError(LOSSY_QUERY)
    room = get(count)
    for end, place in places.items():
        put(count, room)
        write_nodes([edge[end] for edge in edges], place, count)
    if data:
        write(data, b"".join(ports[:room]).ljust(_SIZE * room, b"\0"))


# Questions


@entry("cuGraphGetEdges", 12030)
def _edges_of_graph(
    driver: Driver, handle: int, sources: int, targets: int, data: int, count: int
) -> None:
    if bool(sources) != bool(targets):
        raise CallError(INVALID_VALUE)
    nodes = graph_of(driver, handle).nodes(driver)
    edges = [(each, node) for node in nodes for each in node.before]
    _write(edges, {0: sources, 1: targets}, data, count)


@entry("cuGraphGetEdges", 10000)
def _edges_without_data(driver: Driver, handle: int, sources: int, targets: int, count: int) -> None:
    _edges_of_graph(driver, handle, sources, targets, 0, count)


@entry("cuGraphNodeGetDependencies", 12030)
def _dependencies(driver: Driver, handle: int, out: int, data: int, count: int) -> None:
    node = node_of(driver, handle)
    _write([(each, node) for each in node.before], {0: out}, data, count)


@entry("cuGraphNodeGetDependencies", 10000)
def _dependencies_without_data(driver: Driver, handle: int, out: int, count: int) -> None:
    _dependencies(driver, handle, out, 0, count)


@entry("cuGraphNodeGetDependentNodes", 12030)
def _dependents(driver: Driver, handle: int, out: int, data: int, count: int) -> None:
    node = node_of(driver, handle)
    after = [each for each in node.graph.nodes(driver) if node in each.before]
    _write([(node, each) for each in after], {1: out}, data, count)


@entry("cuGraphNodeGetDependentNodes", 10000)
def _dependents_without_data(driver: Driver, handle: int, out: int, count: int) -> None:
    _dependents(driver, handle, out, 0, count)


# Changes


def _given(
    driver: Driver, handle: int, of: int, to: int, data: int, count: int
) -> tuple[Graph, dict[Edge, bytes]]:
    """Return edges that a program names, each of them once, with their data."""
    graph = graph_of(driver, handle)
    sources, targets = read_nodes(driver, of, count), read_nodes(driver, to, count)
    edges = list(zip(sources, targets, strict=True))
    foreign = any(node.graph is not graph for edge in edges for node in edge)
    itself = any(source is target for source, target in edges)
    if graph.capture is not None or foreign or itself or len(set(edges)) != count:
        raise CallError(INVALID_VALUE)
    return graph, dict(zip(edges, _read_data(data, count), strict=True))


@entry("cuGraphAddDependencies", 12030)
def _add(driver: Driver, handle: int, of: int, to: int, data: int, count: int) -> None:
    _, edges = _given(driver, handle, of, to, data, count)
    if any(source in target.before for source, target in edges):
        raise CallError(INVALID_VALUE)
    for (source, target), port in edges.items():
        _check_data(source.kind, port, target.kind)
    for (source, target), port in edges.items():
        target.before.append(source)
        if any(port):
            target.ports[source] = port


@entry("cuGraphAddDependencies", 10000)
def _add_without_data(driver: Driver, handle: int, of: int, to: int, count: int) -> None:
    _add(driver, handle, of, to, 0, count)


@entry("cuGraphRemoveDependencies", 12030)
def _remove(driver: Driver, handle: int, of: int, to: int, data: int, count: int) -> None:
    graph, edges = _given(driver, handle, of, to, data, count)
    known = all(
        source in target.before and target.ports.get(source, _PLAIN) == port
        for (source, target), port in edges.items()
    )
    if not known or (edges and graph.allocates(driver)):
        raise CallError(INVALID_VALUE)
    for source, target in edges:
        target.before.remove(source)
        target.ports.pop(source, None)


@entry("cuGraphRemoveDependencies", 10000)
def _remove_without_data(driver: Driver, handle: int, of: int, to: int, count: int) -> None:
    _remove(driver, handle, of, to, 0, count)
