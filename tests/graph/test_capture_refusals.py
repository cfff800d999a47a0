"""Operations that no capture permits, in its thread and in others."""
# ruff: noqa: PT012  (a capture that fails has a body of several statements)

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.devices.active_capture import (
    ALLOCATE,
    FREE,
    FROM_HOST,
    INSTANTIATE,
    LOAD,
    OTHER_STREAM,
    REPLAY,
    RESET,
    RESOLVE_KERNEL,
    SET_SCALAR,
    SYNCHRONIZE,
    TIME_EVENT,
    TO_HOST,
    UNLOAD,
    WAIT_OUTSIDE,
    RefusedOperation,
)
from preheat.devices.array import Array, Scalar
from preheat.devices.kernel import Kernel
from preheat.devices.module import Module, SymbolView
from preheat.devices.stream import Event, Stream
from preheat.errors import CaptureError, DeviceError, DriverError, LaunchError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph, State
from tests.driver_errors import not_supported
from tests.faulty import FaultyGpu
from tests.graph.support import (
    KERNELS,
    MODES,
    AxpyCase,
    BodyError,
    LegacyDefaultStream,
    axpy_case,
    line_here,
    line_of,
    nothing_left_open,
    scalar_log,
)
from tests.threads import run_in_thread

# What no capture can hold


class Scene(NamedTuple):
    """The objects that an operation may use, created before the capture."""

    made: AxpyCase
    module: Module
    spare: Array
    scalar: Scalar
    stream: Stream
    event: Event
    table: SymbolView
    other: Graph

    @property
    def gpu(self) -> Gpu:
        """Return the device."""
        return self.made.gpu


def scene(gpu: Gpu) -> Scene:
    """Return a scene on `gpu`; the context has used the default stream before."""
    made = axpy_case(gpu)
    stream = gpu.stream()
    module = gpu.module(KERNELS)
    made.axpy.launch(0, made.x, made.y, made.n, grid=5, block=64, stream=stream)
    made.axpy.launch(0, made.x, made.y, made.n, grid=5, block=64, stream=LegacyDefaultStream())
    event = gpu.record()
    scalar = gpu.scalar("int32", 41, name="answer")
    spare = gpu.array(made.xs)
    table = module.symbol("table", "int32")
    other = made.captured(100)
    gpu.synchronize()
    return Scene(made, module, spare, scalar, stream, event, table, other)


class Case(NamedTuple):
    """An operation inside a capture, and the error that refuses it."""

    do: Callable[[Scene], object]
    words: str
    act: RefusedOperation | None  # None: work in another stream, which only relaxed captures let pass


ELSEWHERE = "work in a stream other than the captured one"


ACTS = {
    "compile": Case(lambda s: s.gpu.kernel(KERNELS + "\n", "axpy"), "compiling or loading", LOAD),
    "module": Case(lambda s: s.gpu.module(KERNELS, label="x.cu"), "compiling or loading", LOAD),
    "first use": Case(lambda s: s.module["spin"], "first use of a kernel", RESOLVE_KERNEL),
    "empty": Case(lambda s: s.gpu.empty(3), "allocating memory", ALLOCATE),
    "zeros": Case(lambda s: s.gpu.zeros(3), "allocating memory", ALLOCATE),
    "array": Case(lambda s: s.gpu.array([1, 2]), "allocating memory", ALLOCATE),
    "array of array": Case(lambda s: s.gpu.array(s.spare), "allocating memory", ALLOCATE),
    "scalar": Case(lambda s: s.gpu.scalar("int32"), "allocating memory", ALLOCATE),
    "close": Case(lambda s: s.spare.close(), "freeing memory", FREE),
    "numpy": Case(lambda s: s.spare.numpy(), "copying to the host", TO_HOST),
    "get": Case(lambda s: s.scalar.get(), "copying to the host", TO_HOST),
    "read symbol": Case(lambda s: s.table.numpy(), "copying to the host", TO_HOST),
    "write": Case(lambda s: s.spare.write(s.made.ys), "copying from the host", FROM_HOST),
    "write symbol": Case(lambda s: s.table.write([3, 4, 5]), "copying from the host", FROM_HOST),
    "synchronize": Case(lambda s: s.gpu.synchronize(), "synchronising", SYNCHRONIZE),
    "stream.synchronize": Case(lambda s: s.stream.synchronize(), "synchronising", SYNCHRONIZE),
    "stream.done": Case(lambda s: s.stream.done(), "synchronising", SYNCHRONIZE),
    "event.synchronize": Case(lambda s: s.event.synchronize(), "synchronising", SYNCHRONIZE),
    "event.done": Case(lambda s: s.event.done(), "synchronising", SYNCHRONIZE),
    "record": Case(lambda s: s.gpu.record(timing=True), "timing an event", TIME_EVENT),
    "wait": Case(lambda s: s.gpu.wait(s.event), "waiting for outside work", WAIT_OUTSIDE),
    "stream.record": Case(lambda s: s.stream.record(), ELSEWHERE, OTHER_STREAM),
    "stream.wait": Case(lambda s: s.stream.wait(s.event), ELSEWHERE, OTHER_STREAM),
    "set": Case(lambda s: s.scalar.set(42), "setting a scalar", SET_SCALAR),
    "trim": Case(lambda s: s.gpu.trim(), "unloading programs", UNLOAD),
    "reset": Case(lambda s: s.gpu.reset(), "resetting or closing the device", RESET),
    "gpu.close": Case(lambda s: s.gpu.close(), "resetting or closing the device", RESET),
    "replay": Case(lambda s: s.other.replay(), "replaying a graph", REPLAY),
    "upload": Case(lambda s: s.other.upload(), "making a graph ready", INSTANTIATE),
    "another stream": Case(lambda s: in_stream(s.made, s.stream), ELSEWHERE, None),
    "the default stream": Case(lambda s: in_stream(s.made, LegacyDefaultStream()), ELSEWHERE, None),
}


