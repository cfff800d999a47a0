"""Kernels that read textures, and read and write surfaces, against NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.driver.calls.cuda import Program, compiled, cu, ok, status
from tests.driver.calls.images import (
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

SOURCE = b"""
#define KERNEL extern "C" __global__ void
#define I int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return;
typedef cudaTextureObject_t Tex;
typedef cudaSurfaceObject_t Surf;
#define FETCHES(T, NAME) \\
KERNEL fetch_##NAME(Tex t, T* out, const int* at, int n) { I out[i] = tex1Dfetch<T>(t, at[i]); } \\
KERNEL one_##NAME(Tex t, T* out, const float* at, int n) { I out[i] = tex1D<T>(t, at[i]); } \\
KERNEL two_##NAME(Tex t, T* out, const float2* at, int n) { \\
    I out[i] = tex2D<T>(t, at[i].x, at[i].y); } \\
KERNEL three_##NAME(Tex t, T* out, const float4* at, int n) { \\
    I out[i] = tex3D<T>(t, at[i].x, at[i].y, at[i].z); }
FETCHES(float, float) FETCHES(float2, float2) FETCHES(float4, float4)
FETCHES(int, int) FETCHES(unsigned, unsigned) FETCHES(uchar4, uchar4) FETCHES(short2, short2)
KERNEL level(Tex t, float* out, const float4* at, int n) {
    I out[i] = tex2DLod<float>(t, at[i].x, at[i].y, at[i].z); }
KERNEL layered_one(Tex t, float* out, const float2* at, int n) {
    I out[i] = tex1DLayered<float>(t, at[i].x, (int)at[i].y); }
KERNEL layered_two(Tex t, float* out, const float4* at, int n) {
    I out[i] = tex2DLayered<float>(t, at[i].x, at[i].y, (int)at[i].z); }
KERNEL chosen(const Tex* t, float* out, const float* at, int n) {
    I out[i] = tex1D<float>(t[i & 1], at[i]); }
KERNEL gather(Tex t, float4* out, const float2* at, int n) {
    I out[i] = tex2Dgather<float4>(t, at[i].x, at[i].y); }

#define SURFACES(T, NAME) \\
KERNEL surface_##NAME(Surf from, Surf to, int width, int height, int depth) { \\
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y, z = blockIdx.z; \\
    if (x >= width) return; \\
    T v; \\
    int at = x * (int)sizeof(T), to_x = (width - 1 - x) * (int)sizeof(T); \\
    if (depth > 1) { surf3Dread(&v, from, at, y, z); surf3Dwrite(v, to, to_x, y, z); } \\
    else if (height > 1) { surf2Dread(&v, from, at, y); surf2Dwrite(v, to, to_x, y); } \\
    else { surf1Dread(&v, from, at); surf1Dwrite(v, to, to_x); } }
