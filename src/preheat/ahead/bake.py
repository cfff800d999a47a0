"""Ahead of time: compile all that a manifest lists into a bundle, and prove that nothing is missing."""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.ahead.bundles import archs as baked_for
from preheat.ahead.bundles import meta, require_place, united
from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram, require_programs
from preheat.arch import Arch, ladder
from preheat.artifact import Artifact
from preheat.build.builder import Builder, Miss
from preheat.build.promise import Promise
from preheat.cache.bundle import write
from preheat.config import Config, SealMode
from preheat.errors import InputError, PreheatError, ToolchainError, UnknownEntryError, fresh
from preheat.program import Program

if TYPE_CHECKING:  # costs every process milliseconds to import
    from concurrent.futures import Executor, Future

__all__ = ["Baked", "Checked", "Failed", "Hole", "Job", "Row", "bake", "check", "plan"]

_GUESS = {True: 2.0, False: 0.2}  # seconds of a compile nobody has timed: with includes, without
_LOOK = 0.1  # seconds between two looks at what an executor has begun
_EXPLAINED = 25  # holes that are worth a search for the stored entry most like them,
_EXPLAINING = 1.0  # and the seconds that all of these may take
_OTHER_ARCH = "not baked for this architecture"


class Job(NamedTuple):
    """One program to compile for one architecture, and the seconds that is expected to take."""

    item: ManifestProgram
    arch: Arch
    guess: float

    def __str__(self) -> str:
        return f"{self.item.title} for {self.arch}"


class Row(NamedTuple):
    """One program baked. `source` is the tier it was found in, or "compiler".

    `key` is the digest of its code, `seconds` what its compile took whenever that was, `bytes` what
    it adds to a bundle, `note` why no cache could keep it, `changed` whether its file is no longer
    what was recorded, `include` its include directories, spelled as `preheat.spelling` says.
    """

    label: str
    arch: Arch
    key: str
    source: str
    seconds: float
    bytes: int
    note: str = ""
    changed: bool = False
    include: tuple[str, ...] = ()


class Failed(NamedTuple):
    """What could not be baked, why, and for which architecture; None when for any."""

    title: str
    arch: Arch | None
    error: PreheatError


@dataclass(frozen=True)
class Baked:
    """What a bake came to. `path` is the bundle, if one was written, and `nbytes` its size."""

    rows: tuple[Row, ...]
    failures: tuple[Failed, ...] = ()
    seconds: float = 0.0
    path: Path | None = None
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


class _Made(NamedTuple):
    """One program baked, as it comes back from wherever that was done."""

    row: Row
    promise: Promise


def bake(
    manifest: Manifest | str | os.PathLike[str],
    archs: Arch | str | Iterable[Arch | str] | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    builder: Builder | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    config: Config | None = None,
    on_start: Callable[[Job], None] | None = None,
    on_done: Callable[[Job, Row | Failed], None] | None = None,
) -> Baked:
    """Compile every program of `manifest`, or of the file so named, and write the bundle `output`.

    Longest first, for `archs`, else for the architectures each was recorded with. `jobs` at once (one a
    processor), through `builder`; an `executor` instead opens builders from `config` in its own
    processes, which need not share a cache with this one. What fails is listed, and the rest baked all
    the same; what was finished when a bake ends early is in the cache. `on_start` and `on_done` run in
    this thread.
    """
    started = time.perf_counter()
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs must be at least 1, not {jobs}")
    if output is not None:  # rather now than after an hour
        require_place(output)
    manifest = require_programs(manifest)
    todo = plan(manifest, archs)
    done: list[tuple[Job, _Made]] = []
    failures = [Failed(title, None, error) for title, error in manifest.unreadable]
    config = _able_to_compile(config or Config.from_env())
    with _bench(builder, config, executor) as bench, _submitted(todo, bench, executor, jobs) as futures:
        for job, future in _ended(todo, futures, on_start):
            result = _result(job, future)
            if isinstance(result, _Made):
                done.append((job, result))
            else:
                failures.append(result)
            if on_done is not None:
                on_done(job, result.row if isinstance(result, _Made) else result)
    made, ambiguous = _told_apart(done)
    failures += ambiguous
    failures.sort(key=lambda failed: (failed.title, str(failed.arch)))
    baked = Baked(tuple(sorted(each.row for each in made)), tuple(failures))
    if output is not None and (made or not failures):
        nbytes = _write(Path(output), made, manifest.graphs)
        baked = replace(baked, path=Path(output), nbytes=nbytes)
    return replace(baked, seconds=time.perf_counter() - started)


