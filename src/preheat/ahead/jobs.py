"""The jobs of a bake: what each compiles, how they run in threads, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from preheat.ahead.manifest import ManifestProgram
from preheat.build.builder import Builder
from preheat.build.bundles import BundleEntry
from preheat.build.compile_lock import Attempt
from preheat.build.parallel import Task, run_all
from preheat.errors import PreheatError, ToolchainError, UnknownEntryError, copy_error
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.program import Program

__all__ = ["BakedProgram", "FailedProgram", "Job", "Output", "run_job", "run_jobs"]

J = TypeVar("J")
R = TypeVar("R")


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
    one. `include` has its include directories, spelled as `preheat.model.portable_paths` describes.
    `worker` is the host and the process that an executor used, as "host:pid"; it is empty for this one.
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
    worker: str = ""


class FailedProgram(NamedTuple):
    """A program that could not be baked. `arch` is None when it fails for every architecture."""

    title: str
    arch: Arch | None
    error: PreheatError


class Output(NamedTuple):
    """What a job returns from the thread or process that ran it.

    `request` is the digest under which caches have the program; it is empty if they cannot have it.
    """

    row: BakedProgram
    entry: BundleEntry
    request: str = ""


def run_job(builder: Builder, job: Job, attempt: Attempt | None = None) -> Output:
    """Build the program of a job; `UnknownEntryError` when it lacks a kernel of the manifest."""
    program = job.item.program
    entry, tier = builder.bundle_entry(program, job.arch, job.item.entries, attempt)
    builder.cache.settle()  # Wait for shared stores, so that their queues drop no entry.
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
    request = ""
    with suppress(ToolchainError):  # There may be no compiler if a bundle had the program.
        request = builder.key(program, job.arch).digest
    return Output(row, entry, request)


def run_jobs(
    todo: Sequence[J],
    run: Callable[[J, Attempt], R],
    threads: int | None,
    on_start: Callable[[J], None] | None,
    on_done: Callable[[J, R | PreheatError], None],
) -> None:
    """Run jobs in threads of this process. A failure is also a result."""

    def start(index: int) -> None:
        if on_start is not None:
            on_start(todo[index])

    def end(index: int, task: Task[R]) -> None:
        try:
            result: R | PreheatError = task.outcome()
        except PreheatError as error:
            result = error
        on_done(todo[index], result)

    run_all(todo, run, threads=threads, on_start=start, on_done=end)


def _require_entry(artifact: Artifact, name: str, program: Program) -> None:
    try:
        artifact.entry(name)
    except UnknownEntryError as unknown:
        if "<" not in name or name in program.names:
            raise
        hint = f"name the template instance: add names = [{name!r}] to the program"
        raise copy_error(unknown, hint=hint) from None
