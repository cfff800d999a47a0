"""Warm-up: compiles, loads and captures what manifests and bundles list, before traffic arrives.

It uses `Gpu`, and `Gpu.warm` forwards to `warm`.
"""

from __future__ import annotations

import ast
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from preheat.ahead.bundles import graphs as graphs_of
from preheat.ahead.manifest import Manifest, ManifestProgram, require_programs
from preheat.ahead.report import WarmReport
from preheat.build.bundles import BundleEntry, decode_entry, entry_meta, require_code, runs
from preheat.build.code import Code, compiled_code
from preheat.build.compile_lock import Attempt
from preheat.build.obtain import Build
from preheat.build.parallel import Task, run_all
from preheat.devices.active_capture import LOAD, WARM_GRAPHS
from preheat.devices.session import Session
from preheat.errors import InputError, WarmError
from preheat.gpu import Gpu
from preheat.graph.warmers import Warmable
from preheat.model.arch import Arch, mismatch, runnable_archs
from preheat.store.bundle import Bundle

__all__ = ["WarmSource", "warm"]

T = TypeVar("T")
WarmSource = str | os.PathLike[str] | Manifest | Bundle


class _Job(NamedTuple):
    """A program to prepare for an architecture; None means the device's."""

    wanted: ManifestProgram
    target: Arch | None

    def __str__(self) -> str:
        label = self.wanted.program.label
        return label if self.target is None else f"{label} for {self.target}"


class _LoadableCode(NamedTuple):
    """Code to load, and the names of the kernels to resolve; none means all."""

    code: Code
    entries: tuple[str, ...]


class _LostError(Exception):
    """The device is lost, so everything else would fail as well."""


def warm(gpu: Gpu, sources: Iterable[WarmSource], jobs: int | None = None) -> WarmReport:
    """Compile, load and capture what `sources` list: see `Gpu.warm`."""
    session = gpu._session
    session.context.require_alive()
    session.context.refuse_in_capture(LOAD)
    session.context.refuse_in_capture(WARM_GRAPHS)
    return _WarmUp(gpu, session).run(sources, jobs)


