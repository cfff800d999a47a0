"""Memory: allocated at once, in the order of a stream, and on the host."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from preheat.driver.allocations import Allocation, Kind
from preheat.driver.calls import CallError, entry
from preheat.driver.contexts import Context
from preheat.driver.pools import Pool, current_pool, pool_of
from preheat.driver.raw import U32, U64, put
from preheat.driver.status import (
    HOST_MEMORY_ALREADY_REGISTERED,
    HOST_MEMORY_NOT_REGISTERED,
    INVALID_VALUE,
    NOT_FOUND,
)
from preheat.driver.streams import Stream, stream_of
from preheat.emulator.graph_work import GraphAllocation
from preheat.emulator.memory import align_up

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["note_graph_memory"]

_PAGE = 4096
_PITCH = 512
_HOST_FLAGS = 7
_ON_HOST = (Kind.PINNED, Kind.REGISTERED)


def _context(driver: Driver, call: str) -> Context:
    """Return the current context, for a call that captures of this thread forbid."""
    context = driver.current()
    context.gpu.emulator.captures.reject(call, watched=True)
    return context


# At once


def _allocate(driver: Driver, out: int, size: int, kind: Kind = Kind.DEVICE) -> None:
    context = _context(driver, "allocate")
    if not out or not size:
        raise CallError(INVALID_VALUE)
    start = context.gpu.emulator.allocator.allocate_now(size)
    driver.memory.add(Allocation(start, size, kind, context))
    put(out, start)


@entry("cuMemAlloc", 3020)
def _alloc(driver: Driver, out: int, size: int) -> None:
    _allocate(driver, out, size)


@entry("cuMemAllocPitch", 3020)
def _alloc_pitch(driver: Driver, out: int, pitch: int, width: int, height: int, element: int) -> None:
    if element not in (4, 8, 16):
        raise CallError(INVALID_VALUE)
    step = align_up(width, _PITCH)
    _allocate(driver, out, step * height)
    put(pitch, step)


@entry("cuMemAllocManaged")
def _alloc_managed(driver: Driver, out: int, size: int, flags: int) -> None:
    if flags not in (1, 2):
        raise CallError(INVALID_VALUE)
    _allocate(driver, out, size, Kind.MANAGED)


@entry("cuMemFree", 3020)
def _free(driver: Driver, address: int) -> None:
    _context(driver, "free")
    if not address:
        return
    found = driver.memory.at(address)
    allocator = found.context.gpu.emulator.allocator if found else None
    if found is None or allocator is None or not allocator.is_allocated(address):
        raise CallError(INVALID_VALUE)
    allocator.free_now(address)
    driver.forget(found)


@entry("cuMemGetInfo", 3020)
def _info(driver: Driver, free: int, total: int) -> None:
    info = driver.current().gpu.emulator.memory()
    put(free, info.free)
    put(total, info.total)


@entry("cuMemGetAddressRange", 3020)
def _range(driver: Driver, base: int, size: int, address: int) -> None:
    found = driver.memory.find(address)
    if found is None:
        raise CallError(NOT_FOUND)
    put(base, found.start)
    put(size, found.size)


# In the order of a stream


@entry("cuMemAllocAsync", stream=2)
def _alloc_async(driver: Driver, out: int, size: int, stream: int) -> None:
    where = stream_of(driver, stream)
    gpu = where.context.gpu
    _allocate_in(driver, out, size, pool_of(driver, current_pool(driver, gpu)), where)


@entry("cuMemAllocFromPoolAsync", stream=3)
def _alloc_from(driver: Driver, out: int, size: int, pool: int, stream: int) -> None:
    _allocate_in(driver, out, size, pool_of(driver, pool), stream_of(driver, stream))


def _allocate_in(driver: Driver, out: int, size: int, pool: Pool, stream: Stream) -> None:
    if not out:
        raise CallError(INVALID_VALUE)
    if not size:  # Other than `cuMemAlloc`, these give no memory to a program that asks for none.
        put(out, 0)
        return
    emulator = stream.context.gpu.emulator
    captured = stream.emulated.branch
    start = emulator.allocate(size, stream.emulated)
    if captured is not None:
        made = captured.capture.find_unfreed(start)
        assert made is not None
        note_graph_memory(driver, made, stream.context)
    else:
        pool.count(size)
        driver.memory.add(Allocation(start, size, pool.kind, stream.context, pool))
    put(out, start)


def note_graph_memory(
    driver: Driver, made: GraphAllocation, context: Context, kind: Kind = Kind.GRAPH
) -> None:
    """Know the memory of an allocation node as long as the node exists."""
    start, size = made.address, made.allocation.size
    driver.memory.add(Allocation(start, size, kind, context))
    driver.graph_memory[start] = made
    weakref.finalize(made, driver.memory.remove, start).atexit = False


@entry("cuMemFreeAsync", stream=1)
def _free_async(driver: Driver, address: int, stream: int) -> None:
    where = stream_of(driver, stream)
    emulator = where.context.gpu.emulator
    if where.emulated.branch is not None:
        emulator.free(address, where.emulated)
        return
    found = driver.memory.at(address)
    if found is None or not found.context.gpu.emulator.allocator.is_allocated(address):
        raise CallError(INVALID_VALUE)
    if found.context.gpu is where.context.gpu:
        emulator.free(address, where.emulated)
    else:  # The queues of another device are not ordered with these.
        where.emulated.synchronize()
        found.context.gpu.emulator.allocator.free_now(address)
    driver.forget(found)


# On the host


def _lend(driver: Driver, made: Allocation) -> None:
    """Let the kernels of every device use host memory."""
    hosts = [gpu.emulator.host_memory for gpu in driver.gpus]
    lent = [(host, host.lend(made.start, made.size)) for host in hosts]

    def take_back() -> None:
        for host, buffer in lent:
            host.take_back(buffer)

    made.release = take_back
    driver.memory.add(made)


@entry("cuMemHostAlloc")
def _host_alloc(driver: Driver, out: int, size: int, flags: int) -> None:
    context = _context(driver, "allocate")
    if not out or not size or flags & ~_HOST_FLAGS:
        raise CallError(INVALID_VALUE)
    array = np.zeros(size + _PAGE, np.uint8)
    start = align_up(array.ctypes.data, _PAGE)
    made = Allocation(start, size, Kind.PINNED, context, flags=flags, owner=array)
    _lend(driver, made)
    put(out, made.start)


@entry("cuMemAllocHost", 3020)
def _alloc_host(driver: Driver, out: int, size: int) -> None:
    _host_alloc(driver, out, size, 0)


@entry("cuMemFreeHost")
def _free_host(driver: Driver, address: int) -> None:
    _context(driver, "free")
    _end_host(driver, address, Kind.PINNED, INVALID_VALUE)


@entry("cuMemHostRegister", 6050)
def _register(driver: Driver, address: int, size: int, flags: int) -> None:
    context = _context(driver, "register")
    if not address or not size:
        raise CallError(INVALID_VALUE)
    if driver.memory.find(address) is not None:
        raise CallError(HOST_MEMORY_ALREADY_REGISTERED)
    _lend(driver, Allocation(address, size, Kind.REGISTERED, context, flags=flags))


@entry("cuMemHostUnregister")
def _unregister(driver: Driver, address: int) -> None:
    _context(driver, "unregister")
    _end_host(driver, address, Kind.REGISTERED, HOST_MEMORY_NOT_REGISTERED)


def _end_host(driver: Driver, address: int, kind: Kind, otherwise: int) -> None:
    found = driver.memory.at(address)
    if found is None or found.kind is not kind:
        raise CallError(otherwise)
    driver.forget(found)


@entry("cuMemHostGetDevicePointer", 3020)
def _device_pointer(driver: Driver, out: int, address: int, flags: int) -> None:
    found = driver.memory.find(address)
    if flags or found is None or found.kind not in _ON_HOST:
        raise CallError(INVALID_VALUE)
    put(out, address, U64)


@entry("cuMemHostGetFlags")
def _host_flags(driver: Driver, out: int, address: int) -> None:
    found = driver.memory.find(address)
    if found is None or found.kind not in _ON_HOST:
        raise CallError(INVALID_VALUE)
    mapped = 2  # With unified addresses all host memory is.
    put(out, found.flags | mapped, U32)
