"""Streams, events and the legacy default stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.driver.calls.cuda import Program, cu, ok, status

pytestmark = pytest.mark.cpu_driver

INVALID_HANDLE, NOT_READY = 400, 600
BLOCKING, NON_BLOCKING = 0, 1


@pytest.fixture
def create(program: Program) -> Iterator[Callable[[int], Any]]:
    """Creates streams, and destroys them."""
    del program
    made: list[Any] = []

    def create_one(flags: int) -> Any:
        made.append(ok(cu.cuStreamCreate(flags)))
        return made[-1]

    yield create_one
    for stream in made:
        ok(cu.cuStreamDestroy(stream))


def outcomes(program: Program, first: Any, second: Any, event: Any = None) -> set[int]:
    """Add 1 in a stream and double in another one, often, and return the results."""
    address = program.memory([1])
    found = set()
    for _ in range(40):
        ok(cu.cuMemsetD32(address, 1, 1))
        ok(cu.cuCtxSynchronize())
        ok(program.launch("add", address, 1, 1, stream=first))
        if event is not None:
            ok(cu.cuEventRecord(event, first))
            ok(cu.cuStreamWaitEvent(second, event, 0))
        ok(program.launch("twice", address, 1, stream=second))
        ok(cu.cuStreamSynchronize(second))
        ok(cu.cuCtxSynchronize())
        found.add(program.values(address, 1)[0])
    ok(cu.cuMemFree(address))
    return found


def test_a_missing_wait_between_streams_shows(program: Program, create: Callable[[int], Any]) -> None:
    assert outcomes(program, create(NON_BLOCKING), create(NON_BLOCKING)) == {3, 4}


def test_a_stream_that_waits_for_an_event_sees_the_work_before_it(
    program: Program, create: Callable[[int], Any]
) -> None:
    event = ok(cu.cuEventCreate(0))
    assert outcomes(program, create(NON_BLOCKING), create(NON_BLOCKING), event) == {4}
    ok(cu.cuEventDestroy(event))


@pytest.mark.parametrize("legacy_is_first", [True, False])
def test_blocking_streams_and_the_legacy_default_stream_wait_for_one_another(
    program: Program, create: Callable[[int], Any], legacy_is_first: bool
) -> None:
    stream = create(BLOCKING)
    order = (0, stream) if legacy_is_first else (stream, 0)
    assert outcomes(program, *order) == {4}
    others = (0, create(NON_BLOCKING))
    assert outcomes(program, *(others if legacy_is_first else others[::-1])) == {3, 4}


def test_the_per_thread_default_stream_is_a_blocking_one(program: Program) -> None:
    assert outcomes(program, 2, 0) == {4}
    assert outcomes(program, 1, 2) == {4}


def test_a_stream_knows_what_it_was_created_with(program: Program) -> None:
    stream = ok(cu.cuStreamCreateWithPriority(NON_BLOCKING, -100))
    assert ok(cu.cuStreamGetFlags(stream)) == NON_BLOCKING
    assert ok(cu.cuStreamGetPriority(stream)) == ok(cu.cuCtxGetStreamPriorityRange())[1]
    assert int(ok(cu.cuStreamGetCtx(stream))) == int(program.context)
    assert ok(cu.cuStreamGetId(stream)) != ok(cu.cuStreamGetId(0))
    ok(cu.cuStreamDestroy(stream))
    assert status(cu.cuStreamQuery(stream)) == INVALID_HANDLE


def test_an_event_that_was_never_recorded_is_complete(program: Program) -> None:
    del program
    event = ok(cu.cuEventCreate(0))
    ok(cu.cuEventQuery(event))
    ok(cu.cuEventSynchronize(event))
    assert status(cu.cuEventElapsedTime(event, event)) == INVALID_HANDLE
    ok(cu.cuEventDestroy(event))
    assert status(cu.cuEventQuery(event)) == INVALID_HANDLE


def test_events_measure_time_unless_they_are_told_not_to(
    program: Program, create: Callable[[int], Any]
) -> None:
    stream = create(NON_BLOCKING)
    address = program.memory([1])
    start, end, plain = (ok(cu.cuEventCreate(flags)) for flags in (0, 0, 2))
    ok(cu.cuEventRecord(start, stream))
    ok(program.launch("twice", address, 1, stream=stream))
    ok(cu.cuEventRecord(end, stream))
    ok(cu.cuEventRecord(plain, stream))
    ok(cu.cuEventSynchronize(plain))
    assert ok(cu.cuEventElapsedTime(start, end)) > 0
    assert status(cu.cuEventElapsedTime(start, plain)) == INVALID_HANDLE
    ok(cu.cuMemFree(address))


def test_a_query_ends_although_nothing_waits(program: Program, create: Callable[[int], Any]) -> None:
    stream = create(NON_BLOCKING)
    address = program.memory([0])
    ok(program.launch("add", address, 1, 1, stream=stream))
    seen = {status(cu.cuStreamQuery(stream)) for _ in range(200)}
    assert seen <= {0, NOT_READY}
    assert status(cu.cuStreamQuery(stream)) == 0
    ok(cu.cuMemFree(address))


def test_functions_of_the_host_run_in_the_order_of_their_stream(
    program: Program, create: Callable[[int], Any]
) -> None:
    stream = create(NON_BLOCKING)
    address, seen = program.memory([5]), []
    pinned = ok(cu.cuMemAllocHost(4))
    value = ctypes.c_int.from_address(int(pinned))

    def note(argument: int) -> None:
        seen.append((argument, value.value))

    function = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(note)
    where = ctypes.cast(function, ctypes.c_void_p).value
    ok(program.launch("twice", address, 1, stream=stream))
    ok(cu.cuMemcpyDtoHAsync(pinned, address, 4, stream))
    ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(where), 77))
    ok(cu.cuStreamSynchronize(stream))
    assert seen == [(77, 10)]
    ok(cu.cuMemFreeHost(pinned))
    ok(cu.cuMemFree(address))