def plan(manifest: Manifest, archs: Arch | str | Iterable[Arch | str] | None = None) -> list[Job]:
    """What a bake does, longest first: as timed when it was recorded, else by a guess."""
    if isinstance(archs, Arch | str):
        archs = [archs]
    listed = manifest.jobs(None if archs is None else [Arch.parse(arch) for arch in archs])
    todo = [Job(item, arch, item.seconds or _GUESS[item.program.may_include]) for item, arch in listed]
    return sorted(todo, key=lambda job: -job.guess)


def _told_apart(done: Iterable[tuple[Job, _Made]]) -> tuple[list[_Made], list[Failed]]:
    """What a bundle can hold, and the programs for which it would have two answers to one request.

    Their include directories are spelled alike and hold different headers. None of them is baked: a
    sealed process would be given the code of one where it asked for that of another.
    """
    answers: dict[str, list[tuple[Job, _Made]]] = {}
    for job, each in done:
        answers.setdefault(each.promise.key, []).append((job, each))
    made: list[_Made] = []
    failures: list[Failed] = []
    for alike in answers.values():
        if len({each.promise.artifact.digest for _, each in alike}) == 1:
            made += (each for _, each in alike)
        else:
            error = _ambiguous([job for job, _ in alike])
            failures += (Failed(job.item.title, job.arch, error) for job, _ in alike)
    return made, failures


def _ambiguous(jobs: Sequence[Job]) -> InputError:
    program = jobs[0].item.program
    lists = sorted(", ".join(job.item.program.include) for job in jobs)
    return InputError(
        f"{jobs[0]} is listed {len(jobs)} times with include directories that hold different headers, "
        f"and a bundle cannot tell them apart: {' | '.join(lists)} (each asked for as "
        f"{', '.join(program.asked_include) or 'none'})",
        hint="give the programs different labels, or the directories different names",
    )


def _write(path: Path, made: Sequence[_Made], graphs: Iterable[GraphKeys]) -> int:
    promises: dict[str, Promise] = {}
    for _, promise in made:
        known = promises.get(promise.key)
        promises[promise.key] = promise if known is None else united(known, promise)
    entries = {
        digest: blob for promise in promises.values() for digest, blob in promise.encode().items()
    }
    toolchains = (promise.artifact.toolchain for promise in promises.values())
    return write(path, entries, meta(toolchains, (each.row.arch for each in made), graphs))


def _able_to_compile(config: Config) -> Config:
    """The settings without those of a run that takes from bundles, compiles nothing or records."""
    return replace(config, bundles=(), sealed=SealMode.OFF, record=None)


# One program, wherever it is compiled