SURFACES(unsigned char, uint8x1) SURFACES(short2, int16x2)
SURFACES(float, float32x1) SURFACES(float4, float32x4)
KERNEL layers(Surf s, int* out, int layer) {
    out[threadIdx.x] = surf2DLayeredread<int>(s, 4 * threadIdx.x, 1, layer);
    surf2DLayeredwrite(-1 - (int)threadIdx.x, s, 4 * threadIdx.x, 0, layer);
}
KERNEL outside(Surf s, int* out, int mode, int by) {
    int x = 4 * (int)threadIdx.x + by;
    if (mode == 0) out[threadIdx.x] = surf1Dread<int>(s, x, cudaBoundaryModeTrap);
    if (mode == 1) out[threadIdx.x] = surf1Dread<int>(s, x, cudaBoundaryModeClamp);
    if (mode == 2) out[threadIdx.x] = surf1Dread<int>(s, x, cudaBoundaryModeZero);
    if (mode == 3) surf1Dwrite(100 + (int)threadIdx.x, s, x, cudaBoundaryModeZero);
}
"""
NOT_SUPPORTED = 801
WRAP, CLAMP, MIRROR, BORDER = range(4)
BORDER_COLOR = (0.25, -1.5, 2.0, 7.0)


@pytest.fixture
def kernels(program: Program) -> Any:
    """Return a function that finds a kernel of `SOURCE`."""
    del program
    module = ok(cu.cuModuleLoadData(compiled(source=SOURCE)))
    return lambda name: ok(cu.cuModuleGetFunction(module, name.encode()))


def uploaded(values: np.ndarray[Any, Any]) -> Any:
    """Return device memory with these values."""
    values = np.ascontiguousarray(values)
    address = ok(cu.cuMemAlloc(max(values.nbytes, 4)))
    ok(cu.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes))
    return address


def fetched(kernel: Any, handle: Any, at: np.ndarray[Any, Any], kind: str, channels: int = 1) -> Any:
    """Return what a kernel fetches at coordinates."""
    count = len(at)
    out = np.zeros((count, channels), kind)
    places, results = uploaded(at), uploaded(out)
    given = (handle, results, places, count)
    values = tuple(int(each) for each in given), (*[np.uint64] * 3, np.int32)
    arguments = [np.array(value, form) for value, form in zip(*values, strict=True)]
    pointers = np.array([argument.ctypes.data for argument in arguments], np.uint64)
    blocks = (count + 63) // 64
    ok(cu.cuLaunchKernel(kernel, blocks, 1, 1, 64, 1, 1, 0, 0, pointers.ctypes.data, 0))
    ok(cu.cuMemcpyDtoH(out.ctypes.data, results, out.nbytes))
    ok(cu.cuMemFree(places))
    ok(cu.cuMemFree(results))
    return out


# What the programming guide says of a fetch, for one point in float64


def texel(values: np.ndarray[Any, Any], at: list[int], modes: tuple[int, ...], border: Any) -> Any:
    """Return the numbers of one texel; the axes are in the order x, y, z."""
    place = []
    for index, count, mode in zip(at, values.shape[::-1][1:], modes, strict=False):
        if mode == WRAP:
            index %= count
        elif mode == MIRROR:
            period, inside = divmod(index, count)
            index = count - 1 - inside if period % 2 else inside
        elif mode == BORDER and not 0 <= index < count:
            return np.array(border[: values.shape[-1]], np.float64)
        place.append(min(max(index, 0), count - 1))
    place += [0] * (values.ndim - 1 - len(place))
    return values[tuple(place[::-1])].astype(np.float64)


def sampled(
    values: np.ndarray[Any, Any],
    points: np.ndarray[Any, Any],
    modes: tuple[int, ...],
    *,
    linear: bool,
    normalized: bool,
    border: Any = BORDER_COLOR,
) -> np.ndarray[Any, Any]:
    """Return the fetches of points, whose columns are x, y and z."""
    found = []
    for point in points.astype(np.float64):
        scaled = [
            value * count if normalized else value
            for value, count in zip(point, values.shape[::-1][1:], strict=False)
        ]
        if not linear:
            found.append(texel(values, [int(np.floor(v)) for v in scaled], modes, border))
            continue
        low = [int(np.floor(v - 0.5)) for v in scaled]
        weights = [np.round((v - 0.5 - i) * 256) / 256 for v, i in zip(scaled, low, strict=True)]
        total = np.zeros(values.shape[-1])
        for corner in itertools.product((0, 1), repeat=len(low)):
            weight = np.prod([w if c else 1 - w for w, c in zip(weights, corner, strict=True)])
            place = [i + c for i, c in zip(low, corner, strict=True)]
            total += weight * texel(values, place, modes, border)
        found.append(total)
    return np.array(found)


def points_of(shape: tuple[int, ...], *, normalized: bool, seed: int = 1) -> np.ndarray[Any, Any]:
    """Return random points in and around a texture, with its corners."""
    counts = np.array(shape[::-1][1:], np.float64)
    points = np.random.default_rng(seed).uniform(-1.4, 2.4, (90, len(counts)))
    points[:3] = np.array([[0.0], [1.0], [0.5]])
    return (points if normalized else points * counts).astype(np.float32)


def padded(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return points as float, float2 or float4."""
    width = {1: 1, 2: 2, 3: 4}[points.shape[1]]
    made = np.zeros((len(points), width), np.float32)
    made[:, : points.shape[1]] = points
    return made


NAMES = {1: "one", 2: "two", 3: "three"}
TYPES = {1: "float", 2: "float2", 4: "float4"}


@pytest.mark.parametrize("mode", [WRAP, CLAMP, MIRROR, BORDER])
@pytest.mark.parametrize("linear", [False, True], ids=["point", "linear"])
@pytest.mark.parametrize("shape", [(13, 1), (5, 7, 4), (3, 5, 6, 2)])
def test_normalized_coordinates_are_those_of_the_guide(
    kernels: Any, shape: tuple[int, ...], linear: bool, mode: int
) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    array = new_array(values.reshape((1,) * (4 - len(shape)) + shape))
    modes = (mode,) * 3
    handle = ok(
        texture(of_array(array), modes=modes, linear=linear, normalized=True, border=BORDER_COLOR)
    )
    points = points_of(shape, normalized=True)
    channels = shape[-1]
    kernel = kernels(f"{NAMES[len(shape) - 1]}_{TYPES[channels]}")
    found = fetched(kernel, handle, padded(points), "float32", channels)
    expected = sampled(values, points, modes, linear=linear, normalized=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuArrayDestroy(array))


