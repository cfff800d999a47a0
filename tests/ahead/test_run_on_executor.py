"""Jobs on executors: each result is reported once, lost jobs run again, and a job that kills fails."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.ahead.run_on_executor import RefusedJobError, run_on_executor
from preheat.errors import InputError, LostJobError


class KilledWorker(Exception):  # noqa: N818  (It is the name that Dask uses.)
    """The error of Dask, which tries a job four times before it gives up."""

    allowed_failures = 3


KilledWorker.__module__ = "distributed.scheduler"


class WorkerCrashedError(Exception):
    """The error of Ray."""


WorkerCrashedError.__module__ = "ray.exceptions"

Behaviour = Callable[[int, int], object]  # the job and the number of the attempt -> result or error


class Scripted(Executor):
    """An executor whose workers do what a test says. It counts the attempts of each job."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.attempts: Counter[int] = Counter()
        self.open: set[int] = set()
        self.closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        del fn, kwargs
        (job,) = args
        self.attempts[job] += 1
        result = self.behaviour(job, self.attempts[job])
        future: Future[Any] = Future()
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del wait, cancel_futures
        self.closed = True


def run(executor: Executor | Callable[[], Executor], jobs: range, **more: Any) -> dict[int, Any]:
    """Return the outcomes by job; fail if one is reported twice."""
    ended = list(run_on_executor(executor, jobs, lambda e, job: e.submit(act, job), **more))
    assert sorted(job for job, _ in ended) == list(jobs)
    return dict(ended)


def act(job: int) -> int:
    return job


