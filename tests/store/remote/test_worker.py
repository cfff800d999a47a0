"""Jobs in the background: their order, their limits, and the end of a process."""

from __future__ import annotations

import threading

import pytest

from preheat.store.remote.worker import Worker
from tests.processes import TIMEOUT_SECONDS, wait_for


class Gate:
    """A job that waits until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_SECONDS)


def nothing() -> None:
    """Do nothing."""


def submit(worker: Worker, run: object, size: int = 1, key: str = "key") -> bool:
    return worker.submit(key, run, size=size, give_up=nothing)  # type: ignore[arg-type]


def test_jobs_of_one_key_run_in_order_and_all_are_done_after_a_flush() -> None:
    worker, done = Worker(), list[int]()
    for number in range(100):
        assert submit(worker, lambda number=number: done.append(number))
    assert worker.flush(TIMEOUT_SECONDS)
    assert done == list(range(100))
    assert worker.load == 0


def test_a_full_queue_refuses_without_waiting() -> None:
    worker, gate = Worker(max_jobs=3), Gate()
    assert [submit(worker, gate), submit(worker, nothing), submit(worker, nothing)] == [True] * 3
    assert not submit(worker, nothing)
    gate.opened.set()
    assert worker.flush(TIMEOUT_SECONDS)
    assert submit(worker, nothing)


def test_the_queue_is_limited_by_bytes_but_takes_one_job_of_any_size() -> None:
    worker, gate = Worker(max_bytes=100), Gate()
    assert submit(worker, gate, size=1000)
    assert not submit(worker, nothing, size=1)
    gate.opened.set()
    assert worker.flush(TIMEOUT_SECONDS)
    assert submit(worker, nothing, size=60)
    assert worker.flush(TIMEOUT_SECONDS)


def test_jobs_of_several_keys_run_at_the_same_time() -> None:
    worker, gates = Worker(threads=2), [Gate(), Gate()]
    keys = _keys_of_both_lanes()
    for key, gate in zip(keys, gates, strict=True):
        submit(worker, gate, key=key)
    assert all(gate.entered.wait(TIMEOUT_SECONDS) for gate in gates)
    for gate in gates:
        gate.opened.set()
    assert worker.flush(TIMEOUT_SECONDS)


def _keys_of_both_lanes() -> list[str]:
    by_lane: dict[int, str] = {}
    for number in range(100):
        by_lane.setdefault(hash(str(number)) % 2, str(number))
    return [by_lane[0], by_lane[1]]


def test_a_flush_gives_up_what_has_not_begun_when_time_is_up() -> None:
    worker, gate, given_up = Worker(), Gate(), list[int]()
    submit(worker, gate)
    assert gate.entered.wait(TIMEOUT_SECONDS)
    for number in range(5):
        worker.submit("key", pytest.fail, size=1, give_up=lambda n=number: given_up.append(n))  # type: ignore[misc]
    assert not worker.flush(0.01)
    assert given_up == list(range(5))
    gate.opened.set()
    assert worker.flush(TIMEOUT_SECONDS)


def test_no_thread_is_left_when_there_is_nothing_to_do() -> None:
    before = threading.active_count()
    worker = Worker()
    for number in range(20):
        submit(worker, nothing, key=str(number))
    assert worker.flush(TIMEOUT_SECONDS)
    wait_for(lambda: threading.active_count() <= before)


def test_a_callback_comes_after_all_earlier_jobs() -> None:
    worker, gate, called = Worker(), Gate(), threading.Event()
    worker.when_done(called.set)  # There is no job.
    assert called.is_set()
    called.clear()
    submit(worker, gate)
    worker.when_done(called.set)
    assert not called.is_set()
    gate.opened.set()
    assert called.wait(TIMEOUT_SECONDS)


def test_a_callback_comes_also_when_jobs_are_given_up() -> None:
    worker, gate, called = Worker(), Gate(), threading.Event()
    submit(worker, gate)
    assert gate.entered.wait(TIMEOUT_SECONDS)
    submit(worker, pytest.fail)
    worker.when_done(called.set)
    worker.flush(0.01)
    assert called.is_set()
    gate.opened.set()
    assert worker.flush(TIMEOUT_SECONDS)


def test_jobs_are_done_by_the_flush_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    worker, done = Worker(), list[int]()
    for number in range(3):
        assert submit(worker, lambda number=number: done.append(number))
    assert worker.flush(TIMEOUT_SECONDS)
    assert done == [0, 1, 2]


def test_a_job_with_a_bug_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: seen.set())
    worker, done = Worker(), list[int]()
    submit(worker, lambda: 1 / 0)
    assert seen.wait(TIMEOUT_SECONDS)
    submit(worker, lambda: done.append(1))
    assert worker.flush(TIMEOUT_SECONDS)
    assert done == [1]
    assert worker.load == 0
