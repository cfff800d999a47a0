"""Pools inside captures: memory is handed out without the driver, and kept by the graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.devices.array import Array
from preheat.errors import (
    CaptureError,
    InputError,
    PoolSealedError,
)
from preheat.gpu import Gpu
from preheat.graph.arena import PoolBuffer
from preheat.graph.graph import State
from tests.faulty import FaultyGpu
from tests.graph.pool_support import KIB, add, bytes_of, fail
from tests.graph.support import AxpyCase, axpy_case, line_here
from tests.threads import run_in_thread

# Inside a capture


def test_a_capture_hands_out_from_free_memory(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    with faulty.count_calls("allocate", "free", "synchronize") as calls, faulty.gpu.capture() as graph:
        total = pool.zeros(job.n, "int32")
        add(job, total, 5)
        copy = pool.array(total)
    assert not calls
    assert [node.kind for node in graph.nodes] == ["fill", "kernel", "copy"]
    for _ in range(3):  # zero again every time
        graph.replay()
    np.testing.assert_array_equal(copy.numpy(), 5 * job.xs)
    np.testing.assert_array_equal(total.numpy(), 5 * job.xs)


def test_no_free_memory_is_an_error_that_says_how_much_there_is_and_what_to_do(device: Gpu) -> None:
    pool = device.pool(2 * KIB)
    held = bytes_of(pool, 512)
    where = line_here(2)
    with pytest.raises(CaptureError) as refused, device.capture():
        pool.empty(5000, "uint8")
    assert refused.value.where == where
    assert "5,120 bytes were requested" in str(refused.value)
    assert "1,536 of 1,536 free bytes are contiguous" in str(refused.value)
    assert refused.value.hint == "right before each capture: pool.measure(body), or pool.reserve(5120)"
    assert pool.used == held.nbytes == 512
    pool.reserve(5120)
    with device.capture():
        bytes_of(pool, 5000).fill(1)


def test_an_error_of_the_pool_is_what_the_capture_reports_even_when_swallowed(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(KIB)
    graph = device.capture().begin()
    where = line_here(2)
    with pytest.raises(CaptureError):
        pool.empty(5000, "uint8")
    job.launch()
    with pytest.raises(CaptureError, match=f"{where}: the capture failed: the pool has no room"):
        graph.end()
    job.launch()
    job.check(3)


def test_a_relaxed_capture_does_not_grow_a_pool_either(device: Gpu) -> None:
    pool = device.pool(KIB)
    with pytest.raises(CaptureError, match="no room"), device.capture(mode="relaxed"):
        bytes_of(pool, 5000)
    assert pool.size == KIB


def test_a_capture_copies_nothing_from_the_host_into_a_pool(device: Gpu) -> None:
    pool = device.pool(8 * KIB)
    with pytest.raises(CaptureError, match="copying from the host"), device.capture():
        pool.array([1, 2, 3])
    assert pool.used == 0


def test_memory_dropped_inside_a_capture_comes_back_unless_the_capture_uses_it(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    with device.capture() as graph:
        first = pool.zeros(job.n, "int32")
        place = first.address
        del first
        second = pool.empty(job.n, "int32")
        assert second.address != place
        unused = second.address
        del second
        gc.collect()
        third = pool.zeros(job.n, "int32")
        assert third.address == unused
        add(job, third)
    graph.replay()
    np.testing.assert_array_equal(third.numpy(), 3 * job.xs)


def test_a_capture_that_fails_releases_what_it_took(device: Gpu) -> None:
    pool = device.pool(8 * KIB)
    with pytest.raises(ZeroDivisionError), device.capture():
        fail(pool)
    gc.collect()
    assert pool.used == 0


def test_while_another_thread_captures_a_pool_hands_out_as_ever(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(64 * KIB)
    with device.capture() as graph:
        mine = pool.zeros(job.n, "int32")
        theirs = run_in_thread(lambda: pool.zeros(job.n, "int32").fill(7))
        add(job, mine)
    assert len(graph) == 2
    graph.replay()
    np.testing.assert_array_equal(mine.numpy(), 3 * job.xs)
    np.testing.assert_array_equal(theirs.numpy(), np.full(job.n, 7))


# A capture that allocates from a pool


def doubled(job: AxpyCase) -> Array:
    """`2 * x` by way of an array that is new in every call."""
    made = job.gpu.zeros(job.n, "int32")
    add(job, made, 1)
    add(job, made, 1)
    return made


def test_new_arrays_of_a_capture_come_from_its_pool(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool()
    assert pool.measure(lambda: doubled(job)) == 1280  # counts what comes from `gpu.zeros`, too
    with faulty.count_calls("allocate") as calls, faulty.gpu.capture(pool=pool) as graph:
        made = doubled(job)
    assert calls == {}
    for _ in range(3):
        graph.replay()
    np.testing.assert_array_equal(made.numpy(), 2 * job.xs)
    assert (isinstance(made.buffer, PoolBuffer), pool.used) == (True, 1280)
    del made, graph
    gc.collect()
    faulty.gpu.synchronize()
    assert pool.used == 0
    assert not isinstance(faulty.gpu.empty(3).buffer, PoolBuffer)  # outside it they do not


def test_another_thread_has_nothing_from_the_pool_of_a_capture(device: Gpu) -> None:
    job = axpy_case(device)
    pool = device.pool(8 * KIB)
    with device.capture(pool=pool):
        mine = device.empty(3)
        other = run_in_thread(lambda: device.empty(3))
        job.launch()
    assert [isinstance(each.buffer, PoolBuffer) for each in (mine, other)] == [True, False]


def test_a_capture_that_lacked_memory_has_it_the_next_time(device: Gpu) -> None:
    job = axpy_case(device, 5000)
    pool = device.pool()
    refused = pytest.raises(CaptureError, match="the pool has no room")
    with refused as error, device.capture(pool=pool):
        doubled(job)
    assert "pool.measure(body)" in str(error.value.hint)
    with device.capture(pool=pool) as graph:  # nothing was asked of the pool in between
        made = doubled(job)
    graph.replay()
    np.testing.assert_array_equal(made.numpy(), 2 * job.xs)


def test_a_sealed_pool_is_refused_when_the_capture_begins(faulty: FaultyGpu) -> None:
    job = axpy_case(faulty.gpu)
    pool = faulty.gpu.pool(8 * KIB)
    graph = faulty.gpu.capture(pool=pool)
    entered = list[int]()
    pool.seal()
    with faulty.count_calls() as calls, pytest.raises(PoolSealedError) as refused, graph:
        entered.append(1)
    assert str(refused.value) == "the pool is sealed: a capture that allocates from it cannot begin"
    assert str(refused.value.hint).startswith("pool.unseal() before the capture; without pool=, ")
    assert (entered, calls, graph.status, graph.state) == ([], {}, "none", State.NEW)
    pool.unseal()
    with graph:  # the same one, which has not begun yet
        made = doubled(job)
    graph.replay()
    np.testing.assert_array_equal(made.numpy(), 2 * job.xs)


def test_a_pool_that_is_sealed_inside_the_capture_hands_out_nothing_more(device: Gpu) -> None:
    pool = device.pool(8 * KIB)
    graph = device.capture(pool=pool).begin()
    device.zeros(3)
    pool.seal()
    with pytest.raises(PoolSealedError, match="256 bytes were requested"):
        device.empty(3)
    with pytest.raises(CaptureError, match="the capture failed: the pool is sealed: 256 bytes"):
        graph.end()


def test_a_value_that_is_no_pool_of_this_device_is_refused_at_once(
    open_device: Callable[..., Gpu],
) -> None:
    gpu, other = open_device("emulator:0"), open_device("emulator:1")
    wrong: Any = 1 << 20
    with pytest.raises(InputError, match="pool=1048576 is not a pool of memory"):
        gpu.capture(pool=wrong)
    with pytest.raises(InputError, match="does not belong to emulator:0, or was made before its"):
        gpu.capture(pool=other.pool())
    with pytest.raises(InputError, match="does not belong to emulator:0, or was made before its"):
        gpu.graphs(pool=other.shared_pool())
    pool = gpu.pool()
    pool.close()
    with pytest.raises(InputError, match="this pool is closed: a capture that"), gpu.capture(pool=pool):
        pass
    old = gpu.pool()
    gpu.reset()
    with pytest.raises(InputError, match="or was made before its reset"):
        gpu.capture(pool=old)


def test_a_copy_from_the_host_is_refused_with_a_pool_as_without(device: Gpu) -> None:
    pool = device.pool(8 * KIB)
    with pytest.raises(CaptureError, match="copying from the host"), device.capture(pool=pool):
        device.array([1.0])
    gc.collect()
    assert pool.used == 0


def test_a_measured_body_that_raises_leaves_allocations_to_the_device(device: Gpu) -> None:
    pool = device.pool()
    with pytest.raises(ZeroDivisionError):
        pool.measure(lambda: fail(pool))
    assert not isinstance(device.empty(3).buffer, PoolBuffer)
