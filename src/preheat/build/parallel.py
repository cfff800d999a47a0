"""Many compiles at the same time, on threads: the compilers run in worker processes."""

from __future__ import annotations

import _thread
import os
import time
from _queue import Empty, SimpleQueue  # `queue` is one more import.
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

from preheat.build.compile_lock import Attempt, WouldWait, parallel_compiles
from preheat.process.callsite import attributed_to, call_site
from preheat.process.locks import Lock
from preheat.process.threads import Cancellation, Cancelled, GilLimiter

__all__ = ["Runner", "Task", "run_all"]

J = TypeVar("J")
R = TypeVar("R")

_RETRY = 0.005  # seconds between two attempts of a runner at requests that other processes compile
_TICK = 0.1  # seconds between two calls of `on_tick`
_POLL = 0.2  # seconds between two checks of a thread that waits for a task
_TURNS = 4  # threads of a runner that work on results at the same time, while the others wait
_END = 5.0  # seconds that the end of a run waits for its threads


class Task(Generic[R]):
    """One job of a `Runner`, and its outcome."""

    __slots__ = (
        "_process",
        "_report",
        "_run",
        "_signal",
        "attempt",
        "cancelled",
        "done",
        "error",
        "result",
        "site",
    )  # fmt: skip

    def __init__(self, run: Callable[[Attempt], R], report: Callable[[], object] | None) -> None:
        self._run: Callable[[Attempt], R] | None = run
        self._report = report
        self._process = os.getpid()
        self.site = call_site()
        self.attempt: Attempt | None = None
        self.result: R | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.done = False
        self._signal = allocate_lock()  # released when the task ends
        self._signal.acquire()

    def try_once(self) -> bool:
        """Run the job in this thread; return False if it has to wait for another process."""
        if self.attempt is None:
            self.attempt = Attempt()
            self._notify()
        assert self._run is not None
        try:
            with attributed_to(self.site):
                self.result = self._run(self.attempt)
        except WouldWait:
            return False
        except Cancelled:
            self.cancelled = True
        except BaseException as error:  # The thread that waits for the task raises it.
            self.error = error
        self.finish()
        return True

    def cancel(self) -> None:
        """End the task without an outcome."""
        self.cancelled = True
        self.finish()

    def finish(self) -> None:
        """Wake the threads that wait for the task."""
        if self.attempt is not None:
            self.attempt.close()
        self._run = None  # Release what the function refers to.
        self.done = True
        self._signal.release()
        self._notify()

    def _notify(self) -> None:
        if self._report is not None:
            self._report()

    def wait(self) -> None:
        """Wait until the task has ended.

        In a forked child, which has no thread for it, it is cancelled.
        """
        while not self.done:
            if os.getpid() != self._process:
                self.cancelled = self.done = True
                return
            if self._signal.acquire(timeout=_POLL):
                self._signal.release()  # Wake the next thread that waits.

    def outcome(self) -> R:
        """Return the result of a task that has ended and was not cancelled, or raise its error."""
        if self.error is not None:
            raise self.error
        return cast(R, self.result)