def in_stream(made: AxpyCase, stream: object) -> None:
    """A launch in a stream of the caller's choice."""
    made.axpy.launch(3, made.x, made.y, made.n, grid=5, block=64, stream=stream)


def expected_line(name: str) -> str:
    """Return where an operation is refused: at its own line, or in the function it calls."""
    if ACTS[name].act is not None:
        return line_of(ACTS[name].do)
    file, _, line = line_of(in_stream).partition(":")
    return f"{file}:{int(line) + 2}"


@pytest.mark.parametrize("mode", ["thread_local", "global"])
@pytest.mark.parametrize("name", ACTS)
def test_a_call_that_no_capture_can_hold_raises_at_its_line_and_reaches_no_device(
    name: str, mode: str, faulty: FaultyGpu
) -> None:
    case = ACTS[name]
    made = scene(faulty.gpu)
    with nothing_left_open(faulty):
        with pytest.raises(CaptureError) as out, faulty.gpu.capture(mode=mode) as graph:
            made.made.launch()
            with faulty.count_calls() as calls, pytest.raises(CaptureError) as caught:
                case.do(made)
            assert (calls, graph.status) == ({}, "active")
            raise caught.value
        assert out.value is caught.value
        assert f"{caught.value}".startswith(f"{expected_line(name)}: {case.words}")
        assert caught.value.where == expected_line(name)
        assert caught.value.hint
        assert graph.state is State.FAILED
        made.made.check(0)  # the device is as it was, and so is what the act concerned
        np.testing.assert_array_equal(made.spare.numpy(), made.made.xs)
        np.testing.assert_array_equal(made.table.numpy(), [1, 2, 3])
        assert made.scalar.get() == 41
        made.other.replay()
        made.made.check(100)


@pytest.mark.parametrize("name", ACTS)
def test_a_swallowed_error_comes_out_at_the_end_whatever_went_wrong_later(
    name: str, faulty: FaultyGpu
) -> None:
    case = ACTS[name]
    made = scene(faulty.gpu)
    with nothing_left_open(faulty):
        graph = faulty.gpu.capture().begin()
        made.made.launch()
        with pytest.raises(CaptureError):
            case.do(made)
        with pytest.raises(LaunchError):
            made.made.axpy[1, 32](1)
        for other in ACTS.values():
            with pytest.raises(CaptureError):
                other.do(made)
        made.made.launch()
        with pytest.raises(CaptureError, match="the capture failed") as caught:
            graph.end()
        assert case.words in str(caught.value)
        assert caught.value.where == expected_line(name)
        assert isinstance(caught.value.__cause__, CaptureError)
        assert caught.value.hint == caught.value.__cause__.hint
        assert graph.state is State.FAILED
        made.made.check(0)


