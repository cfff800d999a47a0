"""The jobs of a bake that an executor runs, in its own processes or on other machines: both ends.

A job has the texts of its program, the settings and no file. Headers are found by the worker, in the
include directories of the program. If the worker does not have a directory, an empty one takes its
place. The headers of the result are compared with those on the machine where the bake was started.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import replace
from typing import NamedTuple

from preheat._version import __version__
from preheat.ahead.adapter_process import AdapterProcesses
from preheat.ahead.fleets import FleetWatch, fleet
from preheat.ahead.foreign import BakedForeign, ForeignJob, bake_request
from preheat.ahead.jobs import Job, Output, run_job
from preheat.ahead.run_on_executor import RefusedJobError, run_on_executor
from preheat.build.builder import Builder
from preheat.errors import CompileError, InputError, PreheatError, ToolchainError
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.linked_program import LinkedProgram
from preheat.model.program import Program
from preheat.process.locks import Lock
from preheat.toolchain.headers.evidence import Memo
from preheat.toolchain.headers.states import HeaderState, is_toolkit, mismatch

__all__ = ["bake_on_executor"]

AnyJob = Job | ForeignJob
Result = Output | BakedForeign | PreheatError

_lock = Lock()  # An engine may run several jobs in the threads of one process.
_HEADERS_HINT = "workers need the headers at the same paths: use a shared directory, or one image"


class Work(NamedTuple):
    """A job on its way to a worker. `missing` are its include directories that do not exist here."""

    config: Config
    job: Job | ForeignJob
    missing: tuple[str, ...]
    version: str


class Answer(NamedTuple):
    """The result of a job, and the worker that ran it. Errors travel as values.

    An engine that raises an error again may change its class and its text.
    """

    worker: str
    result: Output | BakedForeign | PreheatError


# Where the bake was started


def bake_on_executor(
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
    portable = sorted(filter(_is_portable, todo), key=lambda job: -job.estimate)
    memo = Memo()
    submit = functools.partial(_submit, config)
    watch = FleetWatch(str(executor), events)
    for job, outcome in run_on_executor(used, portable, submit, on_start, watch):
        on_done(job, _check_result(job, outcome, memo))
    return [job for job in todo if not _is_portable(job)]


def _is_portable(job: AnyJob) -> bool:
    return isinstance(job, Job) or not job.item.kept


def _check_result(job: AnyJob, outcome: Answer | BaseException, memo: Memo) -> Result:
    """Return the result of a job. What went wrong with its worker is a failure of the job."""
    if isinstance(outcome, BaseException):
        return outcome if isinstance(outcome, PreheatError) else _explain_failure(job, outcome)
    worker, result = outcome
    if isinstance(result, BakedForeign):
        return result._replace(worker=worker)
    if isinstance(result, PreheatError):
        return result
    assert isinstance(job, Job)
    if difference := _compare_headers(job.item.program, result.entry.state, memo):
        why = f"{job} was baked on {worker} with headers that differ from those here: {difference}"
        return InputError(why, hint=_HEADERS_HINT)
    return result._replace(row=result.row._replace(worker=worker))


def _explain_failure(job: AnyJob, error: BaseException) -> ToolchainError:
    if isinstance(error, BrokenExecutor | CancelledError):
        why = f"{job} was not baked, because its executor failed: {error or type(error).__name__}"
        return ToolchainError(why, hint="bake again: programs that were finished are in the cache")
    if isinstance(error, RefusedJobError):
        why = f"{job} was not baked, because the executor did not accept it: {error}"
        return ToolchainError(why, hint="pass an executor that is open and connected to its workers")
    # Such as ModuleNotFoundError. All jobs of a worker may meet it, so it does not name this one.
    why = f"a worker could not run a job: {type(error).__name__}: {error}"
    return ToolchainError(why, hint="every worker needs preheat, of one version, and its compilers")


def _submit(config: Config, executor: Executor, job: Job | ForeignJob) -> Future[Answer]:
    """Hand a job to an executor, whose process opens its builder from `config`."""
    missing = tuple(_find_missing(job.item.program)) if isinstance(job, Job) else ()
    return executor.submit(_do_work, Work(config, job, missing, __version__))


def _find_missing(program: Program) -> Iterator[str]:
    return (directory for _, directory in _own_directories(program) if not os.path.isdir(directory))


def _compare_headers(program: Program, state: HeaderState, memo: Memo) -> str | None:
    """Return how the headers of `program` here differ from a compile's, or None.

    Headers of the toolkit are not compared: a worker may have another one.
    """
    roots = dict(_own_directories(program))
    own = tuple(header for header in state.headers if not is_toolkit(header.root))
    return mismatch(replace(state, headers=own, roots=tuple(roots)), roots, memo)


def _own_directories(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the include directories of a program itself, with the labels of a `HeaderState`."""
    if isinstance(program, LinkedProgram):
        for index, part in program.sources.items():
            for label, directory in _own_directories(part):
                yield f"{index}.{label}", directory
    else:
        yield from ((str(index), directory) for index, directory in enumerate(program.include))