class _Bench:
    """A builder that knows of each artifact whether it was found, and where."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self._found: dict[str, str] = {}
        builder.events.sinks.append(self._see)

    def _see(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "hit":
            self._found[fields["key"]] = fields["tier"]

    def make(self, job: Job) -> _Made:
        """The program as entries of a bundle; a kernel that is wanted of it and missing is an error."""
        program = job.item.program
        promise = self.builder.promise(program, job.arch, job.item.entries)
        artifact = promise.artifact
        for name in promise.entries:
            _require_entry(artifact, name, program)
        row = Row(
            label=program.label,
            arch=job.arch,
            key=promise.artifact.digest,
            source=self._found.pop(artifact.digest, "compiler"),
            seconds=artifact.provenance.seconds,
            bytes=sum(map(len, promise.encode().values())),
            note=promise.note,
            changed=job.item.changed,
            include=program.asked_include,
        )
        return _Made(row, promise)

    def leave(self) -> None:
        self.builder.events.sinks.remove(self._see)


def _require_entry(artifact: Artifact, name: str, program: Program) -> None:
    try:
        artifact.entry(name)
    except UnknownEntryError as unknown:
        if "<" not in name or name in program.names:
            raise
        hint = f"a template becomes a kernel by `names`: add names = [{name!r}] to the program"
        raise fresh(unknown, hint=hint) from None


@functools.cache
def _bench_of_process(config: Config) -> _Bench:
    """The one of a process that somebody's executor runs; it ends with the process."""
    return _Bench(Builder.open(config))


def _make(bench: Callable[[], _Bench], job: Job) -> _Made:
    """What executors run: it and its arguments pickle, and so do its results and errors."""
    return bench().make(job)


@contextmanager
def _bench(
    builder: Builder | None, config: Config, executor: Executor | None
) -> Iterator[Callable[[], _Bench]]:
    """How the functions that are submitted come by their builder."""
    if executor is not None:
        yield functools.partial(_bench_of_process, config)
        return
    bench = _Bench(builder or Builder.open(config))
    try:
        yield lambda: bench
    finally:
        bench.leave()
        if builder is None:
            bench.builder.close()


# All of them, in whatever executor


@contextmanager
def _submitted(
    todo: Sequence[Job], bench: Callable[[], _Bench], executor: Executor | None, jobs: int | None
) -> Iterator[list[Future[_Made]]]:
    """All jobs on their way. On leaving, those that have not begun are called off."""
    from concurrent.futures import ThreadPoolExecutor

    # Threads are enough here: the compilers run in worker processes.
    runner = ThreadPoolExecutor(jobs or os.cpu_count()) if executor is None else executor
    futures: list[Future[_Made]] = []
    try:
        for job in todo:
            futures.append(_submit(runner, bench, job))
        yield futures
    finally:
        for future in futures:
            future.cancel()
        if executor is None:
            runner.shutdown(wait=False)


def _submit(executor: Executor, bench: Callable[[], _Bench], job: Job) -> Future[_Made]:
    from concurrent.futures import BrokenExecutor, Future

    try:
        return executor.submit(_make, bench, job)
    except BrokenExecutor as broken:
        future: Future[_Made] = Future()
        future.set_exception(broken)
        return future


def _ended(
    todo: Sequence[Job], futures: Sequence[Future[_Made]], on_start: Callable[[Job], None] | None
) -> Iterator[tuple[Job, Future[_Made]]]:
    """Each job as it ends. Executors do not say what they begin, so that is looked at in between."""
    ended: SimpleQueue[int] = SimpleQueue()
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: ended.put(index))  # type: ignore[misc]
    begun: set[int] = set()

    def begin(index: int) -> None:
        if index not in begun and on_start is not None:
            on_start(todo[index])
        begun.add(index)

    queued, running = deque(range(len(todo))), len(todo)
    while running:
        while queued and (queued[0] in begun or futures[queued[0]].running()):  # taken in turn
            begin(queued.popleft())
        try:
            index = ended.get(timeout=_LOOK)
        except Empty:
            continue
        begin(index)
        running -= 1
        yield todo[index], futures[index]


def _result(job: Job, future: Future[_Made]) -> _Made | Failed:
    """What became of a job. An executor that breaks fails its jobs, not the bake."""
    from concurrent.futures import BrokenExecutor, CancelledError

    try:
        return future.result()
    except PreheatError as error:
        return Failed(job.item.title, job.arch, error)
    except (BrokenExecutor, CancelledError) as broken:
        why = f"{job} was not baked, its executor is gone: {broken or type(broken).__name__}"
        lost = ToolchainError(why, hint="bake again: what was finished is found in the cache")
        return Failed(job.item.title, job.arch, lost)


