"""Frames of a pool: scratch memory that arrays lose at the end of a frame and that graphs share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from preheat import native
from preheat.devices.array import Array
from preheat.errors import (
    CaptureError,
    GraphError,
    StaleBufferError,
    StaleGraphError,
)
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.graph.pool import Pool
from tests.faulty import FaultyGpu
from tests.graph.pool_support import KIB, add, bytes_of, fail
from tests.graph.support import axpy_case, replayer
from tests.threads import run_in_thread

# Frames


def test_a_frame_hands_out_the_same_place_every_time(device: Gpu) -> None:
    pool = device.pool()

    def places(*sizes: int) -> list[int]:
        with pool.frame():
            return [bytes_of(pool, n).address for n in sizes]

    first = places(1000, 31, 257)
    kept = bytes_of(pool, 31)
    assert kept.address not in first
    assert places(1000, 31, 257) == first
    assert places(1000, 31) == first[:2]
    used = pool.used
    assert places(999, 30, 200) == first
    assert pool.used == used
    del kept


def test_arrays_of_a_frame_expire_at_its_end(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool()
    with pool.frame():
        into = pool.zeros(job.n, "int32")
        for _ in range(4):  # the quick way too
            add(job, into)
        bound = job.axpy.bind(3, job.x, into, job.n, grid=5, block=64)
        np.testing.assert_array_equal(into.numpy(), 12 * job.xs)
    uses: list[Callable[[], object]] = [
        lambda: add(job, into),
        lambda: add(job, into[:]),  # a view made afterwards
        bound,
        into.numpy,
        lambda: into.fill(1),
        lambda: job.y.copy_from(into),
    ]
    for use in uses:
        with pytest.raises(StaleBufferError, match="the frame of its pool has ended"):
            use()


def test_a_bound_launch_that_skips_checks_notices_the_end_of_its_frame(device: Gpu) -> None:
    job, pool = axpy_case(device), device.pool()
    with pool.frame():
        into = pool.zeros(job.n, "int32")
        bound = job.axpy.bind(3, job.x, into, job.n, grid=5, block=64)
        for _ in range(3):
            bound()
        np.testing.assert_array_equal(into.numpy(), 9 * job.xs)
    with pytest.raises(StaleBufferError, match="the frame of its pool has ended"):
        bound()


def test_graphs_of_frames_share_memory_and_stay_valid(device: Gpu) -> None:
    job = axpy_case(device, 1009)
    pool = device.pool()
    outs = {n: device.zeros(n, "int32") for n in (1009, 257, 31, 1)}
    graphs: dict[int, Graph] = {}

    def step(pool: Pool, n: int) -> None:
        part, more = pool.zeros(n, "int32"), pool.zeros(n, "int32")
        for into, factor in ((part, 3), (more, 5)):
            job.axpy[-(-n // 64), 64](factor, job.x, into, n)
        job.axpy[-(-n // 64), 64](7, part, more, n)
        outs[n].copy_from(more)

    with pool.frame():
        step(pool, 1009)
    size, used = pool.size, pool.used
    for n in outs:
        with pool.frame(), device.capture() as graphs[n]:
            step(pool, n)
    assert (pool.size, pool.used) == (size, used) == (size, 2 * 4096)
    del pool
    for _ in range(2):
        for n, graph in graphs.items():
            outs[n].fill(-1)
            graph.replay()
            np.testing.assert_array_equal(outs[n].numpy(), 26 * job.xs[:n])


def test_frames_that_get_larger_need_no_more_than_the_largest(device: Gpu) -> None:
    pool = device.pool(64 * KIB)
    for n in (1, 2, 4, 8, 16):
        with pool.frame():
            bytes_of(pool, n * KIB)
            bytes_of(pool, 256)
    assert pool.used == 16 * KIB + 256


def test_scratch_memory_continues_elsewhere_where_it_cannot_be_made_longer(device: Gpu) -> None:
    pool = device.pool(KIB)

    def frame(*sizes: int) -> list[int]:
        with pool.frame():
            return [bytes_of(pool, n).address for n in sizes]

    (first,) = frame(512)
    between = bytes_of(pool, 512)
    there = frame(512, 512)
    assert there[0] == first
    assert abs(there[1] - between.address) >= 512
    assert pool.used == 3 * 512
    assert frame(256, 700) == there  # the second stretch from its beginning, and longer now
    assert pool.used == 2 * 512 + 768
    assert frame(512, 512) == there
    assert frame(200, 200, 700) == [first, first + 256, there[1]]


def test_frames_inside_a_capture_leave_other_streams_to_the_next_frame_outside(
    faulty: FaultyGpu,
) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    side = faulty.gpu.stream()
    with pool.frame(), faulty.gpu.capture() as graph:
        pool.zeros(job.n, "int32")
    graph.replay(stream=side)
    with (
        faulty.count_calls("stream.wait", "stream.record") as calls,
        faulty.gpu.capture(),
        pool.frame(),
    ):
        pool.zeros(job.n, "int32")
    assert not calls
    with faulty.count_calls("stream.wait") as calls, pool.frame():
        add(job, pool.empty(job.n, "int32"))  # in the device's own stream
    assert calls == {"stream.wait": 1}


def test_a_frame_inside_a_capture_takes_memory_without_the_driver(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    with (
        faulty.count_calls("allocate", "stream.wait", "stream.record") as calls,
        faulty.gpu.capture() as graph,
    ):
        with pool.frame():
            part = pool.zeros(job.n, "int32")
            add(job, part)
            job.y.copy_from(part)
        with pool.frame():
            assert pool.empty(job.n, "int32").address == part.address
        with pytest.raises(StaleBufferError, match="the frame of its pool has ended"):
            part.fill(1)
    assert not calls
    graph.replay()
    np.testing.assert_array_equal(job.y.numpy(), 3 * job.xs)


def test_a_frame_without_free_memory_inside_a_capture_is_refused(device: Gpu) -> None:
    pool = device.pool(KIB)
    with pytest.raises(CaptureError, match="no room"), device.capture(), pool.frame():
        bytes_of(pool, 5000)
    with pool.frame():
        assert bytes_of(pool, 5000).nbytes == 5000  # outside it grows


def test_a_frame_inside_another_does_not_touch_its_memory(device: Gpu) -> None:
    pool = device.pool()
    with pool.frame():
        outer = pool.array([7, 8, 9], "int32")
        inner: list[int] = []
        for _ in range(2):
            with pool.frame():
                inner.append(pool.array([1, 2, 3], "int32").address)
        later = pool.array([4, 5], "int32")
        np.testing.assert_array_equal(outer.numpy(), [7, 8, 9])
        np.testing.assert_array_equal(later.numpy(), [4, 5])
        assert inner[0] == inner[1] == later.address != outer.address


def test_a_frame_ends_when_its_body_raises(device: Gpu) -> None:
    pool = device.pool()
    with pool.frame():
        place = bytes_of(pool, 31).address
    with pytest.raises(ZeroDivisionError), pool.frame():
        fail(pool)
    assert bytes_of(pool, 31).address != place  # outside a frame, scratch memory is not handed out
    with pool.frame():
        assert bytes_of(pool, 31).address == place


def test_a_frame_is_its_threads_only(device: Gpu) -> None:
    pool = device.pool(8 * KIB)

    def enter() -> None:
        with pool.frame():
            pytest.fail("two threads share scratch memory")

    with pool.frame():
        mine = bytes_of(pool, 31)
        theirs = run_in_thread(lambda: bytes_of(pool, 31))
        with pytest.raises(GraphError, match="another thread is inside a frame"):
            run_in_thread(enter)
    assert theirs.fill(5).numpy()[0] == 5
    with pytest.raises(StaleBufferError):
        mine.numpy()


def test_two_captures_in_frames_are_the_same_work(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)

    def captured() -> Graph:
        with pool.frame(), device.capture() as graph:
            add(job, pool.zeros(job.n, "int32"))
        return graph

    assert captured().diff(captured()) == []


def test_closing_an_array_of_a_frame_makes_its_graph_stale(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    with pool.frame():
        part = pool.zeros(job.n, "int32")
        with device.capture() as graph:
            add(job, part)
        graph.replay()
        part.close()
    with pytest.raises(StaleGraphError):
        graph.replay()


def test_the_next_frame_waits_for_what_the_last_did_in_other_streams(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    side = faulty.gpu.stream()
    with pool.frame():
        part = pool.zeros(job.n, "int32")
        job.axpy.launch(3, job.x, part, job.n, grid=5, block=64, stream=side)
        with faulty.gpu.capture() as graph:
            add(job, part)
    graph.replay(stream=side)
    with faulty.count_calls("stream.wait") as calls, pool.frame():
        add(job, pool.empty(job.n, "int32"))  # in the device's own stream
    assert calls == {"stream.wait": 1}
    with faulty.count_calls("stream.wait") as calls, pool.frame():
        add(job, pool.empty(job.n, "int32"))
    assert not calls


def test_a_replay_in_another_stream_waits_for_frames_in_between(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    side = faulty.gpu.stream()
    with pool.frame(), faulty.gpu.capture() as graph:
        pool.zeros(job.n, "int32")
    for _ in range(2):
        graph.replay(stream=side)
    with pool.frame():
        add(job, pool.empty(job.n, "int32"))
    with faulty.count_calls("stream.wait") as calls:
        for _ in range(2):
            graph.replay(stream=side)
    assert calls == {"stream.wait": 1}


def test_a_graph_is_not_replayed_over_arrays_of_a_frame_that_is_open(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    with device.capture() as inside, pool.frame():
        add(job, pool.zeros(job.n, "int32"))
    with pool.frame(), device.capture() as around:
        add(job, pool.zeros(job.n, "int32"))
    for graph in (inside, around):
        for _ in range(2):  # the quick way too
            graph.replay()
    with pool.frame():
        live = pool.array(job.ys)
        for graph in (inside, around, inside, around):
            with pytest.raises(GraphError, match="shares scratch memory with a frame") as refused:
                graph.replay()
            assert refused.value.hint == "replay it outside `with pool.frame()`"
            with pytest.raises(GraphError, match="shares scratch memory"):
                run_in_thread(partial(graph.replay, stream=device.stream()))
        np.testing.assert_array_equal(live.numpy(), job.ys)
    for graph in (inside, around):
        graph.replay()
        assert graph.num_replays == 3


def test_a_launch_is_as_fast_as_before_once_the_frame_has_ended(faulty: FaultyGpu) -> None:
    pool = faulty.gpu.pool(8 * KIB)
    with faulty.gpu.capture() as graph, pool.frame():
        pool.zeros(31)
    with pool.frame():
        pool.zeros(31)
    graph.replay()
    with faulty.count_calls() as calls:
        graph.replay()
    assert calls == {"replay": 1}
    assert (replayer(graph).launch is not None) == (native.core is not None)


def test_a_frame_refuses_the_graphs_that_it_has_reached_and_no_others(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(64 * KIB)
    with pool.frame():
        bytes_of(pool, 4 * KIB)
        with device.capture() as graph, pool.frame():
            add(job, pool.zeros(job.n, "int32"))
    with pool.frame():
        first = pool.array(job.ys)  # where that frame had nothing
        for _ in range(3):
            graph.replay()
        np.testing.assert_array_equal(first.numpy(), job.ys)
        bytes_of(pool, 4 * KIB)
        with pytest.raises(GraphError, match="shares scratch memory"):
            graph.replay()
        with device.capture() as mine, pool.frame():
            add(job, pool.zeros(job.n, "int32"))
        mine.replay()
        pool.zeros(job.n, "int32")
        with pytest.raises(GraphError, match="shares scratch memory"):
            mine.replay()


def test_a_graph_is_replayed_inside_the_frame_it_was_captured_in(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool()
    with pool.frame():
        before = pool.array(job.ys)
        with device.capture() as graph:
            with pool.frame():
                part = pool.zeros(job.n, "int32")
                add(job, part)
                add(job, before)
            after = pool.zeros(job.n, "int32")  # where `part` was
            add(job, after, 5)
        assert after.address == part.address
        for times in (1, 2, 3):
            graph.replay()
            np.testing.assert_array_equal(before.numpy(), job.ys + 3 * times * job.xs)
            np.testing.assert_array_equal(after.numpy(), 5 * job.xs)


def test_an_array_of_a_frame_is_the_operand_of_a_graph_in_every_frame(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool()

    @device.graphed()
    def step(x: Array) -> Array:
        job.axpy[5, 64](3, x, job.y, job.n)
        return job.y

    total = job.ys.copy()
    for factor in range(1, 6):
        with pool.frame():
            step(pool.array(factor * job.xs))
        total += 3 * factor * job.xs
        np.testing.assert_array_equal(job.y.numpy(), total)
    assert len(step.graphs) == 1


def test_a_frame_inside_a_capture_does_not_affect_replays_of_other_threads(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    with device.capture() as graph, pool.frame():
        part = pool.zeros(job.n, "int32")
        add(job, part)
        job.y.copy_from(part)
    with device.capture(), pool.frame():
        pool.zeros(job.n, "int32")
        run_in_thread(graph.replay)
    np.testing.assert_array_equal(job.y.numpy(), 3 * job.xs)


def test_frames_wait_for_other_streams_while_another_thread_captures(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    side = faulty.gpu.stream()

    def use() -> None:
        with pool.frame():
            part = pool.zeros(job.n, "int32")
            job.axpy.launch(3, job.x, part, job.n, grid=5, block=64, stream=side)
            before.update(faulty.device.calls)
        with pool.frame():
            add(job, pool.empty(job.n, "int32"))

    before: dict[str, int] = {}
    with faulty.gpu.capture() as graph:
        job.launch()
        run_in_thread(use)
        assert faulty.device.calls["stream.wait"] - before["stream.wait"] == 1  # home, for `side`
    graph.replay()
    job.check(3)


def test_frames_end_in_the_reverse_order(device: Gpu) -> None:
    pool = device.pool(8 * KIB)
    first, second = pool.frame(), pool.frame()
    first.__enter__()
    a = pool.array([1, 2], "int32")
    second.__enter__()
    b = pool.array([3, 4], "int32")
    with pytest.raises(GraphError, match="frames must end in the reverse order") as refused:
        first.__exit__(None, None, None)
    assert "this one ends with it" in str(refused.value.hint)
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([1, 2], [3, 4])
    second.__exit__(None, None, None)
    for ended in (a, b):
        with pytest.raises(StaleBufferError, match="the frame of its pool has ended"):
            ended.numpy()
    with pool.frame():
        assert pool.empty(2, "int32").address == a.address


def test_measuring_counts_what_frames_take_once(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool()

    def body() -> None:
        for _ in range(3):
            with pool.frame():
                add(job, pool.zeros(job.n, "int32"))

    assert pool.measure(body) == 1280
    size = pool.size
    with device.capture() as graph:
        body()
    assert len(graph) == 6
    assert (pool.size, pool.used) == (size, 1280)
