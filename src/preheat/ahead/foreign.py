"""Requests of other libraries: made ahead of time for a bundle, and checked."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from preheat.ahead.adapter_process import AdapterAnswer, AdapterProcesses
from preheat.ahead.jobs import run_jobs
from preheat.ahead.manifest import ForeignProgram, Manifest
from preheat.ahead.manifest.recorded import RecordedEntries
from preheat.build.builder import Builder
from preheat.build.compile_lock import Attempt
from preheat.errors import AdapterError, PreheatError
from preheat.model.arch import Arch
from preheat.model.codec import DamagedEntryError
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.store.bundle import Bundle

__all__ = [
    "COPY_AGAIN",
    "DAMAGED",
    "RECORD_AGAIN",
    "STORE_UNUSABLE",
    "BakedForeign",
    "ForeignJob",
    "MissingForeign",
    "bake_foreign",
    "bake_request",
    "closures",
    "missing_foreign",
    "plan_foreign",
]

#: The reason for a program that may be on a shared store, which could not be used.
STORE_UNUSABLE = "not on this machine, and a shared store could not be used"
#: The reason for a program whose entry in a bundle has a wrong checksum, and the hint.
DAMAGED = "damaged: copy the bundle again"
COPY_AGAIN = "copy the bundle again, and check it: 'preheat bundle verify FILE' lists what is damaged"
#: The hint of bakes and checks for a program that a bake alone cannot make.
RECORD_AGAIN = (
    "record again with --fresh, on a GPU of each architecture and with the versions of this machine, "
    "and then bake"
)
_NOT_LOADED = (
    "a check needs the library and the modules of the application, in the versions of the bake"
)
_ESTIMATE = 1.0  # seconds for a request that was never measured
_COPY = 0.001  # seconds for a request whose entries are copied from the recording
_OTHER_KEY = (
    "its key is not the recorded one, although nothing that was recorded has changed; "
    "a sealed run may miss it"
)
_COPIED = "it cannot be compiled again; the recorded entry was copied"
_MEASURED = "the measured result of the recording was copied"


class ForeignJob(NamedTuple):
    """One request to make for one architecture, and the expected seconds."""

    item: ForeignProgram
    arch: Arch | None
    estimate: float

    def __str__(self) -> str:
        return self.item.title if self.arch is None else f"{self.item.title} for {self.arch}"


class BakedForeign(NamedTuple):
    """The entries that a request needs, and whether any had to be made.

    `notes` say how they may differ from the recorded ones. `worker` is an executor's, if one ran
    the job.
    """

    job: ForeignJob
    entries: tuple[ForeignEntry, ...]
    notes: tuple[str, ...] = ()
    made: bool = False
    worker: str = ""


def plan_foreign(manifest: Manifest, archs: Sequence[Arch] | None) -> list[ForeignJob]:
    """Return the jobs for requests of other libraries, longest first."""
    jobs = [ForeignJob(item, arch, _estimate(item)) for item, arch in manifest.foreign_jobs(archs)]
    return sorted(jobs, key=lambda job: -job.estimate)


def _estimate(item: ForeignProgram) -> float:
    """Return the expected seconds of a bake. `item.seconds` is the duration in the recording.

    A bake does not repeat a compile or a measurement whose result it copies.
    """
    return _COPY if item.kept else item.seconds or _ESTIMATE


def closures(manifest: Manifest, builder: Builder) -> list[tuple[ForeignProgram, int]]:
    """Return the requests whose closure is baked, each with the largest possible number of its kernels.

    A request whose number cannot be determined is left out: its bake reports the error.
    """
    wanted = [item for item in manifest.foreign if not item.kept and item.coverage == "closure"]
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
    recorded: RecordedEntries,
    *,
    jobs: int | None,
    on_start: Callable[[ForeignJob], None] | None,
    on_done: Callable[[ForeignJob, BakedForeign | PreheatError], None],
) -> None:
    """Make the entries of all jobs in processes of their adapters. A failure is also a result.

    `recorded` has the entries that cannot be made again.
    """
    with closing(AdapterProcesses(builder)) as processes:
        kept = [job.item for job in todo if not job.item.request]
        builder.cache.look_ahead(r.digest for item in kept for r in recorded_requests(item))
        run = functools.partial(bake_request, builder, processes, recorded=recorded)
        # Entries that are copied come last, because other jobs may have made them.
        for makes in (True, False):
            part = [job for job in todo if bool(job.item.request) is makes]
            run_jobs(part, run, jobs or os.cpu_count(), on_start, on_done)


def bake_request(
    builder: Builder,
    processes: AdapterProcesses,
    job: ForeignJob,
    attempt: Attempt | None = None,
    *,
    recorded: RecordedEntries | None = None,
) -> BakedForeign:
    """Return the entries of one job; `AdapterError` if they cannot be made.

    `attempt` has no effect: the adapter waits in its own process. `recorded` has the entries that
    cannot be made again.
    """
    del attempt
    if not job.item.request:
        return _copy_recorded(builder, job, recorded)
    assert job.arch is not None
    answer = processes.bake(job.item, job.arch)
    if answer.outdated:
        raise AdapterError(f"{job}: {answer.outdated}", hint=RECORD_AGAIN)
    if job.item.kept:
        return _take_measured(builder, job, answer, recorded)
    store = processes.store(builder)
    found = [store.get(request) for request in answer.entries]
    entries = tuple(entry for entry in found if entry is not None)
    if len(entries) < len(found):
        gone = f"{len(found) - len(entries)} of {len(found)} entries"
        raise AdapterError(f"{job}: {gone} were evicted during the bake")
    notes = answer.notes or _find_unexplained(job, answer.entries)
    return BakedForeign(job, entries, tuple(notes), answer.made)


def _find_unexplained(job: ForeignJob, baked: Sequence[ForeignRequest]) -> list[str]:
    """Return a note if a bake for the recorded architecture makes none of the recorded entries."""
    assert job.arch is not None
    recorded = {request.digest for request in recorded_requests(job.item)}
    same_arch = job.arch.plain in {arch.plain for arch in job.item.archs}
    if not same_arch or not recorded or recorded & {request.digest for request in baked}:
        return []
    return [_OTHER_KEY]


def _take_measured(
    builder: Builder, job: ForeignJob, answer: AdapterAnswer, recorded: RecordedEntries | None
) -> BakedForeign:
    """Return the measurements of a request. They belong to the source and the architecture."""
    assert job.arch is not None
    found = [_find(builder, request, recorded) for request in answer.entries]
    entries = tuple(entry for entry in found if entry is not None)
    if len(entries) < len(found):
        missing = explain_unmeasured(job, answer.notes)
        if missing is None:  # The recording has it, and its content is not here.
            raise _not_here(job, "its measured result is", recorded)
        recorded_there = job.arch.plain in _archs(job.item)
        hint = RECORD_AGAIN if recorded_there else _other_recording(job.arch)
        raise AdapterError(f"{job}: {missing}", hint=hint)
    return BakedForeign(job, entries, (_MEASURED,))


def explain_unmeasured(job: ForeignJob, notes: Sequence[str]) -> str | None:
    """Return why no recording has a measurement for a job; None when a recording has it.

    The measurement itself was looked for, and was not found.
    """
    assert job.arch is not None
    own = _archs(job.item)
    if job.arch.plain not in own:
        return f"a result is measured on a GPU, and there is one for {_join_archs(own)} only"
    if notes:
        return (
            f"its result was measured before a change, and must be measured again: {'; '.join(notes)}"
        )
    return None


def _copy_recorded(builder: Builder, job: ForeignJob, recorded: RecordedEntries | None) -> BakedForeign:
    """Return the recorded entries of a request that its adapter cannot make again."""
    item = job.item
    if job.arch is not None and job.arch.plain not in _archs(item):
        raise AdapterError(
            f"{job} cannot be made: {only_recorded_for(item)}",
            hint=_other_recording(job.arch),
        )
    found = [_find(builder, request, recorded) for request in recorded_requests(item)]
    wanted = [entry for entry in found if entry is not None and _runs_on(entry, job.arch)]
    if not wanted:
        which = "its recorded entry is" if len(found) == 1 else f"its {len(found)} recorded entries are"
        raise _not_here(job, which, recorded)
    notes = [_COPIED] if item.archs else []
    if missing := found.count(None):
        gone = f"{missing} of {len(found)} recorded entries"
        notes.append(
            f"{gone} are neither beside the manifest nor in the cache; "
            "other shards may make them, or 'preheat record --fresh' drops them"
        )
    return BakedForeign(job, tuple(wanted), tuple(notes))


def _other_recording(arch: Arch) -> str:
    """Return the hint for an entry that no recording has for `arch`."""
    return (
        f"record on a GPU of {arch}, and add that recording: preheat record -o MANIFEST --merge OTHER"
    )


def _not_here(job: ForeignJob, which: str, recorded: RecordedEntries | None) -> AdapterError:
    """Return the error for entries of a recording that were not copied to this machine."""
    hint = f"record again{'' if job.arch is None else f' on a GPU of {job.arch}'}"
    if recorded is not None and recorded.absent:
        hint = f"copy {recorded.absent[0]} from the machine that recorded, or {hint}"
    return AdapterError(f"{job}: {which} neither beside the manifest nor in the cache", hint=hint)


def only_recorded_for(item: ForeignProgram) -> str:
    """Return why an entry that is copied from a recording exists for some architectures only."""
    own = _join_archs(_archs(item))
    return f"it was recorded for {own}, and only a run on a GPU makes it for another architecture"


def _join_archs(archs: Iterable[Arch]) -> str:
    return ", ".join(map(str, sorted(archs)))


def _archs(item: ForeignProgram) -> set[Arch]:
    return {arch.plain for arch in item.archs}


def _find(
    builder: Builder, request: ForeignRequest, recorded: RecordedEntries | None
) -> ForeignEntry | None:
    """Return an entry of the recording, or else of the cache of this machine."""
    found = None if recorded is None else recorded.get(request)
    return builder.foreign.get(request) if found is None else found


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


def missing_foreign(
    todo: Iterable[ForeignJob], builder: Builder, recorded: RecordedEntries | None = None
) -> list[MissingForeign]:
    """Return the jobs whose entries a run through `builder` would not find, each with the reason."""
    missing: list[MissingForeign] = []
    todo = list(todo)
    if not todo:
        return missing
    with closing(AdapterProcesses(builder)) as processes:
        needed = [_find_needed(job, processes, recorded) for job in todo]
    known = [each for each in needed if isinstance(each, _Needed)]
    builder.cache.look_ahead((r.digest for each in known for r in each.requests), once=False)
    for job, each in zip(todo, needed, strict=True):
        if isinstance(each, MissingForeign):
            missing.append(each)
            continue
        unanswered = builder.cache.unanswered
        found = _missing(job, builder, each)
        if found is not None:
            answered = builder.cache.unanswered == unanswered
            missing.append(found if answered else MissingForeign(job, STORE_UNUSABLE))
    return missing


class _Needed(NamedTuple):
    """The entries that a job needs, and how they may differ from the recorded ones."""

    requests: list[ForeignRequest]
    notes: list[str]


def _find_needed(
    job: ForeignJob, processes: AdapterProcesses, recorded: RecordedEntries | None
) -> _Needed | MissingForeign:
    """Return the entries that a job needs, or why they are not known."""
    item = job.item
    if not item.request:
        if job.arch is not None and job.arch.plain not in _archs(item):
            return MissingForeign(job, only_recorded_for(item), RECORD_AGAIN)
        return _Needed([r for r in recorded_requests(item) if _may_run_on(r, job, recorded)], [])
    assert job.arch is not None
    try:
        answer = processes.keys(item, job.arch)
    except AdapterError as error:
        return MissingForeign(job, str(error).removeprefix(f"{job}: "), error.hint or _NOT_LOADED)
    if answer.outdated:
        return MissingForeign(job, answer.outdated, RECORD_AGAIN)
    return _Needed(answer.entries, answer.notes)


def _may_run_on(request: ForeignRequest, job: ForeignJob, recorded: RecordedEntries | None) -> bool:
    """Return False for an entry that was recorded for another architecture than the job's."""
    entry = None if recorded is None else recorded.get(request)
    return entry is None or _runs_on(entry, job.arch)


def _missing(job: ForeignJob, builder: Builder, needed: _Needed) -> MissingForeign | None:
    """Return why entries of a job are missing; None when all are stored."""
    requests, notes = needed
    absent = [request for request in requests if builder.foreign.get(request) is None]
    if not absent:
        return None
    if any(damaged_in(bundle, request.digest) for bundle in builder.bundles for request in absent):
        return MissingForeign(job, DAMAGED, COPY_AGAIN)
    if job.item.request and job.item.kept and (reason := explain_unmeasured(job, notes)):
        return MissingForeign(job, reason, RECORD_AGAIN)
    return MissingForeign(job, "; ".join(notes) or _reason(job, builder, len(absent), len(requests)))


def _reason(job: ForeignJob, builder: Builder, absent: int, needed: int) -> str:
    there = {
        entry.target
        for entry in builder.foreign.all(job.item.kind)
        if entry.request.name == job.item.name
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
