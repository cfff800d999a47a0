"""Side streams inside a capture: forked by an event, captured as branches, joined by an event."""
# ruff: noqa: PT012  (a capture that fails has a body of several statements)

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from preheat import native
from preheat.devices.array import Array
from preheat.devices.kernel import Kernel
from preheat.devices.stream import Stream
from preheat.errors import CaptureError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph, State
from tests.faulty import FaultyGpu
from tests.graph.support import BodyError, axpy_case, line_here
from tests.threads import run_in_thread

N = 33
MIX = """
extern "C" __global__ void mix(const int* x, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = (y[threadIdx.x] * 5 + x[threadIdx.x] + 1) & 0xffff;
}
extern "C" __global__ void put(int* x, int value, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = value;
}
"""


class Bench:
    """Four arrays, a kernel whose result depends on the order of its launches, and a side stream."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.kernel: Kernel = gpu.kernel(MIX, "mix")
        self.put: Kernel = gpu.kernel(MIX, "put")
        self.side: Stream = gpu.stream()
        self.arrays = [gpu.array(np.full(N, start, "int32")) for start in (1, 2, 3, 4)]
        self.model = [1, 2, 3, 4]
        x, y = (gpu.zeros(N, "int32") for _ in range(2))
        for _ in range(4):  # From here on launches are fast.
            self.kernel[1, 64](x, y, N)
            self.put[1, 64](x, 1, N)

    def mix(self, source: int, target: int, stream: Any = None) -> None:
        x, y = self.arrays[source], self.arrays[target]
        if stream is None:
            self.kernel[1, 64](x, y, N)
        else:
            self.kernel.launch(x, y, N, grid=1, block=64, stream=stream)

    def expect(self, *steps: tuple[int, int]) -> None:
        """Do these steps in the model, and compare."""
        for source, target in steps:
            self.model[target] = (self.model[target] * 5 + self.model[source] + 1) & 0xFFFF
        assert [int(np.unique(array.numpy()).item()) for array in self.arrays] == self.model

    def after(self, graph: Graph) -> list[tuple[int, ...]]:
        return [node.after for node in graph.nodes]


@pytest.fixture
def bench(device: Gpu) -> Bench:
    return Bench(device)


def test_work_in_a_forked_stream_becomes_a_branch_of_the_graph(bench: Bench) -> None:
    with bench.gpu.capture() as graph:
        bench.mix(0, 1)
        bench.side.wait(bench.gpu.record())
        bench.mix(1, 2, bench.side)
        bench.mix(1, 3)
        bench.gpu.wait(bench.side)
        bench.mix(2, 3)
    assert [str(node).partition("[")[0] for node in graph.nodes] == ["mix"] * 4
    assert bench.after(graph) == [(), (0,), (0,), (1, 2)]
    bench.expect()
    for _ in range(3):
        graph.replay()
        bench.expect((0, 1), (1, 2), (1, 3), (2, 3))


def test_branches_that_share_no_memory_are_independent(bench: Bench) -> None:
    with bench.gpu.capture() as graph:
        start = bench.gpu.record()
        bench.mix(0, 1)
        bench.side.wait(start)
        bench.mix(2, 3, bench.side)
        bench.mix(0, 1)
        bench.gpu.wait(bench.side.record())
    assert bench.after(graph) == [(), (), (0,)]
    graph.replay()
    bench.expect((0, 1), (2, 3), (0, 1))


def test_without_side_streams_each_node_follows_the_one_before(bench: Bench) -> None:
    with bench.gpu.capture() as graph:
        bench.mix(0, 1)
        bench.arrays[2].fill(3)
        bench.mix(0, 1)
    assert bench.after(graph) == [(), (0,), (1,)]


def test_uses_of_memory_in_two_branches_are_ordered_without_a_join(bench: Bench) -> None:
    with bench.gpu.capture() as graph:
        start = bench.gpu.record()
        bench.mix(0, 1)
        bench.side.wait(start)  # before the launch above
        bench.mix(1, 2, bench.side)  # reads what the captured stream wrote
        bench.mix(2, 3)  # reads what the side stream wrote
        bench.mix(3, 2, bench.side)
        bench.mix(2, 0)
        bench.mix(0, 1, bench.side)
        bench.gpu.wait(bench.side)
    for _ in range(3):
        graph.replay()
        bench.expect((0, 1), (1, 2), (2, 3), (3, 2), (2, 0), (0, 1))


def test_a_write_waits_for_reads_in_other_branches_and_a_read_does_not(bench: Bench) -> None:
    with bench.gpu.capture() as graph:
        bench.side.wait(bench.gpu.record())
        bench.mix(0, 1, bench.side)
        bench.mix(0, 2)  # also reads 0
        bench.mix(3, 0)  # writes it
        bench.gpu.wait(bench.side)
    assert bench.after(graph) == [(), (), (0, 1)]
    graph.replay()
    bench.expect((0, 1), (0, 2), (3, 0))


def test_memory_used_before_the_first_event_counts(bench: Bench) -> None:
    """These launches are fast ones, of which nothing but the record is kept."""
    with bench.gpu.capture() as graph:
        early = None
        for _ in range(3):
            early = early or bench.gpu.record()
            bench.mix(0, 1)
        assert early is not None
        bench.side.wait(early)
        bench.mix(1, 2, bench.side)
        bench.gpu.wait(bench.side)
    assert bench.after(graph) == [(), (0,), (1,), (2,)]
    graph.replay()
    bench.expect((0, 1), (0, 1), (0, 1), (1, 2))


def test_fills_and_copies_are_ordered_with_branches(bench: Bench) -> None:
    a, b = bench.arrays[:2]
    with bench.gpu.capture() as graph:
        bench.side.wait(bench.gpu.record())
        bench.put.launch(a, 7, N, grid=1, block=64, stream=bench.side)
        b.copy_from(a)
        bench.put.launch(a, 8, N, grid=1, block=64, stream=bench.side)
        a.fill(9)
        bench.mix(0, 2, bench.side)
        bench.gpu.wait(bench.side)
    bench.model[:2] = [9, 7]
    bench.model[2] = 3 * 5 + 9 + 1
    graph.replay()
    bench.expect()


def test_a_stream_is_waited_for_by_name_or_by_event_and_streams_nest(bench: Bench) -> None:
    other = bench.gpu.stream()
    with bench.gpu.capture() as graph:
        bench.mix(0, 1)
        bench.side.wait(graph.stream)
        other.wait(bench.side)
        bench.mix(1, 2, bench.side)
        bench.mix(1, 3, other)
        bench.side.wait(other.record())
        bench.gpu.wait(bench.side)  # joins both
        bench.mix(3, 0)
    assert bench.after(graph) == [(), (0,), (0,), (1, 2)]
    graph.replay()
    bench.expect((0, 1), (1, 2), (1, 3), (3, 0))


def test_the_stream_that_a_capture_names_stands_for_the_captured_one(bench: Bench) -> None:
    main = bench.gpu.stream()
    with bench.gpu.capture(stream=main) as graph:
        bench.mix(0, 1, main)
        bench.side.wait(main)
        bench.mix(1, 2, bench.side)
        main.wait(bench.side)
        bench.mix(2, 3, main)
    graph.replay()
    bench.expect((0, 1), (1, 2), (2, 3))


def test_a_side_stream_works_as_before_outside_and_for_other_threads(bench: Bench) -> None:
    """The stream itself is never captured, so that nobody else is disturbed."""
    with bench.gpu.capture() as graph:
        bench.side.wait(bench.gpu.record())
        bench.mix(0, 1, bench.side)
        run_in_thread(lambda: bench.mix(2, 3, bench.side))
        run_in_thread(bench.side.synchronize)
        bench.gpu.wait(bench.side)
    bench.expect((2, 3))
    bench.mix(0, 2, bench.side)
    bench.expect((0, 2))
    graph.replay()
    bench.expect((0, 1))
    assert len(graph) == 1


def test_a_stream_can_be_forked_in_every_capture(bench: Bench) -> None:
    for _ in range(3):
        with bench.gpu.capture() as graph:
            bench.side.wait(bench.gpu.record())
            bench.mix(0, 1, bench.side)
            bench.gpu.wait(bench.side)
        graph.replay()
        bench.expect((0, 1))


def test_waiting_for_streams_and_events_orders_work_outside_of_captures(bench: Bench) -> None:
    bench.mix(0, 1)
    bench.side.wait(bench.gpu.record())
    bench.mix(1, 2, bench.side)
    bench.gpu.wait(bench.side)
    bench.mix(2, 3)
    bench.expect((0, 1), (1, 2), (2, 3))


# Errors


def test_a_stream_that_is_not_joined_is_named_with_the_line_of_its_fork(bench: Bench) -> None:
    graph = bench.gpu.capture().begin()
    bench.side.wait(bench.gpu.record())
    line = line_here(-1)
    bench.mix(0, 1, bench.side)
    bench.mix(2, 3)
    with pytest.raises(CaptureError) as caught:
        graph.end()
    assert repr(bench.side) in str(caught.value)
    assert "not joined" in str(caught.value)
    assert caught.value.where == line
    assert caught.value.hint == "join it before the end of the capture: gpu.wait(stream)"
    assert graph.state is State.FAILED
    bench.expect()
    bench.mix(0, 1, bench.side)  # All streams work as before.
    bench.expect((0, 1))
    with bench.gpu.capture() as again:
        bench.mix(0, 1)
    again.replay()
    bench.expect((0, 1))


def test_a_stream_without_work_need_not_be_joined(bench: Bench) -> None:
    with bench.gpu.capture() as graph:
        bench.mix(0, 1)
        bench.side.wait(bench.gpu.record())
        bench.mix(0, 1)
    graph.replay()
    bench.expect((0, 1), (0, 1))


def test_a_body_that_raises_leaves_forked_streams_usable(bench: Bench) -> None:
    with pytest.raises(BodyError) as caught, bench.gpu.capture():
        bench.side.wait(bench.gpu.record())
        bench.mix(0, 1, bench.side)
        raise BodyError
    assert not getattr(caught.value, "__notes__", None)
    bench.mix(0, 1, bench.side)
    bench.expect((0, 1))


def test_a_stream_that_was_not_forked_is_refused_and_runs_at_once_in_a_relaxed_capture(
    bench: Bench,
) -> None:
    with (
        pytest.raises(CaptureError, match="work in a stream other than the captured one") as caught,
        bench.gpu.capture(),
    ):
        bench.mix(0, 1, bench.side)
    assert "stream.wait(gpu.record())" in str(caught.value.hint)
    with bench.gpu.capture(mode="relaxed") as graph:
        bench.mix(0, 1)
        bench.mix(2, 3, bench.side)
        bench.side.record()
    bench.expect((2, 3))
    graph.replay()
    bench.expect((0, 1))


def test_an_event_of_a_capture_is_of_no_use_elsewhere(bench: Bench) -> None:
    with bench.gpu.capture():
        bench.mix(0, 1)
        inside = bench.gpu.record()
    for use in (
        inside.done,
        inside.synchronize,
        lambda: inside.elapsed(bench.gpu.record(timing=True)),
        lambda: bench.side.wait(inside),
        lambda: bench.gpu.wait(inside),
    ):
        with pytest.raises(CaptureError, match="recorded inside a capture"):
            use()
    with pytest.raises(CaptureError, match="another capture"), bench.gpu.capture():
        bench.side.wait(inside)
    bench.expect()


def test_another_thread_cannot_wait_for_an_event_of_a_capture(bench: Bench) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            bench.side.wait(inside)
        except CaptureError as error:
            errors.append(error)

    with bench.gpu.capture() as graph:
        bench.mix(0, 1)
        inside = bench.gpu.record()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert "recorded inside a capture" in str(errors[0])
    graph.replay()
    bench.expect((0, 1))


def test_an_error_in_a_side_stream_is_the_error_of_the_capture(bench: Bench) -> None:
    graph = bench.gpu.capture().begin()
    bench.side.wait(bench.gpu.record())
    with pytest.raises(CaptureError):
        bench.arrays[0].numpy()
    bench.mix(0, 1, bench.side)
    with pytest.raises(CaptureError, match="copying to the host"):
        graph.end()
    bench.expect()


def test_only_streams_and_events_can_be_waited_for(bench: Bench) -> None:
    from preheat.errors import InputError

    with pytest.raises(InputError, match="is not a stream"):
        bench.gpu.wait(7)


# Bookkeeping


def test_events_and_streams_of_branches_are_released(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    side = faulty.gpu.stream()

    def capture() -> Graph:
        with faulty.gpu.capture() as graph:
            side.wait(faulty.gpu.record())
            made.axpy.launch(3, made.x, made.y, made.n, grid=5, block=64, stream=side)
            faulty.gpu.wait(side)
        return graph

    capture().close()
    streams = len(faulty.gpu._context.idle_capture_streams)
    with faulty.count_calls("stream") as calls:
        graphs = [capture() for _ in range(3)]
    assert calls == {}  # No new stream is made.
    assert len(faulty.gpu._context.idle_capture_streams) == streams
    for graph in graphs:
        graph.replay()
    made.check(9)


def test_launches_stay_fast_in_captures_without_side_streams(device: Gpu) -> None:
    if native.core is None:
        pytest.skip("only the native core records launches without Python code")
    bench = Bench(device)
    with device.capture() as graph:
        assert device._context.thread_state.capture is graph._capture
        bench.mix(0, 1)
        assert device._context.thread_state.capture is graph._capture
        device.record()
        assert device._context.thread_state.capture is None
        bench.mix(0, 1)
    assert device._context.thread_state.capture is None
    assert len(graph) == 2


# Comparison


def forked(bench: Bench, *, join_early: bool) -> Graph:
    with bench.gpu.capture() as graph:
        bench.mix(0, 1)
        bench.side.wait(bench.gpu.record())
        bench.mix(0, 2, bench.side)
        if join_early:
            bench.gpu.wait(bench.side)
        bench.mix(0, 3)
        bench.gpu.wait(bench.side)
    return graph


def test_diff_tells_that_a_node_waits_for_other_nodes(bench: Bench) -> None:
    early, late = forked(bench, join_early=True), forked(bench, join_early=False)
    assert early.diff(forked(bench, join_early=True)) == []
    (row,) = late.diff(early)
    assert row.startswith("node 2, mix (tests/graph/test_side_streams.py:")
    assert row.endswith(": after nodes 0 became after nodes 1")


def test_diff_looks_through_nodes_that_only_one_capture_has(bench: Bench) -> None:
    def capture(more: bool) -> Graph:
        with bench.gpu.capture() as graph:
            bench.mix(0, 1)
            if more:
                bench.arrays[2].fill(1)
            bench.mix(0, 1)
        return graph

    (row,) = capture(False).diff(capture(True))
    assert "is new" in row
    (row,) = capture(True).diff(capture(False))
    assert "is gone" in row


def test_checked_graphs_compare_what_nodes_wait_for(bench: Bench) -> None:
    from preheat.errors import BakedError

    graphs = bench.gpu.graphs(checked=True)
    early = [True]

    def step() -> Array:
        bench.side.wait(bench.gpu.record())
        bench.mix(0, 1, bench.side)
        if early[0]:
            bench.gpu.wait(bench.side)
        bench.mix(0, 2)
        bench.gpu.wait(bench.side)
        return bench.arrays[2]

    for _ in range(3):
        graphs.run("step", step)
    bench.expect(*[(0, 1), (0, 2)] * 3)
    early[0] = False
    with pytest.raises(BakedError, match="after nodes 0 became after nothing"):
        graphs.run("step", step)
