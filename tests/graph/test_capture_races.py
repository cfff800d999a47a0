"""Captures beside other threads, interrupts, and the garbage collector."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from preheat.errors import CaptureError, InputError
from preheat.gpu import Gpu
from preheat.graph.graph import State
from preheat.graph.libraries import RedirectedLibraries
from tests.devices.support import KERNELS
from tests.faulty import FaultyGpu
from tests.graph.support import InterruptedByTestError, axpy_case
from tests.threads import run_in_thread


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_waiting_for_the_device_never_invalidates_a_capture_that_begins(device: Gpu) -> None:
    made = axpy_case(device)
    over = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            while not over.is_set():
                device.synchronize()
        except BaseException as error:  # The thread of the test checks the error.
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            with device.capture() as graph:
                made.launch()
            graph.close()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []


# Python itself swallows what a signal raises inside a finalizer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_capture_interrupted_anywhere_leaves_thread_and_device_usable(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)

    fired: list[int] = []

    def interrupt(*_: object) -> None:
        fired.append(1)
        raise InterruptedByTestError

    def capture(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while not fired:
            with gpu.capture() as graph:
                made.launch()
            graph.close()

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.freeze()  # so that collecting is quick
    try:
        for turn in range(300):
            fired.clear()
            with suppress(InterruptedByTestError):
                capture(0.0003 + turn % 97 * 3e-6)
            gc.collect()  # an interrupt on the threshold of the `with` leaves it to the collector
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.unfreeze()
    gc.collect()
    with gpu.capture() as graph:
        made.launch()
    graph.replay()
    made.check_launches(1)
    gpu.synchronize()
    assert not gpu._context.captures_by_thread
    assert not gpu._context.deferred_cleanups


def test_a_library_that_cannot_be_sent_back_leaves_no_capture_behind(
    faulty: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = axpy_case(faulty.gpu)

    leave = RedirectedLibraries.leave

    def fail(libraries: RedirectedLibraries) -> None:
        leave(libraries)
        raise RuntimeError("no way back")

    with monkeypatch.context() as patch:
        patch.setattr("preheat.graph.libraries.RedirectedLibraries.leave", fail)
        with pytest.raises(RuntimeError, match="no way back"), faulty.gpu.capture() as graph:
            made.launch()
    assert graph.state is State.FAILED
    for _ in range(3):
        with faulty.gpu.capture() as graph:
            made.launch()
    graph.replay()
    made.check_launches(1)


def test_a_dropped_graph_is_ended_by_its_own_thread_only_while_that_lives(device: Gpu) -> None:
    made = axpy_case(device)
    ended = threading.Event()
    dropped, other = threading.Event(), threading.Event()

    def drop() -> None:
        device.capture().begin()
        dropped.set()
        assert other.wait(300)
        made.launch()  # ends it, and runs
        ended.set()

    thread = threading.Thread(target=drop)
    thread.start()
    assert dropped.wait(300)
    device.synchronize()
    assert device._context.captures_by_thread
    other.set()
    thread.join()
    assert ended.is_set()
    assert not device._context.captures_by_thread
    made.check_launches(1)


def test_arrays_closed_by_a_collector_in_between_do_not_deadlock(device: Gpu) -> None:
    doomed = [device.zeros(3) for _ in range(2)]

    class Closer:
        def __del__(self) -> None:
            doomed.pop().close()

    def cycle() -> None:
        loop: list[object] = [Closer()]
        loop.append(loop)

    def collect() -> None:
        gc.collect()

    def work() -> int:
        cycle()
        # Inside, the order of uses is being changed, which may allocate, and so collect.
        device._context.order.run_locked(collect)
        return len(doomed)

    assert run_in_thread(work) == 1


def test_scalars_set_for_a_replay_wait_for_the_one_before_in_another_stream(faulty: FaultyGpu) -> None:
    note = faulty.gpu.kernel(KERNELS, "add")
    step = faulty.gpu.scalar("int32", name="step")
    out = faulty.gpu.zeros(1, "int32")
    with faulty.gpu.capture() as graph:
        note[1, 1](step, 0, out, 1)
    with faulty.gpu.stream() as stream:
        for turn in range(3):
            with faulty.count_calls("stream.wait") as calls:
                graph.replay(stream=stream, step=turn)
                graph.replay(step=turn + 100)
            assert calls["stream.wait"] >= 2
        with faulty.count_calls("stream.wait") as calls:
            graph.replay(step=7)
            graph.replay(step=8)
        assert calls == {}
    assert out.numpy().tolist() == [8]


def test_filling_a_scalar_inside_a_capture_is_setting_it(device: Gpu) -> None:
    note = device.kernel(KERNELS, "add")
    out = device.zeros(1, "int32")
    step = device.scalar("int32", name="step")
    graph = device.capture().begin()
    note[1, 1](step, 0, out, 1)
    with pytest.raises(CaptureError, match="setting a scalar inside a capture"):
        step.fill(7)
    with pytest.raises(CaptureError, match="the capture failed: setting a scalar inside a capture"):
        graph.end()


@pytest.mark.parametrize("name", ["stream", "synchronize"])
def test_names_that_replay_takes_are_refused(name: str, device: Gpu) -> None:
    with pytest.raises(InputError, match=f"cannot be called '{name}'"):
        device.scalar("int32", name=name)


def test_a_scalar_may_be_called_self(device: Gpu) -> None:
    note = device.kernel(KERNELS, "add")
    out = device.zeros(1, "int32")
    step = device.scalar("int32", name="self")
    with device.capture() as graph:
        note[1, 1](step, 0, out, 1)
    for value in (5, 6, 7):
        graph.replay(self=value)
    assert out.numpy().tolist() == [7]


def test_a_replay_into_a_stream_that_another_thread_captures_is_refused(device: Gpu) -> None:
    made = axpy_case(device)
    with device.capture() as first:
        made.launch()
    with device.capture() as second:
        made.launch()
        stream = second.stream
        with pytest.raises(CaptureError, match="another thread is capturing this stream"):
            run_in_thread(lambda: first.replay(stream))
    second.replay()
    made.check_launches(1)


def test_a_profile_may_use_the_graph_of_its_row(device: Gpu) -> None:
    made = axpy_case(device)
    seen = []

    def write(row: Any) -> None:
        seen.append(row["count"])
        if len(seen) < 3:
            graph.replay()

    device.profile(write, every=1)
    with device.capture() as graph:
        made.launch()
    graph.replay()
    assert seen == [1, 2, 3]
    made.check_launches(3)
    assert graph.num_replays == 3


def test_a_profile_that_raises_does_not_disturb_the_replay(device: Gpu) -> None:
    made = axpy_case(device)

    def write(_: Any) -> None:
        raise ValueError("full")

    device.profile(write, every=1)
    with device.capture() as graph:
        made.launch()
    graph.replay()
    assert graph.num_replays == 1
    made.check_launches(1)


def test_an_error_of_a_fill_that_was_caught_inside_is_not_forgotten(device: Gpu) -> None:
    x = device.zeros(3, "int32")
    graph = device.capture().begin()
    with pytest.raises(InputError, match="does not fit int32"):
        x.fill(1.5)
    x.fill(2)
    with pytest.raises(CaptureError, match=r"the capture failed: .* does not fit int32"):
        graph.end()
    assert np.array_equal(x.numpy(), [0, 0, 0])
