"""Executable graphs: instantiation, launch, and nodes that are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.graph import (
    CycleError,
    Executable,
    Graph,
    Node,
    clone,
    executable_of,
    graph_of,
    node_of,
    work_of,
)
from preheat.driver.launches import asynchronous
from preheat.driver.raw import I32, U32, U64, get, put
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED
from preheat.driver.streams import Stream, stream_of
from preheat.emulator.graph_work import ChildGraph, GraphWork

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

_FREE_ON_LAUNCH, _UPLOAD, _DEVICE_LAUNCH, _PRIORITIES = 1, 2, 4, 8
_INSTANTIATED, _FAILED, _INVALID_STRUCTURE = 0, 1, 2  # results of an instantiation
_KINDS_LEFT_OUT = ("kernel", "copy", "fill")


def _make(driver: Driver, out: int, graph: Graph, flags: int) -> None:
    if flags & _DEVICE_LAUNCH:
        raise CallError(NOT_SUPPORTED)
    if not out or flags & ~(_FREE_ON_LAUNCH | _UPLOAD | _PRIORITIES):
        raise CallError(INVALID_VALUE)
    if graph.capture is not None or graph.moved or _is_instantiated(driver, graph):
        raise CallError(INVALID_VALUE)
    emulator = driver.current().gpu.emulator
    work = work_of(driver, graph)  # It finds cycles.
    emulated = emulator.executable(work, free_on_launch=bool(flags & _FREE_ON_LAUNCH))
    made = Executable(flags, clone(driver, graph), emulated)
    made.handle = graph.executable = driver.handles.add(made)
    put(out, made.handle)


def _is_instantiated(driver: Driver, graph: Graph) -> bool:
    """Return whether a graph with memory of its own has an executable: it cannot have two."""
    if driver.handles.find(graph.executable, Executable) is None:
        return False
    return graph.allocates(driver)


@entry("cuGraphInstantiate")
def _instantiate(driver: Driver, out: int, handle: int, node: int, log: int, size: int) -> None:
    del log, size
    graph = graph_of(driver, handle)
    put(node, 0)
    try:
        _make(driver, out, graph, 0)
    except CycleError as fault:
        put(node, fault.node.handle)
        raise


@entry("cuGraphInstantiateWithFlags")
def _instantiate_with_flags(driver: Driver, out: int, graph: int, flags: int) -> None:
    _make(driver, out, graph_of(driver, graph), flags)


@entry("cuGraphInstantiateWithParams")
def _instantiate_with_parameters(driver: Driver, out: int, graph: int, parameters: int) -> None:
    if not parameters:
        raise CallError(INVALID_VALUE)
    node, result = parameters + 16, parameters + 24
    put(node, 0, U64)
    put(result, _FAILED, I32)
    flags, stream = get(parameters, U64), get(parameters + 8, U64)
    if flags & _UPLOAD:
        stream_of(driver, stream)
    try:
        _make(driver, out, graph_of(driver, graph), flags)
    except CycleError as fault:
        put(node, fault.node.handle, U64)
        put(result, _INVALID_STRUCTURE, I32)
        raise
    put(result, _INSTANTIATED, I32)


@entry("cuGraphExecGetFlags")
def _flags(driver: Driver, handle: int, out: int) -> None:
    made = executable_of(driver, handle)
    if not out:
        raise CallError(INVALID_VALUE)
    put(out, made.flags)


@entry("cuGraphExecGetId")
def _id(driver: Driver, handle: int, out: int) -> None:
    put(out, executable_of(driver, handle).number, U32)


@entry("cuGraphExecDestroy")
def _destroy(driver: Driver, handle: int) -> None:
    executable_of(driver, handle).close(driver)


@entry("cuGraphUpload", stream=1)
def _upload(driver: Driver, handle: int, stream: int) -> None:
    made = executable_of(driver, handle)
    made.emulated(driver).upload(stream_of(driver, stream).emulated)


@entry("cuGraphLaunch", stream=1)
def _launch(driver: Driver, handle: int, stream: int) -> int:
    made, where = executable_of(driver, handle), stream_of(driver, stream)
    if where.emulated.branch is not None:
        _capture(driver, made, where)
        return 0
    status = 0
    with asynchronous(driver, where):
        status = made.emulated(driver).prepare(where.emulated)()[0]
    return status


def _capture(driver: Driver, made: Executable, stream: Stream) -> None:
    """Let the graph that is being captured execute a copy of another one."""
    branch = stream.emulated.branch
    assert branch is not None
    branch.capture.require("graph launch")
    if made.template.allocates(driver):
        raise branch.capture.invalidate("graph launch")
    branch.add("graph", "", ChildGraph(GraphWork([], []), clone(driver, made.template)))


# Nodes that are left out


def _switch(driver: Driver, handle: int, node: int) -> tuple[Executable, Node]:
    """Return an executable, and the node of it that can be left out."""
    made = executable_of(driver, handle)
    found = made.node(node_of(driver, node))
    if found.kind not in _KINDS_LEFT_OUT:
        raise CallError(INVALID_VALUE)
    return made, found


@entry("cuGraphNodeSetEnabled")
def _set_enabled(driver: Driver, handle: int, node: int, enabled: int) -> None:
    made, found = _switch(driver, handle, node)
    found.enabled = bool(enabled)
    made.change()


@entry("cuGraphNodeGetEnabled")
def _is_enabled(driver: Driver, handle: int, node: int, out: int) -> None:
    _, found = _switch(driver, handle, node)
    put(out, int(found.enabled), U32)
