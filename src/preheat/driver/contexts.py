"""Contexts: the primary ones, those that programs create, and which one is current.

The stack of the current contexts of each thread is in the shim, where it needs no interpreter lock.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.raw import I32, U32, U64, put
from preheat.driver.status import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED,
    UNSUPPORTED_LIMIT,
)

if TYPE_CHECKING:
    from preheat.driver.devices import Gpu
    from preheat.driver.driver import Driver

__all__ = ["GREATEST_PRIORITY", "Context"]

_API_VERSION = 3020
GREATEST_PRIORITY = -5

#: The default limits of a context by number, of which kernels on the CPU need none.
_LIMITS = {0: 1024, 1: 7 << 20, 2: 8 << 20, 3: 2, 4: 2048, 5: 128, 6: 0}

_ids = itertools.count(1)


class Context:
    """A context of a device.

    Attributes:
        status: The status with which every call ends after a fault, or 0.
        peers: The contexts whose memory kernels of this one may access.
    """

    def __init__(self, handle: int, gpu: Gpu, *, primary: bool) -> None:
        self.handle = handle
        self.gpu = gpu
        self.primary = primary
        self.alive = True
        self.status = 0
        self.id = next(_ids)
        self.flags = 0
        self.limits = dict(_LIMITS)
        self.peers: set[int] = set()

    def revive(self) -> None:
        """Let the context be as new, after everything in it was destroyed."""
        self.alive = True
        self.status = 0
        self.limits = dict(_LIMITS)
        self.peers.clear()


# Primary contexts


@entry("cuDevicePrimaryCtxRetain", after_fault=True)
def _retain(driver: Driver, out: int, number: int) -> None:
    gpu = driver.gpu(number)
    gpu.retained += 1
    put(out, driver.primary(gpu).handle)


@entry("cuDevicePrimaryCtxRelease", after_fault=True)
def _release(driver: Driver, number: int) -> None:
    gpu = driver.gpu(number)
    if not gpu.retained:
        raise CallError(INVALID_CONTEXT)
    gpu.retained -= 1
    if not gpu.retained and gpu.primary is not None:
        _end(driver, gpu.primary)


@entry("cuDevicePrimaryCtxReset", after_fault=True)
def _reset(driver: Driver, number: int) -> None:
    gpu = driver.gpu(number)
    if gpu.primary is not None and gpu.primary.alive:
        _end(driver, gpu.primary)
        if gpu.retained:  # Those who retained it keep their handle.
            driver.primary(gpu)


@entry("cuDevicePrimaryCtxGetState", after_fault=True)
def _state(driver: Driver, number: int, flags: int, active: int) -> None:
    gpu = driver.gpu(number)
    put(flags, gpu.flags, U32)
    put(active, int(gpu.primary is not None and gpu.primary.alive), I32)


@entry("cuDevicePrimaryCtxSetFlags", after_fault=True)
def _set_state(driver: Driver, number: int, flags: int) -> None:
    driver.gpu(number).flags = flags


def _end(driver: Driver, context: Context) -> None:
    """Destroy a context, and with the last one of its device everything on the device."""
    context.alive = False
    driver.threads.set_alive(context.handle, False)
    driver.end_context(context)


# Contexts of programs


@entry("cuCtxCreate", 2000, 3020)
def _create(driver: Driver, out: int, flags: int, number: int) -> None:
    made = driver.new_context(driver.gpu(number))
    made.flags = flags
    driver.threads.make_current(made.handle)
    put(out, made.handle)


@entry("cuCtxCreate", 11040)
def _create_with_affinity(driver: Driver, out: int, _: int, __: int, flags: int, number: int) -> None:
    _create(driver, out, flags, number)


@entry("cuCtxCreate", 12050)
def _create_with_parameters(driver: Driver, out: int, _: int, flags: int, number: int) -> None:
    _create(driver, out, flags, number)


@entry("cuCtxDestroy", after_fault=True)
def _destroy(driver: Driver, handle: int) -> None:
    context = driver.context(handle) if handle else None
    if context is None or context.primary:
        raise CallError(INVALID_CONTEXT)
    _end(driver, context)
    if driver.threads.current() == handle:
        driver.threads.pop_current()


@entry("cuCtxGetDevice", 2000, after_fault=True)
def _device(driver: Driver, out: int) -> None:
    put(out, driver.current().gpu.index, I32)


@entry("cuCtxGetDevice", 13000, after_fault=True)
def _device_of(driver: Driver, out: int, handle: int) -> None:
    put(out, driver.context(handle).gpu.index, I32)


@entry("cuCtxGetId", after_fault=True)
def _id(driver: Driver, handle: int, out: int) -> None:
    put(out, driver.context(handle).id, U64)


@entry("cuCtxGetApiVersion", after_fault=True)
def _api_version(driver: Driver, handle: int, out: int) -> None:
    driver.context(handle)
    put(out, _API_VERSION, U32)


@entry("cuCtxGetFlags", after_fault=True)
def _flags(driver: Driver, out: int) -> None:
    context = driver.current()
    put(out, context.gpu.flags if context.primary else context.flags, U32)


@entry("cuCtxSetFlags", after_fault=True)
def _set_flags(driver: Driver, flags: int) -> None:
    context = driver.current()
    context.flags = flags
    if context.primary:
        context.gpu.flags = flags


@entry("cuCtxGetStreamPriorityRange")
def _priorities(driver: Driver, least: int, greatest: int) -> None:
    driver.current()
    put(least, 0, I32)
    put(greatest, GREATEST_PRIORITY, I32)


@entry("cuCtxGetLimit")
def _limit(driver: Driver, out: int, which: int) -> None:
    limits = driver.current().limits
    if which not in limits:
        raise CallError(UNSUPPORTED_LIMIT)
    put(out, limits[which], U64)


@entry("cuCtxSetLimit")
def _set_limit(driver: Driver, which: int, value: int) -> None:
    limits = driver.current().limits
    if which not in limits:
        raise CallError(UNSUPPORTED_LIMIT)
    limits[which] = value


@entry("cuCtxGetCacheConfig")
def _cache(driver: Driver, out: int) -> None:
    driver.current()
    put(out, 0, I32)


@entry("cuCtxSetCacheConfig")
def _set_cache(driver: Driver, value: int) -> None:
    del value  # There is no cache whose division a program could prefer.
    driver.current()


@entry("cuCtxGetSharedMemConfig")
def _banks(driver: Driver, out: int) -> None:
    driver.current()
    put(out, 1, I32)  # banks of four bytes


@entry("cuCtxSetSharedMemConfig")
def _set_banks(driver: Driver, value: int) -> None:
    del value
    driver.current()


@entry("cuCtxResetPersistingL2Cache")
def _reset_cache(driver: Driver) -> None:
    driver.current()


@entry("cuCtxSynchronize", 2000)
def _synchronize(driver: Driver) -> None:
    driver.current().gpu.emulator.synchronize()


@entry("cuCtxSynchronize", 13000)
def _synchronize_context(driver: Driver, handle: int) -> None:
    driver.context(handle).gpu.emulator.synchronize()


# Peers


@entry("cuCtxEnablePeerAccess")
def _enable_peer(driver: Driver, handle: int, flags: int) -> None:
    if flags:
        raise CallError(INVALID_VALUE)
    peers = driver.current().peers
    peer = driver.context(handle)
    if peer.handle in peers:
        raise CallError(PEER_ACCESS_ALREADY_ENABLED)
    peers.add(peer.handle)


@entry("cuCtxDisablePeerAccess")
def _disable_peer(driver: Driver, handle: int) -> None:
    peers = driver.current().peers
    if handle not in peers:
        raise CallError(PEER_ACCESS_NOT_ENABLED)
    peers.remove(handle)


# The range of a profiler, which does not see this driver


@entry("cuProfilerStart")
def _start_profiler(driver: Driver) -> None:
    driver.current()


entry("cuProfilerStop")(_start_profiler)
