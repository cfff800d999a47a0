"""Memory, pools, copies, fills and what the driver tells about pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.driver.devices import ATTRIBUTES as DEVICE_ATTRIBUTES
from preheat.driver.functions import ATTRIBUTES as FUNCTION_ATTRIBUTES
from preheat.driver.pointers import ATTRIBUTES as POINTER_ATTRIBUTES
from tests.driver.calls.cuda import Program, cu, ok, status

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, NOT_FOUND = 1, 500
POINTER = cu.CUpointer_attribute


def pointer(name: str, address: Any) -> Any:
    """Return what the driver tells about an address."""
    return cu.cuPointerGetAttribute(getattr(POINTER, f"CU_POINTER_ATTRIBUTE_{name}"), address)


@pytest.mark.parametrize(
    ("numbers", "prefix", "kind"),
    [
        (POINTER_ATTRIBUTES, "CU_POINTER_ATTRIBUTE_", POINTER),
        (FUNCTION_ATTRIBUTES, "CU_FUNC_ATTRIBUTE_", cu.CUfunction_attribute),
        (DEVICE_ATTRIBUTES, "CU_DEVICE_ATTRIBUTE_", cu.CUdevice_attribute),
    ],
)
def test_attributes_have_the_numbers_of_the_header(
    numbers: dict[str, int], prefix: str, kind: Any
) -> None:
    assert {name: int(getattr(kind, prefix + name)) for name in numbers} == numbers


def test_a_copy_in_pageable_memory_is_read_and_written_before_the_call_returns(
    program: Program,
) -> None:
    stream = ok(cu.cuStreamCreate(1))
    values = np.arange(8, dtype=np.int32)
    address = ok(cu.cuMemAlloc(32))
    ok(cu.cuMemcpyHtoDAsync(address, values.ctypes.data, 32, stream))
    values[:] = -1
    found = np.zeros(8, np.int32)
    ok(cu.cuMemcpyDtoHAsync(found.ctypes.data, address, 32, stream))
    assert found.tolist() == list(range(8))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuMemFree(address))
    del program


def test_a_copy_from_pinned_memory_reads_it_when_it_is_executed(program: Program) -> None:
    """A program that changes the memory too early gets the new values with some seeds."""
    del program
    stream = ok(cu.cuStreamCreate(1))
    address, pinned = ok(cu.cuMemAlloc(4)), ok(cu.cuMemAllocHost(4))
    value = ctypes.c_int.from_address(int(pinned))
    seen = set()
    for _ in range(64):
        value.value = 1
        ok(cu.cuMemcpyHtoDAsync(address, pinned, 4, stream))
        value.value = 2
        found = ctypes.c_int()
        ok(cu.cuMemcpyDtoHAsync(ctypes.addressof(found), address, 4, stream))
        seen.add(found.value)
    assert seen == {1, 2}
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuMemFreeHost(pinned))
    ok(cu.cuMemFree(address))


def test_rows_are_copied_with_their_pitches(program: Program) -> None:
    address, pitch = ok(cu.cuMemAllocPitch(12, 4, 4))
    assert pitch == 512
    source = np.arange(24, dtype=np.int32).reshape(4, 6)
    copy = cu.CUDA_MEMCPY2D()
    copy.srcMemoryType, copy.srcHost = cu.CUmemorytype.CU_MEMORYTYPE_HOST, source.ctypes.data
    copy.srcPitch, copy.srcXInBytes = 24, 8
    copy.dstMemoryType, copy.dstDevice = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, address
    copy.dstPitch, copy.WidthInBytes, copy.Height = pitch, 12, 4
    ok(cu.cuMemcpy2D(copy))
    for row in range(4):
        at = cu.CUdeviceptr(int(address) + row * pitch)
        assert program.values(at, 3) == source[row, 2:5].tolist()
    ok(cu.cuMemFree(address))


def test_a_fill_writes_elements_of_each_size(program: Program) -> None:
    address = ok(cu.cuMemAlloc(16))
    ok(cu.cuMemsetD32(address, 0x01020304, 4))
    ok(cu.cuMemsetD16(cu.CUdeviceptr(int(address) + 4), 0x0506, 2))
    ok(cu.cuMemsetD8(cu.CUdeviceptr(int(address) + 8), 7, 4))
    ok(cu.cuMemsetD2D32(cu.CUdeviceptr(int(address) + 12), 4, 9, 1, 1))
    assert program.values(address, 4) == [0x01020304, 0x05060506, 0x07070707, 9]
    assert status(cu.cuMemsetD32(cu.CUdeviceptr(int(address) + 2), 0, 1)) == INVALID_VALUE
    ok(cu.cuMemFree(address))


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_a_fill_of_memory_that_the_host_reads_waits(program: Program, kind: str) -> None:
    del program
    pinned = kind == "pinned"
    address = ok(cu.cuMemAllocHost(4) if pinned else cu.cuMemAllocManaged(4, 1))
    value = ctypes.c_int.from_address(int(address))
    for number in range(16):
        ok(cu.cuMemsetD32(int(address), number, 1))
        assert value.value == number
    ok(cu.cuMemFreeHost(address) if pinned else cu.cuMemFree(address))


def test_memory_of_nobody_is_refused(program: Program) -> None:
    del program
    host = np.zeros(4, np.int32)
    address = ok(cu.cuMemAlloc(16))
    beyond = cu.CUdeviceptr(int(address) + 8)
    assert status(cu.cuMemcpyHtoD(beyond, host.ctypes.data, 16)) == INVALID_VALUE
    assert status(cu.cuMemcpyDtoH(host.ctypes.data, cu.CUdeviceptr(4096), 4)) == INVALID_VALUE
    assert status(cu.cuMemFree(beyond)) == INVALID_VALUE
    ok(cu.cuMemFree(address))
    assert status(cu.cuMemFree(address)) == INVALID_VALUE
    assert status(cu.cuMemAlloc(0)) == INVALID_VALUE


def test_memory_that_one_stream_frees_is_valid_for_its_work_until_then(program: Program) -> None:
    stream = ok(cu.cuStreamCreate(1))
    for _ in range(20):
        address = ok(cu.cuMemAllocAsync(128, stream))
        ok(cu.cuMemsetD32Async(address, 3, 32, stream))
        ok(program.launch("twice", address, 32, stream=stream))
        found = np.zeros(32, np.int32)
        ok(cu.cuMemcpyDtoHAsync(found.ctypes.data, address, 128, stream))
        ok(cu.cuMemFreeAsync(address, stream))
        assert found.tolist() == [6] * 32
    ok(cu.cuStreamDestroy(stream))


def test_a_pool_counts_what_is_allocated_from_it(program: Program) -> None:
    del program
    properties = cu.CUmemPoolProps()
    properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = ok(cu.cuMemPoolCreate(properties))
    kinds = cu.CUmemPool_attribute

    def used() -> tuple[int, int]:
        names = ("USED_MEM_CURRENT", "USED_MEM_HIGH")
        found = [
            ok(cu.cuMemPoolGetAttribute(pool, getattr(kinds, f"CU_MEMPOOL_ATTR_{n}"))) for n in names
        ]
        return int(found[0]), int(found[1])

    address = ok(cu.cuMemAllocFromPoolAsync(1000, pool, 0))
    assert used() == (1000, 1000)
    assert int(ok(pointer("MEMPOOL_HANDLE", address))) == int(pool)
    ok(cu.cuMemFreeAsync(address, 0))
    assert used() == (0, 1000)
    ok(cu.cuMemPoolDestroy(pool))
    assert status(cu.cuMemAllocFromPoolAsync(1, pool, 0)) == 400


def test_no_memory_can_be_allocated_in_the_order_of_a_stream(program: Program) -> None:
    del program
    stream = ok(cu.cuStreamCreate(1))
    assert int(ok(cu.cuMemAllocAsync(0, stream))) == 0
    assert status(cu.cuMemAlloc(0)) == 1
    ok(cu.cuStreamDestroy(stream))


@pytest.mark.parametrize("kind", ["device", "pinned", "managed", "variable", "registered"])
def test_the_driver_knows_what_memory_an_address_is_in(program: Program, kind: str) -> None:
    registered = np.zeros(64, np.uint8)
    make: dict[str, Callable[[], Any]] = {
        "device": lambda: ok(cu.cuMemAlloc(64)),
        "pinned": lambda: ok(cu.cuMemAllocHost(64)),
        "managed": lambda: ok(cu.cuMemAllocManaged(64, 1)),
        "variable": lambda: ok(cu.cuModuleGetGlobal(program.module, b"variable"))[0],
        "registered": lambda: registered.ctypes.data,
    }
    if kind == "registered":
        ok(cu.cuMemHostRegister(registered.ctypes.data, 64, 0))
    start = int(make[kind]())
    inside = cu.CUdeviceptr(start + 2)
    on_host = kind in ("pinned", "registered")
    assert int(ok(pointer("MEMORY_TYPE", inside))) == (1 if on_host else 2)
    assert ok(pointer("IS_MANAGED", inside)) == (kind == "managed")
    assert int(ok(pointer("RANGE_START_ADDR", inside))) == start
    assert status(pointer("HOST_POINTER", inside)) == (0 if on_host or kind == "managed" else 1)
    if kind == "variable":
        return
    assert ok(cu.cuMemGetAddressRange(inside))[1] == 64
    free = {"pinned": cu.cuMemFreeHost, "registered": cu.cuMemHostUnregister}.get(kind, cu.cuMemFree)
    ok(free(start))
    assert status(pointer("MEMORY_TYPE", inside)) == INVALID_VALUE
    assert status(cu.cuMemGetAddressRange(inside)) == NOT_FOUND


def test_an_unknown_address_has_zeros_for_attributes_when_several_are_asked_for(
    program: Program,
) -> None:
    del program
    names = ["MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL"]
    kinds = [getattr(POINTER, f"CU_POINTER_ATTRIBUTE_{name}") for name in names]
    found = ok(cu.cuPointerGetAttributes(len(kinds), kinds, cu.CUdeviceptr(4096)))
    assert [int(each) for each in found] == [0, 0, -2]


def test_host_memory_is_registered_once(program: Program) -> None:
    del program
    memory = np.zeros(64, np.uint8)
    ok(cu.cuMemHostRegister(memory.ctypes.data, 64, 0))
    assert status(cu.cuMemHostRegister(memory.ctypes.data, 64, 0)) == 712
    assert int(ok(cu.cuMemHostGetDevicePointer(memory.ctypes.data, 0))) == memory.ctypes.data
    ok(cu.cuMemHostUnregister(memory.ctypes.data))
    assert status(cu.cuMemHostUnregister(memory.ctypes.data)) == 713


def test_memory_of_a_destroyed_context_is_freed(program: Program) -> None:
    free = ok(cu.cuMemGetInfo())[0]
    context = ok(cu.cuCtxCreate(None, 0, program.device))
    address = ok(cu.cuMemAlloc(1 << 20))
    ok(cu.cuCtxDestroy(context))
    assert ok(cu.cuMemGetInfo())[0] == free
    assert status(pointer("MEMORY_TYPE", address)) == INVALID_VALUE
