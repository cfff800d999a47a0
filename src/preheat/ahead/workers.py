"""The two ends of a bake in other processes: how a job travels, and how a worker runs it.

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
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import NamedTuple

from preheat._version import __version__
from preheat.ahead.adapter_process import AdapterProcesses
from preheat.ahead.foreign import BakedForeign, ForeignJob, bake_request
from preheat.ahead.jobs import Job, Output, run_job
from preheat.build.builder import Builder
from preheat.errors import CompileError, InputError, PreheatError, ToolchainError
from preheat.model.config import Config
from preheat.model.linked_program import LinkedProgram
from preheat.model.program import Program
from preheat.process.locks import Lock
from preheat.toolchain.headers.evidence import Memo
from preheat.toolchain.headers.states import HeaderState, is_toolkit, mismatch

__all__ = ["HEADERS_HINT", "Answer", "header_difference", "submit", "worker_name"]

_lock = Lock()  # An engine may run several jobs in the threads of one process.
HEADERS_HINT = "workers need the headers at the same paths: use a shared directory, or one image"


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


def submit(config: Config, executor: Executor, job: Job | ForeignJob) -> Future[Answer]:
    """Hand a job to an executor, whose process opens its builder from `config`."""
    missing = tuple(_missing(job.item.program)) if isinstance(job, Job) else ()
    return executor.submit(_work, Work(config, job, missing, __version__))


def _missing(program: Program) -> Iterator[str]:
    return (directory for _, directory in _own_directories(program) if not os.path.isdir(directory))


def header_difference(program: Program, state: HeaderState, memo: Memo) -> str | None:
    """Return how the headers of `program` here differ from those of a compile, or None.

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


def worker_name() -> str:
    """Return the host and the process, such as "node-3:4711"."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _work(work: Work) -> Answer:
    try:
        _require_version(work.version)
        return Answer(worker_name(), _run(work))
    except PreheatError as error:
        return Answer(worker_name(), error)


def _require_version(version: str) -> None:
    if version != __version__:
        raise ToolchainError(
            f"{socket.gethostname()} has preheat {__version__}, and the bake was started by {version}",
            hint=f"install one version on all machines: pip install preheat=={version}",
        )


def _run(work: Work) -> Output | BakedForeign:
    builder, processes = _tools(work.config)
    try:
        return _run_with(builder, processes, work)
    finally:
        builder.cache.settle(0)  # A worker may be killed as soon as it has answered.


def _run_with(builder: Builder, processes: AdapterProcesses, work: Work) -> Output | BakedForeign:
    job = work.job
    if isinstance(job, ForeignJob):
        baked = bake_request(builder, processes, job)
        if baked.made and builder.cache.shared:
            # The process of the adapter has the settings of this machine, not those of the bake.
            for made in baked.entries:
                builder.foreign.put(made)
        return baked
    absent = [each for each in _missing(job.item.program) if each not in work.missing]
    if absent:
        job = job._replace(item=replace(job.item, program=_with_empty(job.item.program, absent)))
    try:
        row, entry, request = run_job(builder, job)
    except CompileError as error:
        if not absent:
            raise
        where = f"{socket.gethostname()} has no directory {absent[0]}, where {job} may have headers"
        raise InputError(f"{where}\n{error}", hint=HEADERS_HINT) from None
    # A bundle has no source texts, so they need not travel.
    return Output(row, replace(entry, artifact=replace(entry.artifact, sources={})), request)


def _with_empty(program: Program, absent: list[str]) -> Program:
    """Return the program with empty directories in place of `absent` ones, with the same spellings."""
    if isinstance(program, LinkedProgram):
        parts = (_with_empty(p, absent) if isinstance(p, Program) else p for p in program.parts)
        return replace(program, parts=tuple(parts))
    empty = {each: os.path.join(_scratch(), str(number)) for number, each in enumerate(absent)}
    for directory in empty.values():
        os.makedirs(directory, exist_ok=True)
    return replace(
        program,
        include=tuple(empty.get(each, each) for each in program.include),
        spellings=tuple((empty.get(each, each), spelling) for each, spelling in program.spellings),
    )


@functools.cache
def _scratch() -> str:
    """Return a directory of this process, which is removed when it ends."""
    place = tempfile.TemporaryDirectory(prefix="preheat-worker-")
    atexit.register(place.cleanup)
    return place.name


def _tools(config: Config) -> tuple[Builder, AdapterProcesses]:
    """Return what this process uses for all its jobs."""
    with _lock:
        return _open_tools(config)


@functools.cache
def _open_tools(config: Config) -> tuple[Builder, AdapterProcesses]:
    builder = Builder.open(config)
    processes = AdapterProcesses(builder)
    atexit.register(processes.close)
    return builder, processes
