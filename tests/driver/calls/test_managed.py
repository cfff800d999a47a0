"""Managed memory: its pools, and hints about its place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from tests.driver.calls.cuda import Program, cu, ok, status

pytestmark = pytest.mark.cpu_driver

ATTRIBUTES = cu.CUmem_range_attribute
ADVICE = cu.CUmem_advise
TYPES = cu.CUmemLocationType
INVALID_VALUE, INVALID_DEVICE = 1, 101
NOWHERE = -2


def place(kind: Any, number: int = 0) -> Any:
    """Return a place of memory."""
    made = cu.CUmemLocation()
    made.type, made.id = kind, number
    return made


DEVICE = place(TYPES.CU_MEM_LOCATION_TYPE_DEVICE)
HOST = place(TYPES.CU_MEM_LOCATION_TYPE_HOST)


@pytest.fixture
def memory(program: Program) -> Iterator[Any]:
    del program
    address = ok(cu.cuMemAllocManaged(64, 1))
    yield address
    ok(cu.cuMemFree(address))


def told(address: Any, name: str, size: int = 4) -> Any:
    """Return an attribute of the first 16 bytes."""
    which = getattr(ATTRIBUTES, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
    found = ok(cu.cuMemRangeGetAttribute(size, which, address, 16))
    return [int(each) for each in found] if name == "ACCESSED_BY" else int(found)


def advise(address: Any, name: str, where: Any = HOST) -> int:
    """Give advice, and return the status."""
    return status(cu.cuMemAdvise(address, 64, getattr(ADVICE, f"CU_MEM_ADVISE_{name}"), where))


def test_advice_is_told(memory: Any) -> None:
    assert told(memory, "READ_MOSTLY") == 0
    assert told(memory, "PREFERRED_LOCATION") == NOWHERE
    assert advise(memory, "SET_READ_MOSTLY") == 0
    assert advise(memory, "SET_PREFERRED_LOCATION", DEVICE) == 0
    assert (told(memory, "READ_MOSTLY"), told(memory, "PREFERRED_LOCATION")) == (1, 0)
    assert told(memory, "PREFERRED_LOCATION_TYPE") == int(TYPES.CU_MEM_LOCATION_TYPE_DEVICE)
    assert advise(memory, "SET_PREFERRED_LOCATION", place(TYPES.CU_MEM_LOCATION_TYPE_HOST_NUMA, 3)) == 0
    assert (told(memory, "PREFERRED_LOCATION"), told(memory, "PREFERRED_LOCATION_ID")) == (-1, 3)
    assert advise(memory, "UNSET_READ_MOSTLY") == advise(memory, "UNSET_PREFERRED_LOCATION") == 0
    assert (told(memory, "READ_MOSTLY"), told(memory, "PREFERRED_LOCATION")) == (0, NOWHERE)


def test_who_accesses_memory_is_told(memory: Any) -> None:
    assert advise(memory, "SET_ACCESSED_BY", DEVICE) == advise(memory, "SET_ACCESSED_BY", DEVICE) == 0
    assert advise(memory, "SET_ACCESSED_BY", HOST) == 0
    assert told(memory, "ACCESSED_BY", 12) == [0, -1, NOWHERE]
    assert advise(memory, "UNSET_ACCESSED_BY", DEVICE) == 0
    assert told(memory, "ACCESSED_BY", 8) == [-1, NOWHERE]


def test_the_last_prefetch_is_told(memory: Any) -> None:
    assert told(memory, "LAST_PREFETCH_LOCATION") == NOWHERE
    ok(cu.cuMemPrefetchAsync(memory, 64, DEVICE, 0, 0))
    assert told(memory, "LAST_PREFETCH_LOCATION") == 0
    ok(cu.cuMemPrefetchAsync(memory, 64, HOST, 0, 0))
    assert told(memory, "LAST_PREFETCH_LOCATION") == -1


def test_several_ranges_are_prefetched_and_discarded(memory: Any) -> None:
    other = ok(cu.cuMemAllocManaged(64, 1))
    ranges = [memory, other], [64, 64], 2
    ok(cu.cuMemPrefetchBatchAsync(*ranges, [DEVICE, HOST], [0, 1], 2, 0, 0))
    assert [told(each, "LAST_PREFETCH_LOCATION") for each in (memory, other)] == [0, -1]
    ok(cu.cuMemDiscardAndPrefetchBatchAsync(*ranges, [HOST], [0], 1, 0, 0))
    assert [told(each, "LAST_PREFETCH_LOCATION") for each in (memory, other)] == [-1, -1]
    ok(cu.cuMemDiscardBatchAsync(*ranges, 0, 0))
    assert status(cu.cuMemPrefetchBatchAsync(*ranges, [DEVICE], [1], 1, 0, 0)) == INVALID_VALUE
    assert status(cu.cuMemDiscardBatchAsync([memory], [65], 1, 0, 0)) == INVALID_VALUE
    ok(cu.cuMemFree(other))


def test_wrong_advice_is_refused(program: Program, memory: Any) -> None:
    elsewhere = place(TYPES.CU_MEM_LOCATION_TYPE_DEVICE, 9)
    assert advise(memory, "SET_PREFERRED_LOCATION", elsewhere) == INVALID_DEVICE
    assert advise(memory, "SET_ACCESSED_BY", elsewhere) == INVALID_DEVICE
    assert told(memory, "ACCESSED_BY", 4) == [NOWHERE]
    assert advise(cu.CUdeviceptr(int(memory) + 8), "SET_READ_MOSTLY") == INVALID_VALUE
    other = program.memory([1] * 16)
    assert advise(other, "SET_READ_MOSTLY") == INVALID_VALUE
    ok(cu.cuMemFree(other))


def test_a_pool_of_managed_memory_gives_memory_that_the_host_reads(program: Program) -> None:
    kind = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
    pool = ok(cu.cuMemGetMemPool(HOST, kind))
    assert int(pool) == int(ok(cu.cuMemGetDefaultMemPool(DEVICE, kind))) != 0
    stream = ok(cu.cuStreamCreate(1))
    address = ok(cu.cuMemAllocFromPoolAsync(4, pool, stream))
    ok(cu.cuMemsetD32Async(address, 41, 1, stream))
    ok(program.launch("add", address, 1, 1, stream=stream))
    ok(cu.cuStreamSynchronize(stream))
    assert ctypes.c_int.from_address(int(address)).value == 42
    assert advise(address, "SET_READ_MOSTLY") == INVALID_VALUE  # The advice is for more bytes.
    is_managed = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
    assert ok(cu.cuPointerGetAttribute(is_managed, address))
    ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuStreamDestroy(stream))