@pytest.mark.parametrize("mode", [WRAP, CLAMP, BORDER])
@pytest.mark.parametrize("linear", [False, True], ids=["point", "linear"])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_other_coordinates_count_texels_and_never_wrap(
    kernels: Any, kind: str, linear: bool, mode: int
) -> None:
    values = np.random.default_rng(0).normal(size=(6, 9, 1)).astype(kind)
    array = new_array(values[None])
    modes = (mode,) * 3
    handle = ok(texture(of_array(array), modes=modes, linear=linear, border=BORDER_COLOR))
    points = points_of(values.shape, normalized=False)
    found = fetched(kernels("two_float"), handle, points, "float32")
    used = (CLAMP if mode == WRAP else mode,) * 3
    expected = sampled(values, points, used, linear=linear, normalized=False)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuArrayDestroy(array))


@pytest.mark.parametrize("linear", [False, True], ids=["point", "linear"])
@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int16"])
def test_small_integers_are_floats_of_at_most_one(kernels: Any, kind: str, linear: bool) -> None:
    limits = np.iinfo(kind)
    values = np.random.default_rng(0).integers(limits.min, limits.max, (4, 5, 2), kind)
    values[0, 0] = limits.min, limits.max
    array = new_array(values[None])
    handle = ok(texture(of_array(array), linear=linear))
    points = points_of(values.shape, normalized=False)
    found = fetched(kernels("two_float2"), handle, points, "float32", 2)
    scaled = np.maximum(values / float(limits.max), -1)
    expected = sampled(scaled, points, (CLAMP,) * 3, linear=linear, normalized=False)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuArrayDestroy(array))


@pytest.mark.parametrize(
    ("kind", "channels", "name", "result"),
    [("uint8", 4, "uchar4", "uint8"), ("int16", 2, "short2", "int16"), ("int32", 1, "int", "int32"),
     ("uint32", 1, "unsigned", "uint32"), ("int8", 1, "int", "int32")],
)  # fmt: skip
def test_integers_are_read_as_they_are(
    kernels: Any, kind: str, channels: int, name: str, result: str
) -> None:
    limits = np.iinfo(kind)
    rng = np.random.default_rng(0)
    values = rng.integers(limits.min, limits.max, (7, 3, channels), kind, endpoint=True)
    array = new_array(values[None])
    handle = ok(texture(of_array(array), as_integers=True))
    points = points_of(values.shape, normalized=False)
    found = fetched(kernels(f"two_{name}"), handle, points, result, channels)
    expected = sampled(values, points, (CLAMP,) * 3, linear=False, normalized=False)
    assert (found == expected).all()
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuArrayDestroy(array))


def test_linear_memory_is_read_by_index_and_gives_zero_outside(kernels: Any) -> None:
    values = np.random.default_rng(0).normal(size=(45, 2)).astype(np.float32)
    address = uploaded(values)
    handle = ok(
        texture(pitched(address, "float32", 2, 45, 0, values.nbytes), linear=True, normalized=True)
    )
    at = np.arange(-5, 60, dtype=np.int32)
    found = fetched(kernels("fetch_float2"), handle, at, "float32", 2)
    inside = (at >= 0) & (at < 45)
    assert (found[inside] == values).all()
    assert not found[~inside].any()
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuMemFree(address))


def test_rows_of_memory_are_a_texture_that_sees_later_changes(kernels: Any) -> None:
    values = np.random.default_rng(0).integers(0, 256, (5, 96), np.uint8)
    address = uploaded(values)
    handle = ok(texture(pitched(address, "uint8", 1, 71, 5, 96), linear=True))
    points = points_of((5, 71, 1), normalized=False)
    for change in (0, 1):
        ok(cu.cuMemsetD8(address, 0, 96 * change))
        values[:change] = 0
        found = fetched(kernels("two_float"), handle, points, "float32")
        shown = values[:, :71, None] / 255
        expected = sampled(shown, points, (CLAMP,) * 3, linear=True, normalized=False)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuMemFree(address))


