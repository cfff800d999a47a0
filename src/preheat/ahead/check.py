"""Checking: find the programs of a manifest that a sealed run would not find."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from preheat.ahead.bake import Job, parse_archs, plan
from preheat.ahead.foreign import (
    COPY_AGAIN,
    DAMAGED,
    RECORD_AGAIN,
    STORE_UNUSABLE,
    missing_foreign,
    plan_foreign,
)
from preheat.ahead.manifest import Manifest, Unrecorded, require_programs
from preheat.ahead.manifest.recorded import RecordedEntries
from preheat.build.builder import Builder
from preheat.build.bundles import DAMAGED_ENTRY, baked_archs
from preheat.build.lookup import Miss
from preheat.build.request import look_ahead
from preheat.errors import InputError
from preheat.model.arch import Arch, runnable_archs
from preheat.model.artifact import Artifact

__all__ = ["CheckResult", "MissingProgram", "check"]

# A search for the most similar entry explains a miss. It takes time, so only a few are explained.
_MAX_EXPLAINED = 25
_EXPLAIN_SECONDS = 1.0  # for all of them together
_OTHER_ARCH = "not baked for this architecture"
_CORRECT = "correct the manifest, or record again"


class MissingProgram(NamedTuple):
    """A program that a sealed run would not find. `arch` is None if the program cannot be read."""

    title: str
    arch: Arch | None
    reason: str


@dataclass(frozen=True)
class CheckResult:
    """The result of `preheat.check`: how much of a manifest is stored.

    Attributes:
        programs: The number of programs in the manifest.
        archs: The architectures that were checked.
        missing: The programs that are not stored, with the reasons.
        unchecked_headers: Header files that the code was made from and that do not exist here, so that
            they cannot be compared.
        bakeable: How many of the missing programs a bake makes.
        hints: What to do about the other missing programs.
        unrecorded: What the recording of the manifest does not have, because no adapter covers the
            compiler. It does not count as missing: the files may have been built ahead of time.
        to_record: Those of the missing programs that need a new recording, such as results of
            autotuning for another architecture.

    Examples:
        >>> baked = preheat.bake("kernels.toml", "sm_90")
        >>> preheat.check("kernels.toml", "sm_90", builder=preheat.default_builder()).ok
        True
    """

    programs: int
    archs: tuple[Arch, ...]
    missing: tuple[MissingProgram, ...]
    unchecked_headers: tuple[str, ...] = ()
    bakeable: int = 0
    hints: tuple[str, ...] = ()
    to_record: tuple[MissingProgram, ...] = ()
    unrecorded: tuple[Unrecorded, ...] = ()

    @property
    def ok(self) -> bool:
        """True if a sealed run finds every program."""
        return not self.missing

    @property
    def unasked(self) -> int:
        """The number of missing programs that may be on a shared store, which could not be used."""
        return sum(program.reason == STORE_UNUSABLE for program in self.missing)


def check(
    manifest: Manifest | str | os.PathLike[str],
    archs: Arch | str | Iterable[Arch | str] | None = None,
    *,
    builder: Builder,
) -> CheckResult:
    """Find the programs of `manifest` that a run through `builder` would have to compile.

    Nothing is compiled. Code for another architecture counts if a device of the requested architecture
    runs it.

    Args:
        manifest: A manifest, or the path of one.
        archs: The architectures. By default, each program is checked for those of its recording.
        builder: The builder with the bundles and caches to search.

    Raises:
        InputError: The manifest cannot be read, or has no programs.

    Examples:
        >>> builder = preheat.Builder.open(cache_dir="empty-cache")
        >>> preheat.check("kernels.toml", "sm_90", builder=builder).missing[0].title
        'saxpy.cu'
    """
    manifest = require_programs(manifest)
    todo = plan(manifest, archs)
    programs = len({id(job.item) for job in todo}) + len(manifest.unreadable)
    targets = tuple(sorted({job.arch for job in todo}))
    missing = [MissingProgram(title, None, str(error)) for title, error in manifest.unreadable]
    hints = [error.hint or _CORRECT for _, error in manifest.unreadable]
    unchecked: set[str] = set()
    wanted = ((job.item.program, arch) for job in todo for arch in _candidates(job))
    look_ahead(builder.cache, builder.toolchain, wanted, once=False)
    deadline = time.monotonic() + _EXPLAIN_SECONDS
    for job in sorted(todo, key=lambda job: (job.item.title, job.arch)):
        unanswered = builder.cache.unanswered
        found = _lookup(builder, job)
        if isinstance(found, Artifact):
            unchecked |= _missing_headers(builder, job, found)
            error = _missing_entry(found, job.item.entries)
            reason, hint = (None, "") if error is None else (str(error), error.hint or _CORRECT)
        elif builder.cache.unanswered != unanswered:
            reason, hint = STORE_UNUSABLE, ""
        elif found.reason.startswith(DAMAGED_ENTRY):
            reason, hint = DAMAGED, COPY_AGAIN
        else:
            explain = len(missing) < _MAX_EXPLAINED and time.monotonic() < deadline
            reason, hint = _reason(builder, job, found, targets, explain=explain), ""
        if reason is not None:
            missing.append(MissingProgram(job.item.title, job.arch, reason))
            hints.append(hint)
    requests = plan_foreign(manifest, parse_archs(archs))
    recorded = RecordedEntries(manifest.recorded)
    for request, reason, hint in missing_foreign(requests, builder, recorded):
        missing.append(MissingProgram(request.item.title, request.arch, reason))
        hints.append(hint)
    targets = tuple(sorted({*targets, *(job.arch for job in requests if job.arch is not None)}))
    programs += len({job.item.identity for job in requests})
    return CheckResult(
        programs,
        targets,
        tuple(missing),
        tuple(sorted(unchecked)),
        bakeable=hints.count(""),
        hints=tuple(dict.fromkeys(filter(None, hints))),
        to_record=tuple(
            each for each, hint in zip(missing, hints, strict=True) if hint == RECORD_AGAIN
        ),
        unrecorded=manifest.unrecorded,
    )


def _candidates(job: Job) -> Iterable[Arch]:
    """Return the architectures whose code counts for a job, best first."""
    return (job.arch,) if job.arch.suffix else runnable_archs(job.arch)


def _lookup(builder: Builder, job: Job) -> Artifact | Miss:
    """Return what a device of the architecture would load. A suffix requires exactly that code."""
    misses = []
    for arch in _candidates(job):
        found = builder.explain_lookup(job.item.program, arch)
        if isinstance(found, Artifact):
            return found
        misses.append(found)
    return min(misses, key=lambda miss: miss.reason.startswith("absent"))


def _missing_entry(artifact: Artifact, entries: Iterable[str]) -> InputError | None:
    """Return the error for the first of `entries` that the code does not have."""
    for name in entries:
        try:
            artifact.entry(name)
        except InputError as error:
            return error
    return None


def _reason(builder: Builder, job: Job, miss: Miss, targets: Iterable[Arch], *, explain: bool) -> str:
    """Return why a program is missing, as exactly as possible."""
    program = job.item.program
    kind, _, detail = miss.reason.partition(": ")
    if kind != "absent":
        return detail
    others = {*targets, *(arch for bundle in builder.bundles for arch in baked_archs(bundle))}
    if any(isinstance(builder.explain_lookup(program, arch), Artifact) for arch in others - {job.arch}):
        return _OTHER_ARCH
    if program.uncacheable:
        return f"not baked, and not cacheable: {program.uncacheable}"
    near = builder.nearest(program, job.arch, namesake=True) if explain else None
    if near is None:
        return "not baked"
    if not near.differences:
        return f"baked only by another compiler: {near.artifact.toolchain}"
    if [difference.partition(": ")[0] for difference in near.differences] == ["arch"]:
        return _OTHER_ARCH
    return "; ".join(near.differences)


def _missing_headers(builder: Builder, job: Job, artifact: Artifact) -> set[str]:
    """Return the header files that `artifact` was made from and that do not exist here."""
    if not artifact.headers:
        return set()
    roots = {**builder.toolchain.roots(job.item.program), "/": ""}
    paths = {header.name: f"{roots.get(header.root)}/{header.name}" for header in artifact.headers}
    return {name for name, path in paths.items() if not os.path.exists(path)}
