"""What the driver tells about addresses."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.driver.allocations import Allocation
from preheat.driver.calls import CallError, entry
from preheat.driver.raw import I32, U32, U64, get, put
from preheat.driver.status import INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["ATTRIBUTES"]

_BOOL = ctypes.c_bool
_HOST, _DEVICE = 1, 2
_NO_DEVICE = -2
_READ_AND_WRITE = 3

#: The numbers of the attributes of pointers.
ATTRIBUTES = {
    "CONTEXT": 1, "MEMORY_TYPE": 2, "DEVICE_POINTER": 3, "HOST_POINTER": 4, "SYNC_MEMOPS": 6,
    "BUFFER_ID": 7, "IS_MANAGED": 8, "DEVICE_ORDINAL": 9, "IS_LEGACY_CUDA_IPC_CAPABLE": 10,
    "RANGE_START_ADDR": 11, "RANGE_SIZE": 12, "MAPPED": 13, "ALLOWED_HANDLE_TYPES": 14,
    "IS_GPU_DIRECT_RDMA_CAPABLE": 15, "ACCESS_FLAGS": 16, "MEMPOOL_HANDLE": 17, "MAPPING_SIZE": 18,
    "MAPPING_BASE_ADDR": 19, "MEMORY_BLOCK_ID": 20,
}  # fmt: skip


class _Value(NamedTuple):
    kind: Any  # of ctypes
    unknown: int  # for an address that the driver does not know, in `cuPointerGetAttributes`


_VALUES = {number: _Value(U64, 0) for number in ATTRIBUTES.values()} | {
    ATTRIBUTES["MEMORY_TYPE"]: _Value(U32, 0),
    ATTRIBUTES["SYNC_MEMOPS"]: _Value(_BOOL, 0),
    ATTRIBUTES["IS_MANAGED"]: _Value(_BOOL, 0),
    ATTRIBUTES["DEVICE_ORDINAL"]: _Value(I32, _NO_DEVICE),
    ATTRIBUTES["IS_LEGACY_CUDA_IPC_CAPABLE"]: _Value(_BOOL, 0),
    ATTRIBUTES["MAPPED"]: _Value(_BOOL, 0),
    ATTRIBUTES["IS_GPU_DIRECT_RDMA_CAPABLE"]: _Value(_BOOL, 0),
    ATTRIBUTES["ACCESS_FLAGS"]: _Value(U32, 0),
}


def _describe(found: Allocation, address: int) -> dict[int, int | None]:
    """Return the attributes of memory by number; None for one that this memory does not have."""
    on_host = found.on_host or (found.pool is not None and found.pool.on_host)
    named = {
        "CONTEXT": found.context.handle,
        "MEMORY_TYPE": _HOST if on_host else _DEVICE,
        "DEVICE_POINTER": address,
        "HOST_POINTER": address if on_host or found.is_managed else None,
        "SYNC_MEMOPS": 0,
        "BUFFER_ID": found.number,
        "IS_MANAGED": int(found.is_managed),
        "DEVICE_ORDINAL": found.context.gpu.index,
        "IS_LEGACY_CUDA_IPC_CAPABLE": int(found.can_be_shared),
        "RANGE_START_ADDR": found.start,
        "RANGE_SIZE": found.size,
        "MAPPED": 1,
        "ALLOWED_HANDLE_TYPES": 0,
        "IS_GPU_DIRECT_RDMA_CAPABLE": 0,
        "ACCESS_FLAGS": _READ_AND_WRITE,
        "MEMPOOL_HANDLE": found.pool.handle if found.pool else 0,
        "MAPPING_SIZE": found.size,
        "MAPPING_BASE_ADDR": found.start,
        "MEMORY_BLOCK_ID": found.number,
    }
    return {ATTRIBUTES[name]: value for name, value in named.items()}


@entry("cuPointerGetAttribute")
def _attribute(driver: Driver, out: int, which: int, address: int) -> None:
    found = driver.memory.find(address)
    value = None if found is None else _describe(found, address).get(which)
    if value is None:
        raise CallError(INVALID_VALUE)
    put(out, value, _VALUES[which].kind)


@entry("cuPointerGetAttributes")
def _attributes(driver: Driver, count: int, kinds: int, outs: int, address: int) -> None:
    found = driver.memory.find(address)
    values = {} if found is None else _describe(found, address)
    for at in range(count):
        which = get(kinds + 4 * at, I32)
        if which not in _VALUES:
            raise CallError(INVALID_VALUE)
        value = values.get(which)
        kind, unknown = _VALUES[which]
        put(get(outs + 8 * at), unknown if value is None else value, kind)


@entry("cuPointerSetAttribute")
def _set_attribute(driver: Driver, value: int, which: int, address: int) -> None:
    del value  # Copies of the driver are ordered as a program could ask for.
    if which != ATTRIBUTES["SYNC_MEMOPS"] or driver.memory.find(address) is None:
        raise CallError(INVALID_VALUE)