class Runner:
    """Runs tasks on up to `limit` threads, `parallel_compiles()` by default, in their order.

    A task whose program is being compiled by another process is tried again after other tasks. The
    threads end when no task is left.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or parallel_compiles()
        self._open: deque[Task[Any]] = deque()
        self._deferred: deque[Task[Any]] = deque()
        self._threads = 0
        self._lock = Lock()
        self._cancellation = Cancellation()
        self._turns = GilLimiter(_TURNS)

    def submit(
        self, run: Callable[[Attempt], R], report: Callable[[], object] | None = None
    ) -> Task[R]:
        """Call `run` in a thread. The thread calls `report` at the start and at the end of the task."""
        task: Task[R] = Task(run, report)
        self._open.append(task)
        with self._lock:
            full = self._threads >= self._limit
        if not full:
            try:
                _thread.start_new_thread(self._work, ())
            except RuntimeError:  # The process is exiting, or it has too many threads.
                self._work()
        return task

    def _work(self) -> None:
        # The new thread counts itself, because an interrupt could end the other one before it counts.
        with self._lock:
            if self._threads >= self._limit:
                return
            self._threads += 1
        with self._cancellation, self._turns:
            while (task := self._take()) is not None:
                repeated = task.attempt is not None
                if not task.try_once():
                    with self._lock:  # Another thread may be searching the deferred tasks.
                        self._deferred.append(task)
                    if repeated:  # There was no other task.
                        # All threads together try once in `_RETRY` seconds.
                        self._cancellation.sleep(_RETRY * self._limit)

    def _take(self) -> Task[Any] | None:
        """Return the next task, or None when this thread has to end."""
        with self._lock:
            if self._cancellation.cancelled:
                self._discard()
            if (due := self._due()) is not None:
                return due
            for tasks in (self._open, self._deferred):
                if tasks:
                    return tasks.popleft()
            self._threads -= 1
            return None

    def _due(self) -> Task[Any] | None:
        """Return a task whose result another host may have stored.

        It comes first, because it keeps a lock.
        """
        for task in self._deferred:
            if task.attempt is not None and task.attempt.due():
                self._deferred.remove(task)
                return task
        return None

    def _discard(self) -> None:
        for tasks in (self._open, self._deferred):
            while tasks:
                tasks.popleft().cancel()

    def cancel(self) -> None:
        """Cancel all tasks, end the compilers of those that run, and wait for the threads.

        The wait is bounded: a thread may be inside a function that cannot be interrupted.
        """
        self._cancellation.cancel()
        with self._lock:
            self._discard()
        deadline = time.monotonic() + _END
        while self._threads and time.monotonic() < deadline:
            time.sleep(0.001)


def run_all(
    jobs: Sequence[J],
    run: Callable[[J, Attempt], R],
    *,
    threads: int | None = None,
    on_start: Callable[[int], None] | None = None,
    on_done: Callable[[int, Task[R]], None] | None = None,
    on_tick: Callable[[], None] | None = None,
) -> list[Task[R]]:
    """Call `run(job, attempt)` for every job on threads, and return the tasks in order.

    `threads` is the number of jobs at the same time. Without it, one compile for each processor runs.
    `on_start` and `on_done` get the index of a job. They are called in this thread, as is `on_tick`,
    about ten times a second. An exception, such as Ctrl-C, cancels what has not ended.
    """
    runner = Runner(max(1, min(len(jobs), threads or parallel_compiles())))
    if on_start is None and on_done is None and on_tick is None:
        return _run_silently(runner, jobs, run)
    reports: SimpleQueue[int] = SimpleQueue()
    tasks: list[Task[R]] = []
    running: set[int] = set()
    ended = 0
    try:
        for index, job in enumerate(jobs):
            tasks.append(runner.submit(partial(run, job), partial(reports.put, index)))
        while ended < len(jobs):
            if on_tick is not None:
                on_tick()
            try:
                index = reports.get(timeout=_TICK)
            except Empty:
                continue
            if index not in running:  # A task reports its start first.
                running.add(index)
                if on_start is not None:
                    on_start(index)
                continue
            ended += 1
            if on_done is not None:
                on_done(index, tasks[index])
    finally:
        if ended < len(jobs):
            runner.cancel()
    return tasks


def _run_silently(runner: Runner, jobs: Sequence[J], run: Callable[[J, Attempt], R]) -> list[Task[R]]:
    """Run all jobs without reports, each of which would wake this thread."""
    tasks: list[Task[R]] = []
    try:
        for job in jobs:
            tasks.append(runner.submit(partial(run, job)))
        for task in tasks:
            task.wait()
    finally:
        if len(tasks) < len(jobs) or not all(task.done for task in tasks):
            runner.cancel()
    return tasks
