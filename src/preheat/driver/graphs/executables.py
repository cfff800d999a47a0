"""Executable graphs: instantiation, launch and update."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from preheat.devices.emulator.graph import GraphAllocation, GraphFree
from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.graph import CHILD, Executable, Graph, Node, graph_of, ordered, work_of
from preheat.driver.graphs.parameters import EventWork
from preheat.driver.launches import asynchronous
from preheat.driver.raw import I32, U64, get, put, write
from preheat.driver.status import EXEC_UPDATE_FAILURE, INVALID_VALUE
from preheat.driver.streams import stream_of

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["executable_of"]

_FREE_ON_LAUNCH = 1
_KNOWN_FLAGS = 0b1011  # also an upload, and priorities, which change no result
_INSTANTIATED = 0
_TOPOLOGY_CHANGED, _TYPE_CHANGED, _PARAMETERS_CHANGED = 2, 3, 5
_UPDATE_RESULT = struct.Struct("<I4xQQ")


def executable_of(driver: Driver, handle: int) -> Executable:
    """Return the executable with this handle."""
    return driver.handles.get(handle, Executable)


def _make(driver: Driver, graph: Graph, flags: int) -> int:
    if flags & ~_KNOWN_FLAGS or graph.capture is not None:
        raise CallError(INVALID_VALUE)
    emulator = driver.current().gpu.emulator
    nodes, _ = ordered(driver, graph)
    work = work_of(driver, graph)
    emulated = emulator.executable(work, free_on_launch=bool(flags & _FREE_ON_LAUNCH))
    made = Executable(flags, nodes, work, emulated)
    made.handle = driver.handles.add(made)
    return made.handle


@entry("cuGraphInstantiate", 11000)
def _instantiate(driver: Driver, out: int, graph: int, node: int, log: int, size: int) -> None:
    del log, size
    put(node, 0)
    put(out, _make(driver, graph_of(driver, graph), 0))


@entry("cuGraphInstantiateWithFlags")
def _instantiate_with_flags(driver: Driver, out: int, graph: int, flags: int) -> None:
    put(out, _make(driver, graph_of(driver, graph), flags))


@entry("cuGraphInstantiateWithParams")
def _instantiate_with_parameters(driver: Driver, out: int, graph: int, parameters: int) -> None:
    put(out, _make(driver, graph_of(driver, graph), get(parameters, U64)))
    put(parameters + 16, 0)
    put(parameters + 24, _INSTANTIATED, I32)


@entry("cuGraphExecGetFlags")
def _flags(driver: Driver, handle: int, out: int) -> None:
    put(out, executable_of(driver, handle).flags)


@entry("cuGraphExecDestroy")
def _destroy(driver: Driver, handle: int) -> None:
    executable_of(driver, handle).emulated.close()
    driver.handles.remove(handle)


@entry("cuGraphUpload", stream=1)
def _upload(driver: Driver, handle: int, stream: int) -> None:
    executable_of(driver, handle).emulated.upload(stream_of(driver, stream).emulated)


@entry("cuGraphLaunch", stream=1)
def _launch(driver: Driver, handle: int, stream: int) -> int:
    made, where = executable_of(driver, handle), stream_of(driver, stream)
    branch = where.emulated.branch
    if branch is not None:
        branch.add(CHILD, "", made.emulated.as_work())
        return 0
    status = 0
    for work in _events(made, "wait"):
        where.emulated.wait(work.event.emulated)
    with asynchronous(driver, where):
        status = made.emulated.prepare(where.emulated)()[0]
    for work in _events(made, "record"):
        where.emulated.record(reuse=work.event.emulated)
        work.event.recorded = True
    return status


def _events(made: Executable, kind: str) -> Iterator[EventWork]:
    """Yield the event nodes of one kind. Waits come before the whole graph, and records after it."""
    for each, work in zip(made.kinds, made.work, strict=True):
        if each == kind and isinstance(work, EventWork):
            yield work


# Updates


@entry("cuGraphExecUpdate", 12000)
def _update(driver: Driver, handle: int, graph: int, out: int) -> int:
    made, other = executable_of(driver, handle), graph_of(driver, graph)
    nodes, after = ordered(driver, other)
    fault = _difference(made, nodes, after)
    if fault is not None:
        result, node = fault
        write(out, _UPDATE_RESULT.pack(result, 0 if node is None else node.handle, 0))
        return EXEC_UPDATE_FAILURE
    made.renew(nodes, work_of(driver, other))
    write(out, _UPDATE_RESULT.pack(0, 0, 0))
    return 0


@entry("cuGraphExecUpdate", 10020)
def _update_1(driver: Driver, handle: int, graph: int, node: int, result: int) -> int:
    made, other = executable_of(driver, handle), graph_of(driver, graph)
    nodes, after = ordered(driver, other)
    found, at = _difference(made, nodes, after) or (0, None)
    put(result, found, I32)
    put(node, 0 if at is None else at.handle)
    if found:
        return EXEC_UPDATE_FAILURE
    made.renew(nodes, work_of(driver, other))
    return 0


def _difference(
    made: Executable, nodes: list[Node], after: list[tuple[int, ...]]
) -> tuple[int, Node | None] | None:
    """Return why an executable cannot be updated to other nodes, and the node that differs."""
    if len(nodes) != len(made.kinds):
        return _TOPOLOGY_CHANGED, None
    for place, node in enumerate(nodes):
        if node.kind != made.kinds[place]:
            return _TYPE_CHANGED, node
        if made.after[place] != after[place]:
            return _TOPOLOGY_CHANGED, node
        if isinstance(node.work, GraphAllocation | GraphFree) and node not in made.places:
            return _PARAMETERS_CHANGED, node
    return None
