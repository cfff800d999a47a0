"""Graphs whose capture, instantiation, upload or replay fails: the error, and what works afterwards."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.emulator.graph import EmulatorExecutable
from preheat.errors import (
    CaptureError,
    ContextLostError,
    DeviceError,
    DriverError,
    EmulatorFault,
    OutOfMemoryError,
)
from preheat.gpu import Gpu
from preheat.graph.graph import State
from tests.devices.support import KERNELS as RUNTIME_KERNELS
from tests.driver_errors import illegal_address, not_supported, out_of_memory
from tests.faulty import FaultyDevice, FaultyGpu
from tests.graph.support import KERNELS, InterruptedByTestError, axpy_case, line_here, nothing_left_open
from tests.threads import run_in_thread

# Captures


@pytest.mark.parametrize("verb", ["stream", "stream.begin_capture"])
def test_a_begin_that_fails_can_be_tried_again(verb: str, faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    graph = faulty.gpu.capture()
    faulty.device.fail(verb, *(not_supported(verb) for _ in range(3)))
    with faulty.count_calls("stream") as calls:
        for _ in range(3):
            with pytest.raises(DriverError, match=verb):
                graph.begin()
            assert (graph.state, graph.status) == (State.NEW, "none")
        graph.begin()
    assert calls == {"stream": 4 if verb == "stream" else 1}  # what was made is used again
    made.launch()
    graph.end().replay()
    made.check_launches(1)
    made.check_usable(1)


@pytest.mark.parametrize("error", [out_of_memory, not_supported])
@pytest.mark.parametrize(
    ("verb", "state"), [("stream.begin_capture", State.NEW), ("graph.num_nodes", State.FAILED)]
)
def test_a_capture_whose_begin_or_end_fails_leaves_nothing_behind(
    verb: str, state: State, error: Callable[[str], DeviceError], faulty: FaultyGpu
) -> None:
    made = axpy_case(faulty.gpu)
    faulty.device.fail(verb, error(verb))
    before = faulty.device.calls.copy()
    graph = faulty.gpu.capture()
    with pytest.raises(DeviceError, match=verb), graph:
        made.launch()
    assert (graph.state, graph.status) == (state, "none")
    made.launch(2)
    again = made.captured(10)
    again.replay()
    made.check(12)
    again.close()
    graph.close()
    faulty.gpu.synchronize()
    calls = faulty.device.calls - before
    assert calls["graph.close"] == calls["stream.end_capture"]
    assert faulty.gpu.empty(1).shape == (1,)


def test_an_end_that_fails_frees_what_was_captured(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    faulty.gpu.synchronize()
    with nothing_left_open(faulty, end=1), faulty.count_calls("allocate", "free") as calls:
        own = faulty.gpu.array(made.xs)
        graph = faulty.gpu.capture().begin()
        made.axpy[5, 64](3, own, made.y, made.n)
        with pytest.raises(DeviceError):
            faulty.gpu._device.synchronize()  # another library's
        with pytest.raises(CaptureError):
            graph.end()
        del own
        gc.collect()
        faulty.gpu.synchronize()
    assert calls == {"allocate": 1, "free": 1}
    assert graph.state is State.FAILED


class _NoRecords:
    """Takes the place of the records of a capture, and takes none."""


def test_a_launch_that_cannot_be_recorded_is_not_submitted_and_fails_the_capture(
    faulty: FaultyGpu,
) -> None:
    """A node without a record would not keep its memory."""
    made = axpy_case(faulty.gpu)
    made.launch(times=4)  # From here on launches are fast.
    graph = faulty.gpu.capture().begin()
    capture: Any = faulty.gpu._context.active_capture()
    made.launch()
    nodes, capture.records = capture.records, _NoRecords()
    with pytest.raises((SystemError, AttributeError)) as raised:
        made.launch()
    capture.records = nodes
    assert capture.stream.num_captured_nodes() == 1
    with pytest.raises(CaptureError, match="the capture failed: ") as caught:
        graph.end()
    assert caught.value.__cause__ is raised.value
    made.check_usable(4)


@pytest.mark.parametrize("submitted", [False, True])
def test_a_launch_that_is_interrupted_fails_the_capture(
    submitted: bool, faulty: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether its node exists."""
    call, armed = FaultyDevice._call, list[bool]()

    def interrupt(self: FaultyDevice, verb: str, *args: Any, **more: Any) -> Any:
        launches = armed and verb == "launch"
        if not launches or submitted:
            done = call(self, verb, *args, **more)
        if launches:
            armed.clear()
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(FaultyDevice, "_call", interrupt)
    made = axpy_case(faulty.gpu)
    made.launch(times=4)
    graph = faulty.gpu.capture().begin()
    made.launch()
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        made.launch()
    made.launch()
    with pytest.raises(CaptureError, match="the capture failed: KeyboardInterrupt") as caught:
        graph.end()
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    made.check_usable(4)


