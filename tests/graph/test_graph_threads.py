"""Graphs and threads: concurrent captures, concurrent replays, and close beside replay."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from preheat.emulator.graph import EmulatorExecutable
from preheat.errors import CaptureError, GraphError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph, State
from tests.devices.support import KERNELS
from tests.graph.support import FACTOR, axpy_case
from tests.threads import run_in_thread

PATIENCE = 60.0  # a wait that takes longer is a failure


def together(*works: Callable[[], object]) -> list[Any]:
    """Do all of it at once, a thread each; what they return, or the first error."""
    with ThreadPoolExecutor(len(works)) as pool:
        waiting = [pool.submit(work) for work in works]
        return [each.result(PATIENCE) for each in waiting]


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_two_threads_capture_at_once_while_a_third_works(mode: str, device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    counters = [device.array(np.full(33, seed, np.int32)) for seed in (5, 70)]
    inside, worked = threading.Barrier(3), threading.Barrier(3)

    def capture(which: int) -> Graph:
        x = counters[which]
        with device.capture(mode=mode, name=f"graph {which}") as graph:
            add[2, 32](x, which + 1, x, 33)
            inside.wait(PATIENCE)  # Both captures are active.
            worked.wait(PATIENCE)  # and the third thread has done its work
            x.fill(0) if which else None
            add[2, 32](x, 10 * (which + 1), x, 33)
        return graph

    def third() -> None:
        inside.wait(PATIENCE)
        made = axpy_case(device, 31)  # allocates and copies
        made.launch(times=4)
        made.check_launches(4)
        with device.stream() as side:
            made.axpy.launch(3, made.x, made.y, made.n, grid=5, block=64, stream=side)
            side.synchronize()
        device.synchronize()
        made.check_launches(5)
        made.x.close()
        assert len(device._context.captures_by_thread) == 2  # all of it happened inside both
        worked.wait(PATIENCE)

    first, second, _ = together(lambda: capture(0), lambda: capture(1), third)
    assert [node.kind for node in first.nodes] == ["kernel", "kernel"]
    assert [node.kind for node in second.nodes] == ["kernel", "fill", "kernel"]
    assert [str(node.arguments[1]) for node in first.nodes] == ["1", "10"]
    assert [str(node.arguments[1]) for node in second.nodes if node.kind == "kernel"] == ["2", "20"]
    assert [counter.numpy()[0] for counter in counters] == [5, 70]  # nothing ran yet
    for graph in (first, second, first, second):
        graph.replay()
    assert np.array_equal(counters[0].numpy(), np.full(33, 5 + 2 * 11))
    assert np.array_equal(counters[1].numpy(), np.full(33, 20))
    assert not device._context.captures_by_thread


def test_many_captures_in_many_threads_do_not_mix_their_nodes(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    arrays = [device.zeros(31, "int32") for _ in range(6)]
    start = threading.Barrier(6)

    def capture(which: int) -> list[Graph]:
        start.wait(PATIENCE)
        graphs = []
        for turn in range(5):
            with device.capture() as graph:
                for by in range(which + 1):
                    add[1, 32](arrays[which], 100 * turn + by, arrays[which], 31)
            graphs.append(graph)
        return graphs

    for which, graphs in enumerate(together(*(lambda n=n: capture(n) for n in range(6)))):
        for turn, graph in enumerate(graphs):
            expected = [str(100 * turn + by) for by in range(which + 1)]
            assert [str(node.arguments[1]) for node in graph.nodes] == expected
            graph.replay()
        total = sum(100 * turn + by for turn in range(5) for by in range(which + 1))
        assert np.array_equal(arrays[which].numpy(), np.full(31, total))


def test_one_graph_replayed_by_several_threads_counts_every_replay(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    x = device.zeros(33, "int32")
    with device.capture() as graph:
        add[2, 32](x, 3, x, 33)
    start = threading.Barrier(4)

    def replay() -> None:
        start.wait(PATIENCE)
        for _ in range(50):
            graph.replay()

    together(*[replay] * 4)
    assert graph.num_replays == 200
    assert np.array_equal(x.numpy(), np.full(33, 600))


def test_an_executable_is_never_used_by_two_threads_at_once(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    users: list[int] = []
    overlaps: list[list[int]] = []

    def launch() -> tuple[int, ...]:
        users.append(threading.get_ident())
        time.sleep(0)  # Release the GIL, as a call of the driver does.
        if len(users) > 1:
            overlaps.append(list(users))
        users.remove(threading.get_ident())
        return (0,)

    made = axpy_case(open_device("emulator"))
    monkeypatch.setattr(EmulatorExecutable, "prepare", lambda *_: launch)
    with made.gpu.capture() as graph:
        made.launch()
    start = threading.Barrier(4)
    interval = sys.getswitchinterval()

    def replay() -> None:
        start.wait(PATIENCE)
        for _ in range(2000):
            graph.replay()

    sys.setswitchinterval(1e-6)
    try:
        together(*[replay] * 4)
    finally:
        sys.setswitchinterval(interval)
    assert overlaps == []
    assert graph.num_replays == 8000


def test_scalars_set_by_several_threads_go_with_their_own_replay(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    total = device.zeros(1, "int32")
    accumulate = device.kernel(
        'extern "C" __global__ void accumulate(const int* a, const int* b, int* sum) {'
        " if (*a * 7 != *b) *sum = -1000000000; *sum += *a; }",
        "accumulate",
    )
    a, b = (device.scalar("int32", name=name) for name in ("a", "b"))
    with device.capture() as graph:
        accumulate[1, 1](a, b, total)
        add[1, 1](total, 0, total, 1)
    start = threading.Barrier(3)

    def replay(which: int) -> None:
        start.wait(PATIENCE)
        for turn in range(30):
            value = 1000 * which + turn
            graph.replay(a=value, b=7 * value)

    together(*(lambda n=n: replay(n) for n in range(3)))
    assert graph.num_replays == 90
    assert total.numpy().tolist() == [sum(1000 * n + turn for n in range(3) for turn in range(30))]


def test_closing_against_replaying_is_one_or_the_other(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    x = device.zeros(1, "int32")
    replays = 0
    for _ in range(20):
        with device.capture() as graph:
            add[1, 1](x, 1, x, 1)
        graph.replay()
        start = threading.Barrier(3)

        def replay(graph: Graph = graph, start: threading.Barrier = start) -> str | None:
            start.wait(PATIENCE)
            try:
                for _ in range(200):
                    graph.replay()
            except GraphError as error:
                return str(error)
            return None

        def close(graph: Graph = graph, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            graph.close()

        *said, _ = together(replay, replay, close)
        for words in said:
            assert words is None or words.endswith("cannot be replayed: it was closed")
        assert graph.state is State.CLOSED
        replays += graph.num_replays
    assert x.numpy().tolist() == [replays]


def test_closing_in_several_threads_at_once_is_allowed(device: Gpu) -> None:
    made = axpy_case(device)
    for _ in range(50):
        with device.capture() as graph:
            made.launch()
        start = threading.Barrier(3)

        def close(graph: Graph = graph, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            graph.close()

        together(close, close, close)
        assert graph.state is State.CLOSED


def test_a_graph_captured_in_one_thread_is_replayed_and_closed_in_others(device: Gpu) -> None:
    made = axpy_case(device)

    def capture() -> Graph:
        with device.capture() as graph:
            made.launch()
        return graph

    graph = run_in_thread(capture)
    graph.replay()
    run_in_thread(graph.replay)
    made.check_launches(2)
    run_in_thread(graph.close)
    with pytest.raises(GraphError, match="it was closed"):
        graph.replay()


def test_replays_continue_while_another_thread_captures(device: Gpu) -> None:
    made = axpy_case(device)
    with device.capture() as first:
        made.launch()
    for _ in range(3):
        first.replay()

    def replay() -> None:
        for _ in range(4):
            first.replay()
        first.replay(synchronize=True)

    with device.capture() as second:
        made.y.fill(1)
        run_in_thread(replay)
    assert len(second) == 1
    made.check_launches(8)
    second.replay()
    assert np.array_equal(made.y.numpy(), np.ones(made.n, np.int32))


@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_a_graph_is_made_ready_while_another_thread_captures(mode: str, device: Gpu) -> None:
    made = axpy_case(device)
    first = device.capture().begin()
    made.launch()
    first.end()  # The first replay instantiates and uploads it.
    with device.capture(mode=mode) as second:
        made.y.fill(1)
        if mode == "global":
            with pytest.raises(CaptureError, match="making a graph ready while another"):
                run_in_thread(first.replay)
        else:
            run_in_thread(first.replay)
        made.launch()
    if mode == "global":
        first.replay()
    made.check_launches(1)
    second.replay()
    np.testing.assert_array_equal(made.y.numpy(), 1 + FACTOR * made.xs)


def test_a_variable_read_by_another_thread_does_not_invalidate_a_capture(device: Gpu) -> None:
    made = axpy_case(device)
    module = device.module(KERNELS)
    table = module.symbol("table", "float32")
    with device.capture() as graph:
        made.launch()
        assert run_in_thread(table.numpy).tolist() == [1.5, 2.5, 3.5]
        run_in_thread(lambda: table.write(np.array([4, 5, 6], np.float32)))
        made.launch()
    graph.replay()
    made.check_launches(2)
    assert table.numpy().tolist() == [4, 5, 6]


def test_a_thread_that_ends_inside_its_capture_leaves_the_device_to_the_others(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)

    def forget() -> None:
        graph = gpu.capture().begin()
        made.launch()
        assert len(gpu._context.captures_by_thread) == 1
        del graph

    run_in_thread(forget)
    gc.collect()
    gpu.synchronize()
    assert not gpu._context.captures_by_thread
    made.launch()
    with gpu.capture(mode="global") as graph:
        made.launch()
    graph.replay()
    made.check_launches(2)
