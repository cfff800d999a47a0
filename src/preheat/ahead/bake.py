"""Baking: compile every program of a manifest, ahead of time, into one bundle."""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from preheat.ahead.bundles import merge_entries, meta, require_place
from preheat.ahead.foreign import BakedForeign, ForeignJob, bake_foreign, plan_foreign
from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram, require_programs
from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.build.builder import Builder
from preheat.build.bundle_entries import BundleEntry
from preheat.build.key_locks import Deferral
from preheat.build.look_ahead import look_ahead
from preheat.build.parallel import Task, run_all
from preheat.build.together import estimate
from preheat.cache.bundle import write
from preheat.cache.signatures import Signer
from preheat.config import Config, SealMode
from preheat.errors import InputError, PreheatError, ToolchainError, UnknownEntryError, copy_error
from preheat.program import Program

if TYPE_CHECKING:  # The import takes milliseconds in every process.
    from concurrent.futures import Executor, Future

__all__ = ["BakeResult", "BakedProgram", "FailedProgram", "Job", "bake", "parse_archs", "plan"]

_POLL = 0.1  # seconds between two checks of which jobs an executor has started


class Job(NamedTuple):
    """One program to compile for one architecture, and the expected seconds."""

    item: ManifestProgram
    arch: Arch
    estimate: float

    def __str__(self) -> str:
        return f"{self.item.title} for {self.arch}"


class BakedProgram(NamedTuple):
    """A program that was baked.

    `key` is the digest of its code. `source` is the tier in which it was found, or "compiler".
    `seconds` is the duration of its compile, whenever that was, and `bytes` its size in a bundle.
    `arch` is None for an entry of another library that depends on none.
    `note` says why no cache can store it. `changed` is True when its file is no longer the recorded
    one. `include` has its include directories, spelled as `preheat.portable_paths` describes.
    """

    label: str
    arch: Arch | None
    key: str
    source: str
    seconds: float
    bytes: int
    note: str = ""
    changed: bool = False
    include: tuple[str, ...] = ()


class FailedProgram(NamedTuple):
    """A program that could not be baked. `arch` is None when it fails for every architecture."""

    title: str
    arch: Arch | None
    error: PreheatError


@dataclass(frozen=True)
class BakeResult:
    """The result of a bake. `path` is the bundle, if one was written, and `nbytes` its size."""

    rows: tuple[BakedProgram, ...]
    failures: tuple[FailedProgram, ...] = ()
    seconds: float = 0.0
    path: Path | None = None
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        """Return True if no program failed."""
        return not self.failures


class _Output(NamedTuple):
    """What a job returns from the thread or process that ran it."""

    row: BakedProgram
    entry: BundleEntry


def bake(
    manifest: Manifest | str | os.PathLike[str],
    archs: Arch | str | Iterable[Arch | str] | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    builder: Builder | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    config: Config | None = None,
    key: Signer | None = None,
    on_start: Callable[[Job | ForeignJob], None] | None = None,
    on_done: Callable[[Job | ForeignJob, BakedProgram | FailedProgram], None] | None = None,
) -> BakeResult:
    """Compile every program of `manifest`, a value or a path, and write the bundle `output`.

    `key`, a `preheat.signing.SigningKey`, signs the bundle. Requests of other libraries are made by
    their adapters, in processes of their own.

    Programs are compiled for `archs`, or for the architectures with which each was recorded. The
    longest compiles start first. `jobs` of them run at the same time, one for each processor by
    default, through `builder`. An `executor` runs them in its own processes instead, where builders
    are opened from `config`; these processes need not share a cache with this one.

    A program that fails is listed in the result, and the others are baked. Programs that are finished
    when a bake ends early are in the cache. `on_start` and `on_done` are called in this thread.
    """
    started = time.perf_counter()
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs must be at least 1, not {jobs}")
    if output is not None:  # Fail now and not after an hour of compiling.
        require_place(output)
    manifest = require_programs(manifest)
    todo = plan(manifest, archs)
    done: list[tuple[Job, _Output]] = []
    failures = [FailedProgram(title, None, error) for title, error in manifest.unreadable]
    # Bundles, a seal and a recording are settings for runs.
    config = replace(config or Config.from_env(), bundles=(), sealed=SealMode.OFF, record=None)

    def ended(job: Job, result: _Output | FailedProgram) -> None:
        if isinstance(result, _Output):
            done.append((job, result))
        else:
            failures.append(result)
        if on_done is not None:
            on_done(job, result.row if isinstance(result, _Output) else result)

    if executor is None:
        _run_here(todo, builder, config, jobs, on_start, ended)
    else:
        _run_there(todo, config, executor, on_start, ended)
    requests = plan_foreign(manifest, parse_archs(archs))
    baked = _bake_foreign(requests, builder, config, jobs, on_start, on_done)
    failures += (each for each in baked if isinstance(each, FailedProgram))
    foreign = [each for each in baked if isinstance(each, BakedForeign)]
    outputs, ambiguous = _without_ambiguous(done)
    failures += ambiguous
    failures.sort(key=lambda failed: (failed.title, str(failed.arch)))
    path = Path(output) if output is not None and (outputs or foreign or not failures) else None
    nbytes = 0 if path is None else _write(path, outputs, foreign, manifest.graphs, key)
    foreign.sort(key=lambda each: (each.job.item.identity, each.job.arch or Arch(0, 0)))
    rows = (*sorted(each.row for each in outputs), *map(_foreign_row, foreign))
    return BakeResult(rows, tuple(failures), time.perf_counter() - started, path, nbytes)


