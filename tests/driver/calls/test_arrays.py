"""CUDA arrays: their descriptions, copies, mipmap levels, and the objects that are made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.driver.calls.cuda import Program, cu, ok, status
from tests.driver.calls.images import (
    FORMATS,
    LAYERED,
    SURFACE,
    copied,
    described,
    new_array,
    of_array,
    pitched,
    texture,
)

pytestmark = [pytest.mark.cpu_driver, pytest.mark.usefixtures("program")]

INVALID_VALUE, INVALID_HANDLE, NOT_SUPPORTED = 1, 400, 801
CUBE, GATHER, SPARSE = 4, 8, 64


def random(shape: tuple[int, ...], kind: str = "float32", seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random bytes as numbers; floats are those from 0 to 1."""
    rng = np.random.default_rng(seed)
    if np.dtype(kind).kind == "f":
        return rng.random(shape).astype(kind)
    limits = np.iinfo(kind)
    return rng.integers(limits.min, limits.max, shape, kind, endpoint=True)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1, 13), (1, 5, 7), (3, 5, 7)])
def test_an_array_has_what_was_copied_into_it(
    shape: tuple[int, int, int], channels: int, kind: str
) -> None:
    values = random((*shape, channels), kind)
    array = new_array(values)
    found = copied(np.zeros_like(values), of_array=array)
    assert (found == values).all()
    has = ok(cu.cuArray3DGetDescriptor(array))
    depth, height, width = shape
    assert (has.Width, has.NumChannels, has.Format) == (width, channels, FORMATS[kind])
    assert (has.Height, has.Depth) == (height if height > 1 else 0, depth if depth > 1 else 0)
    ok(cu.cuArrayDestroy(array))


def test_a_plain_description_has_no_depth() -> None:
    plain = cu.CUDA_ARRAY_DESCRIPTOR()
    plain.Width, plain.Height, plain.NumChannels = 6, 4, 2
    plain.Format = FORMATS["int16"]
    array = ok(cu.cuArrayCreate(plain))
    has = ok(cu.cuArrayGetDescriptor(array))
    assert (has.Width, has.Height, has.Format, has.NumChannels) == (6, 4, FORMATS["int16"], 2)
    assert ok(cu.cuArray3DGetDescriptor(array)).Depth == 0
    ok(cu.cuArrayDestroy(array))


def test_an_array_is_part_of_the_memory_in_use_until_it_is_destroyed() -> None:
    free, _ = ok(cu.cuMemGetInfo())
    array = ok(cu.cuArray3DCreate(described((64, 64, 0))))
    assert ok(cu.cuMemGetInfo())[0] == free - 4 * 64 * 64
    ok(cu.cuArrayDestroy(array))
    assert ok(cu.cuMemGetInfo())[0] == free
    assert status(cu.cuArrayDestroy(array)) == INVALID_HANDLE
    assert status(cu.cuArray3DGetDescriptor(array)) == INVALID_HANDLE


@pytest.mark.parametrize(
    ("extents", "channels", "flags", "expected"),
    [
        ((0, 4, 0), 1, 0, INVALID_VALUE),
        ((4, 4, 0), 3, 0, INVALID_VALUE),
        ((4, 0, 4), 1, 0, INVALID_VALUE),
        ((4, 4, 0), 1, LAYERED, INVALID_VALUE),
        ((4, 4, 5), 1, CUBE, INVALID_VALUE),
        ((4, 5, 6), 1, CUBE, INVALID_VALUE),
        ((4, 4, 4), 1, GATHER, INVALID_VALUE),
        ((131073, 0, 0), 1, 0, INVALID_VALUE),
        ((32769, 0, 0), 1, SURFACE, INVALID_VALUE),
        ((4, 0, 2049), 1, LAYERED, INVALID_VALUE),
        ((4, 65537, 0), 1, 0, INVALID_VALUE),
        ((4, 4, 16385), 1, 0, INVALID_VALUE),
        ((4, 4, 0), 1, SPARSE, NOT_SUPPORTED),
        ((131072, 0, 0), 1, 0, 0),
        ((32768, 0, 0), 1, SURFACE, 0),
        ((4, 4, 6), 1, CUBE, 0),
        ((4, 4, 12), 1, CUBE | LAYERED, 0),
        ((4, 0, 4), 1, LAYERED, 0),
    ],
)
def test_an_array_needs_extents_that_fit_its_flags(
    extents: tuple[int, int, int], channels: int, flags: int, expected: int
) -> None:
    result = cu.cuArray3DCreate(described(extents, "float32", channels, flags))
    assert status(result) == expected
    if not expected:
        ok(cu.cuArrayDestroy(result[1]))


