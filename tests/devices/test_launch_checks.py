"""Limits of a launch: the limit itself is accepted, and the next value is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from preheat.devices.base import Geometry
from preheat.errors import LaunchError
from preheat.gpu import Gpu
from tests.devices.support import KERNELS, PTX, SaxpyCase, saxpy_case


@pytest.mark.parametrize(
    ("grid", "block"),
    [(1, 1024), (1, (1, 1024)), (1, (16, 1, 64)), (1, (32, 32)), ((1, 257), 3), ((1, 1, 129), 5)],
)
def test_the_largest_blocks_and_every_axis_run(grid: Any, block: Any, device: Gpu) -> None:
    kernel = device.kernel(KERNELS, "places")
    geometry = kernel.geometry(grid, block)
    blocks, threads = int(np.prod(geometry.grid)), int(np.prod(geometry.block))
    out = device.zeros(blocks * threads, "int32")
    kernel[grid, block](out)
    expected = np.arange(blocks)[:, None] * 1000 + np.arange(threads)
    assert np.array_equal(out.numpy(), expected.ravel())


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("what", ["grid", "block"])
def test_the_limit_of_each_axis_is_allowed_and_one_more_is_not(
    what: str, axis: int, setup: SaxpyCase
) -> None:
    most = getattr(setup.gpu.limits, what)[axis]
    for size, fits in ((most, True), (most + 1, False)):
        extents = [1, 1, 1]
        extents[axis] = size
        given: dict[str, Any] = {"grid": 1, "block": 1, what: tuple(extents)}
        if fits:
            assert getattr(setup.saxpy.geometry(**given), what) == tuple(extents)
        else:
            with pytest.raises(
                LaunchError, match=rf"saxpy: {what} \(.*{size}.*\) exceeds the limits of the device"
            ):
                setup.saxpy.geometry(**given)


def test_the_limit_of_shared_memory_counts_what_is_static(device: Gpu) -> None:
    source = """
        extern "C" __global__ void fixed(int* out) {
            __shared__ int room[256];
            room[threadIdx.x] = threadIdx.x;
            __syncthreads();
            out[threadIdx.x] = room[255 - threadIdx.x];
        }
    """
    kernel = device.kernel(source, "fixed")
    most = device.limits.shared_optin
    assert kernel.attributes.shared == 1024
    out = device.zeros(256, "int32")
    kernel.launch(out, grid=1, block=256, shared=most - 1024)
    assert np.array_equal(out.numpy(), np.arange(255, -1, -1))
    words = f"{most - 1023} bytes of dynamic and 1024 of static shared memory; a block can have {most}"
    with pytest.raises(LaunchError, match=f"fixed: {words}"):
        kernel.launch(out, grid=1, block=256, shared=most - 1023)


def test_launch_bounds_are_the_limit_of_that_kernel(device: Gpu) -> None:
    kernel = device.kernel(KERNELS, "narrow")
    assert kernel.attributes.threads == 64
    out = device.zeros(64, "int32")
    kernel[1, 64](out)
    assert np.array_equal(out.numpy(), np.arange(64))
    with pytest.raises(LaunchError, match="narrow: a block of 65 threads; the maximum of narrow is 64"):
        kernel[1, 65](out)


def test_a_geometry_holds_everything_that_was_said(setup: SaxpyCase) -> None:
    made = setup.saxpy.geometry((4, 2), [8, 4], 128, (2, 1), cooperative=True, programmatic=True)
    assert made == Geometry((4, 2, 1), (8, 4, 1), 128, (2, 1, 1), True, True)
    with pytest.raises(LaunchError, match="cluster 0 is not one to three positive integers"):
        setup.saxpy.geometry(4, 8, cluster=0)


def test_attributes_and_occupancy_are_plausible(setup: SaxpyCase) -> None:
    used = setup.saxpy.attributes
    assert 0 < used.registers < 256
    assert (used.shared, used.local, used.threads) == (0, 0, 1024)
    assert setup.gpu.kernel(KERNELS, "weigh").attributes.constant >= 16
    arch = setup.gpu.arch
    assert used.binary_version == used.ptx_version == 10 * arch.major + arch.minor
    assert used.dynamic_shared == setup.gpu.limits.shared_optin
    setup.saxpy.geometry(1, 1, shared=used.dynamic_shared)  # which a launch can have
    full = setup.saxpy.occupancy(256)
    assert full.fraction == 1.0
    assert full.blocks * 256 == 2048
    assert setup.saxpy.occupancy((16, 16)) == full
    for shared, blocks in ((40 << 10, 5), (100 << 10, 2)):
        crowded = setup.saxpy.occupancy(256, shared)
        assert (crowded.blocks, crowded.fraction) == (blocks, blocks / 8)
    with pytest.raises(LaunchError, match="block 0"):
        setup.saxpy.occupancy(0)


def test_older_ptx_says_for_what_it_was_made(open_device: Callable[..., Gpu]) -> None:
    used = open_device("emulator").kernel(PTX, "keep").attributes
    assert (used.binary_version, used.ptx_version) == (90, 80)


def test_a_carveout_is_kept_and_refused_outside_its_range(setup: SaxpyCase) -> None:
    kernel = setup.saxpy
    assert kernel.carveout is None
    for percent in (0, 50, 100):
        kernel.carveout = percent
        assert kernel.carveout == percent
        setup.launch()
    for wrong in (-1, 101, 50.0, "50", True):
        with pytest.raises(LaunchError, match=f"saxpy: carveout {wrong!r} is not a percentage"):
            kernel.carveout = wrong  # type: ignore[assignment]
    assert kernel.carveout == 100
    kernel.carveout = None
    assert kernel.carveout is None
    setup.check(3)


SHARED: dict[str, Callable[[int], int]] = {
    "none": lambda _: 0,
    "fixed": lambda _: 10_000,
    "large": lambda _: 60_000,
    "by thread": lambda block: 100 * block,
    "too much for large blocks": lambda block: 1000 * block,
}


@pytest.mark.parametrize("limit", [None, 1024, 500, 96, 7])
@pytest.mark.parametrize("shared", SHARED)
def test_the_best_block_has_the_most_threads_on_a_processor(
    shared: str, limit: int | None, setup: SaxpyCase
) -> None:
    kernel = setup.saxpy
    room = SHARED[shared]
    best = kernel.max_potential_block_size(room, limit=limit)
    sizes = {*range(32, (limit or 1024) + 1, 32), limit or 1024}
    fitting = [size for size in sizes if room(size) <= kernel.attributes.dynamic_shared]
    blocks = {size: kernel.occupancy(size, room(size)).blocks for size in fitting}
    assert best.block == max(fitting, key=lambda size: (blocks[size] * size, size))
    assert best.grid == blocks[best.block] * setup.gpu.limits.processors
    if shared == "fixed":
        assert kernel.max_potential_block_size(10_000, limit=limit) == best
    if limit is None and shared == "none":
        kernel[best](2.0, setup.x, setup.y, setup.n)
        setup.check(1)


def test_a_best_block_keeps_to_what_the_kernel_allows(setup: SaxpyCase) -> None:
    narrow = setup.gpu.kernel(KERNELS, "narrow")
    assert narrow.max_potential_block_size().block == 64
    with pytest.raises(LaunchError, match="a block of 65 threads; the maximum of narrow is 64"):
        narrow.max_potential_block_size(limit=65)
    with pytest.raises(
        LaunchError, match="no block of up to 64 threads can run with this dynamic shared"
    ):
        narrow.max_potential_block_size(300_000)
    with pytest.raises(LaunchError, match=r"shared 1\.5 is not a number of bytes"):
        narrow.max_potential_block_size(lambda _: 1.5)  # type: ignore[arg-type,return-value]


@pytest.mark.gpu
def test_the_driver_chooses_the_same_block(open_device: Callable[..., Gpu]) -> None:
    from preheat.devices.cuda.driver import call

    gpu = open_device("cuda")
    for name, shared, limit in (
        ("saxpy", 0, 0), ("saxpy", 4096, 0), ("saxpy", 0, 500), ("saxpy", 40_000, 0), ("narrow", 0, 0),
        ("reverse", 20_000, 0),
    ):  # fmt: skip
        kernel = gpu.kernel(KERNELS, name)
        function: Any = kernel._function
        with function.device.current():
            chosen = call("cuOccupancyMaxPotentialBlockSize", function._function, None, shared, limit)
        best = kernel.max_potential_block_size(shared, limit=limit or None)
        assert tuple(best) == tuple(map(int, chosen))


def test_programmatic_launches_wait_where_the_kernel_says_so(device: Gpu) -> None:
    source = """
        extern "C" __global__ void chain(long long* y, int n) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) y[i] = y[i] * 3 + 1;
        }
    """
    kernel = device.kernel(source, "chain")
    data = np.arange(1009, dtype=np.int64)
    y = device.array(data)
    for _ in range(20):
        kernel.launch(y, 1009, grid=8, block=128, programmatic=True)
        data = data * 3 + 1
    assert np.array_equal(y.numpy(), data)


def test_arguments_go_by_position_cold_and_warm(device: Gpu) -> None:
    made = saxpy_case(device)
    launcher = made.saxpy[5, 64]
    said = set()
    for _ in range(5):
        for launch in (
            made.saxpy[5, 64],
            launcher,  # which becomes quick by another way
            partial(made.saxpy.launch, grid=5, block=64),
            partial(made.saxpy.bind, grid=5, block=64),
        ):
            with pytest.raises(LaunchError) as caught:
                launch(2.0, made.x, made.y, a3=made.n, stream_=None)
            said.add((str(caught.value), caught.value.hint))
        made.launch()
    assert said == {
        (
            "saxpy: a3= and stream_= cannot be given by name; arguments are given in order, "
            "and the kernel takes 4 (float, float const*, float*, int)",
            "settings of a launch go by name to kernel.launch(…, grid=, block=, shared=, stream=, "
            "cluster=, cooperative=, programmatic=)",
        )
    }
    made.check(5)


def test_a_struct_of_another_library_is_taken_by_its_own_size(device: Gpu) -> None:
    class CUuuid:
        def getPtr(self) -> int:  # noqa: N802
            return 8

    made = saxpy_case(device)
    with pytest.raises(
        LaunchError, match="unpack, argument 0: Pair is passed by value: it takes 16 bytes"
    ):
        device.kernel(KERNELS, "unpack")[1, 1](CUuuid(), made.y)