RELAXED = [name for name, case in ACTS.items() if case.act is None or case.act.relaxed]


@pytest.mark.parametrize("name", sorted(ACTS.keys() - set(RELAXED)))
def test_a_relaxed_capture_refuses_what_concerns_every_capture(name: str, device: Gpu) -> None:
    made = scene(device)
    with pytest.raises(CaptureError, match=ACTS[name].words), device.capture(mode="relaxed"):
        made.made.launch()
        ACTS[name].do(made)
    made.made.check(0)


@pytest.mark.parametrize("name", sorted(set(RELAXED) - {"array", "scalar", "array of array"}))
def test_a_relaxed_capture_lets_the_rest_pass(name: str, device: Gpu) -> None:
    made = scene(device)
    with device.capture(mode="relaxed") as graph:
        made.made.launch(3)
        kept = ACTS[name].do(made)
        made.made.launch(4)
        assert graph.status == "active"
    device.synchronize()
    eager = 3 if ACTS[name].act is None else 0
    made.made.check(eager)
    graph.replay()
    made.made.check(eager + 7)
    del kept


@pytest.mark.parametrize(("name", "words"), [("array", "copying from"), ("scalar", "setting a scalar")])
def test_a_relaxed_capture_allocates_but_gives_no_value(name: str, words: str, device: Gpu) -> None:
    made = scene(device)
    with pytest.raises(CaptureError, match=words), device.capture(mode="relaxed"):
        ACTS[name].do(made)


def test_the_captured_stream_is_never_asked_or_waited_for(device: Gpu) -> None:
    made = axpy_case(device)
    stream = device.stream()
    operations: list[Callable[[], object]] = [
        stream.synchronize,
        stream.done,
        lambda: stream.record().done(),
        lambda: stream.record().synchronize(),
        device.synchronize,
    ]
    for mode in MODES:
        for door in operations:
            with pytest.raises(CaptureError), device.capture(stream=stream, mode=mode):
                made.launch()
                door()
            made.check(0)


def test_a_wrong_argument_is_the_first_error_of_its_capture(device: Gpu) -> None:
    made = axpy_case(device)
    with pytest.raises(LaunchError, match="axpy, argument 0") as caught, device.capture():
        made.axpy[5, 64]("three", made.x, made.y, made.n)
    assert caught.value.argument == 0
    graph = device.capture().begin()
    made.launch()
    with pytest.raises(LaunchError):
        made.axpy[5, 64](2.5, made.x, made.y, made.n)
    line = line_here(-1)
    with pytest.raises(CaptureError):
        made.y.numpy()
    with pytest.raises(CaptureError, match="axpy, argument 0: ") as ended:
        graph.end()
    assert ended.value.where == line
    assert isinstance(ended.value.__cause__, LaunchError)
    made.check(0)


def test_a_closed_array_is_a_wrong_argument(device: Gpu) -> None:
    made = axpy_case(device)
    made.x.close()
    with pytest.raises(LaunchError, match="axpy, argument 1"), device.capture():
        made.launch()


