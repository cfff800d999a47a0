"""Streams that are captured into a graph."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.driver import CAPTURE_MODES
from preheat.driver.graphs.edges import read_nodes
from preheat.driver.graphs.graph import Graph, graph_of
from preheat.driver.raw import I32, put
from preheat.driver.status import ILLEGAL_STATE, INVALID_VALUE
from preheat.driver.streams import Stream, stream_of
from preheat.emulator.capture import Branch, Capture

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

_STATUS = ("none", "active", "invalidated")
_ADD, _SET = 0, 1  # what an update does with the dependencies of the next node


@entry("cuStreamBeginCapture", 10010, stream=0)
def _begin(driver: Driver, handle: int, mode: int) -> None:
    if not 0 <= mode < len(CAPTURE_MODES):
        raise CallError(INVALID_VALUE)
    for number, graph in list(driver.captures.items()):
        if graph.capture is not None and graph.capture.over:  # Its stream was destroyed.
            del driver.captures[number]
            graph.abandon(driver)
    stream_of(driver, handle).emulated.begin_capture(CAPTURE_MODES[mode])


@entry("cuStreamBeginCaptureToGraph", 12030, stream=0)
def _begin_to_graph(
    driver: Driver, handle: int, graph: int, dependencies: int, edges: int, count: int, mode: int
) -> None:
    del edges  # Every edge waits for the whole node before it.
    into = graph_of(driver, graph)
    first = read_nodes(driver, dependencies, count)
    if into.capture is not None or any(node.graph is not into for node in first):
        raise CallError(INVALID_VALUE)
    _begin(driver, handle, mode)
    branch = stream_of(driver, handle).emulated.branch
    assert branch is not None
    nodes = into.nodes(driver)
    place = {node: at for at, node in enumerate(nodes)}
    for node in nodes:
        branch.capture.add(node.kind, node.name, node.work, [place[each] for each in node.before])
    branch.capture.set_apart(place.values())
    branch.last = frozenset(place[node] for node in first)
    into.continue_in(branch.capture)
    driver.captures[branch.capture.number] = into


@entry("cuStreamIsCapturing", stream=0)
def _is_capturing(driver: Driver, handle: int, out: int) -> None:
    put(out, _STATUS.index(stream_of(driver, handle).emulated.capture_status()), I32)


def _graph_of_capture(driver: Driver, capture: Capture) -> Graph:
    """Return the graph that a capture makes, which has a handle before the capture ends."""
    found = driver.captures.get(capture.number)
    if found is None:
        found = driver.captures[capture.number] = Graph(capture)
        found.handle = driver.handles.add(found)
    return found


@entry("cuStreamEndCapture", stream=0)
def _end(driver: Driver, handle: int, out: int) -> None:
    put(out, 0)
    stream = stream_of(driver, handle)
    branch = stream.emulated.branch
    if branch is None:
        raise CallError(ILLEGAL_STATE)
    graph = _graph_of_capture(driver, branch.capture)
    try:
        stream.emulated.end_capture()
        graph.nodes(driver)
        put(out, graph.handle)
    except BaseException:
        if branch.capture.over:
            graph.abandon(driver)
        raise
    finally:
        if branch.capture.over:
            graph.capture = None
            del driver.captures[branch.capture.number]


def _require_branch(stream: Stream) -> Branch:
    branch = stream.emulated.branch
    if branch is None:
        raise CallError(ILLEGAL_STATE)
    branch.capture.require("capture dependencies")
    return branch


def _info(
    driver: Driver,
    handle: int,
    status: int,
    number: int,
    graph: int,
    dependencies: int,
    edges: int,
    count: int,
) -> None:
    stream = stream_of(driver, handle)
    put(status, _STATUS.index(stream.emulated.capture_status()), I32)
    branch = stream.emulated.branch
    if branch is None:
        return
    put(number, branch.capture.number)
    made = _graph_of_capture(driver, branch.capture)
    put(graph, made.handle)
    if dependencies or count:
        nodes = made.nodes(driver)
        last = [nodes[at].handle for at in sorted(branch.last)]
        # The program reads them until the next call for this stream.
        found = (ctypes.c_uint64 * max(len(last), 1))(*last)
        plain = (ctypes.c_uint64 * max(len(last), 1))()
        made.told = found, plain
        put(dependencies, ctypes.addressof(found))
        put(edges, ctypes.addressof(plain))
        put(count, len(last))


@entry("cuStreamGetCaptureInfo", 10010, stream=0)
def _short_info(driver: Driver, handle: int, status: int, number: int) -> None:
    _info(driver, handle, status, number, 0, 0, 0, 0)


@entry("cuStreamGetCaptureInfo", 11030, stream=0)
def _info_without_edges(
    driver: Driver, handle: int, status: int, number: int, graph: int, dependencies: int, count: int
) -> None:
    _info(driver, handle, status, number, graph, dependencies, 0, count)


entry("cuStreamGetCaptureInfo", 12030, stream=0)(_info)


@entry("cuStreamUpdateCaptureDependencies", 11030, stream=0)
def _update(driver: Driver, handle: int, nodes: int, count: int, flags: int) -> None:
    branch = _require_branch(stream_of(driver, handle))
    if flags not in (_ADD, _SET):
        raise CallError(INVALID_VALUE)
    mine = _graph_of_capture(driver, branch.capture).nodes(driver)
    given = read_nodes(driver, nodes, count)
    if any(node not in mine for node in given):
        raise CallError(INVALID_VALUE)
    places = frozenset(map(mine.index, given))
    if flags == _SET:
        branch.capture.set_apart(branch.last - places)
    branch.last = places if flags == _SET else branch.last | places


@entry("cuStreamUpdateCaptureDependencies", 12030, stream=0)
def _update_with_edges(
    driver: Driver, handle: int, nodes: int, edges: int, count: int, flags: int
) -> None:
    del edges
    _update(driver, handle, nodes, count, flags)
