"""Nodes that allocate and free memory in each launch, and what a device tells about that memory."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from preheat.driver.allocations import Kind
from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.graph import Graph, Node
from preheat.driver.graphs.node_kinds import PARAMETERS_CHANGED, SUCCESS, Described, NodeKind
from preheat.driver.memory import note_graph_memory
from preheat.driver.raw import U64, get, put
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED
from preheat.emulator.graph_work import GraphAllocation, GraphFree

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["ALLOCATION", "ALLOCATION_ADDRESS", "FREE"]

_POOL_SIZE = 88
#: The type of memory, the types of handles, the kind and number of its place; accesses, size, address.
_ALLOCATION = struct.Struct(f"<4i{_POOL_SIZE - 16}xQQQQ")
#: Where a program finds the address of the memory in the structure.
ALLOCATION_ADDRESS = _ALLOCATION.size - 8
_FREE = struct.Struct("<Q")
_PINNED, _MANAGED = 1, 2
_ON_DEVICE, _PLACES_ON_HOST = 1, (2, 3, 4)

_USED, _USED_HIGH, _RESERVED, _RESERVED_HIGH = range(4)


def _graph(place: Graph | Node) -> Graph:
    """Return the graph of a new node, which may be no part of another one."""
    assert isinstance(place, Graph)
    if place.parent is not None:
        raise CallError(INVALID_VALUE)
    return place


def _read_allocation(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    _graph(place)
    memory, handles, where, number, _, _, size, _ = _ALLOCATION.unpack(data)
    if handles:
        raise CallError(NOT_SUPPORTED)
    if not size:
        raise CallError(INVALID_VALUE)
    kind = _kind(memory, where)
    gpu = driver.gpu(number) if where == _ON_DEVICE else driver.current().gpu
    made = gpu.emulator.allocator.graph_allocation(size)
    note_graph_memory(driver, made, driver.primary(gpu), kind)
    return Described(made)


def _kind(memory: int, where: int) -> Kind:
    """Return the kind of memory of a type at a place."""
    if memory == _MANAGED:
        return Kind.GRAPH_MANAGED
    if memory == _PINNED and where == _ON_DEVICE:
        return Kind.GRAPH
    if memory == _PINNED and where in _PLACES_ON_HOST:
        return Kind.GRAPH_PINNED
    raise CallError(INVALID_VALUE)


def _write_allocation(driver: Driver, node: Node) -> bytes:
    made = node.work
    if not isinstance(made, GraphAllocation):
        raise CallError(INVALID_VALUE)
    known = driver.memory.find(made.address)
    assert known is not None
    memory = _MANAGED if known.is_managed else _PINNED
    where = _PLACES_ON_HOST[0] if known.on_host else _ON_DEVICE
    size, number = made.allocation.size, known.context.gpu.index
    return _ALLOCATION.pack(memory, 0, where, number, 0, 0, size, made.address)


def _read_free(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    """Return the free of memory that this graph allocates, or another one that does not free it."""
    graph = _graph(place)
    (address,) = _FREE.unpack(data)
    made = driver.graph_memory.get(address)
    known = driver.memory.at(address)
    if made is None or known is None or not _can_free(driver, graph, made):
        raise CallError(INVALID_VALUE)
    return Described(known.context.gpu.emulator.allocator.graph_free(made))


def _can_free(driver: Driver, graph: Graph, made: GraphAllocation) -> bool:
    """Return whether a graph can free memory: once, and only there or only in other graphs."""
    freeing = [each for each in driver.handles.all(Graph) if _frees(driver, each, made)]
    if graph in freeing or any(_allocates(driver, each, made) for each in freeing):
        return False
    return not (freeing and _allocates(driver, graph, made))


def _frees(driver: Driver, graph: Graph, made: GraphAllocation) -> bool:
    works = [node.work for node in graph.nodes(driver)]
    return any(isinstance(work, GraphFree) and work.made is made for work in works)


def _allocates(driver: Driver, graph: Graph, made: GraphAllocation) -> bool:
    return any(node.work is made for node in graph.nodes(driver))


def _write_free(driver: Driver, node: Node) -> bytes:
    del driver
    if not isinstance(node.work, GraphFree):
        raise CallError(INVALID_VALUE)
    return _FREE.pack(node.work.made.address)


def _refusal(driver: Driver, old: Node, new: Described) -> int:
    del driver
    return SUCCESS if old.work is new.work else PARAMETERS_CHANGED


ALLOCATION = NodeKind(
    10, _ALLOCATION.size, _read_allocation, _write_allocation, _refusal, changes=False
)
FREE = NodeKind(11, _FREE.size, _read_free, _write_free, _refusal, changes=False)


# What a device tells about the memory of graphs


@entry("cuDeviceGetGraphMemAttribute")
def _attribute(driver: Driver, number: int, which: int, out: int) -> None:
    allocator = driver.gpu(number).emulator.allocator
    kept = allocator.graph_bytes()
    values = {
        _USED: kept,
        _USED_HIGH: allocator.max_graph_bytes,
        _RESERVED: kept,
        _RESERVED_HIGH: allocator.max_graph_bytes,
    }
    if which not in values:
        raise CallError(INVALID_VALUE)
    put(out, values[which], U64)


@entry("cuDeviceSetGraphMemAttribute")
def _set_attribute(driver: Driver, number: int, which: int, value: int) -> None:
    allocator = driver.gpu(number).emulator.allocator
    if which not in (_USED_HIGH, _RESERVED_HIGH) or get(value, U64):
        raise CallError(INVALID_VALUE)
    allocator.max_graph_bytes = allocator.graph_bytes()


@entry("cuDeviceGraphMemTrim")
def _trim(driver: Driver, number: int) -> None:
    emulator = driver.gpu(number).emulator
    emulator.captures.reject("trim", watched=True)
    emulator.allocator.trim_graphs()
