"""Replays: results equal those of eager work, and the graph keeps the memory that it uses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import preheat
from preheat.devices.host import host_bytes
from preheat.errors import (
    DriverError,
    EmulatorFault,
    GraphError,
    StaleGraphError,
)
from preheat.gpu import Gpu
from preheat.graph.graph import Graph, State
from tests.devices.support import SIZES
from tests.faulty import FaultyGpu
from tests.graph.support import KERNELS, AxpyCase, axpy_case, nothing_left_open
from tests.threads import run_in_thread

WAITS = ("synchronize", "stream.synchronize", "stream.done", "copy_out")


# What a replay does


class Mixer:
    """Some steps of arithmetic that rounds at every operation, eagerly or as graphs."""

    def __init__(self, gpu: Gpu, n: int) -> None:
        random = np.random.default_rng(n)
        data = [random.standard_normal(n).astype(np.float32) for _ in range(3)]
        self.gpu = gpu
        self.n = n
        self.mix = gpu.kernel(KERNELS, "mix")
        self.x, self.y, self.z = map(gpu.array, data)

    def first(self) -> None:
        """One body."""
        self._mix(1.1, False, self.x, self.y)
        self._mix(-0.7, True, self.y, self.z)

    def second(self) -> None:
        """Another, which uses what the first made."""
        self._mix(0.3, True, self.z, self.x)
        self.y.copy_from(self.x)

    def between(self, step: int) -> None:
        """Work that is always eager."""
        self._mix(0.01 * step, step % 2 == 1, self.y, self.z)
        if step % 7 == 3:
            self.x.fill(step / 3)

    def _mix(self, by: float, odd: bool, x: Any, y: Any) -> None:
        self.mix[-(-self.n // 64), 64](by, odd, x, y, self.n)

    def results(self) -> list[bytes]:
        """Return every bit of the three arrays."""
        return [array.numpy().tobytes() for array in (self.x, self.y, self.z)]


@pytest.mark.parametrize("n", SIZES)
def test_a_replay_does_what_the_body_does_eagerly(n: int, device: Gpu) -> None:
    eager, graphed = Mixer(device, n), Mixer(device, n)
    with device.capture() as graph:
        graphed.first()
        graphed.second()
    for _ in range(3):
        eager.first()
        eager.second()
        graph.replay()
    assert graphed.results() == eager.results()


@pytest.mark.parametrize("n", [33, 257])
def test_two_graphs_in_turn_with_eager_work_between_are_like_eager_work_to_the_bit(
    n: int, device: Gpu
) -> None:
    eager, graphed = Mixer(device, n), Mixer(device, n)
    with device.capture(name="first") as first:
        graphed.first()
    with device.capture(name="second") as second:
        graphed.second()
    for step in range(104):
        eager.first() if step % 2 else eager.second()
        (first if step % 2 else second).replay()
        for each in (eager, graphed):
            each.between(step)
        if step % 26 == 25:
            assert graphed.results() == eager.results()
            with device.capture() as dropped:  # which disturbs nothing
                graphed.first()
            del dropped
    assert (first.num_replays, second.num_replays) == (52, 52)
    assert graphed.results() == eager.results()


def test_a_replay_reads_what_is_in_its_arrays_now(device: Gpu) -> None:
    made = axpy_case(device)
    graph = made.captured(3)
    made.y.write(made.xs)
    graph.replay()
    np.testing.assert_array_equal(made.y.numpy(), 4 * made.xs)
    made.x.write(made.ys)
    graph.replay()
    np.testing.assert_array_equal(made.y.numpy(), 4 * made.xs + 3 * made.ys)


def test_a_graph_may_be_replayed_from_any_thread(device: Gpu) -> None:
    made = axpy_case(device)
    graph = made.captured(3)
    run_in_thread(graph.replay)
    graph.replay()
    run_in_thread(lambda: graph.replay(synchronize=True))
    made.check(9)


def test_a_graph_may_be_replayed_in_another_stream(device: Gpu) -> None:
    made = axpy_case(device)
    streams = [device.stream() for _ in range(2)]
    graph = made.captured(3)
    made.launch(100)  # which comes first
    graph.replay(stream=streams[0])
    streams[0].synchronize()
    graph.replay(stream=streams[1], synchronize=True)
    graph.replay(stream=streams[0], synchronize=True)
    made.check(109)
    graph.replay()
    made.check(112)


def test_arrays_may_be_allocated_in_other_streams(device: Gpu) -> None:
    first = device.stream()
    second = device.stream()
    axpy = device.kernel(KERNELS, "axpy")
    xs = np.arange(1, 34, dtype=np.int32)
    x, y = device.array(xs, stream=first), device.array(7 * xs, stream=second)
    for given in (None, first, second):
        with device.capture(stream=given) as graph:
            axpy[1, 64](2, x, y, 33)
        for _ in range(3):
            graph.replay()
    np.testing.assert_array_equal(y.numpy(), 25 * xs)
    x.write(10 * xs)  # The replay uses the newest content, written in any stream.
    graph.replay()
    np.testing.assert_array_equal(y.numpy(), 45 * xs)


def test_numpy_operands_are_kept_and_lent_to_every_replay(permissive: Gpu) -> None:
    axpy = permissive.kernel(KERNELS, "axpy")
    xs = np.arange(1, 34, dtype=np.int32)
    x = xs.copy()
    y = np.full(33, 5, np.int32)
    kept = weakref.ref(x)
    with permissive.capture() as graph:
        axpy[1, 64](2, x, y, 33)
    assert (y == 5).all()
    del x
    gc.collect()
    assert kept() is not None
    for turn in range(1, 4):
        graph.replay()
        np.testing.assert_array_equal(y, 5 + 2 * turn * xs)
    graph.close()
    gc.collect()
    assert kept() is None
    with pytest.raises(EmulatorFault):  # and lent no longer than that
        axpy[1, 64](2, preheat.Pointer(y.ctypes.data), permissive.array(xs), 33)


# What cannot be replayed


def test_only_a_completed_capture_is_replayed(device: Gpu) -> None:
    made = axpy_case(device)

    def refused(graph: Graph, words: str) -> None:
        for door in (graph.replay, graph.upload, graph.instantiate):
            if graph.state is State.CAPTURING and door is not graph.instantiate:
                continue  # refused as something no capture holds, see test_capture
            with pytest.raises(GraphError, match=words) as caught:
                door()
            assert caught.type is GraphError
        assert graph.num_replays == 0

    new = device.capture()
    refused(new, "cannot be replayed: nothing was captured yet")
    with device.capture(name="busy") as busy:
        made.launch()
        refused(busy, "graph 'busy' cannot be replayed: it is still being captured")
    busy.close()
    refused(busy, "cannot be replayed: it was closed")
    failed = device.capture()
    with pytest.raises(ZeroDivisionError), failed:
        _ = 1 // 0
    refused(failed, "cannot be replayed: its capture failed")
    made.check(0)


def test_a_graph_may_be_closed_twice_and_releases_what_it_held(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    with nothing_left_open(faulty), faulty.count_calls("free", "allocate") as calls:
        own = faulty.gpu.array(made.xs)
        with faulty.gpu.capture(name="step") as graph:
            made.axpy[5, 64](3, own, made.y, made.n)
        graph.replay()
        del own
        graph.close()
        graph.close()
        gc.collect()
        faulty.gpu.synchronize()
    assert calls == {"allocate": 1, "free": 1}
    assert (graph.state, graph.num_replays) == (State.CLOSED, 1)
    assert repr(graph).startswith("<Graph 'step': closed")
    made.check(3)


def test_a_graph_is_dropped_while_its_replay_runs(device: Gpu) -> None:
    made = axpy_case(device, 1009)
    for _ in range(20):
        made.captured(3).replay()
    made.check(60)


# What a replay asks of the device


def test_the_upload_comes_once_before_the_first_replay(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    stream = faulty.gpu.stream()
    with faulty.count_calls("executable.upload", "replay", "graph.instantiate") as calls:
        graph = made.captured(3)
    assert calls == {"graph.instantiate": 1}
    with faulty.count_calls("executable.upload", "replay", "graph.instantiate") as calls:
        graph.replay()
        graph.replay()
        graph.replay(stream=stream, synchronize=True)
        graph.replay()
    assert calls == {"executable.upload": 1, "replay": 4}
    made.check(12)
    with faulty.count_calls("executable.upload", "replay") as calls:
        early = made.captured(1).upload()
        early.replay()
    assert calls == {"executable.upload": 1, "replay": 1}


def test_a_replay_waits_for_nothing_unless_asked(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    stream = faulty.gpu.stream()
    step = faulty.gpu.scalar("int32", name="step")
    note = faulty.gpu.kernel(KERNELS, "note")
    out = faulty.gpu.zeros(100, "int32")
    count = faulty.gpu.zeros(1, "int32")
    with faulty.gpu.capture() as graph:
        made.launch(3)
        note[1, 1](step, out, count)
    with faulty.count_calls(*WAITS) as calls:
        for i in range(5):
            graph.replay()
            graph.replay(step=i)
            graph.replay(stream=stream)
    assert calls == {}
    with faulty.count_calls(*WAITS) as calls:
        graph.replay(synchronize=True)
        graph.replay(step=9, synchronize=True)
    assert calls == {"stream.synchronize": 2}
    assert graph.num_replays == 17


def test_a_fast_replay_is_one_call_of_the_device(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    graph = made.captured(3)
    graph.replay()
    with faulty.count_calls() as calls:
        for _ in range(7):
            graph.replay()
    assert calls == {"replay": 7}
    made.check(24)


# What a graph owns


def test_a_graph_owns_what_it_uses_whatever_the_program_drops(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    xs = np.random.default_rng(5).integers(1, 100, 1009, dtype=np.int32)
    source = KERNELS + "// a program of its own\n"

    def make() -> tuple[Graph, int]:
        axpy, note = gpu.kernel(source, "axpy"), gpu.kernel(source, "note")
        x, y = gpu.array(xs), gpu.array(7 * xs)
        step = gpu.scalar("int32", name="step")
        out = gpu.zeros(9, "int32")
        count = gpu.zeros(1, "int32")
        with gpu.capture() as graph:
            axpy[16, 64](2, x, y, 1009)
            final.copy_from(y)
            note[1, 1](step, out, count)
            counts.copy_from(out)
        return graph, faulty.device.calls["module.unload"]

    final = gpu.array(-xs)
    counts = gpu.zeros(9, "int32")
    graph, unloaded = make()
    for turn in range(1, 5):
        gc.collect()
        gpu.trim()
        gpu.synchronize()
        junk = [gpu.array(np.full(1009, -1, np.int32)) for _ in range(8)]
        junk += [gpu.scalar("int32", -5) for _ in range(8)]
        graph.replay(step=40 + turn)
        np.testing.assert_array_equal(final.numpy(), (7 + 2 * turn) * xs)
        assert counts.numpy()[:turn].tolist() == list(range(41, 41 + turn))
        del junk
    assert faulty.device.calls["module.unload"] == unloaded
    graph.close()
    del graph
    gc.collect()
    assert gpu.trim() > 0
    assert faulty.device.calls["module.unload"] > unloaded


def test_a_graph_may_outlive_its_kernel_handles_and_streams(device: Gpu) -> None:
    made = axpy_case(device)
    stream = device.stream()
    graph = made.captured(3, stream=stream)
    stream.close()
    del stream
    others = [device.stream() for _ in range(3)]
    graph.replay(synchronize=True)
    made.check(3)
    del others


CLOSES: dict[str, tuple[str, str]] = {
    "x": ("node 0, axpy", "argument 1 (int const*): Array int32[257]"),
    "y": ("node 0, axpy", "argument 2 (int*): Array int32[257]"),
    "filled": ("node 1, fill", "argument 0 (array): Array int32[4]"),
    "copied": ("node 2, copy", "argument 1 (array): Array int32[5]"),
    "scalar": ("node 3, note", "argument 0 (int const*): Scalar 'step' int32"),
}


@pytest.mark.parametrize("replayed", [0, 1, 3])
@pytest.mark.parametrize("name", CLOSES)
def test_closing_memory_makes_its_graphs_stale_and_the_replay_says_whose(
    name: str, replayed: int, faulty: FaultyGpu
) -> None:
    gpu = faulty.gpu
    made = axpy_case(faulty.gpu)
    filled, copied, target = (gpu.array(np.arange(5, dtype=np.int32)) for _ in range(3))
    step = gpu.scalar("int32", name="step")
    out = gpu.zeros(50, "int32")
    count = gpu.zeros(1, "int32")
    note = gpu.kernel(KERNELS, "note")
    with gpu.capture(name="decode") as graph:
        made.launch()
        filled[1:].fill(3)
        target.copy_from(copied)
        note[1, 1](step, out, count)
    for _ in range(replayed):
        graph.replay()
    before = graph.stale
    {"x": made.x, "y": made.y, "filled": filled, "copied": copied, "scalar": step}[name].close()
    assert (before, graph.stale) == (False, True)
    node, argument = CLOSES[name]
    with faulty.count_calls() as calls:
        for door in (graph.replay, graph.upload, lambda: graph.replay(step=1)):
            with pytest.raises(StaleGraphError) as caught:
                door()
            reported = str(caught.value)
            assert reported.startswith(f"graph 'decode' is stale: {node}, ")
            assert reported.endswith(" was closed after the capture")
            assert argument in reported
            assert caught.value.hint
    assert calls == {}
    assert graph.num_replays == replayed


def test_memory_closed_between_capture_and_instantiate_makes_the_graph_stale(device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture().begin()
    made.launch()
    graph.end()
    made.x.close()
    graph.instantiate()
    with pytest.raises(StaleGraphError, match="axpy, argument 1"):
        graph.replay()


def test_closing_other_memory_leaves_a_graph_as_it_is(device: Gpu) -> None:
    made = axpy_case(device)
    spare = device.array(made.xs)
    graph = made.captured(3)
    graph.replay()
    spare.close()
    assert not graph.stale
    graph.replay()
    made.check(6)


# Memory that another library allocates inside


def allocating(made: AxpyCase, **more: Any) -> tuple[Graph, int]:
    """Return a graph in which another library allocates memory without freeing it."""
    seam = made.gpu._device
    with made.gpu.capture(name="step", **more) as graph:
        stream = graph.context.order.adopt(graph.stream.handle)
        address = seam.allocate(64, stream)
        seam.fill(address, b"\1\0\0\0", 16, stream)
        made.launch()
    return graph, address


def test_free_on_launch_lets_a_graph_that_allocates_be_replayed_again(device: Gpu) -> None:
    made = axpy_case(device)
    graph, address = allocating(made, free_on_launch=True)
    assert [node.kind for node in graph.nodes] == ["allocation", "fill", "kernel"]
    for _ in range(4):
        graph.replay()
    made.check(12)
    device._device.free(address, device._context.stream)


def test_without_free_on_launch_the_next_replay_says_what_to_do(device: Gpu) -> None:
    made = axpy_case(device)
    graph, address = allocating(made)
    graph.replay()
    for _ in range(2):
        with pytest.raises(DriverError, match=r"graph 'step' failed: .*INVALID_VALUE") as error:
            graph.replay()
        assert error.value.hint == (
            "this graph allocates memory that it does not free: free that before the next replay, "
            "or capture with free_on_launch=True"
        )
    assert graph.num_replays == 1
    device._device.free(address, device._context.stream)
    graph.replay()
    made.check(6)
    device._device.free(address, device._context.stream)


@pytest.mark.gpu
def test_memory_that_the_driver_allocates_in_a_captured_stream(open_device: Callable[..., Gpu]) -> None:
    from cuda.bindings import driver

    gpu = open_device("cuda")
    made = axpy_case(gpu)
    with gpu.capture(free_on_launch=True) as graph:
        status, address = driver.cuMemAllocAsync(64, graph.stream.handle)
        assert int(status) == 0
        driver.cuMemsetD32Async(address, 7, 16, graph.stream.handle)
        made.launch()
    assert [node.kind for node in graph.foreign] == ["allocation", "fill"]
    for _ in range(3):
        graph.replay()
    made.check(9)
    out = np.zeros(16, np.int32)
    gpu._device.copy_out(host_bytes(out), int(address), gpu._context.stream)
    assert out.tolist() == [7] * 16
    gpu._device.free(int(address), gpu._context.stream)
