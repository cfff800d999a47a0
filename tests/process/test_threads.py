"""Turns: how many threads have one, when they give it up, and that none waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from preheat.process import threads
from preheat.process.threads import GilLimiter, released
from tests.processes import TIMEOUT_SECONDS


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads wait for a turn as long as a test may take."""
    monkeypatch.setattr(threads, "_MAX_WAIT", TIMEOUT_SECONDS)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.usefixtures("patient")
def test_at_most_so_many_threads_have_a_turn() -> None:
    shared = GilLimiter(2)
    inside = 0
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with shared:
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1

    for thread in [in_thread(work) for _ in range(8)]:
        thread.join(TIMEOUT_SECONDS)
    assert most <= 2


@pytest.mark.usefixtures("patient")
def test_a_thread_that_waits_gives_its_turn_to_another() -> None:
    shared = GilLimiter(1)
    other_ran = threading.Event()

    def other() -> None:
        with shared:
            other_ran.set()

    with shared:
        thread = in_thread(other)
        with released():
            assert other_ran.wait(TIMEOUT_SECONDS)
    thread.join(TIMEOUT_SECONDS)


def test_a_thread_without_a_turn_may_wait_too() -> None:
    with released():
        pass
    assert not threads._held


def test_no_thread_waits_for_ever() -> None:
    shared = GilLimiter(1)
    with shared:
        thread = in_thread(lambda: shared.take())
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()
    assert not threads._held


@pytest.mark.usefixtures("patient")
def test_an_error_gives_the_turn_back() -> None:
    shared = GilLimiter(1)
    with pytest.raises(ValueError, match="wrong"), shared:
        raise ValueError("wrong")
    with pytest.raises(ValueError, match="wrong"), shared, released():
        raise ValueError("wrong")
    with shared:
        assert len(threads._held) == 1
    assert not threads._held


def test_a_thread_that_lost_its_patience_gives_nothing_back() -> None:
    shared = GilLimiter(1)

    def without_a_turn() -> None:
        with shared:
            pass

    with shared:
        in_thread(without_a_turn).join(TIMEOUT_SECONDS)
        assert shared._free.empty()
