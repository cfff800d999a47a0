"""Pools: memory for captures that is handed out and taken back without the driver; sealed pools."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from preheat.devices.array import Array
from preheat.errors import (
    CaptureError,
    ContextLostError,
    InputError,
    OutOfMemoryError,
    PoolSealedError,
    StaleBufferError,
    StaleGraphError,
)
from preheat.gpu import Gpu
from preheat.graph.arena import FreeList, Span
from preheat.graph.graph import Graph
from preheat.graph.pool import Pool
from tests.driver_errors import out_of_memory
from tests.faulty import FaultyGpu
from tests.graph.pool_support import KIB, add, bytes_of, fail
from tests.graph.support import KERNELS, AxpyCase, axpy_case, runs_without_a_graph
from tests.processes import run_in_fork

# Sizes and counters


def test_a_pool_of_a_size_is_allocated_whole_and_at_once(faulty: FaultyGpu) -> None:
    with faulty.count_calls("allocate") as calls:
        pool = faulty.gpu.pool(10 * KIB)
    assert calls == {"allocate": 1}
    assert (pool.size, pool.used, pool.peak, pool.sealed) == (10 * KIB, 0, 0, False)


def test_a_pool_without_a_size_allocates_nothing_until_it_hands_out(faulty: FaultyGpu) -> None:
    with faulty.count_calls("allocate") as calls:
        pool = faulty.gpu.pool()
        assert pool.size == 0
    assert not calls
    assert bytes_of(pool, 1).nbytes <= pool.size


def test_handing_out_and_taking_back_need_no_driver_and_make_no_device_calls(faulty: FaultyGpu) -> None:
    pool = faulty.gpu.pool(10 * KIB)
    with faulty.count_calls() as calls:
        for _ in range(3):
            held = [bytes_of(pool, n) for n in (1, 31, 257, 5000)]
            held[1].close()
            del held
    assert not calls
    assert pool.used == 0


def test_pieces_are_aligned_apart_and_inside_the_pool(device: Gpu) -> None:
    pool = device.pool(64 * KIB)
    held = [bytes_of(pool, n) for n in (1, 255, 256, 257, 0, 1009, 31)]
    spans = sorted((each.address, each.address + each.nbytes) for each in held)
    assert all(start % 256 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= pool.size == 64 * KIB


def test_a_pool_counts_what_is_used_and_the_most_that_was(device: Gpu) -> None:
    pool = device.pool(8 * KIB)
    a, b = bytes_of(pool, 300), bytes_of(pool, 1)
    assert (pool.used, pool.peak) == (768, 768)
    a.close()
    assert (pool.used, pool.peak) == (256, 768)
    del b
    assert (pool.used, pool.peak, pool.size) == (0, 768, 8 * KIB)
    assert repr(pool) == f"<Pool 0 of 8,192 bytes on {device.name}>"


@pytest.mark.parametrize("n", [1, 31, 33, 257, 1009])
def test_arrays_of_a_pool_hold_what_they_are_given(device: Gpu, n: int) -> None:
    pool = device.pool()
    given = np.random.default_rng(n).integers(-99, 99, (2, n)).astype(np.int16)
    bytes_of(pool, 4 * n).fill(77)
    np.testing.assert_array_equal(pool.array(given).numpy(), given)
    np.testing.assert_array_equal(pool.array(given, "int64").numpy(), given)
    np.testing.assert_array_equal(pool.array(device.array(given)).numpy(), given)
    np.testing.assert_array_equal(pool.zeros((n, 2), "int16").numpy(), np.zeros((n, 2)))
    assert pool.empty(n).dtype.name == "float32"


def test_an_array_is_not_copied_as_another_type(device: Gpu) -> None:
    with pytest.raises(InputError, match="cannot be copied as int32"):
        device.pool().array(device.array([1.5]), "int32")


def test_kernels_take_arrays_of_a_pool_like_any_other(device: Gpu) -> None:
    job = axpy_case(device)
    into = device.pool().array(job.ys)
    for _ in range(4):  # the quick way too
        add(job, into)
    np.testing.assert_array_equal(into.numpy(), job.ys + 12 * job.xs)


@pytest.mark.parametrize("wrong", [-1, 2.5, "1k"])
def test_a_size_that_is_none_is_refused(device: Gpu, wrong: Any) -> None:
    with pytest.raises(InputError, match="not a number of bytes"):
        device.pool(wrong)
    with pytest.raises(InputError, match="not a number of bytes"):
        device.pool().reserve(wrong)


# Where pieces are


def test_the_same_requests_get_the_same_addresses_again(device: Gpu) -> None:
    pool = device.pool(64 * KIB)

    def requests() -> list[int]:
        first = [bytes_of(pool, n) for n in (1000, 31, 513)]
        del first[1]
        return [each.address for each in (*first, bytes_of(pool, 7), bytes_of(pool, 4096))]

    assert requests() == requests() == requests()


def test_the_first_place_that_fits_is_taken(device: Gpu) -> None:
    pool = device.pool(64 * KIB)
    a, b, c, _ = (bytes_of(pool, n) for n in (512, 256, 1024, 256))
    places = a.address, b.address, c.address
    del a, c
    assert bytes_of(pool, 700).address == places[2]
    small, medium = bytes_of(pool, 256), bytes_of(pool, 512)
    assert (small.address, medium.address) == (places[0], places[2])
    del b, small, medium
    assert bytes_of(pool, 512 + 256 + 1024).address == places[0]  # side by side they are one again


def test_blocks_that_happen_to_lie_side_by_side_are_not_one(device: Gpu) -> None:
    first, second = (device.empty(512, "uint8").buffer for _ in range(2))
    room = FreeList()
    room.put(Span(0x1200, 512, second), Span(0x1000, 512, first))
    assert room.take(1024) is None
    assert room.take(256, after=Span(0x1100, 256, first)) is None
    assert room.take(256, after=Span(0x1100, 256, second)) == (0x1200, 256, second)
    assert (room.largest, room.take(512)) == (512, (0x1000, 512, first))


def test_no_two_pieces_overlap_whatever_the_order(open_device: Callable[..., Gpu]) -> None:
    pool = open_device("emulator").pool(32 * KIB)
    chance = random.Random(7)
    held: list[Array] = []
    for step in range(400):
        if held and chance.random() < 0.5:
            gone = held.pop(chance.randrange(len(held)))
            gone.close() if step % 2 else None
            del gone
        else:
            held.append(bytes_of(pool, chance.choice([1, 31, 256, 257, 1009, 4096])))
        spans = sorted((each.address, each.address + each.nbytes) for each in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert pool.used == sum(-(-each.nbytes // 256) * 256 for each in held)
    held.clear()
    free = pool.size
    pool.reserve(32 * KIB)
    assert pool.size == free  # all of the first block is one stretch again


def test_threads_share_a_pool_without_sharing_pieces(device: Gpu) -> None:
    pool = device.pool(16 * KIB)
    start = threading.Barrier(4)
    seen = list[Array]()

    def take() -> None:
        start.wait(300)
        for _ in range(25):
            bytes_of(pool, 300)  # dropped at once
            seen.append(bytes_of(pool, 31))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len({each.address for each in seen}) == 100
    assert pool.used == 100 * 256


# Giving back


def test_a_block_lives_while_the_pool_or_any_piece_does(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    with faulty.count_calls("free") as calls:
        pool = faulty.gpu.pool(4 * KIB)
        into = pool.array(job.ys)
        del pool
        faulty.gpu.synchronize()
        add(job, into)
        np.testing.assert_array_equal(into.numpy(), job.ys + 3 * job.xs)
    assert not calls
    with faulty.count_calls("free") as calls:
        del into
        faulty.gpu.synchronize()
    assert calls == {"free": 1}


def test_closing_a_piece_makes_its_graphs_stale_and_no_others(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    mine, other = pool.array(job.ys), pool.array(job.ys)
    graphs: list[Graph] = []
    for into in (mine, other):
        with device.capture() as graph:
            add(job, into)
        graphs.append(graph)
    place = mine.address
    mine.close()
    again = pool.array(job.ys)
    assert again.address == place
    assert again.buffer.generation != mine.buffer.generation
    with pytest.raises(StaleGraphError, match=r"node 0, axpy, argument 2 .*int32\[257\]"):
        graphs[0].replay()
    graphs[1].replay()
    np.testing.assert_array_equal(other.numpy(), job.ys + 3 * job.xs)
    np.testing.assert_array_equal(again.numpy(), job.ys)
    with pytest.raises(StaleBufferError):
        mine.numpy()


def test_memory_that_a_graph_uses_is_not_handed_out_again_when_names_are_dropped(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    into = pool.array(job.ys)
    with device.capture() as graph:
        add(job, into)
    place = into.address
    del into
    other = pool.array(job.ys)
    assert other.address != place
    graph.replay()
    np.testing.assert_array_equal(other.numpy(), job.ys)
    graph.close()
    assert pool.array(job.ys).address == place


def test_a_piece_used_in_another_stream_is_handed_out_behind_that_use(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    side = faulty.gpu.stream()
    into = pool.array(job.ys)
    job.axpy.launch(3, job.x, into, job.n, grid=5, block=64, stream=side)
    place = into.address
    del into
    with faulty.count_calls("stream.wait") as calls:
        assert pool.empty(job.n, "int32").address == place
    assert calls == {"stream.wait": 1}
    with faulty.count_calls("stream.wait") as calls:
        assert pool.empty(job.n, "int32").address == place  # ordered once is ordered
    assert not calls


def test_work_in_another_stream_does_not_reach_the_next_owner_of_its_memory(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    side = device.stream()
    spin = device.kernel(KERNELS, "spin")
    into = pool.array(job.ys)
    for _ in range(3):
        spin.launch(1 if "emulator" in device.name else 50_000_000, grid=1, block=1, stream=side)
        job.axpy.launch(3, job.x, into, job.n, grid=5, block=64, stream=side)
    del into
    np.testing.assert_array_equal(pool.zeros(job.n, "int32").numpy(), np.zeros(job.n))


def test_memory_whose_order_failed_is_not_lost(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    side = faulty.gpu.stream()
    into = pool.array(job.ys)
    job.axpy.launch(3, job.x, into, job.n, grid=5, block=64, stream=side)
    place = into.address
    del into
    faulty.device.fail("stream.wait", out_of_memory("cuStreamWaitEvent"))
    with pytest.raises(OutOfMemoryError):
        pool.empty(job.n, "int32")
    with faulty.count_calls("stream.wait") as calls:
        assert pool.empty(job.n, "int32").address == place
    assert calls == {"stream.wait": 1}
    assert pool.used == 0


def test_inside_a_capture_such_a_piece_is_passed_over(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    side = faulty.gpu.stream()
    into = pool.array(job.ys)
    job.axpy.launch(3, job.x, into, job.n, grid=5, block=64, stream=side)
    place = into.address
    del into
    with faulty.gpu.capture() as graph:
        other = pool.zeros(job.n, "int32")
        add(job, other)
    assert other.address != place
    graph.replay()
    np.testing.assert_array_equal(other.numpy(), 3 * job.xs)
    assert pool.empty(job.n, "int32").address == place


def test_memory_that_another_library_holds_is_not_handed_out_until_it_is_released(
    open_faulty: Callable[..., FaultyGpu],
) -> None:
    faulty = open_faulty("emulator")
    pool = faulty.gpu.pool(8 * KIB)
    made = pool.array(np.arange(33, dtype=np.int32))
    view = np.from_dlpack(made)
    place = made.address
    made.close()
    del made
    assert pool.zeros(33, "int32").address != place
    pool.close()
    faulty.gpu.synchronize()
    np.testing.assert_array_equal(view, np.arange(33))


def test_memory_that_another_library_released_is_handed_out_again(
    open_faulty: Callable[..., FaultyGpu],
) -> None:
    faulty = open_faulty("emulator")
    pool = faulty.gpu.pool(8 * KIB)
    made = pool.array(np.arange(33, dtype=np.int32))
    view = np.from_dlpack(made)
    place = made.address
    del made, view
    gc.collect()
    with faulty.count_calls("synchronize", "stream.synchronize") as calls:
        assert pool.zeros(33, "int32").address == place
    assert calls == {}  # which needs no wait of the host


# Growing


def drops(pool: Pool, job: AxpyCase) -> None:
    """Take nine pieces, each dropped before the next is taken: a capture keeps them all."""
    for _ in range(9):
        add(job, pool.zeros(job.n, "int32"))
    job.launch()


def test_a_capture_that_found_no_free_memory_finds_it_a_few_tries_later(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(2 * KIB)
    runs = 0
    graphs = list[Graph]()
    while not graphs:
        drops(pool, job)
        runs += 1
        with suppress(CaptureError), device.capture() as graph:
            drops(pool, job)
        graphs += [graph] if len(graph) else []
    assert 2 <= runs <= 5  # The pool had memory for one of nine.
    graph.replay()
    job.check(3 * (runs + 1))
    assert pool.size <= 4 * 9 * 1280


def test_a_body_that_runs_by_its_key_is_captured_in_the_end_without_being_measured(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(2 * KIB)
    graphs = device.graphs()
    calls = 0
    with runs_without_a_graph("the pool has no room") as reported:
        while "step" not in graphs:
            graphs.run("step", lambda: drops(pool, job))
            calls += 1
            assert calls < 200
    assert len(reported) == 1  # although each try is refused with other numbers
    job.check(3 * calls)


def test_a_failed_reservation_for_a_later_attempt_is_no_error_of_a_smaller_request(
    faulty: FaultyGpu,
) -> None:
    pool = faulty.gpu.pool(2 * KIB)
    held = bytes_of(pool, 256)
    with pytest.raises(CaptureError, match="no room"), faulty.gpu.capture():
        bytes_of(pool, 64 * KIB)
    faulty.device.fail("allocate", out_of_memory("cuMemAllocAsync"), out_of_memory("cuMemAllocAsync"))
    more = bytes_of(pool, 512).fill(7)
    assert more.numpy()[0] == 7
    assert (pool.size, pool.used) == (2 * KIB, held.nbytes + more.nbytes)


def test_each_capture_is_measured_for_right_before_it(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool()
    graphs: list[Graph] = []

    def body(n: int) -> None:
        pool.zeros(n, "int32")
        job.launch()

    for n in (1 << 20, 1 << 19):
        pool.measure(partial(body, n))
        with device.capture() as graph:
            body(n)
        graphs.append(graph)
    assert pool.used == (4 << 20) + (2 << 20)


def test_outside_a_capture_a_pool_grows_by_itself(faulty: FaultyGpu) -> None:
    pool = faulty.gpu.pool(KIB)
    first = bytes_of(pool, KIB)
    with faulty.count_calls("allocate") as calls:
        more = [bytes_of(pool, 1000) for _ in range(9)]
    assert calls == {"allocate": 1}
    assert pool.used == first.nbytes + len(more) * KIB <= pool.size
    assert bytes_of(pool, 5 << 20).nbytes <= pool.size


def test_a_pool_that_cannot_grow_says_so_and_stays_as_it_is(faulty: FaultyGpu) -> None:
    pool = faulty.gpu.pool(KIB)
    with pytest.raises(OutOfMemoryError):
        bytes_of(pool, 1 << 46)
    assert (pool.size, pool.used, pool.peak) == (KIB, 0, 0)
    assert bytes_of(pool, KIB).nbytes == pool.used


def test_reserving_exchanges_unused_blocks_for_one_that_is_large_enough(faulty: FaultyGpu) -> None:
    pool = faulty.gpu.pool(4 * KIB)
    pool.reserve(3 * KIB)
    assert pool.size == 4 * KIB
    pool.reserve(64 * KIB)
    assert pool.size == 64 * KIB
    held = bytes_of(pool, 1)
    pool.reserve(64 * KIB)
    assert pool.size == 128 * KIB
    with faulty.gpu.capture() as graph:
        bytes_of(pool, 64 * KIB).fill(3)
    assert len(graph) == 1
    assert pool.used == held.nbytes + 255 + 64 * KIB


def test_reserving_inside_a_capture_is_refused_where_it_would_allocate(device: Gpu) -> None:
    pool = device.pool(4 * KIB)
    with device.capture():
        pool.reserve(4 * KIB)
        bytes_of(pool, 7).fill(1)
    with pytest.raises(CaptureError, match="allocating memory inside a capture"), device.capture():
        pool.reserve(64 * KIB)
    assert pool.size == 4 * KIB


def test_measuring_runs_the_body_and_reserves_memory_for_its_capture(device: Gpu) -> None:
    job = axpy_case(device, 1009)
    pool = device.pool()
    runs = 0
    out = device.zeros(job.n, "int32")

    def body() -> None:
        nonlocal runs
        runs += 1
        for _ in range(5):  # each is dropped before the next is taken
            part = pool.zeros(job.n, "int32")
            add(job, part)
        out.copy_from(part)

    took = pool.measure(body)
    assert (took, runs) == (5 * 4096, 1)
    np.testing.assert_array_equal(out.numpy(), 3 * job.xs)
    assert pool.used == 0
    out.fill(0)
    size = pool.size
    with device.capture() as graph:
        body()
    graph.replay()
    np.testing.assert_array_equal(out.numpy(), 3 * job.xs)
    assert (pool.size, pool.used) == (size, took)


def test_measuring_leaves_one_free_stretch_that_is_large_enough(device: Gpu) -> None:
    pool = device.pool(KIB)
    kept: list[Array] = []
    took = pool.measure(lambda: kept.extend(bytes_of(pool, 3 << 20) for _ in range(2)))
    assert took == 6 << 20
    with device.capture():
        bytes_of(pool, took).fill(1)
    assert pool.measure(lambda: None) == 0


def test_a_body_that_raises_is_not_measured_and_leaves_the_pool_working(device: Gpu) -> None:
    pool = device.pool()

    with pytest.raises(ZeroDivisionError):
        pool.measure(lambda: fail(pool))
    gc.collect()
    assert pool.used == 0
    place = bytes_of(pool, 1).address
    assert bytes_of(pool, 1).address == place  # it takes back again


def test_measuring_inside_a_capture_is_refused(device: Gpu) -> None:
    pool = device.pool(KIB)
    with pytest.raises(CaptureError, match="measuring a pool inside a capture"), device.capture():
        pool.measure(lambda: bytes_of(pool, 1))


# Sealing


def test_a_pool_says_whether_it_is_sealed(device: Gpu) -> None:
    pool = device.pool()
    reported = [pool.sealed]
    for change in (pool.seal, pool.seal, pool.unseal, pool.unseal):  # Closing twice is allowed.
        change()
        reported.append(pool.sealed)
    assert reported == [False, True, True, False, False]


def test_a_sealed_pool_hands_out_nothing_before_or_inside_a_capture(device: Gpu) -> None:
    pool = device.pool(8 * KIB)
    pool.seal()
    assert repr(pool).endswith(", sealed>")
    asks: list[Callable[[], object]] = [
        lambda: pool.empty(3),
        lambda: pool.zeros(3),
        lambda: pool.array([1.0]),
        lambda: pool.reserve(1),
        lambda: pool.measure(lambda: None),
    ]
    for ask in asks:
        with pytest.raises(PoolSealedError, match="sealed") as refused:
            ask()
        assert "pool.unseal()" in str(refused.value.hint)
    with pytest.raises(PoolSealedError, match="sealed"), device.capture():
        pool.empty(3)
    with pytest.raises(PoolSealedError, match="sealed"), pool.frame():
        pool.empty(3)
    pool.unseal()
    assert pool.empty(3).size == 3


def test_a_sealed_error_that_is_swallowed_ends_the_capture_anyway(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    pool.seal()
    graph = device.capture().begin()
    with pytest.raises(PoolSealedError):
        pool.empty(3)
    job.launch()
    with pytest.raises(CaptureError, match="the pool is sealed: 256 bytes were requested"):
        graph.end()


def test_memory_handed_out_before_the_sealing_captures_and_replays(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    into = pool.array(job.ys)
    pool.seal()
    with device.capture() as graph:
        add(job, into)
    for _ in range(3):
        graph.replay()
    np.testing.assert_array_equal(into.numpy(), job.ys + 9 * job.xs)
    into.close()
    assert pool.used == 0


# Its end


def test_closing_a_pool_closes_what_it_handed_out(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    with faulty.count_calls("free") as calls, faulty.gpu.pool(8 * KIB) as pool:
        into = pool.array(job.ys)
        with pool.frame(), faulty.gpu.capture() as scratchy:
            add(job, pool.zeros(job.n, "int32"))
        with faulty.gpu.capture() as graph:
            add(job, into)
        graph.replay()
        scratchy.replay()
    pool.close()
    assert calls == {"free": 1}
    assert (pool.size, pool.used) == (0, 0)
    assert repr(pool).endswith(", closed>")
    with pytest.raises(StaleBufferError, match="freed"):
        into.numpy()
    for stale in (graph, scratchy):
        with pytest.raises(StaleGraphError):
            stale.replay()
    with pytest.raises(InputError, match="this pool is closed: 256 bytes were requested"):
        bytes_of(pool, 1)
    with pytest.raises(InputError, match="this pool is closed: a frame cannot begin"):
        pool.frame().__enter__()


def test_a_pool_is_not_closed_inside_a_capture(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    into = pool.array(job.ys)
    with pytest.raises(CaptureError, match="freeing memory inside a capture"), device.capture():
        pool.close()
    with pytest.raises(CaptureError, match="freeing memory inside a capture"), device.capture():
        into.close()
    assert pool.zeros(3).numpy().tolist() == [0, 0, 0]
    add(job, into)
    np.testing.assert_array_equal(into.numpy(), job.ys + 3 * job.xs)


def test_after_a_reset_a_pool_says_that_it_is_gone(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    pool = gpu.pool(8 * KIB)
    held = bytes_of(pool, 31)
    gpu.reset()

    def enter() -> None:
        with pool.frame():
            pytest.fail("a frame of a lost pool")

    asks: list[Callable[[], object]] = [
        lambda: pool.empty(3),
        lambda: pool.zeros(3),
        lambda: pool.array([1.0]),
        lambda: pool.reserve(1),
        lambda: pool.measure(lambda: None),
        enter,
    ]
    for ask in asks:
        with pytest.raises(ContextLostError, match="reset"):
            ask()
    with pytest.raises(StaleBufferError, match="reset"):
        held.numpy()
    pool.close()
    assert bytes_of(gpu.pool(), 3).nbytes == 3


def test_a_fork_while_another_thread_takes_from_a_pool_leaves_no_lock_behind(
    open_device: Callable[..., Gpu],
) -> None:
    pool = open_device("emulator").pool(8 * KIB)
    pool._lock.acquire()  # another thread is at it

    def child() -> None:
        assert pool.zeros(3).numpy().tolist() == [0, 0, 0]

    run_in_fork(child)
    pool._lock.release()
    assert pool.used == 0  # the child's is the child's
