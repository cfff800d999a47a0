"""Functions that create, clone, destroy and print graphs, and tell their nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.edges import write_nodes
from preheat.driver.graphs.graph import Graph, Node, clone, graph_of, node_of
from preheat.driver.graphs.updates import KINDS
from preheat.driver.raw import I32, U32, U64, put, text
from preheat.driver.status import INVALID_VALUE, OPERATING_SYSTEM

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []


def _put_handle(out: int, handle: int) -> None:
    if not out:
        raise CallError(INVALID_VALUE)
    put(out, handle)


# Graphs


@entry("cuGraphCreate")
def _create(driver: Driver, out: int, flags: int) -> None:
    if not out or flags:
        raise CallError(INVALID_VALUE)
    made = Graph()
    made.handle = driver.handles.add(made)
    put(out, made.handle)


@entry("cuGraphDestroy")
def _destroy(driver: Driver, handle: int) -> None:
    graph = graph_of(driver, handle)
    if graph.parent is not None:
        raise CallError(INVALID_VALUE)
    graph.close(driver)


@entry("cuGraphClone")
def _clone(driver: Driver, out: int, handle: int) -> None:
    graph = graph_of(driver, handle)
    if not out or graph.allocates(driver):
        raise CallError(INVALID_VALUE)
    put(out, clone(driver, graph).handle)


@entry("cuGraphNodeFindInClone")
def _find_in_clone(driver: Driver, out: int, node: int, handle: int) -> None:
    found = graph_of(driver, handle).copies.get(node_of(driver, node))
    if found is None or driver.handles.find(found.handle, Node) is None:
        raise CallError(INVALID_VALUE)
    _put_handle(out, found.handle)


@entry("cuGraphGetId")
def _graph_id(driver: Driver, handle: int, out: int) -> None:
    put(out, graph_of(driver, handle).number, U32)


# Nodes


@entry("cuGraphGetNodes")
def _nodes(driver: Driver, handle: int, out: int, count: int) -> None:
    write_nodes(graph_of(driver, handle).nodes(driver), out, count)


@entry("cuGraphGetRootNodes")
def _roots(driver: Driver, handle: int, out: int, count: int) -> None:
    nodes = graph_of(driver, handle).nodes(driver)
    write_nodes([node for node in nodes if not node.before], out, count)


@entry("cuGraphNodeGetType")
def _type(driver: Driver, handle: int, out: int) -> None:
    node = node_of(driver, handle)
    if not out:
        raise CallError(INVALID_VALUE)
    put(out, KINDS[node.kind].number, I32)


@entry("cuGraphNodeGetContainingGraph")
def _containing(driver: Driver, handle: int, out: int) -> None:
    _put_handle(out, node_of(driver, handle).graph.handle)


@entry("cuGraphNodeGetLocalId")
def _local_id(driver: Driver, handle: int, out: int) -> None:
    put(out, node_of(driver, handle).number, U32)


@entry("cuGraphNodeGetToolsId")
def _tools_id(driver: Driver, handle: int, out: int) -> None:
    node = node_of(driver, handle)
    put(out, node.graph.number << 32 | node.number, U64)


@entry("cuGraphDestroyNode")
def _destroy_node(driver: Driver, handle: int) -> None:
    node = node_of(driver, handle)
    if node.graph.capture is not None or node.graph.allocates(driver):
        raise CallError(INVALID_VALUE)
    node.graph.remove(driver, node)


# Pictures


@entry("cuGraphDebugDotPrint")
def _print(driver: Driver, handle: int, path: int, flags: int) -> None:
    del flags  # They ask for more about each node.
    graph = graph_of(driver, handle)
    if not path:
        raise CallError(INVALID_VALUE)
    lines = ["digraph dot {", *_lines(driver, graph), "}", ""]
    try:
        Path(text(path)).write_text("\n".join(lines))
    except OSError as fault:
        raise CallError(OPERATING_SYSTEM) from fault


def _lines(driver: Driver, graph: Graph) -> Iterator[str]:
    """Yield what a picture says about a graph and the graphs in its nodes."""
    yield f'subgraph "cluster_{graph.number}" {{'
    yield f'label="graph {graph.number}"'
    for node in graph.nodes(driver):
        child = "" if node.child is None else f"graph {node.child.number}"
        label = f"{node.number} {node.kind} {node.name or child}".strip()
        yield f'"{_place(node)}" [label="{label}"]'
        for before in node.before:
            yield f'"{_place(before)}" -> "{_place(node)}"'
    yield "}"
    for node in graph.nodes(driver):
        if node.child is not None:
            yield from _lines(driver, node.child)


def _place(node: Node) -> str:
    return f"{node.graph.number}.{node.number}"
