"""Graphs after a reset of their device and in forked children."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from preheat.errors import (
    CaptureError,
    ContextLostError,
)
from preheat.gpu import Gpu
from preheat.graph.graph import State
from preheat.process.locks import run_locked
from tests.faulty import FaultyGpu
from tests.graph.support import axpy_case, replayer
from tests.processes import run_in_fork
from tests.threads import run_in_thread

# Resets


def test_a_reset_by_another_thread_inside_the_capture_is_named(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    graph = gpu.capture()

    def body() -> None:
        with graph:
            made.launch()
            run_in_thread(gpu.reset)
            made.launch()

    with pytest.raises(ContextLostError, match="it was reset"):
        body()
    assert graph.state is State.FAILED
    axpy_case(gpu).check_usable()


def test_a_reset_that_the_body_never_noticed_is_named_by_the_end(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    graph = gpu.capture().begin()
    made.launch()
    run_in_thread(gpu.reset)
    with pytest.raises((ContextLostError, CaptureError), match="it was reset") as caught:
        graph.end()
    assert "another library" not in str(caught.value)
    assert graph.state is State.FAILED
    axpy_case(gpu).check_usable()


@pytest.mark.parametrize("warm", [0, 3])
def test_a_graph_does_not_outlive_a_reset(warm: int, open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    graph = axpy_case(gpu).captured()
    for _ in range(warm):
        graph.replay()
    run_in_thread(gpu.reset)
    for operation in (graph.replay, graph.upload):
        with pytest.raises(ContextLostError, match="it was reset, and everything on it was lost"):
            operation()
    assert graph.num_replays == warm
    graph.close()
    axpy_case(gpu).check_usable()


def test_a_reset_is_refused_inside_and_by_a_global_capture_everywhere(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    with pytest.raises(CaptureError, match="resetting or closing the device inside"), gpu.capture():
        gpu.reset()
    with gpu.capture(mode="global") as graph:
        made.launch()
        for operation in (gpu.reset, gpu.close):
            with pytest.raises(CaptureError, match="while another thread captures"):
                run_in_thread(operation)
    graph.replay()
    made.check_launches(1)


# Forks


def test_a_graph_works_on_in_a_forked_child_of_the_emulator(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    graph = made.captured()
    graph.replay()

    def work() -> None:
        graph.replay()
        graph.replay()
        made.check_launches(3)
        made.check_usable(3)
        graph.close()

    run_in_fork(work)
    graph.replay()
    made.check_launches(2)
    assert graph.num_replays == 2


@pytest.mark.gpu
def test_a_graph_in_a_forked_child_of_a_gpu_says_what_happened(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("cuda")
    made = axpy_case(gpu)
    graph = made.captured()
    graph.replay()
    gpu.synchronize()

    def work() -> None:
        for operation in (graph.replay, graph.upload, gpu.capture):
            with pytest.raises(ContextLostError, match="forked from one that was using the GPU"):
                operation()
        graph.close()

    run_in_fork(work)
    graph.replay()
    made.check_launches(2)


def test_a_fork_inside_the_capture_copies_the_capture(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)

    def work() -> None:
        made.launch()
        graph.end().replay()
        assert len(graph) == 2
        made.check_launches(2)
        made.check_usable(2)

    graph = gpu.capture().begin()
    made.launch()
    run_in_fork(work)
    graph.end().replay()
    assert len(graph) == 1
    made.check_launches(1)
    made.check_usable(1)


def test_a_fork_inside_the_capture_of_a_device_that_cannot_is_named(
    open_faulty: Callable[..., FaultyGpu],
) -> None:
    faulty = open_faulty("emulator")
    faulty.device._part.survives_fork = False
    made = axpy_case(faulty.gpu)

    def work() -> None:
        with faulty.count_calls() as calls:
            with pytest.raises(ContextLostError, match="forked"):
                made.launch()
            with pytest.raises((ContextLostError, CaptureError), match="forked"):
                graph.end()
        assert calls == {}  # The device of the parent gets no calls.

    graph = faulty.gpu.capture().begin()
    made.launch()
    run_in_fork(work)
    graph.end().replay()
    made.check_launches(1)


def test_a_child_is_free_of_the_captures_of_threads_it_does_not_have(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    inside, done = threading.Event(), threading.Event()

    def capture() -> None:
        with gpu.capture(mode="global"):
            made.launch()
            inside.set()
            done.wait(300)

    thread = threading.Thread(target=capture)
    thread.start()
    assert inside.wait(300)
    try:
        run_in_fork(lambda: made.check_usable())
    finally:
        done.set()
        thread.join(300)


def test_a_child_does_not_wait_for_a_replay_of_its_parent(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    graph = made.captured()

    def work() -> None:
        signal.alarm(240)
        graph.replay()
        made.check_launches(1)

    # As when another thread replays it:
    run_locked(replayer(graph).lock, lambda: run_in_fork(work))
