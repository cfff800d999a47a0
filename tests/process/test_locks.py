"""Locks that survive their holders, and descriptors with an owner."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from preheat.build.compile_lock import SingleFlight
from preheat.model.events import Events
from preheat.process import locks
from preheat.process.files import Descriptor, open_fd
from preheat.process.lazy import lazy
from preheat.process.locks import Holder, Lock, no_fork
from tests.processes import TIMEOUT_SECONDS, expect_success, start_python, wait_for


def lose(lock: Lock) -> None:
    """Take `lock` and never give it back."""
    assert lock.acquire(sys._getframe()) is not None


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_lock_has_one_holder_at_a_time() -> None:
    lock = Lock()
    count = 0

    def work() -> None:
        nonlocal count
        for _ in range(500):
            with lock:
                before = count
                for _ in range(5):
                    pass
                count = before + 1

    for thread in [in_thread(work) for _ in range(6)]:
        thread.join()
    assert count == 3000


def test_a_lock_has_as_many_holders_as_slots() -> None:
    lock = Lock(holders=3)
    inside = list[int]()
    most = list[int]()
    three = threading.Barrier(3)

    def work(number: int) -> None:
        with lock:
            inside.append(number)
            most.append(len(inside))
            three.wait(TIMEOUT_SECONDS)
            inside.remove(number)

    for thread in [in_thread(lambda number=number: work(number)) for number in range(18)]:  # type: ignore[misc]
        thread.join()
    assert len(most) == 18
    assert max(most) == 3


def test_a_lock_that_its_holder_lost_is_taken_over_and_says_so() -> None:
    lock = Lock()
    with lock as lost:
        assert not lost
    lose(lock)
    assert not lock.locked()
    with lock as lost:
        assert lost
        assert lock.locked()
    with lock as lost:
        assert not lost


class Large:
    """Something that a function uses."""


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def lose_with_frame(lock: Lock) -> weakref.ref[Large]:
    """Lose a lock as `lose` does, and return what the function has used."""
    used = Large()
    lock.acquire(sys._getframe())
    return weakref.ref(used)


@pytest.mark.usefixtures("no_collections")
def test_what_a_thread_uses_that_took_a_lost_lock_over_needs_no_garbage_collection() -> None:
    lock = Lock()
    lose(lock)

    def take() -> weakref.ref[Large]:
        used = Large()
        with lock:
            return weakref.ref(used)

    assert take()() is None


@pytest.mark.usefixtures("no_collections")
def test_a_lost_holder_is_forgotten_though_nobody_needs_its_place() -> None:
    lock = Lock(holders=2)
    with lock:
        kept = lose_with_frame(lock)
    assert kept() is not None  # Its frame tells whether it still runs.
    with lock:
        assert kept() is None


def test_a_lock_that_another_thread_holds_is_waited_for() -> None:
    lock = Lock()
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    holder = in_thread(hold)
    held.wait()
    assert lock.acquire(sys._getframe(), timeout=0.01) is None
    done.set()
    with lock as lost:
        assert not lost
    holder.join()


def test_a_thread_can_take_its_lock_again() -> None:
    lock = Lock()

    def again() -> None:
        with lock:
            pass

    with lock:
        again()
        assert lock.locked()
    assert not lock.locked()


def test_a_call_is_over_when_its_function_has_ended_though_its_frame_is_kept() -> None:
    def call() -> Holder:
        made = Holder(sys._getframe())
        assert made.alive()
        return made

    made = call()
    assert made.frame is not None
    assert not made.alive()


def test_a_fork_waits_for_what_must_not_be_forked() -> None:
    held = threading.Event()
    order = list[str]()

    def hold() -> None:
        with no_fork:
            held.set()
            time.sleep(0.2)  # long enough for a fork that does not wait to come first
            order.append("done")

    holder = in_thread(hold)
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(int(TIMEOUT_SECONDS))
        with no_fork:
            os._exit(order != ["done"])
    assert os.waitpid(child, 0)[1] == 0
    holder.join()
    assert not no_fork.locked()


def test_one_of_those_who_wait_takes_the_place_of_an_interrupted_thread() -> None:
    flights: SingleFlight[int] = SingleFlight(Events())
    flying = threading.Event()
    waiting = threading.Event()
    made = list[int]()

    def interrupted() -> int:
        flying.set()
        waiting.wait()
        raise KeyboardInterrupt

    def fly() -> None:
        with pytest.raises(KeyboardInterrupt):
            flights.run("key", interrupted)

    def make() -> int:
        made.append(1)
        return 7

    def is_waiting(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code.co_name == "wait"

    threads = [in_thread(fly)]
    results = list[int]()
    flying.wait()
    for _ in range(4):
        threads.append(in_thread(lambda: results.append(flights.run("key", make))))
    wait_for(lambda: all(map(is_waiting, threads[1:])))
    waiting.set()
    for thread in threads:
        thread.join()
    assert results == [7] * 4
    assert made == [1]
    assert flights.run("key", lambda: 8) == 8  # nothing old is handed out


def test_a_signal_handler_of_a_computing_thread_computes_the_result_itself() -> None:
    flights: SingleFlight[int] = SingleFlight(Events())
    assert flights.run("key", lambda: 1 + flights.run("key", lambda: 1)) == 2


def test_a_descriptor_is_closed_once(tmp_path: Path) -> None:
    file = open_fd(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    assert not file.closed
    assert not os.get_inheritable(file)
    file.close()
    other = os.open(tmp_path, os.O_RDONLY)  # takes its number
    assert other == file
    file.close()
    del file
    os.fstat(other)
    os.close(other)


def test_a_descriptor_without_references_is_closed(tmp_path: Path) -> None:
    number = int(open_fd(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    with Descriptor(os.open(tmp_path, os.O_RDONLY)) as file:
        os.fstat(file)
    assert file.closed


def test_a_lazy_attribute_is_computed_once() -> None:
    class Thing:
        computed = 0

        @lazy
        def number(self) -> int:
            """A number."""
            self.computed += 1
            return 5

    thing = Thing()
    assert (thing.number, thing.number, thing.computed) == (5, 5, 1)
    assert Thing.number.__doc__ == "A number."


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions collect at safe points only")
def test_no_garbage_is_collected_while_the_frames_of_threads_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.11.0 to 3.11.8 deadlocks then."""
    frames = sys._current_frames
    enabled: list[bool] = []

    def listed() -> dict[int, FrameType]:
        enabled.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", listed)
    assert Holder(sys._getframe()).alive()
    assert (enabled, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        assert Holder(sys._getframe()).alive()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions collect at safe points only")
def test_no_garbage_is_collected_while_the_stack_of_another_thread_is_read() -> None:
    """A finalizer would let that thread leave the frames, and Python 3.11 would crash."""
    ready, leave = threading.Event(), threading.Event()

    def deep(number: int) -> None:
        if number:
            deep(number - 1)
        else:
            ready.set()
            leave.wait(TIMEOUT_SECONDS)

    places: list[str] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            places.append(sys._getframe(1).f_code.co_name)

    thread = threading.Thread(target=deep, args=(100,))
    thread.start()
    assert ready.wait(TIMEOUT_SECONDS)
    assert thread.ident is not None
    call = Holder(sys._getframe())
    call.thread = thread.ident  # Its stack is deep.
    thresholds = gc.get_threshold()
    gc.collect()
    try:
        gc.set_threshold(1)
        Garbage()
        assert call.alive() is False
    finally:
        gc.set_threshold(*thresholds)
        leave.set()
        thread.join()
    assert gc.isenabled()
    gc.collect()
    assert len(places) == 1
    assert places != ["alive"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections are not disabled")
def test_collections_go_on_in_a_child_that_is_forked_while_a_stack_is_read() -> None:
    code = (
        "import gc, os, threading\n"
        "from preheat.process import locks\n"
        "paused, end = threading.Event(), threading.Event()\n"
        "def read():\n"
        "    locks._pause_collections(); paused.set(); end.wait(60); locks._resume_collections()\n"
        "thread = threading.Thread(target=read)\n"
        "thread.start()\n"
        "assert paused.wait(60) and not gc.isenabled()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if gc.isenabled() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert not gc.isenabled()\n"
        "end.set(); thread.join()\n"
        "assert gc.isenabled()\n"
    )
    expect_success(start_python(code))


def test_places_that_are_freed_together_wake_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_POLL", (TIMEOUT_SECONDS, TIMEOUT_SECONDS))
    lock = Lock(holders=3)
    frames: list[FrameType] = []
    done = threading.Event()
    took = threading.Semaphore(0)

    def hold() -> None:
        frame = sys._getframe()
        lock.acquire(frame)
        frames.append(frame)
        done.wait()

    def wait() -> None:
        with lock:
            took.release()
            done.wait()

    holders = [threading.Thread(target=hold) for _ in range(3)]
    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for thread in holders:
        thread.start()
    wait_for(lambda: len(frames) == 3)
    for thread in waiters:
        thread.start()
    time.sleep(0.1)  # so that they wait
    for frame in frames:
        lock.release(frame)
    assert all(took.acquire(timeout=TIMEOUT_SECONDS / 2) for _ in waiters)
    done.set()
    for thread in holders + waiters:
        thread.join()
