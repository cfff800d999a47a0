"""Runs jobs on an executor of `concurrent.futures`, and runs those again whose worker died.

A worker may die because of its job or for another reason, such as a machine that is switched off, and
executors report the death for other jobs of the worker as well. So a lost job runs again. After its
second loss it is suspected: it runs at the end, when no other job does. A job that is lost then is
the cause. It fails, and all others are complete.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from preheat.errors import InputError, LostJobError

__all__ = ["RefusedJobError", "run_on_executor"]

J = TypeVar("J")
R = TypeVar("R")

_POLL = 0.1  # seconds between two checks of which jobs an executor has started
_SUSPECT = 2  # deaths of workers after which a job runs alone
_DEATHS_ALONE = 2  # deaths of workers of a job that runs alone, after which it fails
_MAX_BREAKS = 16  # executors that break in a row before any of them finishes a job

# The errors by which engines report that a worker died. Their packages are not imported for that.
_DEATHS = {
    "distributed.scheduler.KilledWorker",
    "ray.exceptions.LocalRayletDiedError",
    "ray.exceptions.NodeDiedError",
    "ray.exceptions.ObjectLostError",
    "ray.exceptions.OutOfMemoryError",
    "ray.exceptions.WorkerCrashedError",
}


class RefusedJobError(Exception):
    """An executor did not accept a job, for example because it is shut down."""


def run_on_executor(
    executor: Executor | Callable[[], Executor],
    todo: Sequence[J],
    submit: Callable[[Executor, J], Future[R]],
    on_start: Callable[[J], None] | None = None,
    on_wait: Callable[[Executor], None] | None = None,
) -> Iterator[tuple[J, R | BaseException]]:
    """Run all jobs, and yield each when it ends, with its result or its error.

    `submit` hands one job to the executor. A function in the place of an executor makes one; such an
    executor is replaced when it breaks, and it is shut down in the end. An end of the iteration cancels
    what has not started. The error of a job that the executor did not accept is a `RefusedJobError`.
    `on_start` is called in this thread, at the latest when the job ends. While no job ends, `on_wait`
    is called again and again.
    """
    yield from _Run(executor, todo, submit, on_start, on_wait).results()


class _Run(Generic[J, R]):
    def __init__(
        self,
        executor: Executor | Callable[[], Executor],
        todo: Sequence[J],
        submit: Callable[[Executor, J], Future[R]],
        on_start: Callable[[J], None] | None,
        on_wait: Callable[[Executor], None] | None,
    ) -> None:
        self._make = None if isinstance(executor, Executor) else executor
        self._executor = executor if isinstance(executor, Executor) else _make_executor(executor)
        self._todo = todo
        self._submit_job = submit
        self._on_start = on_start
        self._on_wait = on_wait
        self._open: dict[int, Future[R]] = {}  # by the index of the job, in the order of submission
        self._ended: SimpleQueue[tuple[int, Future[R]]] = SimpleQueue()
        self._queued = deque(range(len(todo)))  # jobs whose start was not seen
        self._started: set[int] = set()
        self._refused: set[int] = set()  # jobs that the executor did not accept
        self._deaths: Counter[int] = Counter()  # of workers, by the index of their job
        self._suspected: list[int] = []
        self._breaks = 0
        self._workers = 1  # of the executor that broke last

    def results(self) -> Iterator[tuple[J, R | BaseException]]:
        try:
            self._submit(range(len(self._todo)))
            while self._open:
                index, outcome = self._next()
                if not self._repeat_if_lost(index, outcome):
                    yield self._todo[index], self._explain_refusal(index, outcome)
            for index in self._suspected:
                yield self._todo[index], self._explain_refusal(index, self._run_alone(index))
        finally:
            self._close()

    def _submit(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            try:
                future = self._submit_job(self._executor, self._todo[index])
            except Exception as refusal:  # Each engine has its own error for a lost connection.
                self._refused.add(index)
                future = Future()
                future.set_exception(refusal)
            self._open[index] = future
            future.add_done_callback(lambda done, index=index: self._ended.put((index, done)))  # type: ignore[misc]

    def _next(self) -> tuple[int, R | BaseException]:
        """Wait for a job that ends, and take it out of the open ones."""
        while True:
            self._announce_starts()
            try:
                index, future = self._ended.get(timeout=_POLL)
            except Empty:
                if self._on_wait is not None:
                    self._on_wait(self._executor)
                continue
            if self._open.get(index) is future:  # Else it belongs to an executor that was replaced.
                del self._open[index]
                self._start(index)
                return index, _get_outcome(future)

    # Starts

    def _announce_starts(self) -> None:
        """Report the jobs that run. Executors do not announce that, and start jobs in their order."""
        while self._queued and self._has_started(self._queued[0]):
            self._start(self._queued.popleft())

    def _has_started(self, index: int) -> bool:
        future = self._open.get(index)
        return index in self._started or (future is not None and future.running())

    def _start(self, index: int) -> None:
        if index not in self._started and self._on_start is not None:
            self._on_start(self._todo[index])
        self._started.add(index)

    # Deaths of workers

    def _repeat_if_lost(self, index: int, outcome: R | BaseException) -> bool:
        """Return whether a job was lost. It then runs again, now or at the end."""
        if self._is_final(index, outcome):
            return False
        if isinstance(outcome, BrokenExecutor) and self._make is not None:
            self._replace_executor(self._make)
            self._recover(index)
            return True
        self._deaths[index] += _count_deaths(outcome)
        if self._deaths[index] < _SUSPECT:
            self._submit([index])
        else:
            self._suspected.append(index)
        return True

    def _is_final(self, index: int, outcome: R | BaseException) -> bool:
        """Return whether a job ended, well or badly, or cannot be given to any worker."""
        if not _count_deaths(outcome):
            self._breaks = 0
            return True
        if self._make is None or not isinstance(outcome, BrokenExecutor):
            return index in self._refused
        return self._breaks >= _MAX_BREAKS

    def _explain_refusal(self, index: int, outcome: R | BaseException) -> R | BaseException:
        """Return the outcome, with a `RefusedJobError` for a job that was not accepted.

        The error of an executor whose workers have died says why it accepts no more jobs.
        """
        if index not in self._refused or not isinstance(outcome, Exception) or _count_deaths(outcome):
            return outcome
        refusal = RefusedJobError(f"{type(outcome).__name__}: {outcome}")
        refusal.__cause__ = outcome
        return refusal

    def _replace_executor(self, make: Callable[[], Executor]) -> None:
        self._breaks += 1
        self._workers = getattr(self._executor, "_max_workers", None) or os.cpu_count() or 1
        self._executor.shutdown(wait=False)
        self._executor = _make_executor(make)

    def _recover(self, first: int) -> None:
        """Submit the jobs of a broken executor again, except those that may have run when it broke.

        An executor starts jobs in their order. It gives its workers one job more than they run.
        """
        unfinished = [index for index, future in self._open.items() if not _has_finished(future)]
        for index in unfinished:
            del self._open[index]
        jobs = sorted([first, *unfinished])
        running, waiting = jobs[: self._workers + 1], jobs[self._workers + 1 :]
        for index in running:
            self._deaths[index] += 1
        self._suspected += running
        self._refused.difference_update(jobs)
        self._submit(waiting)

    def _run_alone(self, index: int) -> R | BaseException:
        """Run a suspected job while no other runs, and return its final outcome."""
        deaths = 0
        while deaths < _DEATHS_ALONE:
            self._submit([index])
            _, outcome = self._next()
            if self._is_final(index, outcome):
                return outcome
            if isinstance(outcome, BrokenExecutor) and self._make is not None:
                self._replace_executor(self._make)
                self._refused.discard(index)
            deaths += _count_deaths(outcome)
        return LostJobError(self._todo[index], self._deaths[index] + deaths)

    def _close(self) -> None:
        for future in self._open.values():
            future.cancel()
        if self._make is not None:
            self._executor.shutdown(wait=not self._open, cancel_futures=True)


def _make_executor(make: object) -> Executor:
    """Return the executor that a function makes; `InputError` for anything else."""
    made = make() if callable(make) else make
    if not isinstance(made, Executor):
        raise InputError(
            f"an executor of concurrent.futures is expected, not {made!r}",
            hint="pass an executor, a function that makes one, or an address such as dask://HOST:PORT",
        )
    return made


def _get_outcome(future: Future[R]) -> R | BaseException:
    """Return the result or the error of a job that ended. A job that was cancelled has an error."""
    try:
        error = future.exception()
        return future.result() if error is None else error
    except CancelledError as cancelled:
        return cancelled


def _has_finished(future: Future[Any]) -> bool:
    return future.done() and not isinstance(_get_outcome(future), BrokenExecutor)


def _count_deaths(outcome: object) -> int:
    """Return how many workers of a job died, according to its error; 0 for every other outcome."""
    if isinstance(outcome, BrokenExecutor):
        return 1
    if not isinstance(outcome, BaseException):
        return 0
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(outcome).__mro__}
    if not names & _DEATHS:
        return 0
    # Dask runs a lost job again by itself, a few times, before it reports that.
    return 1 + getattr(outcome, "allowed_failures", 0)