@pytest.mark.parametrize("between", [False, True], ids=["nearest", "interpolated"])
def test_a_level_is_chosen_limited_and_interpolated(kernels: Any, between: bool) -> None:
    rng = np.random.default_rng(0)
    mipmaps = ok(cu.cuMipmappedArrayCreate(described((12, 8, 0)), 4))
    levels = []
    for number in range(4):
        shape = (1, max(8 >> number, 1), max(12 >> number, 1), 1)
        levels.append(rng.normal(size=shape).astype(np.float32))
        copied(levels[-1], to_array=ok(cu.cuMipmappedArrayGetLevel(mipmaps, number)))
    handle = ok(
        texture(
            of_array(mipmaps, mipmapped=True), linear=True, normalized=True, linear_levels=between,
            levels=(0.5, 2.75), bias=0.25,
        )
    )  # fmt: skip
    points = points_of((8, 12, 1), normalized=True)
    wanted = rng.uniform(-1, 5, len(points)).astype(np.float32)
    at = padded(np.column_stack([points, wanted]))
    found = fetched(kernels("level"), handle, at, "float32")
    used = np.clip(wanted.astype(np.float64) + 0.25, 0.5, 2.75)
    each = [
        sampled(values[0], points, (CLAMP,) * 3, linear=True, normalized=True)[:, 0]
        for values in levels
    ]
    if between:
        low = np.floor(used).astype(int)
        weight = np.round((used - low) * 256) / 256
        rows = np.arange(len(points))
        grid = np.array(each)
        expected = (1 - weight) * grid[low, rows] + weight * grid[np.minimum(low + 1, 3), rows]
    else:
        expected = np.choose(np.floor(used + 0.5).astype(int), each)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6, atol=1e-6)
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuMipmappedArrayDestroy(mipmaps))


@pytest.mark.parametrize("height", [1, 4])
def test_a_layer_is_filtered_alone(kernels: Any, height: int) -> None:
    values = np.random.default_rng(0).normal(size=(3, height, 5, 1)).astype(np.float32)
    array = new_array(values, LAYERED)
    handle = ok(texture(of_array(array), linear=True))
    shape = (height, 5, 1) if height > 1 else (5, 1)
    points = points_of(shape, normalized=False)
    layers = np.random.default_rng(2).integers(-1, 5, len(points))
    at = padded(np.column_stack([points, layers.astype(np.float32)]))
    found = fetched(kernels("layered_two" if height > 1 else "layered_one"), handle, at, "float32")
    for layer in range(3):
        chosen = np.clip(layers, 0, 2) == layer
        image = values[layer] if height > 1 else values[layer, 0]
        expected = sampled(image, points[chosen], (CLAMP,) * 3, linear=True, normalized=False)
        np.testing.assert_allclose(found[chosen], expected, rtol=1e-6, atol=1e-6)
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuArrayDestroy(array))


def test_threads_fetch_from_textures_of_their_own(kernels: Any) -> None:
    values = np.random.default_rng(0).normal(size=(2, 1, 1, 40, 1)).astype(np.float32)
    arrays = [new_array(each) for each in values]
    handles = [ok(texture(of_array(array))) for array in arrays]
    table = uploaded(np.array([int(handle) for handle in handles], np.uint64))
    at = np.arange(40, dtype=np.float32)
    found = fetched(kernels("chosen"), table, at, "float32")[:, 0]
    assert (found == values[np.arange(40) % 2, 0, 0, np.arange(40), 0]).all()
    for handle, array in zip(handles, arrays, strict=True):
        ok(cu.cuTexObjectDestroy(handle))
        ok(cu.cuArrayDestroy(array))
    ok(cu.cuMemFree(table))


def test_a_kernel_keeps_its_texture_if_that_is_destroyed_after_the_launch(kernels: Any) -> None:
    array = new_array(np.full((1, 1, 8, 1), 3, np.float32))
    handle = ok(texture(of_array(array)))
    out, at = uploaded(np.zeros(8, np.float32)), uploaded(np.zeros(8, np.float32))
    given = [np.array(int(v), np.uint64) for v in (handle, out, at)] + [np.array(8, np.int32)]
    pointers = np.array([argument.ctypes.data for argument in given], np.uint64)
    ok(cu.cuLaunchKernel(kernels("one_float"), 1, 1, 1, 8, 1, 1, 0, 0, pointers.ctypes.data, 0))
    ok(cu.cuTexObjectDestroy(handle))
    ok(cu.cuArrayDestroy(array))
    found = np.zeros(8, np.float32)
    ok(cu.cuMemcpyDtoH(found.ctypes.data, out, 32))
    assert (found == 3).all()
    ok(cu.cuMemFree(out))
    ok(cu.cuMemFree(at))


