"""Scalars of graphs: set by name, in order with the replay, also for many queued replays."""
# ruff: noqa: PT012  (a capture that fails has a body of several statements)

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from preheat.errors import CaptureError, DriverError, InputError
from preheat.gpu import Gpu
from preheat.graph.graph import State
from tests.driver_errors import not_supported
from tests.faulty import FaultyGpu
from tests.graph.support import KERNELS, nothing_left_open, scalar_log
from tests.threads import run_in_thread

SLOW = 200_000_000  # cycles: a tenth of a second, long after 100 replays were queued


def test_a_replay_sets_scalars_by_name(device: Gpu) -> None:
    made = scalar_log(device)
    graph = made.captured()
    assert graph.scalars == {"step": made.step}
    for value in (7, -3, 2**31 - 1):
        graph.replay(step=value)
        assert made.step.get() == value
    assert made.seen() == [7, -3, 2**31 - 1]


def test_a_scalar_that_is_not_set_keeps_its_value(device: Gpu) -> None:
    made = scalar_log(device)
    graph = made.captured()
    graph.replay()
    graph.replay(step=5)
    graph.replay()
    made.step.set(6)
    graph.replay()
    assert made.seen() == [-1, 5, 5, 6]


def test_replays_queued_behind_a_slow_kernel_each_see_their_own_value(device: Gpu) -> None:
    made = scalar_log(device)
    graph = made.captured()
    spin = device.kernel(KERNELS, "spin")
    spin[1, 1](SLOW if device.name.startswith("cuda") else 1)
    for i in range(100):
        graph.replay(step=3 * i + 1)
    assert made.seen() == [3 * i + 1 for i in range(100)]
    assert graph.num_replays == 100


@pytest.mark.gpu
def test_the_replays_behind_a_slow_kernel_are_really_queued(open_device: Any) -> None:
    gpu = open_device("cuda")
    made = scalar_log(gpu)
    graph = made.captured()
    graph.replay(step=0, synchronize=True)
    gpu.kernel(KERNELS, "spin")[1, 1](SLOW)
    for i in range(1, 101):
        graph.replay(step=i)
    assert not gpu.record().done()
    assert made.seen() == list(range(101))


def test_several_scalars_behind_a_slow_kernel_each_see_their_own_values(device: Gpu) -> None:
    a, b = (device.scalar("int32", name=name) for name in "ab")
    out, count = device.zeros(200, "int32"), device.zeros(1, "int32")
    pair = device.kernel(KERNELS, "pair")
    with device.capture() as graph:
        pair[1, 1](a, b, out, count)
    device.kernel(KERNELS, "spin")[1, 1](SLOW if device.name.startswith("cuda") else 1)
    for i in range(100):
        if i % 2:
            graph.replay(a=i, b=-i)
        else:
            graph.replay(b=-i, a=i)
    expected = [value for i in range(100) for value in (i, -i)]
    np.testing.assert_array_equal(out.numpy(), expected)


