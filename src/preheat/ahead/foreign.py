"""Requests of other libraries: made ahead of time for a bundle, and checked."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from preheat.ahead.adapter_process import AdapterProcesses
from preheat.ahead.manifest import ForeignProgram, Manifest
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.build.key_locks import Deferral
from preheat.build.parallel import Task, run_all
from preheat.cache.bundle import Bundle
from preheat.cache.codec import DamagedEntryError
from preheat.errors import AdapterError, PreheatError
from preheat.foreign import ForeignEntry, ForeignRequest

__all__ = [
    "COPY_AGAIN",
    "DAMAGED",
    "NOT_ASKED",
    "BakedForeign",
    "ForeignJob",
    "MissingForeign",
    "bake_foreign",
    "bake_request",
    "closures",
    "missing_foreign",
    "plan_foreign",
]

#: The reason for a missing program when that is not known for certain.
NOT_ASKED = "not on this machine, and a shared store could not be asked"
#: The reason for a program whose entry in a bundle has a wrong checksum, and the hint.
DAMAGED = "damaged: copy the bundle again"
COPY_AGAIN = "copy the bundle again, and check it: 'preheat bundle verify FILE' lists what is damaged"
_NOT_LOADED = (
    "a check needs the library and the modules of the application, in the versions of the bake"
)
_ESTIMATE = 1.0  # seconds for a request that was never measured
_OTHER_KEY = (
    "its key is not the recorded one, although nothing that was recorded has changed; "
    "a sealed run may miss it"
)
_COPIED = "it cannot be compiled again; the recorded entry was copied"


class ForeignJob(NamedTuple):
    """One request to make for one architecture, and the expected seconds."""

    item: ForeignProgram
    arch: Arch | None
    estimate: float

    def __str__(self) -> str:
        return self.item.title if self.arch is None else f"{self.item.title} for {self.arch}"


class BakedForeign(NamedTuple):
    """The entries that a request needs, and whether any had to be made.

    `notes` say how they may differ from the recorded ones. `worker` is that of an executor, if one ran
    the job.
    """

    job: ForeignJob
    entries: tuple[ForeignEntry, ...]
    notes: tuple[str, ...] = ()
    made: bool = False
    worker: str = ""


def plan_foreign(manifest: Manifest, archs: Sequence[Arch] | None) -> list[ForeignJob]:
    """Return the jobs for requests of other libraries, longest first."""
    jobs = [
        ForeignJob(item, arch, item.seconds or _ESTIMATE) for item, arch in manifest.foreign_jobs(archs)
    ]
    return sorted(jobs, key=lambda job: -job.estimate)


def closures(manifest: Manifest, builder: Builder) -> list[tuple[ForeignProgram, int]]:
    """Return the requests whose closure is baked, and how many kernels each of them has, at most.

    A request whose number cannot be determined is left out: its bake reports the error.
    """
    wanted = [item for item in manifest.foreign if item.request and item.coverage == "closure"]
    found = []
    if wanted:
        with closing(AdapterProcesses(builder)) as processes:
            for item in wanted:
                with suppress(AdapterError):
                    found.append((item, processes.count(item)))
    return found


def bake_foreign(
    todo: Sequence[ForeignJob],
    builder: Builder,
    *,
    jobs: int | None,
    on_start: Callable[[ForeignJob], None],
    on_done: Callable[[ForeignJob, BakedForeign | PreheatError], None],
) -> None:
    """Make the entries of all jobs in processes of their adapters. A failure is a result as well."""

    with closing(AdapterProcesses(builder)) as processes:
        kept = [job.item for job in todo if not job.item.request]
        builder.cache.look_ahead(r.digest for item in kept for r in recorded_requests(item))
        run = functools.partial(bake_request, builder, processes)
        # What is kept comes last: a job that makes its entries may have made those as well.
        for makes in (True, False):
            part = [job for job in todo if bool(job.item.request) is makes]
            _run_all(part, run, jobs, on_start, on_done)


def _run_all(
    todo: Sequence[ForeignJob],
    run: Callable[[ForeignJob, Deferral], BakedForeign],
    jobs: int | None,
    on_start: Callable[[ForeignJob], None],
    on_done: Callable[[ForeignJob, BakedForeign | PreheatError], None],
) -> None:
    def started(index: int) -> None:
        on_start(todo[index])

    def ended(index: int, task: Task[BakedForeign]) -> None:
        try:
            result: BakedForeign | PreheatError = task.outcome()
        except PreheatError as error:
            result = error
        on_done(todo[index], result)

    run_all(todo, run, threads=jobs or os.cpu_count(), on_start=started, on_done=ended)


def bake_request(
    builder: Builder, processes: AdapterProcesses, job: ForeignJob, deferral: Deferral | None = None
) -> BakedForeign:
    """Return the entries of one job; `AdapterError` where they cannot be made.

    `deferral` has no effect: the adapter waits in its own process.
    """
    del deferral
    if not job.item.request:
        return _recorded(builder, job)
    assert job.arch is not None
    store = processes.store(builder)
    answer = processes.bake(job.item, job.arch)
    found = [store.get(request) for request in answer.entries]
    entries = tuple(entry for entry in found if entry is not None)
    if len(entries) < len(found):
        gone = f"{len(found) - len(entries)} of {len(found)} entries"
        raise AdapterError(f"{job}: {gone} were evicted during the bake")
    notes = answer.notes or _unexplained(job, answer.entries)
    return BakedForeign(job, entries, tuple(notes), answer.made)


def _unexplained(job: ForeignJob, baked: Sequence[ForeignRequest]) -> list[str]:
    """Return a note where a bake for the recorded architecture makes none of the recorded entries."""
    assert job.arch is not None
    recorded = {request.digest for request in recorded_requests(job.item)}
    same_arch = job.arch.plain in {arch.plain for arch in job.item.archs}
    if not same_arch or not recorded or recorded & {request.digest for request in baked}:
        return []
    return [_OTHER_KEY]


def _recorded(builder: Builder, job: ForeignJob) -> BakedForeign:
    """Return the recorded entries of a request that its adapter cannot make again."""
    item = job.item
    if job.arch is not None and _is_other(job.arch, item.archs):
        own = ", ".join(map(str, item.archs))
        raise AdapterError(
            f"{job} cannot be made: it was recorded for {own}, and its code cannot be imported",
            hint=f"record it on a GPU of {job.arch}, and merge the bundles",
        )
    found = [builder.foreign.get(request) for request in recorded_requests(item)]
    wanted = [entry for entry in found if entry is not None and _runs_on(entry, job.arch)]
    if not wanted:
        raise AdapterError(
            f"{job}: none of the {len(found)} recorded entries is in the cache, and they cannot be "
            "compiled again",
            hint="record again, and bake with the same cache",
        )
    notes = [_COPIED] if item.archs else []
    if missing := found.count(None):
        gone = f"{missing} of {len(found)} recorded entries are no longer in the cache"
        notes.append(f"{gone}; 'preheat record --fresh' drops them from the manifest")
    return BakedForeign(job, tuple(wanted), tuple(notes))


def _runs_on(entry: ForeignEntry, arch: Arch | None) -> bool:
    return arch is None or entry.arch is None or entry.arch.plain == arch.plain


def recorded_requests(item: ForeignProgram) -> list[ForeignRequest]:
    """Return the entries that a recording used."""
    arch = item.archs[0] if len(item.archs) == 1 else None
    return [ForeignRequest.referenced(item.kind, text, item.name, arch) for text in item.entries]


class MissingForeign(NamedTuple):
    """A job whose entries a run would not find, and the reason. Without a `hint`, a bake makes them."""

    job: ForeignJob
    reason: str
    hint: str = ""


def missing_foreign(todo: Iterable[ForeignJob], builder: Builder) -> list[MissingForeign]:
    """Return the jobs whose entries a run through `builder` would not find."""
    missing: list[MissingForeign] = []
    todo = list(todo)
    if not todo:
        return missing
    with closing(AdapterProcesses(builder)) as processes:
        needed = [_needed(job, processes) for job in todo]
    known = [each for each in needed if isinstance(each, _Needed)]
    builder.cache.look_ahead((r.digest for each in known for r in each.requests), once=False)
    for job, each in zip(todo, needed, strict=True):
        if isinstance(each, AdapterError):
            reason = str(each).removeprefix(f"{job}: ")
            missing.append(MissingForeign(job, reason, each.hint or _NOT_LOADED))
            continue
        unanswered = builder.cache.unanswered
        found = _missing(job, builder, each)
        if found is not None:
            asked = builder.cache.unanswered == unanswered
            missing.append(found if asked else MissingForeign(job, NOT_ASKED))
    return missing


class _Needed(NamedTuple):
    """The entries that a job needs, and how they may differ from the recorded ones."""

    requests: list[ForeignRequest]
    notes: list[str]


def _needed(job: ForeignJob, processes: AdapterProcesses) -> _Needed | AdapterError:
    """Return the entries that a job needs, or the error because of which they are not known."""
    if not job.item.request:
        return _Needed(recorded_requests(job.item), [])
    assert job.arch is not None
    try:
        requests, notes, _ = processes.keys(job.item, job.arch)
    except AdapterError as error:
        return error
    return _Needed(requests, notes)


def _missing(job: ForeignJob, builder: Builder, needed: _Needed) -> MissingForeign | None:
    """Return why entries of a job are missing; None when all are stored."""
    item = job.item
    if not item.request and job.arch is not None and _is_other(job.arch, item.archs):
        own = ", ".join(map(str, item.archs))
        reason = f"recorded for {own}, and it cannot be made for another architecture"
        return MissingForeign(job, reason, f"record it on a GPU of {job.arch}, and merge the bundles")
    requests, notes = needed
    absent = [request for request in requests if builder.foreign.get(request) is None]
    if not absent:
        return None
    if any(damaged_in(bundle, request.digest) for bundle in builder.bundles for request in absent):
        return MissingForeign(job, DAMAGED, COPY_AGAIN)
    return MissingForeign(job, "; ".join(notes) or _reason(job, builder, len(absent), len(requests)))


def _is_other(arch: Arch, archs: Iterable[Arch]) -> bool:
    return arch.plain not in {each.plain for each in archs}


def _reason(job: ForeignJob, builder: Builder, absent: int, needed: int) -> str:
    there = {
        entry.target for entry in builder.foreign.all(job.item.kind) if entry.label == job.item.name
    }
    if there and str(job.arch) not in there:
        return "not baked for this architecture"
    return "not baked" if absent == needed else f"{absent} of {needed} not baked"


def damaged_in(bundle: Bundle, digest: str) -> bool:
    """Return whether a bundle has an entry whose checksum is wrong."""
    try:
        bundle.get(digest)
    except DamagedEntryError:
        return True
    except OSError:
        return False
    return False
