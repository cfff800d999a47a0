"""Graph caches whose capture or replay fails: the step still runs exactly once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from preheat.errors import (
    CaptureError,
    CaptureWarning,
    ContextLostError,
    DeviceError,
    DriverError,
    GraphError,
    StaleBufferError,
)
from preheat.gpu import Gpu
from preheat.graph import cache_entries
from preheat.process.callsite import shown_path
from tests.driver_errors import illegal_address, out_of_memory
from tests.faulty import FaultyGpu
from tests.graph.cache_support import Step, cache_graphs
from tests.graph.support import axpy_case, line_here, line_of, nothing_left_open, runs_without_a_graph
from tests.threads import run_in_thread

# Captures that fail


def test_a_body_that_no_capture_can_hold_runs_once_a_call_and_is_not_captured_again(
    device: Gpu,
) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    step = Step(made)

    def body() -> int:
        step()
        return int(made.y.numpy()[0])  # a copy to the host

    tried = list[int]()
    with runs_without_a_graph("copying to the host inside a capture") as reported:
        for call in range(1, 61):
            before = step.entered
            assert graphs.run("k", body) == made.ys[0] + 3 * call * made.xs[0]
            tried += [call] * (step.entered - before - 1)
    assert len(reported) == 1
    assert tried == [2, 2 + 17, 19 + 33]  # 16 calls in peace, then 32, …
    (one,) = graphs.report().quarantined
    assert (one.key, one.failures, one.waits) == ("k", 3, 64 - 8)
    assert "copying to the host inside a capture" in one.reason
    assert "test_cache_failures.py" in one.reason
    assert one.reason.endswith("(hint: read results after the replay)")
    assert "'k': failed 3 times, tries again in 56 calls" in str(graphs.report())
    assert len(graphs) == 0


def test_a_failed_capture_is_reported_once_for_each_reason_at_the_line_of_the_caller(
    device: Gpu,
) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    waits = [True]

    def body() -> None:
        made.launch()
        if waits:
            device.synchronize()
        made.y.numpy()

    with runs_without_a_graph() as reported:
        for _ in range(2):
            graphs.run(8, body)
        line = line_here(-1)
        for key in (7, 9):  # the same reason under other keys
            cache_graphs(graphs, body, key)
        waits.clear()
        for _ in range(17):
            graphs.run(8, body)  # tried again, and it fails elsewhere
    first, second = reported
    assert f"{shown_path(first.filename)}:{first.lineno}" == line
    assert str(first.message) == (
        "8 cannot be captured and runs without a graph: "
        f"CaptureError: {line_of(body, 3)}: synchronising inside a capture "
        "(hint: synchronise after the replay)\n"
        "later calls try again; graphs.report() lists what failed"
    )
    assert f"{line_of(body, 4)}: copying to the host inside a capture" in str(second.message)
    made.check(3 * 23)
    warmed_too = device.graphs()
    with runs_without_a_graph("copying to the host"):  # Other graphs report their own failures.
        cache_graphs(warmed_too, body, 8)


def test_warnings_that_are_errors_come_out_after_the_step(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()

    def body() -> None:
        made.launch()
        device.synchronize()

    graphs.run("k", body)
    with pytest.raises(CaptureWarning, match="synchronising inside a capture"):  # as this suite is run
        graphs.run("k", body)
    made.check(6)
    graphs.run("k", body)
    made.check(9)
    (one,) = graphs.report().quarantined
    assert (one.failures, device._context.captures_by_thread) == (1, {})


def test_a_filter_of_the_program_silences_the_warning(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for _ in range(3):
            graphs.run("k", made.y.numpy)
    assert len(graphs.report().quarantined) == 1


def test_warming_raises_and_warns_of_nothing(device: Gpu) -> None:
    with pytest.raises(GraphError, match="1 of 1 key could not be captured"):
        device.graphs().warm([8], lambda _: device.synchronize())


def test_the_wait_after_failures_doubles_to_a_bound() -> None:
    known = cache_entries.UncapturedKey()
    waits = list[int]()
    for _ in range(12):
        known.record_failure("so")
        waits.append(known.wait)
    assert waits == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096, 4096]


def test_a_key_leaves_quarantine_when_a_capture_succeeds(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    graphs = faulty.gpu.graphs()
    step = Step(made)
    faulty.device.fail("graph.instantiate", out_of_memory("cuGraphInstantiate"))
    with runs_without_a_graph("CUDA_ERROR_OUT_OF_MEMORY"):
        for _ in range(2 + 16):
            graphs.run("k", step)
            assert "k" not in graphs
    graphs.run("k", step)
    assert "k" in graphs
    assert graphs.report().quarantined == ()
    made.check(3 * 19)


@pytest.mark.parametrize("verb", ["graph.instantiate", "executable.upload"])
def test_a_graph_that_cannot_be_made_ready_leaves_the_step_to_run_once(
    verb: str, faulty: FaultyGpu
) -> None:
    made = axpy_case(faulty.gpu)
    graphs = faulty.gpu.graphs()
    step = Step(made)
    failed = {"instantiate": 1} if verb == "graph.instantiate" else {}
    with nothing_left_open(faulty, **failed):
        graphs.run("k", step)
        faulty.device.fail(verb, out_of_memory("cuGraphInstantiate"))
        with runs_without_a_graph("CUDA_ERROR_OUT_OF_MEMORY"):
            assert graphs.run("k", step) is made.y
        made.check(6)
        (one,) = graphs.report().quarantined
        assert "CUDA_ERROR_OUT_OF_MEMORY" in one.reason
        graphs.run("k", step)
        made.check(9)


def test_a_capture_that_cannot_begin_leaves_the_step_to_run_once(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    graphs = faulty.gpu.graphs()
    step = Step(made)
    graphs.run("k", step)
    faulty.device.fail("stream.begin_capture", out_of_memory("cuStreamBeginCapture"))
    with runs_without_a_graph("cuStreamBeginCapture failed"):
        graphs.run("k", step)
    made.check(6)
    assert [one.key for one in graphs.report().quarantined] == ["k"]


def test_a_capture_that_another_library_invalidates_leaves_the_step_to_run_once(
    faulty: FaultyGpu,
) -> None:
    made = axpy_case(faulty.gpu)
    graphs = faulty.gpu.graphs()

    def body() -> None:
        made.launch()
        with suppress(DriverError):
            faulty.device.synchronize()  # a call that preheat does not see

    with nothing_left_open(faulty, end=1), runs_without_a_graph("another library invalidated"):
        graphs.run("k", body)
        graphs.run("k", body)
        made.check(6)
    (one,) = graphs.report().quarantined
    assert "another library invalidated the capture" in one.reason


def test_an_error_of_the_body_itself_comes_out_of_its_eager_run(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    calls = list[int]()

    def body() -> None:
        calls.append(1)
        made.launch()
        if len(calls) > 1:
            raise ZeroDivisionError(f"call {len(calls)}")

    graphs.run("k", body)
    with pytest.raises(ZeroDivisionError, match="call 3"):  # 2 was the capture
        graphs.run("k", body)
    (one,) = graphs.report().quarantined
    assert one.reason == "ZeroDivisionError: call 2"
    made.check(6)


def test_the_reason_names_the_first_error_not_what_came_of_it(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()

    def body() -> None:
        made.launch()
        try:
            device.synchronize()
        except CaptureError:
            raise KeyError("came of it") from None

    graphs.run("k", body)
    with runs_without_a_graph("synchronising inside a capture"):
        graphs.run("k", body)
    made.check(6)
    (one,) = graphs.report().quarantined
    assert "KeyError" in one.reason
    assert "synchronising inside a capture" in one.reason


def test_a_body_that_does_nothing_on_the_device_runs_as_it_is(device: Gpu) -> None:
    graphs = device.graphs()
    with runs_without_a_graph("nothing was captured"):
        assert [graphs.run("k", lambda: 7) for _ in range(3)] == [7, 7, 7]
    (one,) = graphs.report().quarantined
    assert "nothing was captured" in one.reason


def test_invalidating_forgets_that_a_key_failed(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    fails = [True]

    def body() -> None:
        made.launch()
        if fails:
            device.synchronize()

    with runs_without_a_graph("synchronising inside a capture"):
        for _ in range(2):
            graphs.run("k", body)
    fails.clear()
    graphs.invalidate("k")
    assert graphs.report().quarantined == ()
    for _ in range(2):
        graphs.run("k", body)
    assert "k" in graphs
    made.check(12)


@pytest.mark.parametrize("verb", ["graph.instantiate", "executable.upload", "replay"])
def test_an_error_that_the_device_does_not_survive_is_raised(verb: str, faulty: FaultyGpu) -> None:
    raised_and_lost(faulty, verb)


@pytest.mark.parametrize("verb", ["launch", "stream.begin_capture", "stream.end_capture"])
def test_nor_is_one_inside_the_capture_hidden(verb: str, open_faulty: Callable[..., FaultyGpu]) -> None:
    raised_and_lost(open_faulty("emulator"), verb)  # a GPU would be left with the capture open


def raised_and_lost(faulty: FaultyGpu, verb: str) -> None:
    """Check that an error of `verb` that ends the context is raised by this call and all later ones."""
    made = axpy_case(faulty.gpu)
    graphs = faulty.gpu.graphs()
    step = Step(made)
    graphs.run("k", step)
    faulty.device.fail(verb, illegal_address("cuGraphInstantiate"))
    with faulty.count_calls("launch") as calls, pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        graphs.run("k", step)
    assert calls.get("launch", 0) <= 1  # into the capture: none after it
    for _ in range(2):
        with pytest.raises((ContextLostError, StaleBufferError), match="is lost after an error"):
            graphs.run("k", step)
    assert graphs.report().quarantined == ()


def test_a_lost_device_is_named_for_a_cached_graph_too(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    graphs = faulty.gpu.graphs()
    cache_graphs(graphs, Step(made), "k")
    faulty.device.fail("fill", illegal_address("cuGraphInstantiate"))
    with pytest.raises(DriverError):
        made.y.fill(1)
    with pytest.raises(ContextLostError, match="is lost after an error"):
        graphs.run("k", Step(made))
    with pytest.raises(ContextLostError, match="is lost after an error"):
        graphs.replay("k")


@pytest.mark.parametrize("when", [1, 2])
def test_an_interrupt_comes_out_and_leaves_the_key_usable(when: int, device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    calls = list[int]()

    def body() -> None:
        calls.append(1)
        if len(calls) == when:
            raise KeyboardInterrupt
        made.launch()

    for call in range(1, 6):
        if call == when:
            with pytest.raises(KeyboardInterrupt):
                graphs.run("k", body)
        else:
            graphs.run("k", body)
    made.check(3 * 4)
    assert "k" in graphs
    assert graphs.report().quarantined == ()
    assert device._context.captures_by_thread == {}


# Stale graphs, lost contexts


def test_a_stale_cached_graph_counts_as_absent_and_is_captured_anew(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    xs = [device.array(made.xs), device.array(made.xs)]

    def step() -> None:
        made.axpy[5, 64](3, xs[-1], made.y, made.n)

    cache_graphs(graphs, step, "k")
    xs.pop().close()
    assert "k" not in graphs
    assert len(graphs) == 0
    assert graphs.replay("k") is False
    graphs.run("k", step)
    assert "k" not in graphs
    graphs.run("k", step)
    assert "k" in graphs
    made.check(12)


def test_a_cached_graph_that_becomes_stale_under_way_runs_eagerly(
    device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    xs = [device.array(made.xs), device.array(made.xs)]

    def step() -> None:
        made.axpy[5, 64](3, xs[-1], made.y, made.n)

    cache_graphs(graphs, step, "k")
    (cached,) = graphs._entries.graphs.values()
    replay = cached.graph.replay

    def close_then(**more: Any) -> None:
        if len(xs) > 1:
            xs.pop().close()  # as another thread might, just now
        replay(**more)

    monkeypatch.setattr(cached.graph, "replay", close_then)
    graphs.run("k", step)
    made.check(9)
    assert "k" not in graphs


def test_after_a_reset_cached_graphs_are_gone_and_the_next_session_has_its_own(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    graphs = gpu.graphs()
    cache_graphs(graphs, Step(axpy_case(gpu)), "a", "b")
    graphs.run("seen", Step(axpy_case(gpu)))
    gpu.reset()
    assert len(graphs) == 0
    assert "a" not in graphs
    assert graphs.replay("b") is False
    made = axpy_case(gpu)
    step = Step(made)
    for key in ("a", "seen"):
        graphs.run(key, step)
        assert key not in graphs
        graphs.run(key, step)
        assert key in graphs
    made.check(12)


def test_a_capture_that_a_reset_overtakes_is_not_kept(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    graphs = gpu.graphs()
    made = axpy_case(gpu)

    def step() -> None:
        made.launch()
        if threading.get_ident() in gpu._context.captures_by_thread:
            run_in_thread(gpu.reset)

    graphs.run("k", step)
    with pytest.raises((ContextLostError, CaptureError), match="reset"):
        graphs.run("k", step)
    assert len(graphs) == 0
    assert graphs.report().quarantined == ()
