"""Baking: compile every program of a manifest, ahead of time, into one bundle."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.ahead.bundles import merge_entries, meta
from preheat.ahead.foreign import BakedForeign, ForeignJob, bake_foreign, plan_foreign
from preheat.ahead.jobs import BakedProgram, FailedProgram, Job, Output, run_job, run_jobs
from preheat.ahead.manifest import GraphKeys, Manifest, require_programs
from preheat.ahead.manifest.recorded import RecordedEntries
from preheat.ahead.output import BundleOutput, fill_stores
from preheat.ahead.shards import Shard
from preheat.build.batch import estimate
from preheat.build.builder import Builder
from preheat.build.bundles import BundleEntry
from preheat.build.known_archs import require_known
from preheat.build.request import look_ahead
from preheat.errors import InputError, PreheatError
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.events import logged_events
from preheat.model.key import long_texts
from preheat.process.lazy import LazyModule
from preheat.store.base import UploadResult
from preheat.store.signing.keys import SigningKey

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from preheat.ahead import bake_on_executor
else:  # It takes milliseconds to import, and most bakes compile in this process.
    bake_on_executor = LazyModule("preheat.ahead.bake_on_executor", logs=True)

__all__ = [
    "BakeResult",
    "BakedProgram",
    "FailedProgram",
    "Job",
    "bake",
    "parse_archs",
    "plan",
    "plan_all",
]

Archs = Arch | str | Iterable[Arch | str] | None
OnStart = Callable[[Job | ForeignJob], None]
OnDone = Callable[[Job | ForeignJob, BakedProgram | FailedProgram], None]


@dataclass(frozen=True)
class BakeResult:
    """The result of `preheat.bake`.

    Attributes:
        rows: The programs that were baked, one row for each architecture.
        failures: The programs that could not be baked, with their errors.
        seconds: The time of the whole bake.
        path: The bundle, if one was written.
        nbytes: The size of the bundle.
        stores: A row for each shared store that this process may write to: how many entries it had
            (`present`), how many were written to it at the end (`written`), and how many it lacks
            (`missing`), with a `reason`.

    Examples:
        >>> result = preheat.bake("kernels.toml", "sm_90")
        >>> [(row.label, str(row.arch)) for row in result.rows], result.failures
        ([('saxpy.cu', 'sm_90')], ())
    """

    rows: tuple[BakedProgram, ...]
    failures: tuple[FailedProgram, ...] = ()
    seconds: float = 0.0
    path: Path | None = None
    nbytes: int = 0
    stores: tuple[UploadResult, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no program failed."""
        return not self.failures


