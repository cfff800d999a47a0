"""What a graph keeps alive, when it releases that, and the absence of leaks."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.errors import CaptureError, GraphError, StaleGraphError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph, State
from tests.devices.support import KERNELS
from tests.faulty import FaultyGpu
from tests.graph.support import axpy_case
from tests.threads import run_in_thread


class Held:
    """A graph of a launch, a fill and a copy, whose parts are known by weak references alone."""

    def __init__(self, gpu: Gpu) -> None:
        self.out = gpu.array(np.full(33, 7, np.int32))
        add = gpu.kernel(KERNELS, "add", label="held.cu")
        x = gpu.array(np.arange(33, dtype=np.int32))
        y = gpu.empty(33, "int32")
        z = gpu.empty(33, "int32")
        by = gpu.scalar("int32", 4, name="by")
        with gpu.capture() as graph:
            add[2, 32](x[0:], 4, y, 33)
            z.fill(9)
            y[0:1].copy_from(z[3:4])
            add[2, 32](y, 1, self.out, 33)
            add[1, 1](by, 100, self.out, 1)
        self.graph: Graph | None = graph
        self.parts: list[weakref.ref[Any]] = [weakref.ref(array.buffer) for array in (x, y, z, by)]
        self.parts.append(weakref.ref(add.module))
        gpu._session.kernels.clear()
        gpu._session.modules.clear()

    def alive(self) -> list[bool]:
        gc.collect()
        return [part() is not None for part in self.parts]


def test_a_graph_holds_arrays_scalars_and_programs_after_their_names_are_gone(device: Gpu) -> None:
    held = Held(device)
    assert held.graph is not None
    assert held.alive() == [True] * 5
    device.synchronize()
    others = [device.array(np.full(33, -1, np.int32)) for _ in range(16)]  # would lie where they were
    held.graph.replay(by=20)
    assert held.out.numpy().tolist() == [120, *range(6, 38)]
    assert held.graph.nbytes == 4 * 33 * 4 + 4
    del others


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_graph_releases_everything(how: str, device: Gpu) -> None:
    held = Held(device)
    before = device.memory().free
    assert held.graph is not None
    held.graph.replay()
    if how == "close":
        held.graph.close()
        assert (held.graph.state, held.graph.nbytes, held.graph.scalars) == (State.CLOSED, 0, {})
        with pytest.raises(GraphError, match="cannot be replayed: it was closed"):
            held.graph.replay()
    else:
        held.graph = None
    assert held.alive() == [False] * 5
    device.synchronize()
    assert held.out.numpy().tolist() == [104, *range(6, 38)]  # the replay was finished
    assert device.memory().free >= before


def raising(graph: Graph, work: Callable[[], object]) -> None:
    with graph:
        work()
        _ = 1 / 0


def test_two_scalars_of_one_name_hold_nothing_either(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    add = gpu.kernel(KERNELS, "add")
    out = gpu.empty(1, "int32")
    one, two = (gpu.scalar("int32", name="step") for _ in range(2))
    parts = [weakref.ref(each.buffer) for each in (one, two)]
    graph = gpu.capture().begin()
    add[1, 1](one, 1, out, 1)
    add[1, 1](two, 1, out, 1)
    with (
        faulty.count_calls("graph.close") as calls,
        pytest.raises(GraphError, match="are called 'step'"),
    ):
        graph.end()
    assert calls == {"graph.close": 1}
    del one, two
    gc.collect()
    assert [part() for part in parts] == [None, None]


def test_a_graph_that_is_stale_keeps_the_rest_until_it_is_closed(device: Gpu) -> None:
    made = axpy_case(device)
    with device.capture() as graph:
        made.launch()
    rest = weakref.ref(made.y.buffer)
    made.x.close()
    del made
    gc.collect()
    assert rest() is not None
    with pytest.raises(StaleGraphError):
        graph.replay()
    graph.close()
    gc.collect()
    assert rest() is None


def test_a_graph_does_not_keep_its_device_from_closing(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    with gpu.capture() as graph:
        made.launch()
    graph.replay()
    gpu.close()
    graph.close()
    del graph
    gc.collect()


def test_a_graph_dropped_inside_its_capture_ends_the_capture(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    gpu.capture().begin()
    gc.collect()
    made.launch()
    made.check_launches(1)
    assert not gpu._context.captures_by_thread


def test_a_graph_in_a_cycle_is_collected_like_anything_else(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    with faulty.gpu.capture() as graph:
        made.launch()
    cycle: list[object] = [graph]
    cycle.append(cycle)
    with faulty.count_calls("executable.close") as asked:
        del graph, cycle
        gc.collect()
    assert asked == {}  # a finalizer calls no driver
    with faulty.count_calls("executable.close") as asked:
        faulty.gpu.empty(1)
    assert asked == {"executable.close": 1}


def churn(gpu: Gpu, times: int) -> None:
    """Capture, replay, and then drop or close graphs in every combination."""
    add = gpu.kernel(KERNELS, "add")
    kept = gpu.zeros(33, "int32")
    for turn in range(times):
        x = gpu.array(np.arange(33, dtype=np.int32))
        step = gpu.scalar("int32", turn, name="step")
        with gpu.capture() as graph:
            add[2, 32](x, turn, x, 33)
            add[1, 1](step, 1, kept, 1)
            x.fill(turn)
        if turn % 4:
            graph.replay(step=turn)
        if turn % 3 == 0:
            graph.close()
        if turn % 5 == 0:
            x.close()


def streams_of(gpu: Gpu) -> list[object]:
    """Return every stream that the runtime knows."""
    order = gpu._context.order
    return [
        *order._own_streams.values(),
        *order._capture_streams.values(),
        *order._foreign_streams.values(),
    ]


@pytest.mark.hardware("it counts objects, of which the driver has some in the same process")
def test_hundreds_of_captures_leave_nothing_behind(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    context = faulty.gpu._context
    churn(gpu, 20)
    gc.collect()
    gpu.synchronize()
    free = gpu.memory().free
    objects = len(gc.get_objects())
    streams = len(streams_of(gpu))
    tracemalloc.start()
    try:
        with faulty.count_calls() as calls:
            churn(gpu, 300)
            gc.collect()
            gpu.synchronize()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert calls["stream.begin_capture"] == calls["stream.end_capture"] == 300
    assert calls["graph.close"] == calls["executable.close"] == calls["graph.instantiate"] == 300
    assert calls["free"] == calls["allocate"] == 601
    assert (len(context.deferred_cleanups), len(context._held_until_done), len(streams_of(gpu))) == (
        0,
        0,
        streams,
    )
    assert len(context.idle_capture_streams) == 1
    assert gpu.memory().free == free or gpu.name.startswith("cuda")
    assert len(gc.get_objects()) < objects + 100
    assert grown < 200_000


def test_failed_captures_leave_nothing_behind(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    context = gpu._context

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(ZeroDivisionError):
                raising(gpu.capture(), made.launch)

    fail(5)
    gc.collect()
    objects, streams = len(gc.get_objects()), len(streams_of(gpu))
    fail(100)
    gc.collect()
    assert len(gc.get_objects()) < objects + 50
    assert (
        len(streams_of(gpu)),
        len(context.idle_capture_streams),
        len(context.deferred_cleanups),
    ) == (streams, 1, 0)


def resident() -> int:
    """Bytes of memory that this process has."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.hardware("it measures host memory, which is also that of the device")
