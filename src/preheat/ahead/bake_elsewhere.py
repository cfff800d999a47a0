"""The jobs of a bake that an executor runs, in its own processes or on other machines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor

from preheat.ahead.executor_run import RefusedJobError, run_on_executor
from preheat.ahead.fleets import fleet
from preheat.ahead.fleets.watch import FleetWatch
from preheat.ahead.foreign import BakedForeign, ForeignJob
from preheat.ahead.jobs import Job, Output
from preheat.ahead.workers import HEADERS_HINT, Answer, header_difference, submit
from preheat.errors import InputError, PreheatError, ToolchainError
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.toolchain.headers.evidence import Memo

__all__ = ["bake_elsewhere"]

AnyJob = Job | ForeignJob
Result = Output | BakedForeign | PreheatError


def bake_elsewhere(
    todo: Sequence[AnyJob],
    config: Config,
    events: Events,
    executor: Executor | Callable[[], Executor] | str,
    on_start: Callable[[AnyJob], None] | None,
    on_done: Callable[[AnyJob, Result], None],
) -> list[AnyJob]:
    """Run jobs on an executor, the longest first, and return those that have to run in this process.

    The latter are requests of other libraries that cannot be made again: their entries are copied from
    the recording, or from the cache of this machine. A fleet that has no worker is a `fault` event.
    """
    used = fleet(executor) if isinstance(executor, str) else executor
    sent = sorted(filter(_can_travel, todo), key=lambda job: -job.estimate)
    memo = Memo()
    hand_over = functools.partial(submit, config)
    watch = FleetWatch(str(executor), events)
    for job, outcome in run_on_executor(used, sent, hand_over, on_start, watch):
        on_done(job, _result(job, outcome, memo))
    return [job for job in todo if not _can_travel(job)]


def _can_travel(job: AnyJob) -> bool:
    return isinstance(job, Job) or not job.item.kept


def _result(job: AnyJob, outcome: Answer | BaseException, memo: Memo) -> Result:
    """Return the result of a job. What went wrong with its worker is a failure of the job."""
    if isinstance(outcome, BaseException):
        return outcome if isinstance(outcome, PreheatError) else _failure(job, outcome)
    worker, result = outcome
    if isinstance(result, BakedForeign):
        return result._replace(worker=worker)
    if isinstance(result, PreheatError):
        return result
    assert isinstance(job, Job)
    if difference := header_difference(job.item.program, result.entry.state, memo):
        why = f"{job} was baked on {worker} with headers that differ from those here: {difference}"
        return InputError(why, hint=HEADERS_HINT)
    return result._replace(row=result.row._replace(worker=worker))


def _failure(job: AnyJob, error: BaseException) -> ToolchainError:
    if isinstance(error, BrokenExecutor | CancelledError):
        why = f"{job} was not baked, because its executor failed: {error or type(error).__name__}"
        return ToolchainError(why, hint="bake again: programs that were finished are in the cache")
    if isinstance(error, RefusedJobError):
        why = f"{job} was not baked, because the executor did not accept it: {error}"
        return ToolchainError(why, hint="pass an executor that is open and connected to its workers")
    # Such as ModuleNotFoundError. All jobs of a worker may meet it, so it does not name this one.
    why = f"a worker could not run a job: {type(error).__name__}: {error}"
    return ToolchainError(why, hint="every worker needs preheat, of one version, and its compilers")