def test_a_part_of_an_array_is_copied() -> None:
    values = random((3, 5, 8, 1), "int32")
    array = new_array(values)
    found = np.zeros((2, 3, 4), np.int32)
    box = cu.CUDA_MEMCPY3D()
    box.srcMemoryType, box.srcArray = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY, array
    box.srcXInBytes, box.srcY, box.srcZ = 8, 1, 1
    box.dstMemoryType, box.dstHost = cu.CUmemorytype.CU_MEMORYTYPE_HOST, found.ctypes.data
    box.WidthInBytes, box.Height, box.Depth = 16, 3, 2
    ok(cu.cuMemcpy3D(box))
    assert (found == values[1:, 1:4, 2:6, 0]).all()
    box.srcXInBytes = 20
    assert status(cu.cuMemcpy3D(box)) == INVALID_VALUE
    box.srcXInBytes, box.srcZ = 8, 2
    assert status(cu.cuMemcpy3D(box)) == INVALID_VALUE
    box.srcXInBytes, box.srcZ = 6, 1
    assert status(cu.cuMemcpy3D(box)) == INVALID_VALUE
    ok(cu.cuArrayDestroy(array))


def test_rows_are_copied_between_arrays_and_memory(stream: Any) -> None:
    values = random((1, 5, 6, 1), "uint16")
    array = new_array(np.zeros_like(values))
    address, pitch = ok(cu.cuMemAllocPitch(12, 5, 4))
    ok(cu.cuMemsetD8(address, 0, pitch * 5))
    copy = cu.CUDA_MEMCPY2D()
    copy.srcMemoryType, copy.srcHost = cu.CUmemorytype.CU_MEMORYTYPE_HOST, values.ctypes.data
    copy.dstMemoryType, copy.dstArray = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY, array
    copy.WidthInBytes, copy.Height = 12, 5
    ok(cu.cuMemcpy2DAsync(copy, stream))
    back = cu.CUDA_MEMCPY2D()
    back.srcMemoryType, back.srcArray = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY, array
    back.dstMemoryType, back.dstDevice = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, address
    back.dstPitch, back.WidthInBytes, back.Height = pitch, 12, 5
    ok(cu.cuMemcpy2DAsync(back, stream))
    found = np.zeros((5, pitch // 2), np.uint16)
    ok(cu.cuMemcpyDtoHAsync(found.ctypes.data, address, found.nbytes, stream))
    assert (found[:, :6] == values[0, :, :, 0]).all()
    ok(cu.cuMemFree(address))
    ok(cu.cuArrayDestroy(array))


def test_bytes_are_copied_to_and_from_arrays_of_one_row(program: Program, stream: Any) -> None:
    values = np.arange(10, dtype=np.int32)
    one, other = (ok(cu.cuArray3DCreate(described((10, 0, 0), "int32"))) for _ in range(2))
    address = program.memory([0] * 10)
    ok(cu.cuMemcpyHtoA(one, 0, values.ctypes.data, 40))
    ok(cu.cuMemcpyAtoA(other, 8, one, 0, 32))
    ok(cu.cuMemcpyAtoD(address, other, 8, 32))
    assert program.values(address, 10) == [*range(8), 0, 0]
    ok(cu.cuMemcpyDtoA(one, 20, address, 20))
    found = np.zeros(10, np.int32)
    ok(cu.cuMemcpyAtoH(found.ctypes.data, one, 0, 40))
    assert found.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    ok(cu.cuMemcpyHtoAAsync(one, 4, values.ctypes.data, 12, stream))
    ok(cu.cuMemcpyAtoHAsync(found.ctypes.data, one, 0, 16, stream))
    assert found.tolist()[:4] == [0, 0, 1, 2]
    assert status(cu.cuMemcpyHtoA(one, 4, values.ctypes.data, 40)) == INVALID_VALUE
    plane = ok(cu.cuArray3DCreate(described((10, 4, 0), "int32")))
    assert status(cu.cuMemcpyHtoA(plane, 0, values.ctypes.data, 40)) == INVALID_VALUE
    assert status(cu.cuMemcpyHtoA(None, 0, values.ctypes.data, 40)) == INVALID_VALUE
    bytes_only = ok(cu.cuArray3DCreate(described((40, 0, 0), "uint8")))
    assert status(cu.cuMemcpyAtoA(bytes_only, 0, one, 0, 40)) == INVALID_VALUE
    for array in (one, other, plane, bytes_only):
        ok(cu.cuArrayDestroy(array))
    ok(cu.cuMemFree(address))


def test_a_copy_of_an_array_is_captured_and_describes_itself(stream: Any) -> None:
    values = random((2, 3, 4, 1), "int32")
    array, other = new_array(values), new_array(np.zeros_like(values))
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    box = cu.CUDA_MEMCPY3D()
    box.srcMemoryType = box.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY
    box.srcArray, box.dstArray = array, other
    box.srcXInBytes, box.srcY, box.srcZ = 4, 1, 1
    box.WidthInBytes, box.Height, box.Depth = 12, 2, 1
    ok(cu.cuMemcpy3DAsync(box, stream))
    graph = ok(cu.cuStreamEndCapture(stream))
    (node,), _ = ok(cu.cuGraphGetNodes(graph, 1))
    told = ok(cu.cuGraphMemcpyNodeGetParams(node))
    assert told.srcMemoryType == told.dstMemoryType == cu.CUmemorytype.CU_MEMORYTYPE_ARRAY
    assert (int(told.srcArray), int(told.dstArray)) == (int(array), int(other))
    assert (told.srcXInBytes, told.srcY, told.srcZ) == (4, 1, 1)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    found = copied(np.zeros_like(values), of_array=other)
    expected = np.zeros_like(values)
    expected[0, :2, :3] = values[1, 1:, 1:]
    assert (found == expected).all()
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphDestroy(graph))
    ok(cu.cuArrayDestroy(array))
    ok(cu.cuArrayDestroy(other))


# Mipmaps


@pytest.mark.parametrize(
    ("extents", "flags", "sizes"),
    [
        ((13, 0, 0), 0, [(13, 0, 0), (6, 0, 0), (3, 0, 0), (1, 0, 0)]),
        ((8, 3, 0), 0, [(8, 3, 0), (4, 1, 0), (2, 1, 0), (1, 1, 0)]),
        ((2, 2, 5), 0, [(2, 2, 5), (1, 1, 2), (1, 1, 1)]),
        ((2, 2, 5), LAYERED, [(2, 2, 5), (1, 1, 5)]),
    ],
)
def test_each_mipmap_level_has_half_of_the_size(
    extents: tuple[int, int, int], flags: int, sizes: list[tuple[int, int, int]]
) -> None:
    mipmaps = ok(cu.cuMipmappedArrayCreate(described(extents, flags=flags), 99))
    found = []
    for number in range(len(sizes)):
        level = ok(cu.cuMipmappedArrayGetLevel(mipmaps, number))
        has = ok(cu.cuArray3DGetDescriptor(level))
        found.append((has.Width, has.Height, has.Depth))
        assert status(cu.cuArrayDestroy(level)) == INVALID_VALUE
    assert found == sizes
    assert status(cu.cuMipmappedArrayGetLevel(mipmaps, len(sizes))) == INVALID_VALUE
    ok(cu.cuMipmappedArrayDestroy(mipmaps))
    assert status(cu.cuMipmappedArrayDestroy(mipmaps)) == INVALID_HANDLE


# Texture and surface objects


def test_objects_tell_what_they_were_made_of() -> None:
    array = new_array(random((1, 4, 4, 1)), SURFACE)
    made = ok(
        texture(of_array(array), modes=(0, 2, 3), linear=True, normalized=True, border=(1, 2, 3, 4))
    )
    assert int(ok(cu.cuTexObjectGetResourceDesc(made)).res.array.hArray) == int(array)
    told = ok(cu.cuTexObjectGetTextureDesc(made))
    assert [int(mode) for mode in told.addressMode] == [0, 2, 3]
    assert (int(told.filterMode), told.flags, list(told.borderColor)) == (1, 2, [1, 2, 3, 4])
    assert status(cu.cuTexObjectGetResourceViewDesc(made)) == INVALID_VALUE
    surface = ok(cu.cuSurfObjectCreate(of_array(array)))
    assert int(ok(cu.cuSurfObjectGetResourceDesc(surface)).res.array.hArray) == int(array)
    assert status(cu.cuTexObjectDestroy(surface)) == INVALID_VALUE
    assert status(cu.cuSurfObjectDestroy(made)) == INVALID_VALUE
    ok(cu.cuTexObjectDestroy(made))
    ok(cu.cuSurfObjectDestroy(surface))
    assert status(cu.cuTexObjectDestroy(made)) == INVALID_VALUE
    ok(cu.cuArrayDestroy(array))


def test_a_texture_needs_memory_and_settings_that_it_can_use() -> None:
    array, integers = new_array(random((1, 4, 4, 1))), new_array(random((1, 4, 4, 1), "int32"))
    mipmaps = ok(cu.cuMipmappedArrayCreate(described((4, 4, 0)), 3))
    address = ok(cu.cuMemAlloc(1024))
    rows = (address, "float32", 1, 8, 4, 32)
    refused = {
        "no array": texture(of_array(0)),
        "no mipmaps": texture(of_array(array, mipmapped=True), normalized=True),
        "mipmaps need normalized coordinates": texture(of_array(mipmaps, mipmapped=True)),
        "integers are not interpolated": texture(of_array(integers), linear=True),
        "a flag that does not exist": texture(of_array(array), flags=1 << 12),
        "an address that is not aligned": texture(pitched(int(address) + 4, "float32", 1, 8, 0, 64)),
        "memory that ends too early": texture(pitched(address, "float32", 1, 8, 0, 1028)),
        "a pitch that is not aligned": texture(pitched(*rows[:-1], 36)),
        "a pitch that is too small": texture(pitched(address, "float32", 1, 16, 4, 32)),
        "rows beyond the memory": texture(pitched(address, "float32", 1, 8, 33, 32)),
    }
    assert {why: status(result) for why, result in refused.items()} == dict.fromkeys(
        refused, INVALID_VALUE
    )
    assert status(texture(of_array(array), flags=16)) == NOT_SUPPORTED
    for made in (
        texture(pitched(*rows)),
        texture(pitched(address, "float32", 1, 8, 0, 1024)),
        texture(of_array(mipmaps, mipmapped=True), normalized=True),
    ):
        ok(cu.cuTexObjectDestroy(ok(made)))
    assert status(cu.cuSurfObjectCreate(of_array(array))) == INVALID_VALUE
    assert status(cu.cuSurfObjectCreate(pitched(*rows))) == INVALID_VALUE
    ok(cu.cuMipmappedArrayDestroy(mipmaps))
    ok(cu.cuMemFree(address))
    ok(cu.cuArrayDestroy(array))
    ok(cu.cuArrayDestroy(integers))
