"""What a graph holds, when it lets go, and that nothing grows however many there were."""

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
from tests.faulty import Flaky
from tests.graph.support import axpy_case
from tests.runtime.support import KERNELS


class Held:
    """A graph of a launch, a fill and a copy, whose parts are known by weak references alone."""

    def __init__(self, gpu: Gpu) -> None:
        self.out = gpu.array(np.full(33, 7, np.int32))
        add = gpu.kernel(KERNELS, "add", label="held.cu")
        x, y = gpu.array(np.arange(33, dtype=np.int32)), gpu.empty(33, "int32")
        z, by = gpu.empty(33, "int32"), gpu.scalar("int32", 4, name="by")
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
def test_a_graph_lets_go_of_everything(how: str, device: Gpu) -> None:
    held, before = Held(device), device.memory().free
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


def test_closing_twice_is_fine(device: Gpu) -> None:
    made = axpy_case(device)
    with device.capture(name="step") as graph:
        made.launch()
    graph.replay()
    graph.close()
    graph.close()
    assert (graph.state, graph.num_replays) == (State.CLOSED, 1)
    assert repr(graph).startswith("<Graph 'step': closed")
    made.check_launches(1)


def test_a_capture_that_fails_holds_nothing(device: Gpu) -> None:
    made = axpy_case(device)
    names = [device.array(made.xs)]
    alive = weakref.ref(names[0].buffer)
    graph = device.capture()
    with pytest.raises(ZeroDivisionError):
        raising(graph, lambda: made.axpy[5, 64](3, *names, made.y, made.n))
    names.clear()
    gc.collect()
    assert alive() is None
    assert graph.state is State.FAILED


def raising(graph: Graph, work: Callable[[], object]) -> None:
    with graph:
        work()
        _ = 1 / 0


def test_two_scalars_of_one_name_hold_nothing_either(flaky: Flaky) -> None:
    gpu = flaky.gpu
    add, out = gpu.kernel(KERNELS, "add"), gpu.empty(1, "int32")
    one, two = (gpu.scalar("int32", name="step") for _ in range(2))
    parts = [weakref.ref(each.buffer) for each in (one, two)]
    graph = gpu.capture().begin()
    add[1, 1](one, 1, out, 1)
    add[1, 1](two, 1, out, 1)
    with flaky.asked("graph.close") as asked, pytest.raises(GraphError, match="are called 'step'"):
        graph.end()
    assert asked == {"graph.close": 1}
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


def test_a_graph_dropped_inside_its_window_ends_the_window(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    gpu.capture().begin()
    gc.collect()
    made.launch()
    made.check_launches(1)
    assert not gpu._context.captures_by_thread


def test_a_graph_in_a_cycle_is_collected_like_anything_else(flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    with flaky.gpu.capture() as graph:
        made.launch()
    cycle: list[object] = [graph]
    cycle.append(cycle)
    with flaky.asked("executable.close") as asked:
        del graph, cycle
        gc.collect()
    assert asked == {}  # a finalizer calls no driver
    with flaky.asked("executable.close") as asked:
        flaky.gpu.empty(1)
    assert asked == {"executable.close": 1}


def churn(gpu: Gpu, times: int) -> None:
    """Capture, replay and drop or close, in the ways there are."""
    add, kept = gpu.kernel(KERNELS, "add"), gpu.zeros(33, "int32")
    for turn in range(times):
        x, step = gpu.array(np.arange(33, dtype=np.int32)), gpu.scalar("int32", turn, name="step")
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
    """Every stream that the runtime knows."""
    order = gpu._context.order
    return [
        *order._own_streams.values(),
        *order._capture_streams.values(),
        *order._foreign_streams.values(),
    ]


def test_hundreds_of_captures_leave_nothing_behind(flaky: Flaky) -> None:
    gpu, context = flaky.gpu, flaky.gpu._context
    churn(gpu, 20)
    gc.collect()
    gpu.synchronize()
    free, objects, streams = gpu.memory().free, len(gc.get_objects()), len(streams_of(gpu))
    tracemalloc.start()
    try:
        with flaky.asked() as asked:
            churn(gpu, 300)
            gc.collect()
            gpu.synchronize()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert asked["stream.begin_capture"] == asked["stream.end_capture"] == 300
    assert asked["graph.close"] == asked["executable.close"] == asked["graph.instantiate"] == 300
    assert asked["free"] == asked["allocate"] == 601
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
    made, context = axpy_case(gpu), gpu._context

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


@pytest.mark.gpu
def test_ten_thousand_captures_do_not_grow_host_or_device(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("cuda")
    churn(gpu, 1000)
    gc.collect()
    gpu.synchronize()
    host, free = resident(), gpu.memory().free
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
