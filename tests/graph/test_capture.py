"""Captures: begin and end, bodies that raise, and finalizers during a capture."""
# ruff: noqa: PT012  (a capture that fails has a body of several statements)

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.errors import CaptureError, GraphError, InputError
from preheat.gpu import Gpu
from preheat.graph.graph import State
from tests.devices.support import SIZES
from tests.faulty import FaultyGpu
from tests.graph.support import (
    MODES,
    AxpyCase,
    BodyError,
    LegacyDefaultStream,
    axpy_case,
    line_here,
    nothing_left_open,
)
from tests.threads import run_in_thread

# Begin and end


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", SIZES)
def test_a_body_becomes_a_graph_and_nothing_runs_before_its_replay(
    mode: str, n: int, device: Gpu
) -> None:
    made = axpy_case(device, n)
    with device.capture(mode=mode) as graph:
        made.launch(3)
        made.launch(-5)
    assert graph.state is State.READY
    made.check(0)
    graph.replay()
    made.check(-2)


@pytest.mark.parametrize("mode", MODES)
def test_begin_and_end_do_what_the_with_statement_does(mode: str, device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture(mode=mode)
    assert (graph.state, graph.status) == (State.NEW, "none")
    assert graph.begin() is graph
    made.launch(7)
    assert (graph.state, graph.status) == (State.CAPTURING, "active")
    assert graph.end() is graph
    assert (graph.state, graph.status) == (State.CAPTURED, "none")
    assert graph.instantiate() is graph
    assert graph.state is State.READY
    graph.replay()
    made.check(7)


def test_work_outside_the_capture_runs_at_once(device: Gpu) -> None:
    made = axpy_case(device)
    made.launch(2)
    graph = made.captured(10)
    made.launch(3)
    made.check(5)
    graph.replay()
    made.check(15)


@pytest.mark.parametrize("warm", [0, 1, 5])
def test_launches_are_captured_through_every_way_to_launch(warm: int, device: Gpu) -> None:
    made = axpy_case(device)
    grid = -(-made.n // 64)
    block = 64
    args = (2, made.x, made.y, made.n)
    bound = made.axpy.bind(*args, grid=grid, block=block)
    kept = made.axpy[grid, block]
    operations: list[Callable[[], None]] = [
        made.launch,
        bound,
        lambda: kept(*args),
        lambda: made.axpy.launch(*args, grid=grid, block=block, shared=64),
    ]
    for operation in operations * warm:
        operation()
    made.check(warm * 9)
    with device.capture() as graph:
        for operation in operations:
            operation()
    made.check(warm * 9)
    assert len(graph) == len(operations)
    graph.replay()
    made.check(warm * 9 + 9)


def test_the_captured_stream_may_be_named_inside(device: Gpu) -> None:
    made = axpy_case(device)
    stream = device.stream()
    for given in (None, stream):
        with device.capture(stream=given) as graph:
            where: Any = graph.stream if given is None else stream
            made.axpy.launch(2, made.x, made.y, made.n, grid=5, block=64, stream=where)
        assert len(graph) == 1
        graph.replay()
    made.check(4)
    with pytest.raises(CaptureError, match="no capture is under way"):
        _ = graph.stream


def test_fills_and_copies_become_nodes(device: Gpu) -> None:
    made = axpy_case(device, 33)
    wide = device.array(np.arange(33) * 0.5)
    other = device.array(made.ys)
    with device.capture() as graph:
        made.x.fill(4)
        made.y.copy_from(made.x)
        made.launch(2)
        wide[3:20].fill(1.25)
        other[:0].fill(1)  # nothing to do is no node
    assert [node.kind for node in graph.nodes] == ["fill", "copy", "kernel", "fill"]
    np.testing.assert_array_equal(made.x.numpy(), made.xs)
    graph.replay()
    np.testing.assert_array_equal(made.y.numpy(), np.full(33, 12, np.int32))
    expected = np.arange(33) * 0.5
    expected[3:20] = 1.25
    np.testing.assert_array_equal(wide.numpy(), expected)


def test_an_end_without_a_begin_is_an_error(device: Gpu) -> None:
    graph = device.capture()
    with pytest.raises(CaptureError, match="there is no capture to end: this graph is new") as caught:
        graph.end()
    assert caught.value.hint == "begin it first: graph.begin()"
    made = axpy_case(device)
    with pytest.raises(CaptureError, match="this graph is ready"):
        made.captured().end()


def test_a_graph_cannot_begin_twice(device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture().begin()
    began = line_here(-1)
    made.launch(3)
    with pytest.raises(CaptureError, match=f"being captured already, since {began}"):
        graph.begin()
    graph.end().replay()
    made.check(3)
    with pytest.raises(CaptureError, match="this graph is ready already") as caught:
        graph.begin()
    assert caught.value.hint == "a new capture is a new graph"


def test_a_thread_captures_one_graph_at_a_time(device: Gpu) -> None:
    made = axpy_case(device)
    second = device.capture()
    with device.capture() as graph:
        made.launch(3)
        with pytest.raises(CaptureError, match="this thread is capturing already"):
            second.begin()
        assert second.state is State.NEW
        made.launch(4)
    graph.replay()
    made.check(7)
    with second:
        made.launch(5)
    second.replay()
    made.check(12)


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_default_stream_is_not_captured(handle: int, device: Gpu) -> None:
    with pytest.raises(CaptureError, match="the legacy default stream cannot be captured") as caught:
        device.capture(stream=LegacyDefaultStream(handle))
    assert "its own stream" in str(caught.value.hint)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_graph_is_an_error_that_names_its_begin(mode: str, faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    with nothing_left_open(faulty):
        graph = faulty.gpu.capture(mode=mode).begin()
        began = line_here(-1)
        with pytest.raises(CaptureError, match="nothing was captured") as caught:
            graph.end()
        assert caught.value.where == began
        assert (graph.state, graph.status) == (State.FAILED, "none")
        made.captured().close()


def test_an_unknown_mode_is_refused_with_the_known_ones(device: Gpu) -> None:
    with pytest.raises(InputError, match="'local' is not a capture mode") as caught:
        device.capture(mode="local")
    assert caught.value.hint == "use one of thread_local, global, relaxed"


def test_another_thread_can_neither_end_a_capture_nor_launch_into_it(device: Gpu) -> None:
    made = axpy_case(device)
    graph = device.capture().begin()
    began = line_here(-1)
    made.launch(3)
    message = f"belongs to another thread, which began it at {began}"
    with pytest.raises(CaptureError, match=message) as caught:
        run_in_thread(graph.end)
    assert caught.value.hint == "end it in the thread that began it"
    assert (graph.state, graph.status) == (State.CAPTURING, "active")

    def launch() -> None:
        made.axpy.launch(3, made.x, made.y, made.n, grid=5, block=64, stream=graph.stream)

    with pytest.raises(CaptureError, match="another thread is capturing this stream"):
        run_in_thread(launch)
    made.launch(4)
    graph.end().replay()
    assert len(graph) == 2
    made.check(7)


def test_a_graph_that_is_captured_cannot_be_closed(device: Gpu) -> None:
    made = axpy_case(device)
    with device.capture() as graph:
        made.launch()
        with pytest.raises(CaptureError, match="still being captured"):
            graph.close()
    graph.replay()
    made.check(3)


# A body that raises


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("launches", [0, 1, 3])
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_body_that_raises_leaves_everything_usable(
    mode: str, launches: int, own_stream: bool, faulty: FaultyGpu
) -> None:
    gpu = faulty.gpu
    made = axpy_case(gpu)
    stream = gpu.stream() if own_stream else None
    with nothing_left_open(faulty):
        for _ in range(3):
            graph = gpu.capture(mode=mode, stream=stream)
            with pytest.raises(BodyError, match="mine") as caught, graph:
                for _ in range(launches):
                    made.launch()
                raise BodyError("mine")
            assert not hasattr(caught.value, "__notes__")
            assert (graph.state, graph.status) == (State.FAILED, "none")
            with pytest.raises(CaptureError, match="this graph is failed already"):
                graph.begin()
        made.launch(2)
        if stream is not None:
            made.axpy.launch(5, made.x, made.y, made.n, grid=5, block=64, stream=stream)
            stream.synchronize()
        total = 2 + 5 * own_stream
        made.check(total)
        again = made.captured(10, mode=mode, stream=stream)
        again.replay()
        made.check(total + 10)
        again.close()


def test_a_body_that_raises_releases_what_it_used(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    faulty.gpu.synchronize()
    with faulty.count_calls("allocate", "free") as calls:
        own = faulty.gpu.array(made.xs)
        buffer = weakref.ref(own.buffer)
        with pytest.raises(BodyError), faulty.gpu.capture() as graph:
            made.axpy[5, 64](1, own, made.y, made.n)
            raise BodyError
        del own
        gc.collect()
        assert buffer() is None
        faulty.gpu.synchronize()
    assert calls == {"allocate": 1, "free": 1}
    assert graph.state is State.FAILED


STEPS: tuple[Callable[[AxpyCase], object], ...] = (
    lambda b: b.launch(),
    lambda b: b.y.fill(7),
    lambda b: b.y.copy_from(b.x),
    lambda b: b.launch(times=3),
)


@pytest.mark.parametrize("kind_of_error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("at", range(len(STEPS) + 1))
def test_a_body_that_raises_anywhere_leaves_nothing_behind(
    at: int, kind_of_error: type[BaseException], faulty: FaultyGpu
) -> None:
    made = axpy_case(faulty.gpu)
    raised = kind_of_error("mine")
    graph = faulty.gpu.capture()

    verbs = ("stream.begin_capture", "stream.end_capture", "graph.close")
    with faulty.count_calls(*verbs) as calls, pytest.raises(kind_of_error) as caught, graph:
        for step in STEPS[:at]:
            step(made)
        raise raised
    assert caught.value is raised
    assert calls == dict.fromkeys(verbs, 1)
    assert (graph.state, graph.status, len(graph)) == (State.FAILED, "none", 0)
    with pytest.raises(GraphError, match="cannot be replayed: its capture failed"):
        graph.replay()
    with pytest.raises(CaptureError, match="this graph is failed already"):
        graph.begin()
    made.check_usable()


def test_the_first_error_inside_is_noted_on_what_the_body_raises(device: Gpu) -> None:
    made = axpy_case(device)
    with pytest.raises(BodyError) as caught, device.capture():
        made.launch()
        try:
            made.y.numpy()
        except CaptureError as error:
            where = line_here(-2)
            first = error
        raise BodyError
    (note,) = caught.value.__notes__
    assert note.startswith(f"the first error inside this capture was, at {where}: ")
    assert "copying to the host inside a capture" in note
    assert str(first) in note
    made.check_usable()


# Finalizers


@pytest.mark.parametrize("mode", MODES)
def test_finalizers_release_nothing_before_the_capture_ends(mode: str, faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    dead = [faulty.gpu.array(made.xs) for _ in range(5)]
    events = [faulty.gpu.record() for _ in range(300)]
    old = made.captured(1)
    module = faulty.gpu.module("__global__ void f() {}")
    loop: list[object] = [dead.pop(), dead.pop()]
    loop.append(loop)
    verbs = ("free", "graph.close", "executable.close", "module.unload")
    with faulty.count_calls(*verbs) as calls, faulty.gpu.capture(mode=mode) as graph:
        made.launch(3)
        del dead, events, old, module, loop
        gc.collect()
        made.launch(4)
        assert graph.status == "active"
        assert faulty.device.calls["free"] == 0
    assert calls == {"graph.close": 1}  # the new one's, which is instantiated
    with faulty.count_calls("free", "executable.close") as calls:
        graph.replay()
        faulty.gpu.synchronize()
    assert calls == {"free": 5, "executable.close": 1}
    made.check(7)