class _WarmUp:
    """One warm-up of one device."""

    def __init__(self, gpu: Gpu, session: Session) -> None:
        self._session = session
        self._builder = session.builder
        self._bundles = (
            session.builder._bundles
        )  # The warm-up itself reports bundles for other devices.
        self._context = session.context
        self._warmers = gpu._warmers
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._failures: list[tuple[str, Exception]] = []
        self._handled = sys.exception()  # The caller handles it. It is the context of errors below.

    def run(self, sources: Iterable[Any], jobs: int | None) -> WarmReport:
        """Run the warm-up; `WarmError` at the end lists what failed."""
        lost = False
        with self._measure("seconds"):
            opened = [self._open_source(source) for source in sources]
            try:
                self._warm(opened, _parallel_compiles(jobs))
            except _LostError:
                lost = True
        return self._report(lost=lost)

    def _report(self, *, lost: bool) -> WarmReport:
        numbers: dict[str, Any] = {**self._counts, **self._seconds}
        report = WarmReport(**numbers)
        failures = self._failures
        self._failures = []
        for _, error in failures:
            self._clear_frames(error)  # By now, its outer frames have ended as well.
        if failures:
            raise WarmError(failures, report) from failures[-1][1] if lost else None
        return report

    def _warm(self, sources: Sequence[Manifest | Bundle], jobs: int) -> None:
        graphs = self._graphs(sources)
        with self._measure("compiling"):
            ready = [
                *self._best_bundle_entries(sources),
                *self._find_code(self._compile_jobs(sources), jobs),
            ]
        with self._measure("loading"):
            for each in ready:
                self._resolve(each)
        with self._measure("capturing"):
            for name, keys in graphs.items():
                self._capture(name, keys)
            self._attempt("what was executed for the captures", self._context.synchronize)

    # Collecting the work

    def _open_source(self, source: Any) -> Manifest | Bundle:
        if isinstance(source, Manifest):
            return source
        if isinstance(source, Bundle):
            return self._bundles.mount(source.source)
        if not isinstance(source, str | os.PathLike):
            hint = 'gpu.warm("kernels.toml"), or gpu.warm("kernels.heat")'
            raise InputError(f"{source!r} is neither a manifest nor a bundle", hint=hint)
        return (
            require_programs(source) if Path(source).suffix == ".toml" else self._bundles.mount(source)
        )

    def _compile_jobs(self, sources: Iterable[Manifest | Bundle]) -> list[_Job]:
        """Return the programs of the manifests, with the longest compiles first."""
        manifest = Manifest().merged(*(each for each in sources if isinstance(each, Manifest)))
        for title, error in manifest.unreadable:
            self._report_failure(title, error)
        jobs = [_Job(each, target) for each in manifest.programs for target in self._targets(each)]
        return sorted(jobs, key=lambda job: -job.wanted.seconds)

    def _targets(self, wanted: ManifestProgram) -> list[Arch | None]:
        """Return the targets of a program: the device's architecture, and listed ones with a suffix."""
        device = self._context.device.arch
        named: list[Arch | None] = [
            arch for arch in wanted.archs if arch.suffix and mismatch(arch, device) is None
        ]
        return [None, *named] if not named or any(not arch.suffix for arch in wanted.archs) else named

    def _best_bundle_entries(self, sources: Iterable[Manifest | Bundle]) -> list[_LoadableCode]:
        """Return the programs of the bundles, each for the architecture that runs best here."""
        ranks = {arch: rank for rank, arch in enumerate(runnable_archs(self._context.device.arch))}
        best: dict[object, BundleEntry] = {}
        baked: dict[Bundle, dict[str, set[Arch]]] = {}
        for bundle in (each for each in sources if isinstance(each, Bundle)):
            archs = baked[bundle] = {}
            for digest in bundle.digests():
                what = f"{bundle.path.name}, entry {digest[:12]}"
                entry = self._attempt(what, partial(_entry_for, bundle, digest, ranks, archs))
                if entry is None:
                    continue
                previous = best.setdefault(_request_without_arch(entry), entry)
                if ranks[entry.artifact.arch] < ranks[previous.artifact.arch]:
                    best[_request_without_arch(entry)] = entry
        self._counts.update(programs=len(best), hits=len(best))
        self._report_unsuited(sources, baked)
        return [_LoadableCode(Code(each.artifact), each.entries) for each in best.values()]

    def _report_unsuited(
        self, sources: Iterable[Manifest | Bundle], baked: Mapping[Bundle, Mapping[str, set[Arch]]]
    ) -> None:
        """Count the programs that have no code for the device, by the architectures of each label.

        A bundle that has code for no program of its own is a failure, unless other sources have all of
        them. A bundle may have programs for other devices beside those for this one.
        """
        device = self._context.device.arch
        listed = (each.programs for each in sources if isinstance(each, Manifest))
        known = {item.program.label for programs in listed for item in programs}
        known |= {label for rows in baked.values() for label in rows if runs(device, rows[label])}
        self._counts["skipped"] = len({label for rows in baked.values() for label in rows} - known)
        for bundle, rows in baked.items():
            archs = {arch for each in rows.values() for arch in each}
            if not known.issuperset(rows):
                self._attempt(bundle.path.name, partial(require_code, bundle, archs, device))

    def _graphs(self, sources: Iterable[Manifest | Bundle]) -> dict[str, dict[str, None]]:
        """Return the keys to capture for each name, as text."""
        graphs: dict[str, dict[str, None]] = {}
        for source in sources:
            for name, keys in source.graphs if isinstance(source, Manifest) else graphs_of(source):
                graphs.setdefault(name, {}).update(dict.fromkeys(keys))
        return graphs

    # Compiling, loading and capturing

    def _find_code(self, jobs: Sequence[_Job], at_once: int) -> list[_LoadableCode]:
        """Return the code of programs, from a cache or compiled now."""
        self._counts["programs"] += len(jobs)
        ready = []
        missing = []
        for job in jobs:
            find = partial(self._session.find_code, job.wanted.program, job.target)
            found = self._attempt(str(job), find)
            if isinstance(found, Build):
                missing.append((job, found))
            elif found is not None:
                ready.append(_LoadableCode(found, job.wanted.entries))
        self._counts["hits"] += len(ready)
        return ready + self._compile(missing, at_once)

    def _compile(self, missing: Sequence[tuple[_Job, Build]], at_once: int) -> list[_LoadableCode]:
        ready = []

        def end(index: int, task: Task[Code]) -> None:
            job, _ = missing[index]
            code = self._attempt(str(job), task.outcome)
            task.error = None  # It would stay alive with the task.
            if code is not None:
                ready.append((index, _LoadableCode(code, job.wanted.entries)))

        def compile_one(item: tuple[_Job, Build], attempt: Attempt) -> Code:
            return compiled_code(item[1], item[1].obtain(attempt))

        run_all(missing, compile_one, threads=at_once, on_done=end)
        self._counts["compiles"] += len(ready)
        return [code for _, code in sorted(ready, key=itemgetter(0))]

    def _resolve(self, ready: _LoadableCode) -> None:
        """Load code and resolve its kernels."""
        artifact = ready.code.artifact
        new = artifact.digest not in self._session.loaded
        module = self._attempt(artifact.label, partial(self._session.preload, ready.code))
        if module is None:
            return
        if new:
            self._counts.update(modules=1, nbytes=artifact.size)
        for name in ready.entries or [entry.name for entry in artifact.entries]:
            kernel = self._attempt(f"{artifact.label}, {name}", partial(module.__getitem__, name))
            self._counts["entries"] += kernel is not None

    def _capture(self, name: str, texts: Iterable[str]) -> None:
        """Capture the keys of a name, with the largest first if they can be sorted."""
        title = f"graph {name!r}"
        read = [self._attempt(f"{title}, {text}", partial(_parse_key, text)) for text in texts]
        keys = [key[0] for key in read if key is not None]
        with suppress(TypeError):  # Keys of different types have no order.
            keys = sorted(keys, reverse=True)
        graphs = self._attempt(title, partial(self._warmable, name, len(keys)))
        if graphs is None:
            return
        for key in keys:
            new = self._attempt(f"{title}, {key!r}", partial(graphs.warm_key, key))
            self._counts["graphs"] += bool(new)

    def _warmable(self, name: str, keys: int) -> Warmable:
        graphs = self._warmers.find(name)
        graphs.require_capacity(keys)
        return graphs

    # Failures and times

    def _attempt(self, what: str, do: Callable[[], T]) -> T | None:
        """Return the result of `do`, or None after a failure, which is reported at the end."""
        try:
            return do()
        except Exception as error:
            self._report_failure(what, error)
        return None

    def _report_failure(self, what: str, error: Exception) -> None:
        self._clear_frames(error)
        self._failures.append((what, error))
        if self._context.lost is not None:
            raise _LostError

    def _clear_frames(self, error: BaseException | None) -> None:
        """Free what the frames of an error hold, such as arrays, and keep its line numbers."""
        while error is not None and error is not self._handled:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    @contextmanager
    def _measure(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = time.perf_counter() - started


def _parallel_compiles(jobs: Any) -> int:
    if jobs is None:
        return os.cpu_count() or 1
    if not isinstance(jobs, int) or jobs < 1:
        raise InputError(f"jobs={jobs!r} is not a number of compiles at once", hint="jobs=1 or more")
    return jobs


def _entry_for(
    bundle: Bundle, digest: str, ranks: Mapping[Arch, int], archs: dict[str, set[Arch]]
) -> BundleEntry | None:
    """Return an entry for one of these architectures; None for others and for code.

    `archs` gets the architecture of each entry, by the label of its program.
    """
    meta = entry_meta(bundle, digest)
    if meta is None:
        return None
    arch = Arch.parse(meta.get("arch", ""))
    archs.setdefault(str(meta.get("label")), set()).add(arch)
    if arch not in ranks:
        return None
    entry = decode_entry(bundle, digest, meta)
    return entry if entry.artifact.arch in ranks else None


def _request_without_arch(entry: BundleEntry) -> object:
    """Return the parts of a request without architecture and compiler."""
    return tuple(part for part in entry.request if part.label not in ("arch", "toolchain"))


def _parse_key(text: str) -> tuple[Any]:
    """Return the value of a literal, in a tuple because it may be None."""
    try:
        return (ast.literal_eval(text),)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise InputError("this is not a Python literal") from None