class OnDemand(Executor):
    """Hands out futures that a test completes."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        del fn, args, kwargs
        self.futures.append(Future())
        return self.futures[-1]


def test_jobs_that_end_in_an_order_of_their_own_are_reported_in_that_order() -> None:
    executor = OnDemand()
    begun: list[str] = []

    ended: Iterator[tuple[str, Any]]
    ended = run_on_executor(executor, ["a", "b"], lambda e, job: e.submit(print, job), begun.append)
    executor.submit = partial(_submit_second_done, executor)  # type: ignore[method-assign]
    assert next(ended) == ("b", "second")
    assert begun == ["b"]
    executor.futures[0].set_result("first")
    assert next(ended) == ("a", "first")
    assert begun == ["b", "a"]
    assert list(ended) == []


def _submit_second_done(executor: OnDemand, *args: Any) -> Future[Any]:
    future = OnDemand.submit(executor, *args)
    if len(executor.futures) == 2:
        future.set_result("second")
    return future


def test_a_job_is_announced_when_its_executor_runs_it() -> None:
    executor = OnDemand()
    begun: list[str] = []
    ended = run_on_executor(executor, ["a", "b"], lambda e, job: e.submit(print, job), begun.append)

    def submit(*args: Any) -> Future[Any]:
        future = OnDemand.submit(executor, *args)
        future.set_running_or_notify_cancel()
        if len(executor.futures) == 2:
            future.set_result(None)
        return future

    executor.submit = submit  # type: ignore[method-assign]
    assert next(ended)[0] == "b"
    assert begun == ["a", "b"]


def test_an_end_before_the_last_job_cancels_the_others() -> None:
    executor = OnDemand()
    executor.submit = partial(_submit_second_done, executor)  # type: ignore[method-assign]
    ended: Iterator[tuple[str, Any]]
    ended = run_on_executor(executor, ["a", "b", "c"], lambda e, job: e.submit(print, job))
    assert next(ended) == ("b", "second")
    ended.close()  # type: ignore[attr-defined]
    assert [future.cancelled() for future in executor.futures] == [True, False, True]


@pytest.mark.parametrize("death", [KilledWorker, WorkerCrashedError, BrokenExecutor])
def test_a_job_whose_worker_dies_runs_again(death: type[Exception]) -> None:
    executor = Scripted(lambda job, attempt: death() if job == 3 and attempt == 1 else job)
    assert run(executor, range(6)) == {job: job for job in range(6)}
    assert executor.attempts == Counter({0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1})


@pytest.mark.parametrize(
    ("death", "attempts", "deaths"), [(KilledWorker, 2, 8), (WorkerCrashedError, 4, 4)]
)
def test_a_job_that_ends_its_workers_fails_alone(
    death: type[Exception], attempts: int, deaths: int
) -> None:
    executor = Scripted(lambda job, _: death() if job == 2 else job)
    outcomes = run(executor, range(5))
    error = outcomes.pop(2)
    assert outcomes == {job: job for job in (0, 1, 3, 4)}
    assert isinstance(error, LostJobError)
    assert (error.deaths, executor.attempts[2]) == (deaths, attempts)
    assert f"{deaths} workers died" in str(error)


def test_suspected_jobs_run_at_the_end_one_at_a_time() -> None:
    order: list[int] = []

    def behave(job: int, attempt: int) -> object:
        order.append(job)
        return WorkerCrashedError() if job in (0, 1) and attempt <= 2 else job

    assert run(Scripted(behave), range(4)) == {job: job for job in range(4)}
    assert order[:4] == [0, 1, 2, 3]
    assert order[-2:] == [0, 1]


def test_errors_of_jobs_are_results_and_are_not_repeated() -> None:
    executor = Scripted(lambda job, _: ValueError("no") if job else job)
    outcomes = run(executor, range(2))
    assert (outcomes[0], repr(outcomes[1])) == (0, "ValueError('no')")
    assert executor.attempts[1] == 1


def test_an_executor_that_takes_no_job_fails_its_jobs() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    outcomes = run(pool, range(2))
    assert {str(outcome) for outcome in outcomes.values() if isinstance(outcome, RefusedJobError)} == {
        "RuntimeError: cannot schedule new futures after shutdown"
    }
    assert {type(outcome) for outcome in outcomes.values()} == {RefusedJobError}


@pytest.mark.parametrize("given", [3, lambda: 3])
def test_what_is_no_executor_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=r"^an executor of concurrent\.futures is expected, not 3"):
        run(given, range(2))


def test_an_executor_of_the_caller_is_left_open_and_an_own_one_is_closed() -> None:
    mine = Scripted(lambda job, _: job)
    run(mine, range(2))
    assert not mine.closed
    run(lambda: mine, range(2))
    assert mine.closed


@settings(max_examples=60)
@given(
    jobs=st.integers(1, 30),
    deaths=st.dictionaries(st.integers(0, 29), st.integers(1, 6), max_size=8),
    killed=st.sampled_from([KilledWorker, WorkerCrashedError]),
)
def test_every_job_ends_once_whatever_dies(
    jobs: int, deaths: dict[int, int], killed: type[Exception]
) -> None:
    executor = Scripted(lambda job, attempt: killed() if attempt <= deaths.get(job, 0) else job)
    allowed = 3 if killed is WorkerCrashedError else 1  # deaths that a job survives
    for job, outcome in run(executor, range(jobs)).items():
        if deaths.get(job, 0) <= allowed:
            assert outcome == job
            assert executor.attempts[job] == deaths.get(job, 0) + 1
        else:
            assert isinstance(outcome, LostJobError)


# Real processes


def die_or_write(place: str, killers: tuple[int, ...], once: tuple[int, ...], job: int) -> int:
    """Note that a job runs, and kill this process for some of them."""
    seen = Path(place, f"{job}-{os.getpid()}")
    first = not list(Path(place).glob(f"{job}-*"))
    seen.touch()
    if job in killers or (job in once and first):
        os.kill(os.getpid(), signal.SIGKILL)
    return job


def test_a_pool_whose_process_is_killed_is_made_again_and_nothing_is_lost(tmp_path: Path) -> None:
    pools: list[ProcessPoolExecutor] = []

    def make() -> Executor:
        pools.append(ProcessPoolExecutor(2, mp_context=get_context("fork")))
        return pools[-1]

    work = partial(die_or_write, str(tmp_path), (5,), (1, 8))
    ended = dict(run_on_executor(make, range(12), lambda e, job: e.submit(work, job)))
    error = ended.pop(5)
    assert ended == {job: job for job in range(12) if job != 5}
    assert isinstance(error, LostJobError)
    assert len(pools) <= 1 + 3 + 2  # a break for each death, of which job 5 causes three at most


def test_pools_that_always_break_are_given_up() -> None:
    pools = 0

    def make() -> Executor:
        nonlocal pools
        pools += 1
        return Scripted(lambda *_: BrokenExecutor("no process starts"))

    outcomes = run(make, range(300))
    assert pools <= 18
    broken = [outcome for outcome in outcomes.values() if isinstance(outcome, BrokenExecutor)]
    assert len(broken) > 200