def test_a_device_call_that_fails_inside_is_the_first_error(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    first = not_supported("cuLaunchKernelEx")
    faulty.device.fail("launch", None, first, not_supported("later"))
    with nothing_left_open(faulty):
        graph = faulty.gpu.capture().begin()
        made.launch()
        for call in ("cuLaunchKernelEx", "later"):
            with pytest.raises(DriverError, match=f"{call} failed: CUDA_ERROR_NOT_SUPPORTED"):
                made.launch()
        with pytest.raises(CaptureError):
            faulty.gpu.synchronize()
        with pytest.raises(CaptureError, match="the capture failed: cuLaunchKernelEx failed") as caught:
            graph.end()
        assert caught.value.__cause__ is first
        assert str(caught.value.where).startswith("tests/graph/support.py:")
        assert graph.state is State.FAILED
        made.check_usable()


def test_a_launch_that_fails_inside_leaves_nothing_to_the_garbage_collector(faulty: FaultyGpu) -> None:
    """torch ends the process if the collector frees a pool of its memory inside a later capture."""
    made = axpy_case(faulty.gpu)
    made.launch()
    made.launch()
    faulty.device.fail("launch", None, not_supported("cuLaunchKernelEx"))
    graph = faulty.gpu.capture().begin()
    capture = weakref.ref(graph._capture)
    made.launch()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(DriverError):
            made.launch()
        with pytest.raises(CaptureError):
            graph.end()
        del graph
        assert capture() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("work", ["launch", "fill"])
@pytest.mark.parametrize("mode", MODES)
def test_a_capture_that_another_library_invalidates_names_the_last_good_line(
    mode: str, work: str, faulty: FaultyGpu
) -> None:
    made = axpy_case(faulty.gpu)
    with nothing_left_open(faulty, end=1):
        graph = faulty.gpu.capture(mode=mode).begin()
        made.launch()
        if work == "launch":
            made.axpy[5, 64](1, made.x, made.y, made.n)
            last = line_here(-1)
        else:
            made.y.fill(3)
            last = line_here(-1)
        with pytest.raises(DeviceError):
            faulty.gpu._device.synchronize()
        assert graph.status == "invalidated"
        message = "a call of another library invalidated the capture"
        with pytest.raises(CaptureError, match=message) as caught:
            graph.end()
        assert caught.value.where == last
        assert "synchronisation" in str(caught.value.hint)
        assert (graph.state, graph.status) == (State.FAILED, "none")
        made.check_usable()


def test_work_in_an_invalidated_capture_raises_at_its_own_line(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    args = (1, made.x, made.y, made.n)
    with nothing_left_open(faulty, end=1):
        graph = faulty.gpu.capture().begin()
        made.axpy[5, 64](*args)
        last = line_here(-1)
        with pytest.raises(DeviceError):
            faulty.gpu._device.synchronize()
        message = f"another library invalidated the capture, after {last}.*INVALIDATED"
        for _ in range(2):
            with pytest.raises(CaptureError, match=message) as caught:
                made.axpy[5, 64](*args)
            assert caught.value.where == line_here(-1)
        with pytest.raises(CaptureError, match=message) as ended:
            graph.end()
        assert ended.value.where == caught.value.where
        made.check_usable()


def test_a_body_that_raises_after_such_a_call_is_annotated_with_it(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    with pytest.raises(BodyError) as caught, faulty.gpu.capture():
        made.axpy[5, 64](1, made.x, made.y, made.n)
        last = line_here(-1)
        with pytest.raises(DeviceError):
            faulty.gpu._device.synchronize()
        raise BodyError
    (note,) = caught.value.__notes__
    assert (
        f"inside this capture was, at {last}: a call of another library invalidated the capture" in note
    )
    made.check(0)


# Other threads


def test_other_threads_work_on_while_one_captures_for_itself(device: Gpu) -> None:
    made = scene(device)
    mine = axpy_case(device)
    stream = device.stream()

    def busy() -> np.ndarray[Any, Any]:
        own = device.array(mine.xs)
        device.zeros(33, "int32").close()
        mine.axpy[5, 64](2, own, mine.y, mine.n)
        mine.axpy.launch(3, own, mine.y, mine.n, grid=5, block=64, stream=stream)
        event = device.record()
        stream.wait(event)
        event.synchronize()
        stream.synchronize()
        assert event.done()
        assert stream.done()
        made.scalar.set(7)
        assert made.scalar.get() == 7
        made.other.replay()
        device.kernel(KERNELS + "// other\n", "axpy")
        device.synchronize()
        device.trim()
        return mine.y.numpy()

    with device.capture() as graph:
        made.made.launch(5)
        seen = run_in_thread(busy)
        assert graph.status == "active"
        made.made.launch(6)
    np.testing.assert_array_equal(seen, mine.ys + 5 * mine.xs)
    made.made.check(100)
    assert len(graph) == 2  # nothing of the other thread's
    graph.replay()
    made.made.check(111)


@pytest.mark.parametrize("name", ["read symbol", "write symbol"])
def test_symbols_work_in_other_threads_while_one_captures_for_itself(name: str, device: Gpu) -> None:
    made = scene(device)
    with device.capture() as graph:
        made.made.launch(5)
        run_in_thread(lambda: ACTS[name].do(made))
        assert graph.status == "active"
    graph.replay()
    made.made.check(5)


UNSAFE = [name for name, case in ACTS.items() if case.act is not None and case.act.unsafe]


@pytest.mark.parametrize("name", UNSAFE)
def test_a_global_capture_hinders_other_threads_and_stays_valid(name: str, faulty: FaultyGpu) -> None:
    made = scene(faulty.gpu)
    with faulty.gpu.capture(mode="global") as graph:
        began = line_here(-1)
        made.made.launch(5)
        with faulty.count_calls() as calls, pytest.raises(CaptureError) as caught:
            run_in_thread(lambda: ACTS[name].do(made))
        assert calls == {}
        made.made.launch(6)
    assert f"{caught.value.where}: {ACTS[name].words}" in str(caught.value)
    assert str(caught.value).endswith(f" while another thread captures (since {began})")
    assert caught.value.where == line_of(ACTS[name].do)
    graph.replay()
    made.made.check(11)


def test_a_global_capture_lets_other_threads_launch_and_replay(device: Gpu) -> None:
    made = axpy_case(device)
    mine = axpy_case(device, 33)
    noted = scalar_log(device)
    other = mine.captured(10)
    notes = noted.captured()
    operations: list[Callable[[], object]] = [
        lambda: mine.launch(2),
        other.replay,
        lambda: notes.replay(step=4),
        lambda: noted.step.set(5),
        lambda: notes.replay(),
    ]
    with device.capture(mode="global") as graph:
        made.launch(5)
        for door in operations:
            run_in_thread(door)
            assert graph.status == "active"
    assert len(graph) == 1
    graph.replay()
    made.check(5)
    mine.check(12)
    assert noted.seen() == [4, 5]


def test_no_other_thread_works_in_the_captured_stream(device: Gpu) -> None:
    made = axpy_case(device)
    with device.capture() as graph:
        made.launch(5)
        captured = graph.stream
        with pytest.raises(CaptureError, match="another thread is capturing this stream"):
            run_in_thread(lambda: in_stream(made, captured))
        assert graph.status == "active"
    assert len(graph) == 1
    graph.replay()
    made.check(5)


class Home(NamedTuple):
    """Memory allocated in a stream, and a graph that uses it."""

    gpu: Gpu
    stream: Stream
    x: Array
    y: Array
    axpy: Kernel
    graph: Graph


HOMES: dict[str, Callable[[Home], object]] = {
    "fill": lambda h: h.x.fill(1),
    "copy": lambda h: h.x.copy_from(h.y),
    "write": lambda h: h.x.write(np.arange(33, dtype=np.int32)),
    "numpy": lambda h: h.x.numpy(),
    "launch": lambda h: h.axpy[1, 64](1, h.x, h.y, 33),
    "close": lambda h: h.x.close(),
    "empty": lambda h: h.gpu.empty(3, stream=h.stream),
    "replay": lambda h: h.graph.replay(),
    "replay there": lambda h: h.graph.replay(stream=h.stream),
    "wait": lambda h: h.stream.wait(h.gpu.record()),
}


def home(gpu: Gpu) -> Home:
    """Such memory, on `gpu`."""
    stream = gpu.stream()
    axpy = gpu.kernel(KERNELS, "axpy")
    x, y = (gpu.array(np.arange(1, 34, dtype=np.int32), stream=stream) for _ in range(2))
    with gpu.capture() as graph:
        axpy[1, 64](1, x, y, 33)
    gpu.synchronize()
    return Home(gpu, stream, x, y, axpy, graph)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HOMES)
def test_the_stream_a_capture_is_meant_for_stays_free_for_other_threads(
    name: str, mode: str, device: Gpu
) -> None:
    made = home(device)
    mine = axpy_case(device)
    refused = mode == "global" and name in ("write", "numpy", "close", "empty")
    with device.capture(stream=made.stream, mode=mode) as graph:
        mine.launch(5)
        with pytest.raises(CaptureError) if refused else nullcontext():
            run_in_thread(lambda: HOMES[name](made))
        assert graph.status == "active"
        mine.launch(6)
    assert len(graph) == 2
    graph.replay()
    mine.check(11)


@pytest.mark.parametrize("name", ["close", "empty"])
def test_memory_of_that_stream_comes_and_goes_beside_a_relaxed_capture(name: str, device: Gpu) -> None:
    made = home(device)
    mine = axpy_case(device)
    with device.capture(stream=made.stream, mode="relaxed") as graph:
        mine.launch(5)
        HOMES[name](made)
        assert graph.status == "active"
    graph.replay()
    mine.check(5)