def plan(manifest: Manifest, archs: Arch | str | Iterable[Arch | str] | None = None) -> list[Job]:
    """Return the jobs of a bake, longest first, as measured by recordings or else estimated."""
    pairs = manifest.jobs(parse_archs(archs))
    todo = [Job(item, arch, item.seconds or estimate(item.program)) for item, arch in pairs]
    return sorted(todo, key=lambda job: -job.estimate)


def parse_archs(archs: Arch | str | Iterable[Arch | str] | None) -> list[Arch] | None:
    """Return architectures that are given in any form; None where none are given."""
    if archs is None:
        return None
    return [Arch.parse(arch) for arch in ([archs] if isinstance(archs, Arch | str) else archs)]


def _without_ambiguous(
    done: Iterable[tuple[Job, _Output]],
) -> tuple[list[_Output], list[FailedProgram]]:
    """Separate the programs for which a bundle would have two answers to one request.

    Their include directories are spelled alike and hold different headers. None of them is baked: a
    sealed process would be given the code of one where it asked for that of another.
    """
    answers: dict[str, list[tuple[Job, _Output]]] = {}
    for job, each in done:
        answers.setdefault(each.entry.key, []).append((job, each))
    outputs: list[_Output] = []
    failures: list[FailedProgram] = []
    for same in answers.values():
        if len({each.entry.artifact.digest for _, each in same}) == 1:
            outputs += (each for _, each in same)
        else:
            error = _ambiguous([job for job, _ in same])
            failures += (FailedProgram(job.item.title, job.arch, error) for job, _ in same)
    return outputs, failures


def _ambiguous(jobs: Sequence[Job]) -> InputError:
    program = jobs[0].item.program
    lists = sorted(", ".join(job.item.program.include) for job in jobs)
    return InputError(
        f"{jobs[0]} is listed {len(jobs)} times with include directories that have different headers, "
        f"and a bundle cannot distinguish them: {' | '.join(lists)} (all requested as "
        f"{', '.join(program.include_spellings) or 'none'})",
        hint="give the programs different labels, or the directories different names",
    )


def _write(
    path: Path,
    outputs: Sequence[_Output],
    foreign: Sequence[BakedForeign],
    graphs: Iterable[GraphKeys],
    key: Signer | None,
) -> int:
    by_key: dict[str, BundleEntry] = {}
    for _, entry in outputs:
        known = by_key.get(entry.key)
        by_key[entry.key] = entry if known is None else merge_entries(known, entry)
    entries = {digest: blob for entry in by_key.values() for digest, blob in entry.encode().items()}
    entries |= {
        entry.digest: entry.encode(provenance=False) for each in foreign for entry in each.entries
    }
    toolchains = (entry.artifact.toolchain for entry in by_key.values())
    targets = [
        *(each.row.arch for each in outputs),
        *(each.job.arch for each in foreign),
    ]
    archs = (arch for arch in targets if arch is not None)
    return write(path, entries, meta(toolchains, archs, graphs), key)


# Other libraries


def _bake_foreign(
    todo: Sequence[ForeignJob],
    builder: Builder | None,
    config: Config,
    jobs: int | None,
    on_start: Callable[[ForeignJob], None] | None,
    on_done: Callable[[ForeignJob, BakedProgram | FailedProgram], None] | None,
) -> list[BakedForeign | FailedProgram]:
    """Make the entries of other libraries, and return what was made and what failed."""
    results: list[BakedForeign | FailedProgram] = []
    if not todo:
        return results

    def started(job: ForeignJob) -> None:
        if on_start is not None:
            on_start(job)

    def ended(job: ForeignJob, result: BakedForeign | PreheatError) -> None:
        outcome: BakedForeign | FailedProgram
        if isinstance(result, PreheatError):
            outcome = FailedProgram(job.item.title, job.arch, result)
        else:
            outcome = result
        results.append(outcome)
        if on_done is not None:
            on_done(job, _foreign_row(outcome) if isinstance(outcome, BakedForeign) else outcome)

    used = builder or Builder.open(config)
    bake_foreign(todo, used, jobs=jobs, on_start=started, on_done=ended)
    return results


def _foreign_row(baked: BakedForeign) -> BakedProgram:
    job = baked.job
    own = [entry for entry in baked.entries if entry.label == job.item.name]
    return BakedProgram(
        label=job.item.title,
        arch=job.arch,
        key=own[0].digest if own else "",
        source="compiler" if baked.made else "cache",
        seconds=sum(entry.provenance.seconds for entry in own),
        bytes=sum(len(entry.encode(provenance=False)) for entry in own),
        note="; ".join(baked.notes),
    )


