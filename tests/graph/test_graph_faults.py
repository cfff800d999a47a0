"""Captures and replays that fail: at every point, for every reason, nothing is left behind."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from preheat.devices.emulator.capture import EmulatorExecutable
from preheat.errors import (
    CaptureError,
    ContextLostError,
    DriverError,
    EmulatorFault,
    GraphError,
    OutOfMemoryError,
    StaleGraphError,
)
from preheat.gpu import Gpu
from preheat.graph.graph import Graph, State
from preheat.runtime.dict_lock import run_locked
from tests.driver_errors import illegal_address, not_supported, out_of_memory
from tests.faulty import Flaky
from tests.graph.support import AxpyCase, axpy_case, here, replayer
from tests.processes import run_in_fork
from tests.runtime.support import KERNELS
from tests.threads import run_in_thread

SLOW = """
extern "C" __global__ void slow(volatile int* x, int n) { for (int i = 0; i < n; i++) *x = *x + 1; }
"""


def usable(made: AxpyCase, launches: int = 0) -> None:
    """That the device works as before, with and without a capture."""
    context = made.gpu._context
    assert (context.captures_by_thread, context.lost_or_capturing) == ({}, None)
    made.check_launches(launches)
    made.launch()
    graph = made.captured()
    graph.replay()
    made.check_launches(launches + 2)
    graph.close()


# The body raises

STEPS: tuple[Callable[[AxpyCase], object], ...] = (
    lambda b: b.launch(),
    lambda b: b.y.fill(7),
    lambda b: b.y.copy_from(b.x),
    lambda b: b.launch(times=3),
)


@pytest.mark.parametrize("kind_of_error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", range(len(STEPS) + 1))
def test_a_body_that_raises_anywhere_leaves_nothing_behind(
    at: int, kind_of_error: type[BaseException], flaky: Flaky
) -> None:
    made, raised = axpy_case(flaky.gpu), kind_of_error("mine")
    graph = flaky.gpu.capture()

    def body() -> None:
        with graph:
            for step in STEPS[:at]:
                step(made)
            raise raised

    verbs = ("stream.begin_capture", "stream.end_capture", "graph.close")
    with flaky.asked(*verbs) as asked, pytest.raises(kind_of_error) as caught:
        body()
    assert caught.value is raised
    assert asked == dict.fromkeys(verbs, 1)
    assert (graph.state, graph.status, len(graph)) == (State.FAILED, "none", 0)
    with pytest.raises(GraphError, match="cannot be replayed: its capture failed"):
        graph.replay()
    with pytest.raises(CaptureError, match="this graph is failed already"):
        graph.begin()
    usable(made)


def failing(made: AxpyCase, graph: Graph) -> None:
    with graph:
        made.launch()
        _ = 1 / 0


@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_a_body_that_raises_is_forgotten_in_every_mode(mode: str, device: Gpu) -> None:
    made = axpy_case(device)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            failing(made, device.capture(mode=mode))
    usable(made)


def test_a_body_that_raises_on_a_stream_of_the_user_gives_it_back_usable(device: Gpu) -> None:
    made = axpy_case(device)
    side = device.stream()
    with pytest.raises(ZeroDivisionError):
        failing(made, device.capture(stream=side))
    made.axpy.launch(3, made.x, made.y, made.n, grid=5, block=64, stream=side)
    side.synchronize()
    usable(made, 1)


def test_an_error_that_was_swallowed_is_told_beside_the_one_that_comes_out(device: Gpu) -> None:
    made = axpy_case(device)

    def body() -> None:
        with device.capture():
            with suppress(CaptureError):
                made.y.numpy()
            raise ValueError(here(-1))

    with pytest.raises(ValueError, match="test_graph_faults") as caught:
        body()
    (note,) = caught.value.__notes__
    assert note.startswith(f"the first error inside this capture was, at {caught.value}: ")
    assert "copying to the host inside a capture" in note
    usable(made)


def test_a_launch_that_fails_inside_is_what_the_end_reports(flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    flaky.seam.fail("launch", None, not_supported("cuLaunchKernel"), not_supported("later"))
    graph = flaky.gpu.capture().begin()
    made.launch()
    for name in ("cuLaunchKernel", "later"):
        with pytest.raises(DriverError, match=name):
            made.launch()
    with pytest.raises(CaptureError, match="the capture failed: cuLaunchKernel failed") as caught:
        graph.end()
    assert isinstance(caught.value.__cause__, DriverError)
    assert str(caught.value.where).startswith("support.py:")  # the file of `AxpyCase.launch`
    assert graph.state is State.FAILED
    usable(made)


# The device fails


@pytest.mark.parametrize("verb", ["stream", "stream.begin_capture"])
def test_a_begin_that_fails_can_be_tried_again(verb: str, flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    graph = flaky.gpu.capture()
    flaky.seam.fail(verb, *(not_supported(verb) for _ in range(3)))
    with flaky.asked("stream") as asked:
        for _ in range(3):
            with pytest.raises(DriverError, match=verb):
                graph.begin()
            assert (graph.state, graph.status) == (State.NEW, "none")
        graph.begin()
    assert asked == {"stream": 4 if verb == "stream" else 1}  # what was made is used again
    made.launch()
    graph.end().replay()
    made.check_launches(1)
    usable(made, 1)


def test_a_capture_spoilt_behind_our_back_names_the_last_line_that_was_good(flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    graph = flaky.gpu.capture().begin()
    made.y.fill(3)
    good = here(-1)
    with pytest.raises(DriverError):
        flaky.seam.synchronize()  # as another library would, past all our checks
    assert graph.status == "invalidated"
    with pytest.raises(CaptureError, match="a call of another library invalidated the capture") as bad:
        graph.end()
    assert bad.value.where == good
    assert "synchronisation" in str(bad.value.hint)
    assert (graph.state, graph.status) == (State.FAILED, "none")
    usable(made)


def test_work_after_a_capture_was_spoilt_raises_where_it_stands(flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    graph = flaky.gpu.capture().begin()
    made.launch()
    with pytest.raises(DriverError):
        flaky.seam.synchronize()
    for again in (made.launch, made.launch, graph.end):
        with pytest.raises(CaptureError, match=r"another library invalidated the capture.*INVALIDATED"):
            again()
    usable(made)


def test_an_end_whose_graph_cannot_be_read_leaks_nothing(flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    flaky.seam.fail("graph.nodes", not_supported("cuGraphGetNodes"))
    with flaky.asked("stream.end_capture", "graph.close") as asked:
        graph = flaky.gpu.capture().begin()
        made.launch()
        with pytest.raises(DriverError, match="cuGraphGetNodes"):
            graph.end()
    assert asked == {"stream.end_capture": 1, "graph.close": 1}
    assert graph.state is State.FAILED
    usable(made)


@pytest.mark.parametrize("drop", ["close", "forget"])
def test_out_of_memory_at_instantiation_keeps_the_capture_for_another_try(
    drop: str, flaky: Flaky
) -> None:
    made = axpy_case(flaky.gpu)
    flaky.seam.fail(
        "graph.instantiate",
        out_of_memory("cuGraphInstantiate"),
        out_of_memory("cuGraphInstantiate"),
        out_of_memory("cuGraphInstantiate"),
    )
    with flaky.asked("graph.close", "executable.close") as asked:
        with pytest.raises(OutOfMemoryError), flaky.gpu.capture() as graph:
            made.launch()
        for again in (graph.instantiate, graph.replay):
            with pytest.raises(MemoryError):
                again()
            assert (graph.state, graph.num_replays) == (State.CAPTURED, 0)
        del again
        made.check_launches(0)
        graph.replay()
        made.check_launches(1)
        assert (graph.state, graph.num_replays) == (State.READY, 1)
        if drop == "close":
            graph.close()
        del graph
        gc.collect()
        flaky.gpu.synchronize()
    assert asked == {"graph.close": 1, "executable.close": 1}
    usable(made, 1)


@pytest.mark.parametrize("drop", ["close", "forget"])
def test_a_capture_that_never_was_instantiated_is_given_back(drop: str, flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    flaky.seam.fail("graph.instantiate", out_of_memory("cuGraphInstantiate"))
    with flaky.asked("graph.close", "executable.close") as asked:
        with pytest.raises(OutOfMemoryError):
            made.captured()
        graph = flaky.gpu.capture().begin()
        made.launch()
        graph.end()
        if drop == "close":
            graph.close()
        del graph
        gc.collect()
        flaky.gpu.synchronize()
    assert asked == {"graph.close": 2}
    usable(made)


def test_an_upload_that_fails_is_done_again_and_then_never(flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    graph = made.captured()
    flaky.seam.fail("executable.upload", out_of_memory("cuGraphUpload"), not_supported("cuGraphUpload"))
    with flaky.asked("executable.upload", "replay") as asked:
        with pytest.raises(OutOfMemoryError):
            graph.upload()
        with pytest.raises(DriverError, match="cuGraphUpload"):
            graph.replay()
        assert graph.num_replays == 0
        for _ in range(3):
            graph.replay()
    assert asked == {"executable.upload": 3, "replay": 3}
    assert graph.num_replays == 3
    made.check_launches(3)


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("verb", ["replay", "set"])
def test_a_replay_that_fails_is_not_counted_and_the_next_one_works(
    verb: str, warm: int, flaky: Flaky
) -> None:
    gpu, add = flaky.gpu, flaky.gpu.kernel(KERNELS, "add")
    step, out = gpu.scalar("int32", 5, name="step"), gpu.array([1], "int32")
    with gpu.capture() as graph:
        add[1, 32](step, 100, out, 1)
    more: dict[str, Any] = {"step": 7} if verb == "set" else {}
    for _ in range(warm):
        graph.replay(**more)
    flaky.seam.fail(verb, not_supported(verb))
    with pytest.raises(DriverError, match=f"{verb} failed: CUDA_ERROR_NOT_SUPPORTED"):
        graph.replay(**more)
    assert graph.num_replays == warm
    graph.replay(step=9)
    assert graph.num_replays == warm + 1
    assert out.numpy().tolist() == [109]


@pytest.mark.parametrize("warm", [0, 3])
def test_a_replay_that_nothing_survives_names_the_graph_from_then_on(warm: int, flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    graph = made.captured(name="the step")
    for _ in range(warm):
        graph.replay()
    flaky.seam.fail("replay", illegal_address("cuGraphLaunch"))
    with pytest.raises(DriverError, match="the last graph replayed was the step"):
        graph.replay()
    assert graph.num_replays == warm
    with flaky.asked() as asked:
        for door in (graph.replay, graph.upload, flaky.gpu.capture, made.launch):
            with pytest.raises(ContextLostError, match="the last graph replayed was the step"):
                door()
        graph.close()
    assert asked == {}  # the device is left alone


def test_work_that_fails_later_names_the_last_graph_replayed(flaky: Flaky) -> None:
    made = axpy_case(flaky.gpu)
    first, second = made.captured(name="first"), made.captured(name="second")
    for graph in (first, second, first):
        graph.replay()
    flaky.seam.fail("synchronize", illegal_address("cuStreamSynchronize"))
    with pytest.raises(DriverError, match="the last graph replayed was first"):
        flaky.gpu.synchronize()


class InterruptedByTestError(Exception):
    """What Ctrl-C would be, if it were not Ctrl-C."""


def test_a_replay_interrupted_anywhere_leaves_the_graph_usable(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = axpy_case(open_device("emulator"))
    # A launch that takes no time: what is interrupted is the replay around it.
    monkeypatch.setattr(EmulatorExecutable, "prepare", lambda *_: lambda: (0,))
    graph = made.captured()

    def interrupt(*_: object) -> None:
        raise InterruptedByTestError

    def replay(seconds: float) -> None:
        end = time.monotonic() + 20  # timers are late on a busy machine
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while time.monotonic() < end:
            graph.replay()

    gc.collect()
    gc.disable()  # Python swallows an exception inside a callback of its garbage collector
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(1000):
            with pytest.raises(InterruptedByTestError):
                replay(0.0002 + turn % 97 * 1e-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    done = graph.num_replays
    run_in_thread(graph.replay)
    assert graph.num_replays == done + 1


def test_a_fault_inside_a_replay_on_the_emulator_comes_out_of_it(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    with gpu.capture(name="beyond") as graph:
        made.axpy[5, 64](3, made.x, made.y, made.n + 1)
    with pytest.raises(EmulatorFault, match="past the end of the 1028-byte buffer"):
        graph.replay()
    assert graph.num_replays == 0
    with pytest.raises(ContextLostError, match="the last graph replayed was beyond"):
        graph.replay()
    gpu.reset()
    usable(axpy_case(gpu))


# Memory and programs that go away


def test_memory_cannot_be_freed_inside_the_window_that_uses_it(device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture().begin()
    made.launch()
    with pytest.raises(CaptureError, match="freeing memory inside a capture") as caught:
        made.x.close()
    assert caught.value.hint == "close arrays after the capture"
    with pytest.raises(CaptureError, match="the capture failed: freeing memory inside a capture"):
        graph.end()
    usable(made)


def test_memory_freed_by_another_thread_meanwhile_makes_the_graph_stale(device: Gpu) -> None:
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


def test_a_program_is_not_unloaded_under_a_graph(flaky: Flaky) -> None:
    gpu = flaky.gpu
    out, add = gpu.array([3], "int32"), gpu.kernel(KERNELS, "add", label="mine.cu")
    with gpu.capture() as graph:
        add[1, 32](out, 4, out, 1)
        del add
        gc.collect()
        run_in_thread(gpu.trim)
    with flaky.asked("module.unload") as asked:
        assert gpu.trim() == 0
        graph.replay()
        assert out.numpy().tolist() == [7]
    assert asked == {}
    graph.close()
    with flaky.asked("module.unload") as asked:
        gpu.trim()
    assert asked == {"module.unload": 1}


def test_trimming_inside_the_window_is_refused(device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture().begin()
    made.launch()
    with pytest.raises(CaptureError, match="unloading programs inside a capture"):
        device.trim()
    with pytest.raises(CaptureError, match="the capture failed: unloading programs inside a capture"):
        graph.end()
    usable(made)


# Resets


def test_a_reset_by_another_thread_inside_the_window_is_named(open_device: Callable[..., Gpu]) -> None:
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
    usable(axpy_case(gpu))


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
    usable(axpy_case(gpu))


@pytest.mark.parametrize("warm", [0, 3])
def test_a_graph_does_not_outlive_a_reset(warm: int, open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    graph = axpy_case(gpu).captured()
    for _ in range(warm):
        graph.replay()
    run_in_thread(gpu.reset)
    for door in (graph.replay, graph.upload):
        with pytest.raises(ContextLostError, match="it was reset, and everything on it was lost"):
            door()
    assert graph.num_replays == warm
    graph.close()
    usable(axpy_case(gpu))


def test_a_reset_is_refused_inside_and_by_a_global_capture_everywhere(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    with pytest.raises(CaptureError, match="resetting or closing the device inside"), gpu.capture():
        gpu.reset()
    with gpu.capture(mode="global") as graph:
        made.launch()
        for door in (gpu.reset, gpu.close):
            with pytest.raises(CaptureError, match="while another thread captures"):
                run_in_thread(door)
    graph.replay()
    made.check_launches(1)


# The collector


class Cycle:
    """Something that only the collector takes apart."""

    def __init__(self, *holds: object) -> None:
        self.itself, self.holds = self, holds


def test_the_collector_inside_the_window_leaves_the_device_alone(flaky: Flaky) -> None:
    gpu, made = flaky.gpu, axpy_case(flaky.gpu)
    doomed = gpu.kernel(KERNELS, "add", label="doomed.cu")
    bound = doomed.bind(gpu.array([1], "int32"), 1, gpu.array([2], "int32"), 1, grid=1, block=32)
    old = made.captured()
    old.replay()
    event, side = gpu.record(), gpu.stream()
    cycles = [Cycle(gpu.array(made.xs), gpu.array(made.ys)[3:], old, event, side, doomed, bound)]
    gpu._session.kernels.clear()
    gpu._session.modules.clear()
    gpu.synchronize()
    del doomed, bound, old, event, side
    with gpu.capture() as graph:
        made.launch()
        with flaky.asked() as asked:
            cycles.clear()
            gc.collect()
            run_in_thread(gc.collect)
        assert asked == {}
        assert len(gpu._context.deferred_cleanups) >= 6  # four arrays, a graph, an event
        made.launch()
    with flaky.asked("free", "executable.close", "module.unload") as asked:
        gpu.synchronize()
    assert asked == {"free": 4, "executable.close": 1, "module.unload": 1}
    assert not gpu._context.deferred_cleanups
    graph.replay()
    made.check_launches(3)


def test_another_thread_that_allocates_meanwhile_frees_nothing_either(flaky: Flaky) -> None:
    gpu, made = flaky.gpu, axpy_case(flaky.gpu)
    dropped = [gpu.array(made.xs) for _ in range(5)]
    with gpu.capture(), flaky.asked("free", "allocate") as asked:
        made.launch()
        dropped.clear()
        run_in_thread(lambda: made.x.write(gpu.array(made.xs).numpy()))
    assert asked == {"allocate": 1}
    with flaky.asked("free") as asked:
        gpu.empty(1)
    assert asked == {"free": 6}


def test_a_graph_dropped_right_after_its_replay_is_finished_first(device: Gpu) -> None:
    slow, add = device.kernel(SLOW, "slow"), device.kernel(KERNELS, "add")
    x = device.array([0], "int32")
    turns = 100_000 if device.name.startswith("cuda") else 10
    for how in ("close", "drop", "close"):
        y, out = device.array(np.arange(33, dtype=np.int32)), device.empty(33, "int32")
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
        usable(made, 3)
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
        for door in (graph.replay, graph.upload, gpu.capture):
            with pytest.raises(ContextLostError, match="forked from one that was using the GPU"):
                door()
        graph.close()

    run_in_fork(work)
    graph.replay()
    made.check_launches(2)


def test_a_fork_inside_the_window_copies_the_window_too(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)

    def work() -> None:
        made.launch()
        graph.end().replay()
        assert len(graph) == 2
        made.check_launches(2)
        usable(made, 2)

    graph = gpu.capture().begin()
    made.launch()
    run_in_fork(work)
    graph.end().replay()
    assert len(graph) == 1
    made.check_launches(1)
    usable(made, 1)


def test_a_fork_inside_the_window_of_a_device_that_cannot_is_named(
    open_flaky: Callable[..., Flaky],
) -> None:
    flaky = open_flaky("emulator")
    flaky.seam._part.forks = False
    made = axpy_case(flaky.gpu)

    def work() -> None:
        with flaky.asked() as asked:
            with pytest.raises(ContextLostError, match="forked"):
                made.launch()
            with pytest.raises((ContextLostError, CaptureError), match="forked"):
                graph.end()
        assert asked == {}  # the parent's device is left alone

    graph = flaky.gpu.capture().begin()
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
        run_in_fork(lambda: usable(made))
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