def bake(
    manifest: Manifest | str | os.PathLike[str],
    archs: Archs = None,
    *,
    output: str | os.PathLike[str] | None = None,
    replace: bool = False,
    with_sources: bool = False,
    builder: Builder | None = None,
    jobs: int | None = None,
    executor: Executor | Callable[[], Executor] | str | None = None,
    shard: Shard | str | None = None,
    config: Config | None = None,
    key: SigningKey | None = None,
    on_start: OnStart | None = None,
    on_done: OnDone | None = None,
) -> BakeResult:
    """Compile every program of a manifest, and write a bundle.

    The longest compiles start first. Adapters make the entries of other libraries, in separate
    processes. If a bake ends early, the programs that are finished are in the cache. At the end,
    entries that a shared store lacks are written to it.

    Args:
        manifest: A manifest, or the path of one.
        archs: The architectures to compile for. By default, each program is compiled for the
            architectures of its recording.
        output: The path of the bundle. Without it, programs are only compiled into the cache.
        replace: Replace a bundle at this path even if it has code for other architectures.
        with_sources: Store the sources of the programs in the bundle, so that a `SealedError` can show
            the first line that has changed.
        builder: The builder that compiles. The default is that of the process.
        jobs: The number of compiles at the same time. The default is one for each processor.
        executor: Run the compiles in the processes of this executor of `concurrent.futures` instead.
            Builders are opened there from `config`. These processes need not share a cache with this
            one. A function that makes an executor is called again when the executor breaks. A text,
            such as "dask://scheduler:8786", is the address of a fleet. A program whose worker dies is
            given to another worker.
        shard: The part of the programs to bake, such as "2/8".
        config: The settings of builders in an `executor`.
        key: A `preheat.signing.SigningKey` that signs the bundle.
        on_start: A function that this thread calls before each compile.
        on_done: A function that this thread calls after each compile.

    Returns:
        The result. A program that fails is listed in it, and the others are baked.

    Raises:
        InputError: The manifest cannot be read or has no programs, an architecture does not exist, the
            bundle cannot be written, or it has code for architectures that this bake does not make.

    Examples:
        >>> result = preheat.bake("kernels.toml", ["sm_80", "sm_90"], output="kernels.heat")
        >>> result.ok, [str(row.arch) for row in result.rows]
        (True, ['sm_80', 'sm_90'])
    """
    started = time.perf_counter()
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs must be at least 1, not {jobs}")
    # Bundles, a seal and a recording are settings for runs.
    config = dataclasses.replace(
        config or Config.from_env(), bundles=(), sealed=SealMode.OFF, record=None
    )
    archs = parse_archs(archs)
    require_known(archs or (), builder, config)
    manifest = require_programs(manifest)
    everything = plan_all(manifest, archs)
    part = Shard.parse(shard) if isinstance(shard, str) else shard
    todo = _select(everything, part)
    # Fail now and not after an hour of compiling.
    place = None
    if output is not None:
        place = BundleOutput(output, everything, todo, shard=part, replace=replace)
    recorded = RecordedEntries(manifest.recorded)
    results = _Results(on_done)
    used = _BakeBuilder(builder, config)
    if executor is not None:
        events = logged_events() if builder is None else builder.events
        todo = bake_on_executor.bake_on_executor(todo, config, events, executor, on_start, results.add)
    _run_here([job for job in todo if isinstance(job, Job)], used, jobs, on_start, results.add)
    requests = [job for job in todo if isinstance(job, ForeignJob)]
    _run_adapters(requests, recorded, used, jobs, on_start, results.add)
    if with_sources:
        results.programs = [(job, _with_sources(job, output)) for job, output in results.programs]
    outputs, ambiguous = _without_ambiguous(results.programs)
    unreadable = [FailedProgram(title, None, error) for title, error in manifest.unreadable]
    failures = [*unreadable, *results.failures, *ambiguous]
    failures.sort(key=lambda failed: (failed.title, str(failed.arch)))
    foreign = sorted(
        results.foreign, key=lambda each: (each.job.item.identity, each.job.arch or Arch(0, 0))
    )
    path, nbytes = None, 0
    if place is not None and (outputs or foreign or not failures):
        written = _write(place, outputs, foreign, manifest.graphs, key)
        if isinstance(written, InputError):
            failures.append(FailedProgram(str(place.path), None, written))
        else:
            path, nbytes = place.path, written
    rows = (*sorted(each.row for each in outputs), *map(_foreign_row, foreign))
    stores = _fill_stores(outputs, foreign, used)
    return BakeResult(rows, tuple(failures), time.perf_counter() - started, path, nbytes, stores)


def _with_sources(job: Job, output: Output) -> Output:
    sources = long_texts(job.item.program)
    return output._replace(entry=dataclasses.replace(output.entry, sources=sources))


def plan_all(
    manifest: Manifest, archs: Archs = None, shard: Shard | str | None = None
) -> list[Job | ForeignJob]:
    """Return the jobs of a bake or of one shard of it: programs, then requests of other libraries."""
    everything: list[Job | ForeignJob] = [
        *plan(manifest, archs),
        *plan_foreign(manifest, parse_archs(archs)),
    ]
    return _select(everything, shard)


def _select(everything: list[Job | ForeignJob], shard: Shard | str | None) -> list[Job | ForeignJob]:
    if shard is None:
        return everything
    return (Shard.parse(shard) if isinstance(shard, str) else shard).select(everything)


def plan(manifest: Manifest, archs: Archs = None) -> list[Job]:
    """Return the jobs of a bake, longest first, as measured by recordings or else estimated."""
    pairs = manifest.jobs(parse_archs(archs))
    todo = [Job(item, arch, item.seconds or estimate(item.program)) for item, arch in pairs]
    return sorted(todo, key=lambda job: -job.estimate)


def parse_archs(archs: Archs) -> list[Arch] | None:
    """Return architectures that are given in any form, or None."""
    if archs is None:
        return None
    return [Arch.parse(arch) for arch in ([archs] if isinstance(archs, Arch | str) else archs)]


