"""What the driver tells about kernels: their names, parameters, attributes and occupancy."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.configs import read_config
from preheat.driver.devices import PROCESSORS
from preheat.driver.modules import Function, function_of
from preheat.driver.raw import I32, U64, put
from preheat.driver.status import INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["ATTRIBUTES", "max_dynamic_shared"]

#: The numbers of the attributes of functions.
ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 0, "SHARED_SIZE_BYTES": 1, "CONST_SIZE_BYTES": 2, "LOCAL_SIZE_BYTES": 3,
    "NUM_REGS": 4, "PTX_VERSION": 5, "BINARY_VERSION": 6, "CACHE_MODE_CA": 7,
    "MAX_DYNAMIC_SHARED_SIZE_BYTES": 8, "PREFERRED_SHARED_MEMORY_CARVEOUT": 9,
    "CLUSTER_SIZE_MUST_BE_SET": 10, "REQUIRED_CLUSTER_WIDTH": 11, "REQUIRED_CLUSTER_HEIGHT": 12,
    "REQUIRED_CLUSTER_DEPTH": 13, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 14,
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE": 15,
}  # fmt: skip
_DYNAMIC_SHARED = ATTRIBUTES["MAX_DYNAMIC_SHARED_SIZE_BYTES"]
_CARVEOUT = ATTRIBUTES["PREFERRED_SHARED_MEMORY_CARVEOUT"]
_SETTABLE = {number for name, number in ATTRIBUTES.items() if number >= _DYNAMIC_SHARED} - {
    ATTRIBUTES["CLUSTER_SIZE_MUST_BE_SET"]
}
_REGISTERS = 32  # of a kernel that was loaded as PTX, whose number no one knows
_MAX_CLUSTER, _PORTABLE_CLUSTER = 16, 8
_BLOCK_SIZE_TO_SHARED = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)


def _attributes(function: Function) -> dict[int, int]:
    has = function.emulated.attributes
    cluster = has.cluster or (0, 0, 0)
    limits = function.context.gpu.emulator.limits
    named = {
        "MAX_THREADS_PER_BLOCK": has.threads,
        "SHARED_SIZE_BYTES": has.shared,
        "CONST_SIZE_BYTES": has.constant,
        "LOCAL_SIZE_BYTES": has.local,
        "NUM_REGS": has.registers or _REGISTERS,
        "PTX_VERSION": has.ptx_version,
        "BINARY_VERSION": has.binary_version,
        "CACHE_MODE_CA": has.cache_mode_ca,
        "MAX_DYNAMIC_SHARED_SIZE_BYTES": max(limits.shared - has.shared, 0),
        "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
        "CLUSTER_SIZE_MUST_BE_SET": int(has.cluster is not None),
        "REQUIRED_CLUSTER_WIDTH": cluster[0],
        "REQUIRED_CLUSTER_HEIGHT": cluster[1],
        "REQUIRED_CLUSTER_DEPTH": cluster[2],
        "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 0,
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE": 0,
    }
    return {ATTRIBUTES[name]: value for name, value in named.items()} | function.values


def max_dynamic_shared(function: Function) -> int:
    """Return the most dynamic shared memory of a launch, to which the function has opted in."""
    return _attributes(function)[_DYNAMIC_SHARED]


def _attribute(driver: Driver, out: int, which: int, handle: int) -> None:
    values = _attributes(function_of(driver, handle))
    if which not in values:
        raise CallError(INVALID_VALUE)
    put(out, values[which], I32)


def _set_attribute(driver: Driver, handle: int, which: int, value: int) -> None:
    function = function_of(driver, handle)
    if which not in _SETTABLE:
        raise CallError(INVALID_VALUE)
    limit = function.context.gpu.emulator.limits.shared_optin
    if which == _DYNAMIC_SHARED and not 0 <= value <= limit - function.emulated.attributes.shared:
        raise CallError(INVALID_VALUE)
    if which == _CARVEOUT and not -1 <= value <= 100:
        raise CallError(INVALID_VALUE)
    function.values[which] = value


entry("cuFuncGetAttribute")(_attribute)
entry("cuFuncSetAttribute")(_set_attribute)


@entry("cuKernelGetAttribute")
def _kernel_attribute(driver: Driver, out: int, which: int, handle: int, device: int) -> None:
    driver.gpu(device)
    _attribute(driver, out, which, handle)


@entry("cuKernelSetAttribute")
def _set_kernel_attribute(driver: Driver, which: int, value: int, handle: int, device: int) -> None:
    driver.gpu(device)
    _set_attribute(driver, handle, which, value)


@entry("cuFuncSetCacheConfig")
def _cache(driver: Driver, handle: int, config: int) -> None:
    del config  # There is no cache whose division a program could prefer.
    function_of(driver, handle)


@entry("cuKernelSetCacheConfig")
def _kernel_cache(driver: Driver, handle: int, config: int, device: int) -> None:
    driver.gpu(device)
    _cache(driver, handle, config)


@entry("cuFuncSetSharedMemConfig")
def _banks(driver: Driver, handle: int, config: int) -> None:
    _cache(driver, handle, config)


@entry("cuFuncLoad")
def _load(driver: Driver, handle: int) -> None:
    function_of(driver, handle)  # It was loaded with its module.


@entry("cuFuncIsLoaded")
def _is_loaded(driver: Driver, out: int, handle: int) -> None:
    function_of(driver, handle)
    put(out, 1, I32)


def _name(driver: Driver, out: int, handle: int) -> None:
    put(out, driver.text(function_of(driver, handle).emulated.name), U64)


def _parameter(driver: Driver, handle: int, index: int, offset: int, size: int) -> None:
    driver.current()
    parameters = function_of(driver, handle).emulated.parameters
    if index >= len(parameters):
        raise CallError(INVALID_VALUE)
    put(offset, parameters[index].offset)
    put(size, parameters[index].size)


def _parameter_count(driver: Driver, handle: int, out: int) -> None:
    put(out, len(function_of(driver, handle).emulated.parameters))


for _kind in ("Func", "Kernel"):
    entry(f"cu{_kind}GetName")(_name)
    entry(f"cu{_kind}GetParamInfo")(_parameter)
    entry(f"cu{_kind}GetParamCount")(_parameter_count)


# Occupancy


@entry("cuOccupancyMaxActiveBlocksPerMultiprocessor")
def _active_blocks(driver: Driver, out: int, handle: int, threads: int, shared: int) -> None:
    function = function_of(driver, handle)
    if threads < 1:
        raise CallError(INVALID_VALUE)
    if shared > max_dynamic_shared(function):
        put(out, 0, I32)
    else:
        put(out, function.emulated.occupancy(threads, shared).blocks, I32)


@entry("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags")
def _active_blocks_with(
    driver: Driver, out: int, handle: int, threads: int, shared: int, flags: int
) -> None:
    del flags
    _active_blocks(driver, out, handle, threads, shared)


@entry("cuOccupancyMaxPotentialBlockSize")
def _potential(
    driver: Driver, grid: int, block: int, handle: int, size_of: int, shared: int, limit: int
) -> None:
    function = function_of(driver, handle).emulated
    warp = 32
    most_threads = min(function.attributes.threads, limit or function.attributes.threads)
    needs = _BLOCK_SIZE_TO_SHARED(size_of) if size_of else None

    def resident(threads: int) -> int:
        return function.occupancy(threads, needs(threads) if needs else shared).blocks

    sizes = range(max(most_threads - most_threads % warp, 1), 0, -warp)
    best = max(sizes, key=lambda threads: resident(threads) * threads)
    put(grid, resident(best) * PROCESSORS, I32)
    put(block, best, I32)


@entry("cuOccupancyMaxPotentialBlockSizeWithFlags")
def _potential_with(
    driver: Driver,
    grid: int,
    block: int,
    handle: int,
    size_of: int,
    shared: int,
    limit: int,
    flags: int,
) -> None:
    del flags
    _potential(driver, grid, block, handle, size_of, shared, limit)


@entry("cuOccupancyAvailableDynamicSMemPerBlock")
def _available(driver: Driver, out: int, handle: int, blocks: int, threads: int) -> None:
    function = function_of(driver, handle)
    if blocks < 1 or threads < 1:
        raise CallError(INVALID_VALUE)
    has = function.context.gpu.emulator.multiprocessor
    each = has.shared // blocks - has.reserved - function.emulated.attributes.shared
    put(out, max(min(each, max_dynamic_shared(function)), 0), U64)


@entry("cuOccupancyMaxActiveClusters")
def _clusters(driver: Driver, out: int, handle: int, config: int) -> None:
    function = function_of(driver, handle)
    geometry = read_config(config).geometry
    blocks = math.prod(geometry.cluster or (1, 1, 1))
    resident = function.emulated.occupancy(math.prod(geometry.block), geometry.shared).blocks
    put(out, resident * PROCESSORS // blocks, I32)


@entry("cuOccupancyMaxPotentialClusterSize")
def _cluster_size(driver: Driver, out: int, handle: int, config: int) -> None:
    del config
    allowed = function_of(driver, handle).values.get(ATTRIBUTES["NON_PORTABLE_CLUSTER_SIZE_ALLOWED"])
    put(out, _MAX_CLUSTER if allowed else _PORTABLE_CLUSTER, I32)