def test_an_interrupt_that_ends_the_body_has_no_note_about_itself(device: Gpu) -> None:
    made = axpy_case(device)

    def body() -> None:
        capture = device._context.active_capture()
        assert capture is not None
        with capture.operation():  # as during the work
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, device.capture():
        body()
    assert not hasattr(caught.value, "__notes__")
    made.check_usable()


# Instantiation and upload


@pytest.mark.parametrize("drop", ["close", "forget"])
def test_an_instantiation_that_fails_can_be_tried_again(drop: str, faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    with nothing_left_open(faulty, instantiate=3):
        graph = faulty.gpu.capture()
        faulty.device.fail(
            "graph.instantiate", *(out_of_memory("cuGraphInstantiate") for _ in range(3))
        )
        with pytest.raises(OutOfMemoryError, match="cuGraphInstantiate"), graph:
            made.launch()
        assert (graph.state, graph.status) == (State.CAPTURED, "none")
        for attempt in (graph.instantiate, graph.replay):
            with pytest.raises(MemoryError) as caught:
                attempt()
            assert isinstance(caught.value, OutOfMemoryError)
            assert (graph.state, graph.num_replays) == (State.CAPTURED, 0)
        made.check(0)
        made.launch(10)
        made.check(10)
        graph.replay()
        assert (graph.state, graph.num_replays) == (State.READY, 1)
        made.check(13)
        if drop == "close":
            graph.close()
        del graph, attempt, caught
        gc.collect()
    made.launch(-10)
    made.check_usable(1)


@pytest.mark.parametrize("drop", ["close", "forget"])
def test_a_graph_that_was_never_instantiated_is_released(drop: str, faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    faulty.device.fail("graph.instantiate", out_of_memory("cuGraphInstantiate"))
    with (
        nothing_left_open(faulty, instantiate=1),
        faulty.count_calls("graph.close", "executable.close") as calls,
    ):
        with pytest.raises(OutOfMemoryError):
            made.captured()
        graph = faulty.gpu.capture().begin()
        made.launch()
        graph.end()
        if drop == "close":
            graph.close()
        del graph
        gc.collect()
        faulty.gpu.synchronize()
    assert calls == {"graph.close": 2}
    made.check_usable()


@pytest.mark.parametrize("errors", [[out_of_memory], [out_of_memory, not_supported]])
def test_an_upload_that_fails_is_tried_again_and_happens_once(
    errors: list[Callable[[str], DeviceError]], faulty: FaultyGpu
) -> None:
    made = axpy_case(faulty.gpu)
    graph = made.captured()
    faulty.device.fail("executable.upload", *(error("cuGraphUpload") for error in errors))
    with faulty.count_calls("executable.upload", "replay") as calls:
        with pytest.raises(OutOfMemoryError):
            graph.upload()
        for _ in errors[1:]:
            with pytest.raises(DriverError, match="cuGraphUpload"):
                graph.replay()
        assert graph.num_replays == 0
        for _ in range(3):
            graph.replay()
    assert calls == {"executable.upload": len(errors) + 1, "replay": 3}
    assert graph.num_replays == 3
    made.check_launches(3)


def test_graphs_made_and_dropped_leave_nothing_behind(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu, 33)
    with nothing_left_open(faulty):
        for _ in range(50):
            made.captured(1).replay()
        gc.collect()
    made.check(50)


# Replays


@pytest.mark.parametrize("warm", [0, 1, 3])
def test_only_replays_that_were_accepted_are_counted(warm: int, faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    graph = made.captured(3)
    for _ in range(warm):
        graph.replay()
    for verb in ("executable.upload", "replay") if warm == 0 else ("replay",):
        faulty.device.fail(verb, out_of_memory("cuGraphLaunch"))
        with pytest.raises(OutOfMemoryError):
            graph.replay()
        assert graph.num_replays == warm
    graph.replay()
    assert graph.num_replays == warm + 1
    made.check(3 * warm + 3)


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("verb", ["replay", "set"])
def test_a_replay_that_fails_is_not_counted_and_the_next_one_works(
    verb: str, warm: int, faulty: FaultyGpu
) -> None:
    gpu = faulty.gpu
    add = faulty.gpu.kernel(RUNTIME_KERNELS, "add")
    step = gpu.scalar("int32", 5, name="step")
    out = gpu.array([1], "int32")
    with gpu.capture() as graph:
        add[1, 32](step, 100, out, 1)
    more: dict[str, Any] = {"step": 7} if verb == "set" else {}
    for _ in range(warm):
        graph.replay(**more)
    faulty.device.fail(verb, not_supported(verb))
    with pytest.raises(DriverError, match=f"{verb} failed: CUDA_ERROR_NOT_SUPPORTED"):
        graph.replay(**more)
    assert graph.num_replays == warm
    graph.replay(step=9)
    assert graph.num_replays == warm + 1
    assert out.numpy().tolist() == [109]


def test_a_replay_interrupted_anywhere_leaves_the_graph_usable(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = axpy_case(open_device("emulator"))
    # The launch takes no time, so that the interrupt hits the replay around it.
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


# Errors that end the context


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("name", ["decode", None])
def test_an_error_that_ends_the_context_names_the_last_graph_replayed(
    name: str | None, warm: int, faulty: FaultyGpu
) -> None:
    made = axpy_case(faulty.gpu)
    before = made.captured(1, name="prefill")
    graph = faulty.gpu.capture(name=name).begin()
    message = name or f"captured at {line_here(-1)}"
    made.launch()
    graph.end()
    before.replay()
    for _ in range(warm):
        graph.replay()
    faulty.device.fail("replay", illegal_address("cuGraphLaunch"))
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS") as caught:
        graph.replay()
    assert str(caught.value).endswith(f"the last graph replayed was {message}")
    assert graph.num_replays == warm
    gpu = faulty.gpu
    with faulty.count_calls() as asked:
        for call in (
            graph.replay,
            graph.upload,
            before.replay,
            gpu.capture,
            gpu.synchronize,
            made.launch,
        ):
            with pytest.raises(ContextLostError, match=f"the last graph replayed was {message}"):
                call()
        graph.close()
    assert asked == {}  # A lost device gets no calls.


@pytest.mark.parametrize("verb", ["copy_out", "launch", "synchronize", "replay"])
def test_an_error_after_a_replay_names_the_graph_at_the_next_call(verb: str, faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    first, second = made.captured(1, name="first"), made.captured(2, name="second")
    for graph in (second, first, second):
        graph.replay()
    calls: dict[str, Callable[[], object]] = {
        "copy_out": made.y.numpy,
        "launch": made.launch,
        "synchronize": faulty.gpu.synchronize,
        "replay": second.replay,
    }
    faulty.device.fail(verb, illegal_address("cuStreamSynchronize"))
    with pytest.raises(DriverError, match="the last graph replayed was second"):
        calls[verb]()


def test_without_a_replay_no_graph_is_named(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    made.captured(1)
    faulty.device.fail("launch", illegal_address("cuLaunchKernelEx"))
    with pytest.raises(DriverError) as caught:
        made.launch()
    assert "graph" not in str(caught.value)


@pytest.mark.parametrize(
    ("kernel", "message"), [("axpy", "past the end of the 1028-byte buffer"), ("crash", "crash")]
)
def test_a_kernel_that_faults_in_a_replay_names_itself_and_the_graph(
    kernel: str, message: str, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("emulator")
    made = axpy_case(gpu)
    crash = gpu.kernel(KERNELS, "crash")
    wild_pointer = gpu.array(np.array([3], np.int64))
    with gpu.capture(name="faulty") as graph:
        if kernel == "axpy":
            made.axpy[5, 64](3, made.x, made.y, made.n + 1)
        else:
            crash[1, 1](wild_pointer)
    with pytest.raises(EmulatorFault, match=message) as caught:
        graph.replay()
    assert "the last graph replayed was faulty" in str(caught.value)
    assert graph.num_replays == 0
    with pytest.raises(ContextLostError, match="the last graph replayed was faulty"):
        graph.replay()
    gpu.reset()
    axpy_case(gpu).check_usable()