@pytest.mark.gpu
def test_ten_thousand_captures_do_not_grow_host_or_device(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("cuda")
    churn(gpu, 1000)
    gc.collect()
    gpu.synchronize()
    host = resident()
    free = gpu.memory().free
    churn(gpu, 10_000)
    gc.collect()
    gpu.synchronize()
    assert resident() - host < 16 << 20
    assert free - gpu.memory().free < 32 << 20
    assert not gpu._context.deferred_cleanups


def test_a_failed_capture_is_gone_without_the_collector(device: Gpu) -> None:
    made = axpy_case(device)
    arrays = [device.array(made.xs)]
    alive = weakref.ref(arrays[0].buffer)

    def fail() -> None:
        graph = device.capture().begin()
        made.axpy[5, 64](3, arrays[0], made.y, made.n)
        with suppress(CaptureError):
            device.synchronize()
        with suppress(CaptureError):
            graph.end()

    gc.collect()
    gc.disable()
    try:
        fail()
        arrays.clear()
        assert alive() is None
    finally:
        gc.enable()


# Memory and programs that are released


def test_memory_cannot_be_freed_inside_the_capture_that_uses_it(device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture().begin()
    made.launch()
    with pytest.raises(CaptureError, match="freeing memory inside a capture") as caught:
        made.x.close()
    assert caught.value.hint == "close arrays after the capture"
    with pytest.raises(CaptureError, match="the capture failed: freeing memory inside a capture"):
        graph.end()
    made.check_usable()


def test_memory_freed_by_another_thread_during_the_capture_makes_the_graph_stale(device: Gpu) -> None:
    made = axpy_case(device)
    with device.capture(name="step") as graph:
        made.launch()
        run_in_thread(made.x.close)
    assert graph.stale
    words = r"graph 'step' is stale: node 0, axpy, argument 1 \(int const\*\): Array int32\[257\]"
    with pytest.raises(StaleGraphError, match=words):
        graph.replay()
    assert graph.num_replays == 0


@pytest.mark.parametrize("warm", [0, 3])
def test_memory_freed_after_the_capture_makes_the_graph_stale(warm: int, device: Gpu) -> None:
    made = axpy_case(device)
    view = made.x[0:]
    graph = made.captured(name="step")
    for _ in range(warm):
        graph.replay()
    view.close()
    for _ in range(2):
        with pytest.raises(StaleGraphError, match="node 0, axpy, argument 1") as caught:
            graph.replay()
        assert "capture again" in str(caught.value.hint)
    assert graph.num_replays == warm
    made.check_launches(warm)


def test_a_program_is_not_unloaded_under_a_graph(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    out = gpu.array([3], "int32")
    add = gpu.kernel(KERNELS, "add", label="mine.cu")
    with gpu.capture() as graph:
        add[1, 32](out, 4, out, 1)
        del add
        gc.collect()
        run_in_thread(gpu.trim)
    with faulty.count_calls("module.unload") as calls:
        assert gpu.trim() == 0
        graph.replay()
        assert out.numpy().tolist() == [7]
    assert calls == {}
    graph.close()
    with faulty.count_calls("module.unload") as calls:
        gpu.trim()
    assert calls == {"module.unload": 1}


def test_trimming_inside_the_capture_is_refused(device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture().begin()
    made.launch()
    with pytest.raises(CaptureError, match="unloading programs inside a capture"):
        device.trim()
    with pytest.raises(CaptureError, match="the capture failed: unloading programs inside a capture"):
        graph.end()
    made.check_usable()


# The garbage collector

SLOW = """
extern "C" __global__ void slow(volatile int* x, int n) { for (int i = 0; i < n; i++) *x = *x + 1; }
"""


class Cycle:
    """Something that only the collector takes apart."""

    def __init__(self, *holds: object) -> None:
        self.itself, self.holds = self, holds


def test_the_collector_inside_the_capture_makes_no_device_calls(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    made = axpy_case(faulty.gpu)
    doomed = gpu.kernel(KERNELS, "add", label="doomed.cu")
    bound = doomed.bind(gpu.array([1], "int32"), 1, gpu.array([2], "int32"), 1, grid=1, block=32)
    old = made.captured()
    old.replay()
    event = gpu.record()
    side = gpu.stream()
    cycles = [Cycle(gpu.array(made.xs), gpu.array(made.ys)[3:], old, event, side, doomed, bound)]
    gpu._session.kernels.clear()
    gpu._session.modules.clear()
    gpu.synchronize()
    del doomed, bound, old, event, side
    with gpu.capture() as graph:
        made.launch()
        with faulty.count_calls() as calls:
            cycles.clear()
            gc.collect()
            run_in_thread(gc.collect)
        assert calls == {}
        assert len(gpu._context.deferred_cleanups) >= 6  # four arrays, a graph, an event
        made.launch()
    with faulty.count_calls("free", "executable.close", "module.unload") as calls:
        gpu.synchronize()
    assert calls == {"free": 4, "executable.close": 1, "module.unload": 1}
    assert not gpu._context.deferred_cleanups
    graph.replay()
    made.check_launches(3)


def test_another_thread_that_allocates_frees_nothing_either(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    made = axpy_case(faulty.gpu)
    dropped = [gpu.array(made.xs) for _ in range(5)]
    with gpu.capture(), faulty.count_calls("free", "allocate") as calls:
        made.launch()
        dropped.clear()
        run_in_thread(lambda: made.x.write(gpu.array(made.xs).numpy()))
    assert calls == {"allocate": 1}
    with faulty.count_calls("free") as calls:
        gpu.empty(1)
    assert calls == {"free": 6}


def test_a_graph_dropped_right_after_its_replay_is_finished_first(device: Gpu) -> None:
    slow, add = device.kernel(SLOW, "slow"), device.kernel(KERNELS, "add")
    x = device.array([0], "int32")
    turns = 100_000 if device.name.startswith("cuda") else 10
    for how in ("close", "drop", "close"):
        y = device.array(np.arange(33, dtype=np.int32))
        out = device.empty(33, "int32")
        with device.capture() as graph:
            slow[1, 1](x, turns)
            add[2, 32](y, 5, out, 33)
        del y
        graph.replay()
        if how == "close":
            graph.close()
        del graph
        gc.collect()
        device.empty(33, "int32").fill(-1)  # which drains, and may lie where `y` was
        assert np.array_equal(out.numpy(), np.arange(33) + 5)
    assert x.numpy().tolist() == [3 * turns]
