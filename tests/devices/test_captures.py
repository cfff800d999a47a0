"""Captures at the device interface: all devices have the same states and the same error codes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.devices import base
from preheat.devices.arguments import new_param_buffer
from preheat.devices.base import Geometry
from preheat.devices.host import host_bytes
from preheat.errors import DriverError
from preheat.gpu import Gpu
from tests.graph.support import KERNELS, axpy_case
from tests.threads import run_in_thread

MODES = ["thread_local", "global", "relaxed"]
ILLEGAL, UNSUPPORTED, INVALIDATED, INVALID_VALUE = 401, 900, 901, 1
UNJOINED, ISOLATION, CAPTURED_EVENT, WRONG_THREAD = 904, 905, 907, 908


class Seam(NamedTuple):
    """A device below the runtime: a stream to capture, another, memory, a module to unload."""

    device: base.Device
    captured: base.Stream
    other: base.Stream
    address: int
    module: base.Module
    spare: base.Module
    load: Callable[[], base.Module]
    event: base.Event  # recorded before, in the other stream

    def fill(self, stream: base.Stream, value: int = 7) -> None:
        """Some work."""
        self.device.fill(self.address, value.to_bytes(4, "little"), 3, stream)

    def words(self) -> list[int]:
        """Return what the memory holds."""
        out = np.zeros(6, np.int32)
        self.device.copy_out(host_bytes(out), self.address, self.other)
        return [int(word) for word in out]


@pytest.fixture
def seam(device: Gpu) -> Iterator[Seam]:
    raw = device._device
    artifact = device.module(KERNELS).artifact
    captured, other = raw.stream(), raw.stream()
    address = raw.allocate(24, other)
    raw.fill(address, bytes(4), 6, other)
    event = other.record()
    raw.synchronize()

    def load() -> base.Module:
        return raw.load(artifact)

    yield Seam(raw, captured, other, address, load(), load(), load, event)
    if captured.capture_status() != "none":  # a test that failed in the middle
        code_of(captured.end_capture)
    raw.synchronize()
    raw.free(address, other)
    event.close()
    for stream in (captured, other):
        stream.close()


def code_of(do: Callable[[], object]) -> int:
    """Return the number of the error that `do` raises; 0 where it raises none."""
    try:
        do()
    except DriverError as error:
        return error.code
    return 0


Call = Callable[[Seam], object]

#: Calls that invalidate every capture they affect, from any thread.
EVERYWHERE: dict[str, Call] = {
    "synchronize": lambda s: s.device.synchronize(),
    "captured.synchronize": lambda s: s.captured.synchronize(),
    "captured.done": lambda s: s.captured.done(),
}
#: Calls that concern global captures from any thread, others from their own, relaxed ones never.
WATCHED: dict[str, Call] = {"unload": lambda s: s.spare.unload()}
#: Calls that concern no capture.
HARMLESS: dict[str, Call] = {
    "other.synchronize": lambda s: s.other.synchronize(),
    "other.done": lambda s: s.other.done(),
    "event.done": lambda s: s.event.done(),
    "event.synchronize": lambda s: s.event.synchronize(),
    "allocate": lambda s: s.device.free(s.device.allocate(64, s.other), s.other),
    "copy_out": lambda s: s.words(),
    "fill": lambda s: s.fill(s.other, 5),
    "copy": lambda s: s.device.copy(s.address + 12, s.address, 12, s.other),
    "record": lambda s: s.other.record().close(),
    "wait": lambda s: s.other.wait(s.event),
    "load": lambda s: s.load(),
    "function": lambda s: s.module.function("note"),
    "symbol": lambda s: s.module.symbol("table"),
    "set": lambda s: s.device.setter([(s.address, 4)], s.other)(b"\1\0\0\0"),
    "captured.record": lambda s: s.captured.record().close(),
    "status": lambda s: s.captured.capture_status(),
    "stream": lambda s: s.device.stream().close(),
}
#: Calls that concern the captured stream: the number they get.
WRONG: dict[str, tuple[Call, int]] = {
    "wait for an outside event": (lambda s: s.captured.wait(s.event), ISOLATION),
    "ask a captured event": (lambda s: s.captured.record().done(), CAPTURED_EVENT),
    "wait for a captured event": (lambda s: s.captured.record().synchronize(), CAPTURED_EVENT),
}


def rows() -> Iterator[tuple[str, str, str, int]]:
    """Yield mode, thread, call and its error code; a call with an error invalidates the capture."""
    for mode in MODES:
        for thread in ("same", "other"):
            yield from ((mode, thread, name, UNSUPPORTED) for name in EVERYWHERE)
            yield from ((mode, thread, name, 0) for name in HARMLESS)
            yield from ((mode, thread, name, code) for name, (_, code) in WRONG.items())
            seen = mode == "global" or (mode == "thread_local" and thread == "same")
            yield from ((mode, thread, name, UNSUPPORTED if seen else 0) for name in WATCHED)


CALLS: dict[str, Call] = EVERYWHERE | WATCHED | HARMLESS | {name: do for name, (do, _) in WRONG.items()}


@pytest.mark.parametrize(("mode", "thread", "name", "code"), list(rows()))
def test_a_call_during_a_capture_gets_the_error_of_its_mode_and_thread(
    mode: str, thread: str, name: str, code: int, seam: Seam
) -> None:
    seam.captured.begin_capture(mode)
    seam.fill(seam.captured)
    assert seam.captured.capture_status() == "active"

    def call() -> int:
        return code_of(lambda: CALLS[name](seam))

    assert (run_in_thread(call) if thread == "other" else call()) == code
    assert seam.captured.capture_status() == ("invalidated" if code else "active")
    if code:
        assert code_of(lambda: seam.fill(seam.captured)) == INVALIDATED
        assert code_of(seam.captured.end_capture) == INVALIDATED
    else:
        seam.fill(seam.captured, 8)
        graph = seam.captured.end_capture()
        assert [node.kind for node in graph.nodes()] == ["fill", "fill"]
        graph.close()
    assert seam.captured.capture_status() == "none"
    seam.captured.synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_captured_work_runs_when_it_is_replayed(mode: str, seam: Seam) -> None:
    seam.captured.begin_capture(mode)
    seam.fill(seam.captured, 9)
    seam.device.copy(seam.address + 12, seam.address, 12, seam.captured)
    graph = seam.captured.end_capture()
    assert [(node.kind, node.name) for node in graph.nodes()] == [("fill", ""), ("copy", "")]
    assert seam.words() == [0] * 6
    executable = graph.instantiate()
    graph.close()
    executable.upload(seam.other)
    replay = executable.prepare(seam.other)
    assert seam.words() == [0] * 6
    assert replay()[0] == 0
    assert seam.words() == [9] * 6
    executable.close()


def test_kernels_are_captured_with_the_parameters_of_the_moment(seam: Seam, device: Gpu) -> None:
    made = axpy_case(device, 33)
    device.synchronize()
    block = new_param_buffer(made.axpy._signature)
    function = seam.module.function("axpy")
    submit = function.prepare(Geometry((1, 1, 1), (64, 1, 1)), seam.captured)
    seam.captured.begin_capture("thread_local")
    for a in (3, 4):
        block.pack(a, made.x.address, made.y.address, 33)
        assert submit(block.pointers, 0)[0] == 0
    graph = seam.captured.end_capture()
    assert graph.nodes() == [("kernel", "axpy")] * 2
    block.pack(0, 0, 0, 0)
    executable = graph.instantiate()
    graph.close()
    assert executable.prepare(seam.captured)()[0] == 0
    seam.captured.synchronize()
    made.check(7)
    executable.close()


@pytest.mark.parametrize("mode", MODES)
def test_another_thread_may_add_to_a_captured_stream(mode: str, seam: Seam) -> None:
    seam.captured.begin_capture(mode)
    seam.fill(seam.captured, 1)
    run_in_thread(lambda: seam.fill(seam.captured, 2))
    graph = seam.captured.end_capture()
    assert len(graph.nodes()) == 2
    graph.close()


@pytest.mark.parametrize("mode", MODES)
def test_beginning_a_capture_twice_is_illegal(mode: str, seam: Seam) -> None:
    seam.captured.begin_capture(mode)
    for again in MODES:
        assert code_of(lambda again=again: seam.captured.begin_capture(again)) == ILLEGAL  # type: ignore[misc]
    assert seam.captured.capture_status() == "active"
    seam.captured.end_capture().close()


def test_ending_without_a_capture_is_illegal(seam: Seam) -> None:
    assert seam.captured.capture_status() == "none"
    assert code_of(seam.captured.end_capture) == ILLEGAL
    assert seam.captured.capture_status() == "none"


@pytest.mark.parametrize("handle", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_capturing_the_legacy_default_stream_is_unsupported(mode: str, handle: int, seam: Seam) -> None:
    stream = seam.device.adopt(handle)
    assert code_of(lambda: stream.begin_capture(mode)) == UNSUPPORTED
    assert stream.capture_status() == "none"


@pytest.mark.parametrize("mode", MODES)
def test_ending_in_another_thread_depends_on_the_mode(mode: str, seam: Seam) -> None:
    seam.captured.begin_capture(mode)
    seam.fill(seam.captured)

    def end() -> int:
        return code_of(lambda: seam.captured.end_capture().close())

    assert run_in_thread(end) == (0 if mode == "relaxed" else WRONG_THREAD)
    assert seam.captured.capture_status() == "none"
    assert end() == ILLEGAL
    seam.fill(seam.captured, 4)
    seam.captured.synchronize()
    assert seam.words()[:3] == [4] * 3


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_capture_is_a_graph_of_nothing(mode: str, seam: Seam) -> None:
    seam.captured.begin_capture(mode)
    graph = seam.captured.end_capture()
    assert graph.nodes() == []
    graph.close()


def test_two_threads_capture_two_streams_and_one_invalidates_only_its_own(seam: Seam) -> None:
    began, spoilt = threading.Event(), threading.Event()

    def other() -> tuple[int, int]:
        seam.other.begin_capture("thread_local")
        seam.fill(seam.other, 2)
        began.set()
        assert spoilt.wait(300)
        code = code_of(lambda: seam.load().unload())
        return code, code_of(seam.other.end_capture)

    seam.captured.begin_capture("thread_local")
    seam.fill(seam.captured, 1)
    codes: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: codes.append(other()), daemon=True)
    thread.start()
    assert began.wait(300)
    assert code_of(lambda: seam.spare.unload()) == UNSUPPORTED
    status = seam.captured.capture_status(), seam.other.capture_status()
    ended = code_of(seam.captured.end_capture)
    spoilt.set()
    thread.join(300)
    assert status == ("invalidated", "active")
    assert (ended, codes) == (INVALIDATED, [(UNSUPPORTED, INVALIDATED)])


def test_a_stream_whose_capture_was_invalidated_can_be_captured_again(seam: Seam) -> None:
    for _ in range(3):
        seam.captured.begin_capture("thread_local")
        assert code_of(seam.device.synchronize) == UNSUPPORTED
        assert code_of(seam.captured.end_capture) == INVALIDATED
    seam.captured.begin_capture("thread_local")
    seam.fill(seam.captured)
    graph = seam.captured.end_capture()
    assert len(graph.nodes()) == 1
    graph.close()


# Streams that are forked from the captured one


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_waits_for_a_captured_event_is_captured_as_a_branch(
    mode: str, seam: Seam
) -> None:
    second = seam.address + 12
    seam.captured.begin_capture(mode)
    seam.fill(seam.captured, 4)
    assert seam.other.capture_id() is None
    seam.other.wait(seam.captured.record())
    assert seam.other.capture_status() == "active"
    assert seam.other.capture_id() == seam.captured.capture_id() is not None
    seam.device.copy(second, seam.address, 12, seam.other)
    seam.captured.wait(seam.other.record())
    seam.fill(seam.captured, 5)
    assert seam.captured.num_captured_nodes() == seam.other.num_captured_nodes() == 3
    graph = seam.captured.end_capture()
    assert [seam.captured.capture_status(), seam.other.capture_status()] == ["none", "none"]
    assert [node.kind for node in graph.nodes()] == ["fill", "copy", "fill"]
    first, branch, last = graph.dependencies()
    assert (first, branch) == ((), (0,))
    assert 1 in last
    executable = graph.instantiate()
    graph.close()
    for _ in range(2):
        assert executable.prepare(seam.other)()[0] == 0
        assert seam.words() == [5] * 3 + [4] * 3
    executable.close()


def test_branches_may_be_independent(seam: Seam) -> None:
    seam.captured.begin_capture("thread_local")
    start = seam.captured.record()
    seam.fill(seam.captured, 1)
    seam.other.wait(start)
    seam.device.fill(seam.address + 12, b"\2\0\0\0", 3, seam.other)
    seam.captured.wait(seam.other.record())
    graph = seam.captured.end_capture()
    assert graph.dependencies() == [(), ()]
    executable = graph.instantiate()
    graph.close()
    assert executable.prepare(seam.other)()[0] == 0
    assert seam.words() == [1] * 3 + [2] * 3
    executable.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_that_is_not_joined_fails_the_end_of_the_capture(mode: str, seam: Seam) -> None:
    seam.captured.begin_capture(mode)
    seam.fill(seam.captured, 1)
    seam.other.wait(seam.captured.record())
    seam.fill(seam.other, 2)
    assert code_of(seam.captured.end_capture) == UNJOINED
    assert [seam.captured.capture_status(), seam.other.capture_status()] == ["none", "none"]
    seam.fill(seam.other, 3)
    assert seam.words()[:3] == [3] * 3


# Memory that a graph allocates


class Allocating(NamedTuple):
    """A graph that allocates 256 bytes, fills 3 words there, copies them, and may free its memory."""

    seam: Seam
    executable: base.Executable
    address: int
    kinds: list[str]

    def replay(self) -> int:
        """Return the status of one replay."""
        return self.executable.prepare(self.seam.other)()[0]


def allocating(seam: Seam, *, free: bool, free_on_launch: bool) -> Allocating:
    seam.captured.begin_capture("thread_local")
    address = seam.device.allocate(256, seam.captured)
    seam.device.fill(address, b"\5\0\0\0", 3, seam.captured)
    seam.device.copy(seam.address, address, 12, seam.captured)
    if free:
        seam.device.free(address, seam.captured)
    graph = seam.captured.end_capture()
    kinds = [node.kind for node in graph.nodes()]
    executable = graph.instantiate(free_on_launch=free_on_launch)
    graph.close()
    return Allocating(seam, executable, address, kinds)


def test_memory_that_a_graph_frees_itself_is_allocated_in_every_replay(seam: Seam) -> None:
    made = allocating(seam, free=True, free_on_launch=False)
    assert made.kinds == ["allocation", "fill", "copy", "free"]
    for _ in range(3):
        seam.fill(seam.other, 1)
        assert made.replay() == 0
        assert seam.words()[:3] == [5] * 3
    made.executable.close()


def test_memory_that_is_allocated_still_keeps_a_graph_from_its_next_replay(seam: Seam) -> None:
    made = allocating(seam, free=False, free_on_launch=False)
    assert made.kinds == ["allocation", "fill", "copy"]
    assert [made.replay(), made.replay(), made.replay()] == [0, INVALID_VALUE, INVALID_VALUE]
    seam.device.free(made.address, seam.other)
    assert [made.replay(), made.replay()] == [0, INVALID_VALUE]
    assert seam.words()[:3] == [5] * 3
    seam.device.free(made.address, seam.other)
    made.executable.close()


def test_free_on_launch_frees_what_the_replay_before_left_allocated(seam: Seam) -> None:
    made = allocating(seam, free=False, free_on_launch=True)
    for _ in range(3):
        seam.fill(seam.other, 1)
        assert made.replay() == 0
        assert seam.words()[:3] == [5] * 3
    seam.device.copy(seam.address + 12, made.address, 12, seam.other)  # which is allocated still
    assert seam.words() == [5] * 6
    seam.device.free(made.address, seam.other)
    assert made.replay() == 0  # after that, too
    seam.device.free(made.address, seam.other)
    made.executable.close()


@pytest.mark.parametrize("seed", range(8))
def test_late_replays_allocate_and_free_in_the_order_of_their_stream(
    open_device: Callable[..., Gpu], seed: int
) -> None:
    raw = open_device("emulator", schedule=seed)._device
    captured, other, side = raw.stream(), raw.stream(), raw.stream()
    unused: Any = None
    address = raw.allocate(24, other)
    seam = Seam(raw, captured, other, address, unused, unused, unused, other.record())
    made = allocating(seam, free=False, free_on_launch=True)
    for _ in range(3):
        assert made.replay() == 0
    side.wait(other.record())
    raw.free(made.address, side)
    other.wait(side.record())
    assert made.replay() == 0
    assert seam.words()[:3] == [5] * 3


def test_memory_that_no_graph_allocated_is_not_freed_in_one(seam: Seam) -> None:
    seam.captured.begin_capture("thread_local")
    seam.fill(seam.captured)
    assert code_of(lambda: seam.device.free(seam.address, seam.captured)) != 0
    code_of(seam.captured.end_capture)  # Some devices invalidate the capture here.
    seam.fill(seam.other, 3)  # The capture still exists.
    assert seam.words()[:3] == [3] * 3