# Proving that nothing is missing


class Hole(NamedTuple):
    """What a sealed run would not find, on which architecture (None: on any), and why."""

    title: str
    arch: Arch | None
    reason: str


@dataclass(frozen=True)
class Checked:
    """How far what is stored covers a manifest.

    `unchecked` are header files that code was made from and that are not here to compare.
    """

    programs: int
    archs: tuple[Arch, ...]
    holes: tuple[Hole, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a sealed run finds everything."""
        return not self.holes


def check(
    manifest: Manifest | str | os.PathLike[str],
    archs: Arch | str | Iterable[Arch | str] | None = None,
    *,
    builder: Builder,
) -> Checked:
    """Which programs of `manifest` a run through `builder` would have to compile; compiles nothing.

    Code for another architecture counts where the one asked for runs it, as it does for a device.
    """
    manifest = require_programs(manifest)
    todo = plan(manifest, archs)
    programs = len({id(job.item) for job in todo}) + len(manifest.unreadable)
    targets = tuple(sorted({job.arch for job in todo}))
    holes = [Hole(title, None, str(error)) for title, error in manifest.unreadable]
    unchecked: set[str] = set()
    until = time.monotonic() + _EXPLAINING
    for job in sorted(todo, key=lambda job: (job.item.title, job.arch)):
        found = _stored(builder, job)
        if isinstance(found, Artifact):
            unchecked |= _not_here(builder, job, found)
            reason = _lacking(found, job.item.entries)
        else:
            explain = len(holes) < _EXPLAINED and time.monotonic() < until
            reason = _why(builder, job, found, targets, explain=explain)
        if reason is not None:
            holes.append(Hole(job.item.title, job.arch, reason))
    return Checked(programs, targets, tuple(holes), tuple(sorted(unchecked)))


def _stored(builder: Builder, job: Job) -> Artifact | Miss:
    """What a device of the architecture is given; where a suffix asks for exact code, that alone."""
    misses = []
    for arch in (job.arch,) if job.arch.suffix else ladder(job.arch):
        found = builder.why(job.item.program, arch)
        if isinstance(found, Artifact):
            return found
        misses.append(found)
    return min(misses, key=lambda miss: miss.reason.startswith("absent"))


def _lacking(artifact: Artifact, entries: Iterable[str]) -> str | None:
    for name in entries:
        try:
            artifact.entry(name)
        except InputError as error:
            return str(error)
    return None


def _why(builder: Builder, job: Job, miss: Miss, targets: Iterable[Arch], *, explain: bool) -> str:
    """Why a program is not there, as exactly as can be told."""
    program, (kind, _, what) = job.item.program, miss.reason.partition(": ")
    if kind != "absent":
        return what
    others = {*targets, *(arch for bundle in builder.bundles for arch in baked_for(bundle))}
    if any(isinstance(builder.why(program, arch), Artifact) for arch in others - {job.arch}):
        return _OTHER_ARCH
    if program.uncacheable:
        return f"not baked, and no cache keeps it: {program.uncacheable}"
    near = builder.nearest(program, job.arch, namesake=True) if explain else None
    if near is None:
        return "not baked"
    if not near.differences:
        return f"not baked by this compiler, only by {near.artifact.toolchain}"
    if [difference.partition(": ")[0] for difference in near.differences] == ["arch"]:
        return _OTHER_ARCH
    return "; ".join(near.differences)


def _not_here(builder: Builder, job: Job, artifact: Artifact) -> set[str]:
    """The header files that `artifact` was made from and that cannot be compared."""
    if not artifact.headers:
        return set()
    roots = {**builder.toolchain.roots(job.item.program), "/": ""}
    paths = {header.name: f"{roots.get(header.root)}/{header.name}" for header in artifact.headers}
    return {name for name, path in paths.items() if not os.path.exists(path)}