# One program


def _run(builder: Builder, job: Job, deferral: Deferral | None = None) -> _Output:
    """Build the program of a job; `UnknownEntryError` when it lacks a kernel of the manifest."""
    program = job.item.program
    entry, tier = builder.bundle_entry(program, job.arch, job.item.entries, deferral)
    builder.cache.settle()  # A bake fills shared stores: it waits rather than lets an entry be dropped.
    artifact = entry.artifact
    for name in entry.entries:
        _require_entry(artifact, name, program)
    row = BakedProgram(
        label=program.label,
        arch=job.arch,
        key=artifact.digest,
        source=tier,
        seconds=artifact.provenance.seconds,
        bytes=sum(map(len, entry.encode().values())),
        note=entry.untracked_reason,
        changed=job.item.changed,
        include=program.include_spellings,
    )
    return _Output(row, entry)


def _require_entry(artifact: Artifact, name: str, program: Program) -> None:
    try:
        artifact.entry(name)
    except UnknownEntryError as unknown:
        if "<" not in name or name in program.names:
            raise
        hint = f"name the template instance: add names = [{name!r}] to the program"
        raise copy_error(unknown, hint=hint) from None


# All programs


def _run_here(
    todo: Sequence[Job],
    builder: Builder | None,
    config: Config,
    jobs: int | None,
    on_start: Callable[[Job], None] | None,
    on_done: Callable[[Job, _Output | FailedProgram], None],
) -> None:
    """Run the jobs through `builder`, or through one that is opened for them."""
    used = builder or Builder.open(config)

    def started(index: int) -> None:
        if on_start is not None:
            on_start(todo[index])

    def ended(index: int, task: Task[_Output]) -> None:
        job = todo[index]
        try:
            result: _Output | FailedProgram = task.outcome()
        except PreheatError as error:
            result = FailedProgram(job.item.title, job.arch, error)
        on_done(job, result)

    try:
        run = functools.partial(_run, used)
        wanted = [(job.item.program, job.arch) for job in todo]
        look_ahead(used.cache, used.toolchain, wanted)
        with used.expect(wanted, most=jobs):
            run_all(todo, run, threads=jobs, on_start=started, on_done=ended)
        used.cache.close()  # What was baked is on shared stores when the bake ends.
    finally:
        if builder is None:
            used.close()


def _run_there(
    todo: Sequence[Job],
    config: Config,
    executor: Executor,
    on_start: Callable[[Job], None] | None,
    on_done: Callable[[Job, _Output | FailedProgram], None],
) -> None:
    """Run the jobs in the processes of an executor. On exit, cancel those that have not started."""
    futures: list[Future[_Output]] = []
    try:
        for job in todo:
            futures.append(_submit(executor, config, job))
        for job, future in _completed(todo, futures, on_start):
            on_done(job, _result(job, future))
    finally:
        for future in futures:
            future.cancel()


@functools.cache
def _builder_of_process(config: Config) -> Builder:
    """Return the builder of a process that an executor of the caller runs."""
    return Builder.open(config)


def _run_in_process(config: Config, job: Job) -> _Output:
    return _run(_builder_of_process(config), job)


def _submit(executor: Executor, config: Config, job: Job) -> Future[_Output]:
    from concurrent.futures import BrokenExecutor, Future

    try:
        return executor.submit(_run_in_process, config, job)
    except BrokenExecutor as broken:
        future: Future[_Output] = Future()
        future.set_exception(broken)
        return future


def _completed(
    todo: Sequence[Job], futures: Sequence[Future[_Output]], on_start: Callable[[Job], None] | None
) -> Iterator[tuple[Job, Future[_Output]]]:
    """Yield each job when it ends. Executors do not announce starts, so these are polled."""
    ended: SimpleQueue[int] = SimpleQueue()
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: ended.put(index))  # type: ignore[misc]
    started: set[int] = set()

    def start(index: int) -> None:
        if index not in started and on_start is not None:
            on_start(todo[index])
        started.add(index)

    queued = deque(range(len(todo)))
    remaining = len(todo)
    while remaining:
        # Executors start jobs in the order of their submission.
        while queued and (queued[0] in started or futures[queued[0]].running()):
            start(queued.popleft())
        try:
            index = ended.get(timeout=_POLL)
        except Empty:
            continue
        start(index)
        remaining -= 1
        yield todo[index], futures[index]


def _result(job: Job, future: Future[_Output]) -> _Output | FailedProgram:
    """Return the output of a job or its failure. A broken executor fails its jobs, not the bake."""
    from concurrent.futures import BrokenExecutor, CancelledError

    try:
        return future.result()
    except PreheatError as error:
        return FailedProgram(job.item.title, job.arch, error)
    except (BrokenExecutor, CancelledError) as broken:
        why = f"{job} was not baked, because its executor failed: {broken or type(broken).__name__}"
        lost = ToolchainError(why, hint="bake again: programs that were finished are in the cache")
        return FailedProgram(job.item.title, job.arch, lost)
