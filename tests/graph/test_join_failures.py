"""Captures with forked streams that cannot be joined or ended: every later capture works."""
# ruff: noqa: PT012  (a capture that fails has a body of several statements)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from preheat.devices.stream import Stream
from preheat.errors import CaptureError, ContextLostError, OutOfMemoryError
from preheat.graph.branches import Branch
from tests.driver_errors import illegal_address, not_supported, out_of_memory
from tests.faulty import FaultyGpu
from tests.graph.support import AxpyCase, BodyError, InterruptedByTestError, axpy_case, line_here

ENDS = [None, not_supported]
end_fails_too = pytest.mark.parametrize("end", ENDS, ids=["the end works", "the end fails too"])


class Forks:
    """A kernel with its operands and two side streams, on a device that can be made to fail."""

    def __init__(self, faulty: FaultyGpu) -> None:
        self.gpu, self.device = faulty
        self.made: AxpyCase = axpy_case(faulty.gpu)
        self.sides = [faulty.gpu.stream() for _ in range(2)]
        self.expected = 0

    def launch(self, stream: Stream) -> None:
        made = self.made
        made.axpy.launch(1, made.x, made.y, made.n, grid=5, block=64, stream=stream)

    def fork(self) -> None:
        """Fork the first stream from the captured one, and the second one from the first."""
        first, second = self.sides
        first.wait(self.gpu.record())
        self.launch(first)
        second.wait(first.record())
        self.launch(second)

    def join(self) -> None:
        for side in self.sides:
            self.gpu.wait(side)

    def fail(self, verb: str, error: Callable[[str], Any] | None, after: int = 0) -> None:
        """Let a call fail after this number of calls that work."""
        if error is not None:
            self.device.fail(verb, *[None] * after, error(verb))

    def check_usable(self) -> None:
        """Check that nothing ran or captures, and that captures in all streams work."""
        context = self.gpu._context
        assert (context.captures_by_thread, context.unrestricted) == ({}, True)
        idle = context.idle_capture_streams
        assert [stream.capture_status() for stream in idle] == ["none"] * len(idle)
        for turn in range(2 * len(idle) + 2):  # Every idle stream takes part again.
            with self.gpu.capture() as graph:
                self.fork()
                self.join()
            graph.replay()
            self.made.check(2 * (turn + 1))
        self.launch(self.sides[0])
        self.made.check(2 * (turn + 1) + 1)


@pytest.fixture
def forks(faulty: FaultyGpu) -> Forks:
    return Forks(faulty)


@end_fails_too
@pytest.mark.parametrize("verb", ["stream.record", "stream.wait"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_join_that_fails_at_the_end_is_the_error_and_the_capture_is_ended(
    forks: Forks, verb: str, after: int, end: Callable[[str], Any] | None
) -> None:
    graph = forks.gpu.capture().begin()
    forks.fork()
    forks.join()
    forks.fail(verb, out_of_memory, after)
    forks.fail("stream.end_capture", end)
    with pytest.raises(CaptureError) as caught:
        graph.end()
    title = repr(forks.sides[after])
    assert f"{title} cannot be joined at the end of the capture: {verb}" in str(caught.value)
    assert isinstance(caught.value.__cause__, CaptureError)
    forks.check_usable()


def test_several_joins_that_fail_are_reported_by_the_first(forks: Forks) -> None:
    graph = forks.gpu.capture().begin()
    line = line_here(1)
    forks.sides[0].wait(forks.gpu.record())
    forks.sides[1].wait(forks.gpu.record())
    forks.launch(forks.sides[0])
    forks.join()
    forks.fail("stream.record", out_of_memory)
    forks.fail("stream.record", not_supported)
    with pytest.raises(CaptureError, match=r"cannot be joined at the end") as caught:
        graph.end()
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
    assert caught.value.where == line
    forks.check_usable()


@end_fails_too
@pytest.mark.parametrize("joined", [False, True])
def test_a_body_that_raises_ends_the_capture_of_nested_branches(
    forks: Forks, joined: bool, end: Callable[[str], Any] | None
) -> None:
    with pytest.raises(BodyError) as caught, forks.gpu.capture():
        forks.fork()
        if joined:
            forks.join()
        forks.fail("stream.end_capture", end)
        raise BodyError
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == (end is not None)
    assert all("the capture cannot be ended: stream.end_capture failed" in note for note in notes)
    forks.check_usable()


def test_a_body_whose_own_join_fails_gets_that_error_and_the_capture_is_ended(forks: Forks) -> None:
    with pytest.raises(OutOfMemoryError, match=r"stream\.record"), forks.gpu.capture():
        forks.fork()
        forks.fail("stream.record", out_of_memory)
        forks.join()
    forks.check_usable()


@pytest.mark.parametrize("verb", ["stream", "stream.wait"])
def test_a_fork_that_fails_takes_no_part_in_the_capture(forks: Forks, verb: str) -> None:
    graph = forks.gpu.capture().begin()
    forks.made.launch()
    mark = forks.gpu.record()
    forks.fail(verb, out_of_memory)
    with pytest.raises(OutOfMemoryError):
        forks.sides[0].wait(mark)
    with pytest.raises(CaptureError, match="other than the captured one"):
        forks.launch(forks.sides[0])  # It would run at once.
    with pytest.raises(CaptureError, match=f"the capture failed: {verb} failed"):
        graph.end()
    forks.check_usable()


@pytest.mark.parametrize("place", ["fork", "join", "end"])
def test_an_interrupt_leaves_no_stream_in_a_capture(
    forks: Forks, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Branch.wait

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(Branch, "wait", wait)
        raise InterruptedByTestError

    with pytest.raises(InterruptedByTestError), forks.gpu.capture():
        if place != "fork":
            forks.fork()
        if place == "end":
            forks.join()
        monkeypatch.setattr(Branch, "wait", interrupted)
        if place == "fork":
            forks.fork()
        if place == "join":
            forks.join()
    forks.gpu.synchronize()  # A safe point ends a capture whose end was interrupted.
    forks.check_usable()


def test_a_context_that_is_lost_in_a_join_is_the_error(forks: Forks) -> None:
    graph = forks.gpu.capture().begin()
    captured = graph._capture.stream  # type: ignore[union-attr]
    forks.fork()
    forks.join()
    forks.fail("stream.record", illegal_address)
    with pytest.raises(ContextLostError, match=r"stream\.record failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        graph.end()
    captured.close()  # A context that works ends the capture with the stream, for the next tests.


def test_a_pool_takes_another_stream_if_a_capture_keeps_the_first(forks: Forks) -> None:
    pool = forks.gpu.shared_pool()
    for end in (not_supported, None):
        graph = forks.gpu.capture(pool=pool).begin()
        forks.fork()
        forks.join()
        forks.fail("stream.end_capture", end)
        if end is not None:
            with pytest.raises(CaptureError):
                graph.end()
            continue
        graph.end().replay()
    forks.made.check(2)
