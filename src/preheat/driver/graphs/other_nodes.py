"""Nodes that call the host, record or wait for events, execute a graph, or do nothing."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError
from preheat.driver.events import Event
from preheat.driver.graphs.graph import Graph, Node, clone, graph_of
from preheat.driver.graphs.node_kinds import Described, NodeKind
from preheat.driver.status import INVALID_VALUE
from preheat.driver.streams import HostCall
from preheat.emulator.graph_work import ChildGraph, EventRecord, EventWait, GraphWork, do_nothing

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["CHILD", "EMPTY", "HOST", "RECORD", "WAIT"]

_HOST = struct.Struct("<QQI4xQ")
_CHILD = struct.Struct("<Qi4x")
_RECORD = struct.Struct("<QQ")
_WAIT = struct.Struct("<Q")
_CLONE, _MOVE, _NOT_OWNED = 0, 1, -1


# Functions of the host


def _read_host(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    del driver, place
    function, argument, _, _ = _HOST.unpack(data)
    if not function:
        raise CallError(INVALID_VALUE)
    return Described(HostCall(function, argument))


def _write_host(driver: Driver, node: Node) -> bytes:
    del driver
    if not isinstance(node.work, HostCall):
        raise CallError(INVALID_VALUE)
    return _HOST.pack(node.work.function, node.work.argument, 0, 0)


HOST = NodeKind(3, _HOST.size, _read_host, _write_host)


# Graphs


def _read_child(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    handle, ownership = _CHILD.unpack(data)
    graph = graph_of(driver, handle)
    if graph.capture is not None or graph.moved or ownership not in (_CLONE, _MOVE):
        raise CallError(INVALID_VALUE)
    if isinstance(place, Node):  # Only its parameters are taken.
        return Described(ChildGraph(GraphWork([], []), graph))
    if ownership == _CLONE:
        if graph.allocates(driver):
            raise CallError(INVALID_VALUE)
        graph = clone(driver, graph)
    elif graph.parent is not None or graph in place.around():
        raise CallError(INVALID_VALUE)
    graph.moved = ownership == _MOVE
    return Described(ChildGraph(GraphWork([], []), graph))


def _write_child(driver: Driver, node: Node) -> bytes:
    del driver
    if node.child is None:
        raise CallError(INVALID_VALUE)
    return _CHILD.pack(node.child.handle, _NOT_OWNED)


CHILD = NodeKind(4, _CHILD.size, _read_child, _write_child)


# Nothing


def _read_empty(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    del driver, data, place
    return Described(do_nothing)


def _write_empty(driver: Driver, node: Node) -> bytes:
    del driver, node
    return b""


EMPTY = NodeKind(5, 0, _read_empty, _write_empty)


# Events


def _event(driver: Driver, handle: int) -> Event:
    found = driver.handles.find(handle, Event)
    if found is None:
        raise CallError(INVALID_VALUE)
    return found


def _read_wait(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    del place
    event = _event(driver, *_WAIT.unpack(data))
    return Described(EventWait(event.emulated, event))


def _read_record(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    del place
    handle, _ = _RECORD.unpack(data)
    event = _event(driver, handle)
    return Described(EventRecord(event.emulated, event))


def _handle(node: Node) -> int:
    work = node.work
    if not isinstance(work, EventRecord | EventWait) or not isinstance(work.owner, Event):
        raise CallError(INVALID_VALUE)
    return work.owner.handle


def _write_wait(driver: Driver, node: Node) -> bytes:
    del driver
    return _WAIT.pack(_handle(node))


def _write_record(driver: Driver, node: Node) -> bytes:
    del driver
    return _RECORD.pack(_handle(node), 0)


WAIT = NodeKind(6, _WAIT.size, _read_wait, _write_wait)
RECORD = NodeKind(7, _RECORD.size, _read_record, _write_record)