@dataclass
class _Results:
    """What the jobs of a bake have made, and what failed, in the order in which they ended."""

    on_done: OnDone | None
    programs: list[tuple[Job, Output]] = field(default_factory=list)
    foreign: list[BakedForeign] = field(default_factory=list)
    failures: list[FailedProgram] = field(default_factory=list)

    def add(self, job: Job | ForeignJob, result: Output | BakedForeign | PreheatError) -> None:
        """Add the result of a job, and report it."""
        row: BakedProgram | FailedProgram
        if isinstance(result, PreheatError):
            row = FailedProgram(job.item.title, job.arch, result)
            self.failures.append(row)
        elif isinstance(result, BakedForeign):
            row = _foreign_row(result)
            self.foreign.append(result)
        else:
            assert isinstance(job, Job)
            row = result.row
            self.programs.append((job, result))
        if self.on_done is not None:
            self.on_done(job, row)


def _without_ambiguous(
    done: Iterable[tuple[Job, Output]],
) -> tuple[list[Output], list[FailedProgram]]:
    """Separate the programs for which a bundle would have two answers to one request.

    Their include directories are spelled alike and hold different headers. None of them is baked,
    because a sealed process that requests one could get the code of another.
    """
    answers: dict[str, list[tuple[Job, Output]]] = {}
    for job, each in done:
        answers.setdefault(each.entry.key, []).append((job, each))
    outputs: list[Output] = []
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
    place: BundleOutput,
    outputs: Sequence[Output],
    foreign: Sequence[BakedForeign],
    graphs: Iterable[GraphKeys],
    key: SigningKey | None,
) -> int | InputError:
    by_key: dict[str, BundleEntry] = {}
    for _, entry, _ in outputs:
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
    return place.write(entries, meta(toolchains, archs, graphs), targets, key)


def _foreign_row(baked: BakedForeign) -> BakedProgram:
    job = baked.job
    own = [entry for entry in baked.entries if entry.request.name == job.item.name]
    return BakedProgram(
        label=job.item.title,
        arch=job.arch,
        key=own[0].digest if own else "",
        source="compiler" if baked.made else "cache",
        seconds=sum(entry.provenance.seconds for entry in own),
        bytes=sum(len(entry.encode(provenance=False)) for entry in own),
        note="; ".join(baked.notes),
        worker=baked.worker,
    )


# Jobs in this process


class _BakeBuilder:
    """The caller's builder, or one opened on first use.

    All parts of a bake share it. A shared store that cannot be used is then reported once.
    """

    def __init__(self, builder: Builder | None, config: Config) -> None:
        self._given = builder
        self._opened: Builder | None = None
        self._config = config

    @property
    def may_have_stores(self) -> bool:
        """Whether the builder may have shared stores. Nothing is opened to find out."""
        return self._given is not None or bool(self._config.remote)

    def get(self) -> Builder:
        """Return the builder."""
        if self._given is not None:
            return self._given
        if self._opened is None:
            self._opened = Builder.open(self._config)
        return self._opened

    def close(self) -> None:
        """Close a builder that was opened here. It can still be used."""
        if self._opened is not None:
            self._opened.close()


def _fill_stores(
    outputs: Sequence[Output], foreign: Sequence[BakedForeign], builder: _BakeBuilder
) -> tuple[UploadResult, ...]:
    if not builder.may_have_stores:
        return ()
    try:
        return fill_stores(outputs, foreign, builder.get())
    finally:
        builder.close()


def _run_here(
    todo: Sequence[Job],
    builder: _BakeBuilder,
    jobs: int | None,
    on_start: OnStart | None,
    on_done: Callable[[Job, Output | PreheatError], None],
) -> None:
    """Run the jobs in threads of this process."""
    if not todo:
        return
    used = builder.get()
    try:
        run = functools.partial(run_job, used)
        wanted = [(job.item.program, job.arch) for job in todo]
        look_ahead(used.cache, used.toolchain, wanted)
        run_jobs(todo, run, jobs, on_start, on_done)
        used.cache.close()  # Finish writing to shared stores before checking what they lack.
    finally:
        builder.close()


def _run_adapters(
    todo: Sequence[ForeignJob],
    recorded: RecordedEntries,
    builder: _BakeBuilder,
    jobs: int | None,
    on_start: OnStart | None,
    on_done: Callable[[ForeignJob, BakedForeign | PreheatError], None],
) -> None:
    """Make the entries of other libraries."""
    if not todo:
        return
    bake_foreign(todo, builder.get(), recorded, jobs=jobs, on_start=on_start, on_done=on_done)
    builder.close()
