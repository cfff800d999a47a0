"""The parameters of nodes, as structures of the program and as work."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from preheat.devices.base import Geometry
from preheat.devices.emulator.graph import GraphAllocation, GraphFree
from preheat.devices.emulator.launch import KernelWork
from preheat.driver.calls import CallError
from preheat.driver.copies import BOX_3D, Copy, Fill, Side, box, fill_of
from preheat.driver.events import Event, EventWork
from preheat.driver.graphs.graph import Graph, Node
from preheat.driver.launches import parameter_pointers, prepared
from preheat.driver.memory import note_graph_memory
from preheat.driver.modules import function_of
from preheat.driver.raw import I32, U64, get, put, read, write
from preheat.driver.status import INVALID_VALUE
from preheat.driver.streams import HostCall, Stream

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = [
    "EventWork", "allocation_work", "copy_work", "empty_work", "event_work", "fill_work", "free_work",
    "host_work", "kernel_work", "write_allocation", "write_copy", "write_fill", "write_free",
    "write_host", "write_kernel",
]  # fmt: skip

#: Structures. That of a kernel is its first version; the second one has a kernel and a context more.
_KERNEL = struct.Struct("<Q7I4xQQ")
_KERNEL_MORE = struct.Struct("<QQ")
_FILL = struct.Struct("<QQIIQQ")
_HOST = struct.Struct("<QQ")
_POOL_BYTES = 88
_ALLOCATION = struct.Struct("<QQQQ")  # after the properties of the pool
_ON_HOST, _ON_DEVICE = 1, 2
_LEGACY = 0


def empty_work() -> None:
    """Do nothing."""


# Kernels


def kernel_work(driver: Driver, address: int, *, second: bool) -> KernelWork:
    """Return the launch that a structure describes."""
    handle, *sizes, parameters, extra = _KERNEL.unpack(read(address, _KERNEL.size))
    if second and not handle:
        handle = get(address + _KERNEL.size)
    function = function_of(driver, handle)
    gx, gy, gz, bx, by, bz, shared = sizes
    emulator = function.context.gpu.emulator
    stream = Stream(
        function.context, emulator.adopt(_LEGACY)
    )  # The launch decides in which one it runs.
    launch = prepared(driver, function, Geometry((gx, gy, gz), (bx, by, bz), shared), stream)
    pointers, _kept = parameter_pointers(function, parameters, extra)
    values = [
        read(get(pointers + 8 * at), parameter.size)
        for at, parameter in enumerate(function.emulated.parameters)
    ]
    return KernelWork(launch, values)


def write_kernel(driver: Driver, node: Node, out: int, *, second: bool) -> None:
    """Write the structure of a kernel node. Its pointers are valid as long as the node."""
    work = node.work
    if not isinstance(work, KernelWork):
        raise CallError(INVALID_VALUE)
    values = [ctypes.create_string_buffer(value, len(value)) for value in work.values]
    pointers = (ctypes.c_uint64 * max(len(values), 1))(*map(ctypes.addressof, values))
    node.kept = values, pointers
    function, geometry = driver.kernels[work.launch], work.launch.geometry
    fields = (*geometry.grid, *geometry.block, geometry.shared, ctypes.addressof(pointers), 0)
    write(out, _KERNEL.pack(function.handle, *fields))
    if second:
        write(out + _KERNEL.size, _KERNEL_MORE.pack(0, 0))


# Copies, fills and functions of the host


def copy_work(driver: Driver, address: int) -> Copy:
    """Return the copy that a structure describes."""
    return box(driver, address, depth=True)


def write_copy(node: Node, out: int) -> None:
    """Write the structure of a copy node."""
    work = node.work
    if not isinstance(work, Copy):
        raise CallError(INVALID_VALUE)

    def fields(side: Side) -> tuple[int, ...]:
        kind = _ON_HOST if side.allocator is None else _ON_DEVICE
        places = (side.address, 0) if side.allocator is None else (0, side.address)
        pitch = side.pitch or work.width
        return 0, 0, 0, 0, kind, *places, 0, 0, pitch, (side.layer or pitch) // pitch

    sizes = (work.width, work.height, work.depth)
    write(out, BOX_3D.pack(*fields(work.source), *fields(work.target), *sizes))


def fill_work(driver: Driver, address: int) -> Fill:
    """Return the fill that a structure describes."""
    target, pitch, value, size, width, height = _FILL.unpack(read(address, _FILL.size))
    if size not in (1, 2, 4):
        raise CallError(INVALID_VALUE)
    return fill_of(driver, target, value, size, width, height, pitch)


def write_fill(node: Node, out: int) -> None:
    """Write the structure of a fill node."""
    work = node.work
    if not isinstance(work, Fill):
        raise CallError(INVALID_VALUE)
    value, size = int.from_bytes(work.value, "little"), len(work.value)
    where = work.target
    write(out, _FILL.pack(where.address, where.pitch, value, size, work.count, work.height))


def host_work(address: int) -> HostCall:
    """Return the call that a structure describes."""
    function, argument = _HOST.unpack(read(address, _HOST.size))
    if not function:
        raise CallError(INVALID_VALUE)
    return HostCall(function, argument)


def write_host(node: Node, out: int) -> None:
    """Write the structure of a host node."""
    work = node.work
    if not isinstance(work, HostCall):
        raise CallError(INVALID_VALUE)
    write(out, _HOST.pack(work.function, work.argument))


# Memory


def allocation_work(driver: Driver, address: int) -> GraphAllocation:
    """Return the allocation that a structure describes, and write its address into the structure."""
    where, number = get(address + 8, I32), get(address + 12, I32)
    _, _, size, _ = _ALLOCATION.unpack(read(address + _POOL_BYTES, _ALLOCATION.size))
    device_location = 1
    if where != device_location or not size:
        raise CallError(INVALID_VALUE)
    gpu = driver.gpu(number)
    made = gpu.emulator.allocator.graph_allocation(size)
    note_graph_memory(driver, made, driver.primary(gpu))
    put(address + _POOL_BYTES + 24, made.address, U64)
    return made


def write_allocation(driver: Driver, node: Node, out: int) -> None:
    """Write the structure of an allocation node."""
    work = node.work
    if not isinstance(work, GraphAllocation):
        raise CallError(INVALID_VALUE)
    known = driver.memory.find(work.address)
    number = 0 if known is None else known.context.gpu.index
    pinned, device_location = 1, 1
    properties = struct.pack("<4i", pinned, 0, device_location, number)
    write(out, properties.ljust(_POOL_BYTES, b"\0"))
    write(out + _POOL_BYTES, _ALLOCATION.pack(0, 0, work.allocation.size, work.address))


def free_work(driver: Driver, graph: Graph, address: int) -> GraphFree:
    """Return the free of memory that the same graph allocates."""
    nodes = graph.nodes(driver)
    freed = {node.work.made.address for node in nodes if isinstance(node.work, GraphFree)}
    for node in nodes:
        work = node.work
        if isinstance(work, GraphAllocation) and work.address == address and address not in freed:
            known = driver.memory.find(address)
            assert known is not None
            return known.context.gpu.emulator.allocator.graph_free(work)
    raise CallError(INVALID_VALUE)


def write_free(node: Node, out: int) -> None:
    """Write the address that a free node frees."""
    if not isinstance(node.work, GraphFree):
        raise CallError(INVALID_VALUE)
    put(out, node.work.made.address, U64)


# Events


def event_work(driver: Driver, handle: int) -> EventWork:
    """Return the work of a node that records an event or waits for it."""
    return EventWork(driver.handles.get(handle, Event))