def test_several_scalars_are_set_in_one_operation(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    scalars = [gpu.scalar("int32", name=name) for name in ("a", "b")]
    out, count = gpu.zeros(20, "int32"), gpu.zeros(1, "int32")
    pair = gpu.kernel(KERNELS, "pair")
    with gpu.capture() as graph:
        pair[1, 1](*scalars, out, count)
    with faulty.count_calls("set", "fill", "copy_in", "copy", "launch", "replay") as calls:
        graph.replay(a=1, b=2)
        graph.replay(b=4, a=3)
        graph.replay(b=6)
    assert calls == {"set": 3, "replay": 3}
    np.testing.assert_array_equal(out.numpy()[:6], [1, 2, 3, 4, 3, 6])
    with faulty.count_calls("setter") as calls:  # made ready once for each choice of names
        graph.replay(a=7, b=8)
        graph.replay(b=9)
    assert calls == {}


def test_scalars_are_set_in_the_stream_of_the_replay(device: Gpu) -> None:
    made = scalar_log(device)
    stream = device.stream()
    graph, own = made.captured(), made.captured(stream=stream)
    for i in range(20):
        graph.replay(stream=stream, step=i)
        own.replay(step=100 + i)
    assert made.seen() == [value for i in range(20) for value in (i, 100 + i)]


def test_graphs_share_a_scalar(device: Gpu) -> None:
    made = scalar_log(device)
    first, second = made.captured(), made.captured()
    first.replay(step=1)
    second.replay()
    second.replay(step=2)
    first.replay()
    run_in_thread(lambda: first.replay(step=3))
    assert made.seen() == [1, 1, 2, 2, 3]


VALUES: dict[str, list[Any]] = {
    "int8": [-128, 127, 5],
    "uint8": [255, 1],
    "int16": [-(2**15), 77],
    "uint16": [2**16 - 1, 3],
    "int32": [-(2**31), 2**31 - 1],
    "uint32": [2**32 - 1, 9],
    "int64": [-(2**63), 2**63 - 1],
    "uint64": [2**64 - 1, 11],
    "float16": [1.5, -65504.0, np.float16(0.1)],
    "float32": [3.25, -1e-38, np.float32(0.1), float("inf")],
    "float64": [0.1, -1e300, 2],
    "bool": [True, False, True],
    "complex64": [1.5 - 2j, 3],
    "complex128": [0.1 + 0.2j, -7],
    "bfloat16": [1.5, -0.0078125],
    "float8_e4m3fn": [np.uint8(0x3C)],
    "float8_e5m2": [np.uint8(0x41)],
}


def bits(value: Any, dtype: str) -> bytes:
    """Return the bytes of a value in device memory."""
    if dtype == "bfloat16":
        return struct.pack("<f", value)[2:]  # of values that have no more digits
    return np.array(value).astype(dtype if not dtype.startswith("float8") else "uint8").tobytes()


@pytest.mark.parametrize("dtype", VALUES)
def test_scalars_of_every_type_are_set(dtype: str, device: Gpu) -> None:
    value = device.scalar(dtype, name="value")
    size = value.nbytes
    values = VALUES[dtype]
    out, count = device.zeros(16 * size, "uint8"), device.zeros(1, "int32")
    keep = device.kernel(KERNELS, "keep")
    with device.capture() as graph:
        keep[1, 1](value, size, out, count)
    for each in values:
        graph.replay(value=each)
    expected = b"".join(bits(each, dtype) for each in values)
    assert out.numpy().tobytes()[: len(expected)] == expected


@pytest.mark.parametrize(("first", "second"), [("int8", "complex128"), ("float64", "bfloat16")])
def test_scalars_of_several_sizes_are_set_together(first: str, second: str, device: Gpu) -> None:
    rows = [(name, device.scalar(name, name=name)) for name in (first, second)]
    outs = [device.zeros(32, "uint8") for _ in rows]
    counts = [device.zeros(1, "int32") for _ in rows]
    keep = device.kernel(KERNELS, "keep")
    with device.capture() as graph:
        for (_, scalar), out, count in zip(rows, outs, counts, strict=True):
            keep[1, 1](scalar, scalar.nbytes, out, count)
    given = {name: VALUES[name][0] for name in (first, second)}
    graph.replay(**given)
    for (name, scalar), out in zip(rows, outs, strict=True):
        assert out.numpy().tobytes()[: scalar.nbytes] == bits(given[name], name)


WRONG: dict[str, list[Any]] = {
    "int8": [128, -129, 1.5, "1", None, [1]],
    "uint32": [-1, 2**32, 1j],
    "float16": [1e6, "x"],
    "float32": [1e39, 1j],
    "int64": [2**63, 1e3],
    "bfloat16": [1e39, "1"],
    "complex128": ["1j", [1j, 2j]],
}


@pytest.mark.parametrize("dtype", WRONG)
def test_a_value_that_does_not_fit_is_refused_before_anything_happens(
    dtype: str, faulty: FaultyGpu
) -> None:
    gpu = faulty.gpu
    value, other = gpu.scalar(dtype, 1, name="value"), gpu.scalar("int32", 4, name="other")
    out, count = gpu.zeros(64, "uint8"), gpu.zeros(1, "int32")
    keep = gpu.kernel(KERNELS, "keep")
    with gpu.capture() as graph:
        keep[1, 1](value, value.nbytes, out, count)
        keep[1, 1](other, other.nbytes, out, count)
    before = value.get()
    for wrong in WRONG[dtype]:
        with faulty.count_calls() as calls, pytest.raises(InputError):
            graph.replay(other=5, value=wrong)
        assert calls == {}
    assert graph.num_replays == 0
    assert (value.get(), other.get()) == (before, 4)


def test_an_unknown_name_is_refused_with_the_nearest(faulty: FaultyGpu) -> None:
    made = scalar_log(faulty.gpu)
    graph = made.captured(name="decode")
    for given in ({"stop": 1}, {"step": 2, "stop": 1}):
        with faulty.count_calls() as calls, pytest.raises(InputError) as caught:
            graph.replay(**given)  # type: ignore[arg-type]
        assert calls == {}
        assert str(caught.value) == "graph 'decode' uses no scalar called 'stop'; it uses: step"
        assert caught.value.hint == "did you mean 'step'?"
    assert (graph.num_replays, made.seen(), made.step.get()) == (0, [], -1)


def test_a_graph_without_scalars_says_how_to_get_one(device: Gpu) -> None:
    made = scalar_log(device)
    nameless = device.scalar("int32", 3)
    with device.capture() as graph:
        made.note[1, 1](nameless, made.out, made.count)
    with pytest.raises(InputError, match="no scalar called 'token'; it uses: none") as caught:
        graph.replay(token=3)
    assert "gpu.scalar(…, name='token')" in str(caught.value.hint)
    graph.replay()
    assert made.seen() == [3]


def test_two_scalars_of_one_name_are_refused_at_the_end(faulty: FaultyGpu) -> None:
    made, other = scalar_log(faulty.gpu), scalar_log(faulty.gpu)
    with nothing_left_open(faulty):
        graph = faulty.gpu.capture().begin()
        for each in (made, other, made):
            each.note[1, 1](each.step, each.out, each.count)
        with pytest.raises(CaptureError, match="two scalars of this graph are called 'step'") as caught:
            graph.end()
        assert caught.value.hint
        assert (graph.state, graph.status) == (State.FAILED, "none")
        again = made.captured()
        again.replay(step=8)
        assert made.seen() == [8]
        again.close()


def test_nameless_scalars_may_be_many(device: Gpu) -> None:
    made = scalar_log(device)
    scalars = [device.scalar("int32", value) for value in (5, 6)]
    with device.capture() as graph:
        for scalar in (*scalars, made.step):
            made.note[1, 1](scalar, made.out, made.count)
    graph.replay(step=7)
    assert made.seen() == [5, 6, 7]


@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_setting_a_scalar_inside_a_capture_is_an_error(mode: str, device: Gpu) -> None:
    made = scalar_log(device)
    words = "setting a scalar inside a capture"
    with pytest.raises(CaptureError, match=words) as caught, device.capture(mode=mode):
        made.note[1, 1](made.step, made.out, made.count)
        made.step.set(3)
    assert caught.value.hint == "graph.replay(name=value) sets it for each replay"
    assert made.step.get() == -1


@pytest.mark.parametrize("dtype", VALUES)
def test_a_scalar_of_every_type_is_set_in_one_operation_in_a_stream(
    dtype: str, faulty: FaultyGpu
) -> None:
    scalar = faulty.gpu.scalar(dtype)
    side = faulty.gpu.stream()
    for value in VALUES[dtype]:
        for stream in (side, None):
            scalar.set(0)
            with faulty.count_calls("set", "fill", "copy_in", "copy", "launch") as calls:
                scalar.set(value, stream=stream)
            assert calls == {"set": 1}
            assert scalar.numpy().tobytes() == bits(value, dtype)


def test_setting_a_scalar_in_a_stream_inside_a_capture_is_an_error(device: Gpu) -> None:
    made = scalar_log(device)
    side = device.stream()
    graph = device.capture(stream=side).begin()
    made.note[1, 1](made.step, made.out, made.count)
    for stream in (side, graph.stream, device.stream()):
        with pytest.raises(CaptureError, match="setting a scalar inside a capture"):
            made.step.set(3, stream=stream)
    captured = graph.stream
    with pytest.raises(CaptureError, match="setting a scalar while another thread captures"):
        run_in_thread(lambda: made.step.set(3, stream=captured))
    run_in_thread(lambda: made.step.set(5, stream=side))  # which is not the captured one
    with pytest.raises(CaptureError, match="the capture failed: setting a scalar"):
        graph.end()
    assert made.step.get() == 5


def test_a_value_that_is_no_stream_for_a_scalar_is_refused(open_device: Any) -> None:
    gpu, other = open_device("emulator:0"), open_device("emulator:1")
    scalar = gpu.scalar("int32", 4)
    with pytest.raises(InputError, match="'main' is not a stream"):
        scalar.set(5, stream="main")
    with pytest.raises(InputError, match="does not belong to emulator:0"):
        scalar.set(5, stream=other.stream())
    with pytest.raises(InputError, match="does not fit int32"):
        scalar.set(2**31, stream=gpu.stream())
    assert scalar.get() == 4


@pytest.mark.hardware("it needs a kernel that runs for long beside the host")
@pytest.mark.gpu
def test_a_scalar_set_in_a_busy_stream_waits_there_and_readers_wait_for_it(open_device: Any) -> None:
    gpu = open_device("cuda")
    made = scalar_log(gpu)
    side = gpu.stream()
    graph = made.captured()
    graph.replay(synchronize=True)
    for step in (7, 8):
        gpu.kernel(KERNELS, "spin").launch(SLOW, grid=1, block=1, stream=side)
        made.step.set(step, stream=side)
        assert not side.done()
        graph.replay()
    assert made.seen() == [-1, 7, 8]


@pytest.mark.parametrize("name", ["stream", "synchronize"])
def test_a_name_that_replay_takes_itself_is_refused(name: str, device: Gpu) -> None:
    with pytest.raises((CaptureError, InputError), match=name):
        scalar_log(device, name=name).captured()


def test_a_set_that_fails_is_no_replay(faulty: FaultyGpu) -> None:
    made = scalar_log(faulty.gpu)
    graph = made.captured()
    graph.replay(step=1)
    error = not_supported("cuMemsetD32Async")
    faulty.device.fail("set", error)
    with faulty.count_calls("replay") as calls, pytest.raises(DriverError, match="NOT_SUPPORTED"):
        graph.replay(step=2)
    assert calls == {}
    graph.replay(step=3)
    assert made.seen() == [1, 3]
    assert graph.num_replays == 2
