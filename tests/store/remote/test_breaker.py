"""When a breaker opens, permits a trial, and closes."""

from __future__ import annotations

import pytest

from preheat.store.remote.server import Breaker
from tests.store.remote.remote_stores import Clock


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    """Return a breaker whose pauses do not vary."""
    return Breaker(patience=2.0, clock=clock, chance=lambda: 0.5)


def fail(breaker: Breaker, seconds: float = 0.0) -> bool:
    return breaker.count_fault(seconds)


def open_it(breaker: Breaker) -> None:
    assert [fail(breaker) for _ in range(3)] == [False, False, True]


def pause_of(breaker: Breaker, clock: Clock) -> float:
    """Return the seconds until the next trial, which is claimed."""
    began = clock.now
    while not breaker.claim_trial():
        clock.now += 0.125
        assert clock.now < began + 1000
    return clock.now - began


def test_three_faults_in_a_row_open_it(breaker: Breaker) -> None:
    open_it(breaker)
    assert not breaker.closed


def test_a_success_between_faults_keeps_it_closed(breaker: Breaker) -> None:
    for _ in range(10):
        assert not fail(breaker)
        assert not fail(breaker)
        assert not breaker.count_success()
    assert breaker.closed


def test_one_fault_that_took_all_the_time_opens_it(breaker: Breaker) -> None:
    assert not fail(breaker, 1.0)
    assert fail(breaker, 1.0)


def test_faults_of_requests_that_began_before_it_opened_do_not_count(
    breaker: Breaker, clock: Clock
) -> None:
    open_it(breaker)
    assert not any(fail(breaker, 2.0) for _ in range(15))
    assert not breaker.count_success()
    assert not breaker.closed
    assert pause_of(breaker, clock) == 1


def test_one_caller_gets_the_trial_and_the_others_wait_for_a_pause(
    breaker: Breaker, clock: Clock
) -> None:
    assert not breaker.claim_trial()  # It is closed.
    open_it(breaker)
    assert not breaker.claim_trial()
    clock.now += 1
    assert [breaker.claim_trial() for _ in range(3)] == [True, False, False]
    clock.now += 1  # The trial was never made.
    assert breaker.claim_trial()


def test_a_trial_that_succeeds_closes_it_once(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    pause_of(breaker, clock)
    assert breaker.count_success(trial=True)
    assert breaker.closed
    assert not breaker.count_success(trial=True)


def test_pauses_grow_to_a_minute(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    pauses = []
    for _ in range(8):
        pauses.append(pause_of(breaker, clock))
        assert not breaker.count_fault(0.0, trial=True)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_server_that_keeps_failing_after_it_recovered_is_left_alone_for_longer(
    breaker: Breaker, clock: Clock
) -> None:
    pauses = []
    for _ in range(4):
        open_it(breaker)
        pauses.append(pause_of(breaker, clock))
        breaker.count_success(trial=True)
    assert pauses == [1, 2, 4, 8]
    clock.now += 9  # It worked for longer than the last pause.
    open_it(breaker)
    assert pause_of(breaker, clock) == 1


def test_pauses_vary_so_that_processes_do_not_try_at_one_time(clock: Clock) -> None:
    pauses = set()
    for chance in (0.0, 0.5, 1.0):
        breaker = Breaker(patience=2.0, clock=clock, chance=lambda chance=chance: chance)  # type: ignore[misc]
        open_it(breaker)
        pauses.add(pause_of(breaker, clock))
    assert pauses == {0.75, 1.0, 1.25}
