"""Graph caches and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from preheat.gpu import Gpu
from tests.graph.cache_support import Step, cache_graphs
from tests.graph.support import axpy_case
from tests.processes import run_in_fork
from tests.threads import run_in_thread

# Threads


def test_while_one_thread_captures_a_key_others_run_it_eagerly(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    entered = list[str]()

    def other() -> None:
        entered.append("eager")
        assert threading.get_ident() not in device._context.captures_by_thread
        made.launch()

    def step() -> None:
        made.launch()
        if threading.get_ident() in device._context.captures_by_thread:
            entered.append("captured")
            for _ in range(3):
                run_in_thread(lambda: graphs.run("k", other))

    graphs.run("k", step)
    graphs.run("k", step)
    assert entered == ["captured", "eager", "eager", "eager"]
    made.check(3 * 5)
    assert "k" in graphs


def test_two_keys_are_captured_at_once(device: Gpu) -> None:
    made = axpy_case(device)
    other = axpy_case(device)
    graphs = device.graphs()

    def step() -> None:
        made.launch()
        if threading.get_ident() in device._context.captures_by_thread:
            run_in_thread(lambda: cache_graphs(graphs, other.launch, "b"))

    graphs.run("a", step)
    graphs.run("a", step)
    assert list(graphs) == ["b", "a"]
    made.check(6)
    other.check(6)


@pytest.mark.parametrize("verb", ["invalidate", "install"])
def test_a_capture_that_was_overtaken_does_its_step_and_is_dropped(verb: str, device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    newer = made.captured(100)

    def step() -> None:
        made.launch()
        if threading.get_ident() in device._context.captures_by_thread:
            if verb == "install":
                graphs.install("k", newer)
            else:
                graphs.invalidate()

    graphs.run("k", step)
    graphs.run("k", step)
    made.check(6)
    assert graphs.replay("k") is (verb == "install")
    made.check(106 if verb == "install" else 6)


def test_many_threads_on_few_keys_each_step_happens_once(device: Gpu) -> None:
    n, rounds, workers = 31, 25, 4
    made = axpy_case(device, n)
    graphs = device.graphs(capacity=2)
    atomic = device.kernel(
        'extern "C" __global__ void bump(int* at, int by) { atomicAdd(at, by); }', "bump"
    )
    counter = device.zeros(3, "int32")
    start = threading.Barrier(workers)
    open_now = dict[int, int]()
    most = list[int]()

    def body(key: int) -> None:
        inside = threading.get_ident() in device._context.captures_by_thread
        if inside:
            open_now[key] = open_now.get(key, 0) + 1
            most.append(open_now[key])
        atomic[1, 1](counter[key : key + 1], key + 1)
        if inside:
            open_now[key] -= 1

    def worker(seed: int) -> None:
        start.wait(300)
        for key in np.random.default_rng(seed).permutation(np.arange(3).repeat(rounds)):
            graphs.run(int(key), lambda key=int(key): body(key))  # type: ignore[misc]

    threads = [threading.Thread(target=worker, args=(seed,), daemon=True) for seed in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    want = [workers * rounds * (key + 1) for key in range(3)]
    np.testing.assert_array_equal(counter.numpy(), want)
    assert max(most) == 1  # never two captures of one key
    assert graphs.report().quarantined == ()
    made.check(0)


def test_a_forked_child_continues_with_its_own_locks(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    graphs = gpu.graphs()
    made = axpy_case(gpu)
    cache_graphs(graphs, Step(made), "k")
    ready, done = threading.Event(), threading.Event()

    def hold() -> None:
        with graphs._entries.lock:
            ready.set()
            done.wait(300)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert ready.wait(300)

    def child() -> None:
        graphs.run("k", made.y.close)  # replayed, so nothing is closed
        graphs.run("new", made.launch)
        made.check(12)

    try:
        run_in_fork(child)
    finally:
        done.set()
        thread.join(300)