# On the worker


def _worker_name() -> str:
    """Return the host and the process, such as "node-3:4711"."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _do_work(work: Work) -> Answer:
    try:
        _require_version(work.version)
        return Answer(_worker_name(), _run(work))
    except PreheatError as error:
        return Answer(_worker_name(), error)


def _require_version(version: str) -> None:
    if version != __version__:
        raise ToolchainError(
            f"{socket.gethostname()} has preheat {__version__}, and the bake was started by {version}",
            hint=f"install one version on all machines: pip install preheat=={version}",
        )


def _run(work: Work) -> Output | BakedForeign:
    builder, processes = _use_tools(work.config)
    try:
        return _run_with(builder, processes, work)
    finally:
        builder.cache.settle(0)  # A worker may be killed as soon as it has answered.


def _run_with(builder: Builder, processes: AdapterProcesses, work: Work) -> Output | BakedForeign:
    job = work.job
    if isinstance(job, ForeignJob):
        baked = bake_request(builder, processes, job)
        if baked.made and builder.cache.shared:
            # The process of the adapter has the settings of this machine, not the bake's.
            for made in baked.entries:
                builder.foreign.put(made)
        return baked
    absent = [each for each in _find_missing(job.item.program) if each not in work.missing]
    if absent:
        job = job._replace(item=replace(job.item, program=_replace_absent(job.item.program, absent)))
    try:
        row, entry, request = run_job(builder, job)
    except CompileError as error:
        if not absent:
            raise
        where = f"{socket.gethostname()} has no directory {absent[0]}, where {job} may have headers"
        raise InputError(f"{where}\n{error}", hint=_HEADERS_HINT) from None
    # A bundle has no source texts, so they need not travel.
    return Output(row, replace(entry, artifact=replace(entry.artifact, sources={})), request)


def _replace_absent(program: Program, absent: list[str]) -> Program:
    """Return the program with empty directories in place of `absent` ones, with the same spellings."""
    if isinstance(program, LinkedProgram):
        parts = (_replace_absent(p, absent) if isinstance(p, Program) else p for p in program.parts)
        return replace(program, parts=tuple(parts))
    empty = {each: os.path.join(_make_scratch(), str(number)) for number, each in enumerate(absent)}
    for directory in empty.values():
        os.makedirs(directory, exist_ok=True)
    return replace(
        program,
        include=tuple(empty.get(each, each) for each in program.include),
        spellings=tuple((empty.get(each, each), spelling) for each, spelling in program.spellings),
    )


@functools.cache
def _make_scratch() -> str:
    """Return a directory of this process, which is removed when it ends."""
    place = tempfile.TemporaryDirectory(prefix="preheat-worker-")
    atexit.register(place.cleanup)
    return place.name


def _use_tools(config: Config) -> tuple[Builder, AdapterProcesses]:
    """Return what this process uses for all its jobs."""
    with _lock:
        return _open_tools(config)


@functools.cache
def _open_tools(config: Config) -> tuple[Builder, AdapterProcesses]:
    builder = Builder.open(config)
    processes = AdapterProcesses(builder)
    atexit.register(processes.close)
    return builder, processes
