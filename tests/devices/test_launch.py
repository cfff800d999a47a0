"""Launches: correct results on the fast and the slow path, from any number of threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from preheat.devices.operands import Pointer
from preheat.errors import EmulatorFault, LaunchError, StaleBufferError
from preheat.gpu import Gpu
from tests.devices.support import KERNELS, PTX, SIZES, SaxpyCase, saxpy_case
from tests.faulty import FaultyGpu


@pytest.mark.parametrize("n", SIZES)
def test_every_launch_of_many_is_right(n: int, device: Gpu) -> None:
    made = saxpy_case(device, n)
    for times in range(1, 8):
        made.saxpy[-(-n // 64), 64](2.0, made.x, made.y, n)
        made.check(times)


def test_geometry_may_be_written_in_any_form(device: Gpu) -> None:
    kernel = device.kernel(KERNELS, "places")
    forms: list[tuple[Any, Any]] = [
        (6, 8), ((6,), (8,)), ([6], [8]), (np.int64(6), np.int32(8)), ((3, 2), (4, 2)),
        ((1, 2, 3), (2, 2, 2)), ((6, 1, 1), [8, 1]),
    ]  # fmt: skip
    expected = [block * 1000 + thread for block in range(6) for thread in range(8)]
    for grid, block in forms:
        for _ in range(4):
            out = device.zeros(48, "int32")
            kernel[grid, block](out)
            assert out.numpy().tolist() == expected, (grid, block)
        kernel.launch(out.fill(0), grid=grid, block=block)
        assert out.numpy().tolist() == expected


def test_a_kernel_without_parameters_runs(device: Gpu) -> None:
    module = device.module(KERNELS)
    for _ in range(5):
        module["count"][1, 1]()
    assert module.symbol("counter", "int32").numpy().tolist() == [46]


def test_the_same_launch_by_every_road(device: Gpu) -> None:
    made = saxpy_case(device)
    kernel = made.saxpy
    args = (2.0, made.x, made.y, made.n)
    kept = kernel[5, 64]
    bound = kernel.bind(*args, grid=5, block=64)
    roads: list[Callable[[], None]] = [
        lambda: kernel[5, 64](*args),
        lambda: kernel.launch(*args, grid=5, block=64),
        lambda: kernel.launch(*args, grid=5, block=64, stream=device.stream()),
        lambda: kept(*args),
        bound,
    ]
    times = 0
    for _ in range(4):
        for road in roads:
            road()
            times += 1
            made.check(times)


def test_arguments_may_change_with_every_launch(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    data = np.arange(97, dtype=np.int32)
    arrays = [device.array(data * k) for k in (1, 5, 7)]
    for step in range(12):
        out = device.empty(97, "uint32" if step % 2 else "int32")
        add[2, 64](arrays[step % 3][step:], step - 6, out, 97 - step)
        expected = data[step:] * (1, 5, 7)[step % 3] + step - 6
        assert np.array_equal(out.numpy()[: 97 - step].view(np.int32), expected)


def test_a_view_is_launched_on_at_its_own_address(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    table = device.array(np.arange(60, dtype=np.int32).reshape(6, 10))
    for _ in range(4):
        out = device.zeros((3, 10), "int32")
        add[1, 32](table[4], 100, out[1], 10)
        assert out.numpy().tolist() == [[0] * 10, list(range(140, 150)), [0] * 10]


def test_a_scalar_is_a_pointer_to_its_newest_value(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    step = device.scalar("int32")
    out = device.zeros(1, "int32")
    for value in (3, -4, 2**30, 0, 9):
        step.set(value)
        add[1, 1](step, 1, out, 1)
        assert out.numpy()[0] == value + 1


# Threads


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` … at once, each in a thread; the first error of any comes out."""
    start = threading.Barrier(count)
    errors = list[BaseException]()

    def one(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def interrupted(at: int, code: str, do: Callable[[], object]) -> bool:
    """Do it, with an interrupt at instruction `at` of functions called `code`; False if it ended."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_name != code:
            return None
        # Python 3.13 counts instructions only once a frame has its trace function: at its first line.
        frame.f_trace_opcodes = True
        frame.f_trace_lines = event == "call"
        count += event == "opcode"
        if count == at and event == "opcode":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # Python 3.12 reports instructions only if a frame has asked for them before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.usefixtures("without_native_core")
@pytest.mark.parametrize("function", ["run", "convert", "_pack", "_submit_packed"])
def test_a_launch_works_after_any_interrupt(open_device: Callable[..., Gpu], function: str) -> None:
    kernel = (gpu := open_device("emulator")).kernel(PTX, "keep")
    out = gpu.zeros(4)
    at = 0

    def launch() -> None:
        kernel[1, 1](out, at, 2, 3.0)

    launch()
    while interrupted(at := at + 1, function, launch):
        out.fill(0)
        launch()
        assert out.numpy().view(np.int32)[2] == at, f"not after an interrupt at instruction {at}"
    assert at > 5


@pytest.mark.parametrize("quick", [False, True])
def test_threads_launch_the_same_kernel_with_their_own_scalars(quick: bool, device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    x = device.array(np.arange(33, dtype=np.int32))
    outs = [device.zeros((25, 33), "int32") for _ in range(8)]
    if quick:
        for _ in range(3):
            add[1, 64](x, 0, outs[0][0], 33)

    def work(number: int) -> None:
        for turn in range(25):
            add[1, 64](x, number * 1000 + turn, outs[number][turn], 33)

    in_threads(8, work)
    for number, out in enumerate(outs):
        expected = np.arange(33) + number * 1000 + np.arange(25)[:, None]
        assert np.array_equal(out.numpy(), expected)


def test_threads_call_one_bound_launch_at_once(device: Gpu) -> None:
    out = device.zeros(1, "int32")
    module = device.module(KERNELS)
    bound = module["add"].bind(device.array([4], "int32"), 5, out, 1, grid=1, block=1)

    def work(_: int) -> None:
        for _ in range(20):
            bound()

    in_threads(8, work)
    assert out.numpy()[0] == 9


def test_threads_allocate_launch_and_drop_at_once(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        for _ in range(15):
            data = random.integers(0, 1000, 61, np.int32)
            out = device.empty(61, "int32")
            add[1, 64](device.array(data), number, out, 61)
            assert np.array_equal(out.numpy(), data + number)

    in_threads(8, work)


# Bound launches


def test_a_bound_launch_says_what_it_is_and_holds_its_arguments(device: Gpu) -> None:
    made = saxpy_case(device)
    x = device.array(made.xs)
    bound = made.saxpy.bind(2.0, x, made.y, made.n, grid=5, block=(64, 1))
    assert repr(bound) == "<Bound saxpy grid=(5, 1, 1) block=(64, 1, 1)>"
    alive = weakref.ref(x.buffer)
    del x
    gc.collect()
    others = [device.array(np.full(made.n, 9.0, np.float32)) for _ in range(4)]
    bound()
    bound()
    made.check(2)
    assert alive() is not None
    del bound, others
    gc.collect()
    assert alive() is None


def test_a_bound_launch_refuses_memory_that_was_closed(device: Gpu) -> None:
    made = saxpy_case(device)
    bound = made.saxpy.bind(2.0, made.x, made.y, made.n, grid=5, block=64)
    bound()
    made.x.close()
    for _ in range(2):
        with pytest.raises(StaleBufferError, match=r"saxpy, argument 1: .*its memory was freed"):
            bound()
    made.check(1)
    with pytest.raises(StaleBufferError, match="saxpy, argument 1"):
        made.saxpy.bind(2.0, made.x, made.y, made.n, grid=5, block=64)


def test_binding_checks_what_a_launch_checks(device: Gpu) -> None:
    made = saxpy_case(device)
    with pytest.raises(LaunchError, match="saxpy: 2 arguments given"):
        made.saxpy.bind(2.0, made.x, grid=1, block=1)
    with pytest.raises(LaunchError, match=r"saxpy, argument 3: int cannot take 1\.5"):
        made.saxpy.bind(2.0, made.x, made.y, 1.5, grid=1, block=1)
    with pytest.raises(LaunchError, match="a block of 2048 threads"):
        made.saxpy.bind(2.0, made.x, made.y, 1, grid=1, block=(64, 32))


def test_a_bound_launch_in_a_second_stream_is_right_every_time(device: Gpu) -> None:
    made = saxpy_case(device)
    with device.stream() as stream:
        bound = made.saxpy.bind(2.0, made.x, made.y, made.n, grid=5, block=64, stream=stream)
        for times in range(1, 5):
            bound()
            made.check(times)


# Memory of the host, which the emulator shares


@pytest.fixture
def hosted(permissive: Gpu) -> SaxpyCase:
    """Return a kernel on an emulator that uses memory of the host."""
    return saxpy_case(permissive)


def test_numpy_arrays_are_used_in_place_on_an_emulator_that_permits_it(hosted: SaxpyCase) -> None:
    ys = hosted.ys.copy()
    for times in range(1, 6):
        hosted.saxpy[5, 64](2.0, hosted.xs, ys, hosted.n)
        np.testing.assert_allclose(ys, hosted.ys + 2.0 * times * hosted.xs, rtol=1e-5, atol=1e-5)


def test_own_arrays_and_numpy_arrays_may_take_turns(hosted: SaxpyCase) -> None:
    host = hosted.ys.copy()
    times = 0
    for turn in range(12):
        x = hosted.x if turn % 2 else hosted.xs
        hosted.saxpy[5, 64](2.0, x, hosted.y if turn % 3 else host, hosted.n)
        times += bool(turn % 3)
    hosted.check(times)
    np.testing.assert_allclose(host, hosted.ys + 8.0 * hosted.xs, rtol=1e-5, atol=1e-5)


def test_one_array_may_be_several_operands_and_empty_ones_pass(hosted: SaxpyCase) -> None:
    host = hosted.ys.copy()
    nothing = np.zeros(0, np.float32)
    fixed = host.view()
    fixed.flags.writeable = False
    hosted.saxpy[5, 64](2.0, host, host, hosted.n)
    hosted.saxpy[5, 64](2.0, fixed, host, hosted.n)
    np.testing.assert_allclose(host, 9.0 * hosted.ys, rtol=1e-5)
    hosted.saxpy[5, 64](2.0, nothing, nothing, 0)
    hosted.saxpy[5, 64](2.0, hosted.gpu.zeros(0), hosted.gpu.zeros(0), 0)


def test_a_numpy_array_of_the_wrong_type_is_refused(hosted: SaxpyCase) -> None:
    for wrong, words in (
        (hosted.xs.astype(np.float64), r"float const\* cannot take an ndarray of float64"),
        (hosted.xs.astype(">f4"), "big-endian"),
        (hosted.xs[::-1], "not contiguous"),
    ):
        with pytest.raises(LaunchError, match=f"saxpy, argument 1: .*{words}"):
            hosted.saxpy[5, 64](2.0, wrong, hosted.y, hosted.n)


def test_subclasses_of_numpy_arrays_pass_too(hosted: SaxpyCase, tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(hosted.n,))
    mapped[:] = hosted.xs
    hosted.saxpy[5, 64](2.0, mapped, hosted.y, hosted.n)
    hosted.check(1)


@pytest.mark.parametrize("warm", [0, 4])
def test_read_only_arrays_can_be_read_and_not_written(warm: int, hosted: SaxpyCase) -> None:
    hosted.launch(warm)
    fixed = hosted.xs.copy()
    fixed.flags.writeable = False
    hosted.saxpy[5, 64](2.0, fixed, hosted.y, hosted.n)
    hosted.check(warm + 1)
    with pytest.raises(LaunchError, match=r"argument 2: ndarray is read-only, and float\* may be"):
        hosted.saxpy[5, 64](2.0, hosted.xs, fixed, hosted.n)
    assert np.array_equal(fixed, hosted.xs)


def test_host_memory_is_out_of_reach_after_its_launch(hosted: SaxpyCase) -> None:
    host = hosted.ys.copy()
    hosted.saxpy[5, 64](2.0, hosted.x, host, hosted.n)
    with pytest.raises(EmulatorFault, match="saxpy"):
        hosted.saxpy[5, 64](2.0, hosted.x, Pointer(host.ctypes.data), hosted.n)


# What a launch costs the device


def test_a_warm_launch_asks_the_device_for_nothing_else(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    made.launch(3)
    with faulty.count_calls() as calls:
        made.launch(10)
    assert calls == {"launch": 10}
    bound = made.saxpy.bind(2.0, made.x, made.y, made.n, grid=5, block=64)
    with faulty.count_calls() as calls:
        bound()
        bound()
    assert calls == {"launch": 2}
    made.check(15)


def test_a_refused_launch_asks_the_device_for_nothing(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    for warm in (0, 4):
        made.launch(warm)
        with faulty.count_calls() as calls, pytest.raises(LaunchError):
            made.saxpy[5, 64](2.0, made.x, made.y)
        assert calls == {}


def test_a_blocking_device_waits_after_every_launch(
    kind: str, open_faulty: Callable[..., FaultyGpu]
) -> None:
    faulty = open_faulty(kind, blocking=True)
    made = saxpy_case(faulty.gpu)
    with faulty.count_calls("launch", "stream.synchronize") as calls:
        made.launch(5)
    assert calls == {"launch": 5, "stream.synchronize": 5}
    made.check(5)


def test_shared_memory_beyond_the_default_is_opted_in_to(device: Gpu) -> None:
    kernel = device.kernel(KERNELS, "reverse")
    for n in (100, 12 << 10, 12_289, 50_000):  # of four bytes each: below, at and above 48 KiB
        data = np.random.default_rng(n).integers(0, 1 << 30, n, np.int32)
        made = device.array(data)
        kernel.launch(made, n, grid=1, block=256, shared=4 * n)
        assert np.array_equal(made.numpy(), data[::-1])


def test_more_geometries_than_are_kept_ready_still_work(setup: SaxpyCase) -> None:
    for grid in range(1, 600):
        setup.saxpy[grid, 1](0.0, setup.x, setup.y, 0)
    setup.launch(2)
    setup.check(2)


def test_a_shuffle_from_a_lane_that_is_not_there_gives_zero(device: Gpu) -> None:
    """CUDA leaves it undefined; the emulator does as this GPU does."""
    source = """
    extern "C" __global__ void down(int* out, int end) {
        int i = threadIdx.x;
        if (i >= end) return;
        out[i] = __shfl_down_sync(~0u, i + 100, 4);
    }"""
    kernel = device.kernel(source, "down")
    for block, end in ((32, 32), (32, 24), (20, 32)):  # all lanes, some exited, some that never were
        out = device.zeros(32, "int32")
        alive = min(block, end)
        kernel[1, block](out, end)
        lanes = np.arange(alive)
        there = (lanes + 4 < alive) | (lanes + 4 >= 32)  # the value of the thread itself
        source_lane = np.where(lanes + 4 < 32, lanes + 4, lanes)
        assert out.numpy()[:alive].tolist() == np.where(there, source_lane + 100, 0).tolist()
