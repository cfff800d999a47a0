"""Pools of memory: their attributes, and which one a device uses."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from preheat.driver.allocations import Kind
from preheat.driver.calls import CallError, entry
from preheat.driver.raw import I32, U64, get, put, read
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED

if TYPE_CHECKING:
    from preheat.driver.devices import Gpu
    from preheat.driver.driver import Driver

__all__ = ["Pool", "current_pool", "pool_of"]

_ON_DEVICE = 1
_HOST_LOCATIONS = (2, 3)
_MANAGED = 2  # a type of allocations
_READ_AND_WRITE = 3
_RELEASE_THRESHOLD, _RESERVED, _RESERVED_HIGH, _USED, _USED_HIGH = 4, 5, 6, 7, 8
_REUSE = (1, 2, 3)  # the attributes of 32 bits that a program may set


class Pool:
    """A pool of memory of a device, of host memory, or of managed memory.

    Attributes:
        kind: The kind of the memory that is allocated from it.
        used: Bytes that are allocated from it now.
        most_used: The most since the program has set this to 0.
    """

    def __init__(self, gpu: Gpu, *, on_host: bool = False, kind: Kind = Kind.DEVICE) -> None:
        self.handle = 0
        self.gpu = gpu
        self.on_host = on_host
        self.kind = kind
        self.used = 0
        self.most_used = 0
        self.most_reserved = 0
        self.values = {_RELEASE_THRESHOLD: 0} | dict.fromkeys(_REUSE, 1)
        self.access: dict[int, int] = {gpu.index: _READ_AND_WRITE}

    def count(self, size: int) -> None:
        """Count memory as allocated from the pool, or as freed if `size` is negative."""
        self.used += size
        self.most_used = max(self.most_used, self.used)
        self.most_reserved = max(self.most_reserved, self.used)


def pool_of(driver: Driver, handle: int) -> Pool:
    """Return the pool with this handle."""
    return driver.handles.get(handle, Pool)


def _default_pool(driver: Driver, gpu: Gpu) -> int:
    """Return the handle of the pool that a device has from the beginning."""
    if not gpu.default_pool:
        gpu.default_pool = _add(driver, Pool(gpu))
    return gpu.default_pool


def _add(driver: Driver, pool: Pool) -> int:
    pool.handle = driver.handles.add(pool)
    return pool.handle


def current_pool(driver: Driver, gpu: Gpu) -> int:
    """Return the handle of the pool that a device uses."""
    return gpu.pool or _default_pool(driver, gpu)


@entry("cuMemPoolCreate")
def _create(driver: Driver, out: int, properties: int) -> None:
    context = driver.current()
    context.gpu.emulator.captures.reject("pool create", watched=True)
    kind, exported, where, number = struct.unpack("<4i", read(properties, 16))
    if exported:
        raise CallError(NOT_SUPPORTED)
    if kind == _MANAGED:
        gpu = driver.gpu(number) if where == _ON_DEVICE else context.gpu
        pool = Pool(gpu, kind=Kind.MANAGED)
    elif where == _ON_DEVICE:
        pool = Pool(driver.gpu(number))
    elif where in _HOST_LOCATIONS:
        pool = Pool(context.gpu, on_host=True)
    else:
        raise CallError(INVALID_VALUE)
    put(out, _add(driver, pool))


@entry("cuMemPoolDestroy")
def _destroy(driver: Driver, handle: int) -> None:
    pool = pool_of(driver, handle)
    if handle in (pool.gpu.default_pool, pool.gpu.managed_pool):
        raise CallError(INVALID_VALUE)
    if handle == pool.gpu.pool:
        pool.gpu.pool = 0
    driver.handles.remove(handle)  # Memory that is allocated from it still counts on `Pool`.


@entry("cuMemPoolSetAttribute")
def _set_attribute(driver: Driver, handle: int, which: int, value: int) -> None:
    pool = pool_of(driver, handle)
    if which in _REUSE:
        pool.values[which] = get(value, I32)
    elif which == _RELEASE_THRESHOLD:
        pool.values[which] = get(value, U64)
    elif which in (_RESERVED_HIGH, _USED_HIGH) and not get(value, U64):
        if which == _USED_HIGH:
            pool.most_used = pool.used
        else:
            pool.most_reserved = pool.used
    else:
        raise CallError(INVALID_VALUE)


@entry("cuMemPoolGetAttribute")
def _attribute(driver: Driver, handle: int, which: int, out: int) -> None:
    pool = pool_of(driver, handle)
    counts = {
        _RESERVED: pool.used,
        _RESERVED_HIGH: pool.most_reserved,
        _USED: pool.used,
        _USED_HIGH: pool.most_used,
    }
    values = pool.values | counts
    if which not in values:
        raise CallError(INVALID_VALUE)
    put(out, values[which], I32 if which in _REUSE else U64)


@entry("cuMemPoolTrimTo")
def _trim(driver: Driver, handle: int, keep: int) -> None:
    del keep  # No freed memory is kept.
    pool_of(driver, handle).gpu.emulator.captures.reject("trim", watched=True)


@entry("cuMemPoolSetAccess")
def _set_access(driver: Driver, handle: int, places: int, count: int) -> None:
    pool = pool_of(driver, handle)
    for at in range(places, places + 12 * count, 12):
        where, number, flags = struct.unpack("<3i", read(at, 12))
        if where == _ON_DEVICE:
            pool.access[driver.gpu(number).index] = flags


@entry("cuMemPoolGetAccess")
def _access(driver: Driver, out: int, handle: int, place: int) -> None:
    where, number = struct.unpack("<2i", read(place, 8))
    pool = pool_of(driver, handle)
    found = pool.access.get(number, 0) if where == _ON_DEVICE else _READ_AND_WRITE
    put(out, found, I32)


@entry("cuDeviceGetDefaultMemPool")
def _device_default(driver: Driver, out: int, number: int) -> None:
    put(out, _default_pool(driver, driver.gpu(number)), U64)


@entry("cuDeviceGetMemPool")
def _device_pool(driver: Driver, out: int, number: int) -> None:
    put(out, current_pool(driver, driver.gpu(number)), U64)


@entry("cuDeviceSetMemPool")
def _set_device_pool(driver: Driver, number: int, handle: int) -> None:
    pool = pool_of(driver, handle)
    if pool.gpu is not driver.gpu(number) or pool.on_host:
        raise CallError(INVALID_VALUE)
    pool.gpu.pool = handle


@entry("cuMemGetDefaultMemPool")
def _default_at(driver: Driver, out: int, place: int, kind: int) -> None:
    pool = _managed_pool(driver) if kind == _MANAGED else _default_pool(driver, _gpu_at(driver, place))
    put(out, pool, U64)


@entry("cuMemGetMemPool")
def _pool_at(driver: Driver, out: int, place: int, kind: int) -> None:
    pool = _managed_pool(driver) if kind == _MANAGED else current_pool(driver, _gpu_at(driver, place))
    put(out, pool, U64)


def _managed_pool(driver: Driver) -> int:
    """Return the handle of the pool of managed memory, whose place makes no difference here."""
    gpu = driver.current().gpu
    if not gpu.managed_pool:
        gpu.managed_pool = _add(driver, Pool(gpu, kind=Kind.MANAGED))
    return gpu.managed_pool


def _gpu_at(driver: Driver, place: int) -> Gpu:
    where, number = struct.unpack("<2i", read(place, 8))
    if where != _ON_DEVICE:
        raise CallError(NOT_SUPPORTED)
    return driver.gpu(number)