# Surfaces


@pytest.mark.parametrize("form", ["uint8x1", "int16x2", "float32x1", "float32x4"])
@pytest.mark.parametrize("shape", [(1, 1, 37), (1, 3, 21), (2, 3, 9)])
def test_a_surface_is_read_and_written(kernels: Any, shape: tuple[int, int, int], form: str) -> None:
    kind, _, channels = form.partition("x")
    values = np.random.default_rng(0).integers(0, 100, (*shape, int(channels))).astype(kind)
    arrays = new_array(values, SURFACE), new_array(np.zeros_like(values), SURFACE)
    surfaces = [ok(cu.cuSurfObjectCreate(of_array(array))) for array in arrays]
    depth, height, width = shape
    given = [np.array(int(surface), np.uint64) for surface in surfaces]
    given += [np.array(extent, np.int32) for extent in (width, height, depth)]
    pointers = np.array([argument.ctypes.data for argument in given], np.uint64)
    kernel = kernels(f"surface_{form}")
    ok(cu.cuLaunchKernel(kernel, 2, height, depth, 32, 1, 1, 0, 0, pointers.ctypes.data, 0))
    found = copied(np.zeros_like(values), of_array=arrays[1])
    assert (found == values[:, :, ::-1]).all()
    for surface, array in zip(surfaces, arrays, strict=True):
        ok(cu.cuSurfObjectDestroy(surface))
        ok(cu.cuArrayDestroy(array))


def launched(kernel: Any, surface: Any, out: Any, *numbers: int) -> Any:
    """Launch a kernel in 8 threads; return the status of waiting for it."""
    given = [np.array(int(v), np.uint64) for v in (surface, out)]
    given += [np.array(number, np.int32) for number in numbers]
    pointers = np.array([argument.ctypes.data for argument in given], np.uint64)
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 8, 1, 1, 0, 0, pointers.ctypes.data, 0))
    return status(cu.cuCtxSynchronize())


def test_a_layer_of_a_surface_is_read_and_written(kernels: Any) -> None:
    values = np.random.default_rng(0).integers(0, 100, (3, 2, 8, 1)).astype(np.int32)
    array = new_array(values, LAYERED | SURFACE)
    surface = ok(cu.cuSurfObjectCreate(of_array(array)))
    out = uploaded(np.zeros(8, np.int32))
    assert launched(kernels("layers"), surface, out, 2) == 0
    found = np.zeros(8, np.int32)
    ok(cu.cuMemcpyDtoH(found.ctypes.data, out, 32))
    assert (found == values[2, 1, :, 0]).all()
    values[2, 0, :, 0] = -1 - np.arange(8)
    assert (copied(np.zeros_like(values), of_array=array) == values).all()
    ok(cu.cuSurfObjectDestroy(surface))
    ok(cu.cuArrayDestroy(array))
    ok(cu.cuMemFree(out))


def test_coordinates_outside_a_surface_are_clamped_or_zero(kernels: Any) -> None:
    values = np.arange(10, 15, dtype=np.int32).reshape(1, 1, 5, 1)
    array = new_array(values, SURFACE)
    surface = ok(cu.cuSurfObjectCreate(of_array(array)))
    out = uploaded(np.zeros(8, np.int32))
    for mode, expected in ((1, [10, 10, 11, 12, 13, 14, 14, 14]), (2, [0, 10, 11, 12, 13, 14, 0, 0])):
        assert launched(kernels("outside"), surface, out, mode, -4) == 0
        found = np.zeros(8, np.int32)
        ok(cu.cuMemcpyDtoH(found.ctypes.data, out, 32))
        assert found.tolist() == expected
    assert launched(kernels("outside"), surface, out, 3, -8) == 0
    found = copied(np.zeros_like(values), of_array=array)
    assert found.ravel().tolist() == [102, 103, 104, 105, 106]
    ok(cu.cuSurfObjectDestroy(surface))
    ok(cu.cuArrayDestroy(array))
    ok(cu.cuMemFree(out))


def test_a_texture_instruction_without_support_is_refused_when_the_kernel_is_found() -> None:
    module = ok(cu.cuModuleLoadData(compiled(source=SOURCE)))
    assert status(cu.cuModuleGetFunction(module, b"gather")) == NOT_SUPPORTED
    ok(cu.cuModuleUnload(module))
