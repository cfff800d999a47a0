"""`preheat bake`: compile the programs of a manifest ahead of time into one bundle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from preheat.ahead.bake import BakedProgram, BakeResult, FailedProgram, Job, bake, plan_all
from preheat.ahead.foreign import ForeignJob, closures
from preheat.ahead.manifest import Manifest, require_programs, with_coverage
from preheat.ahead.shards import Shard
from preheat.build.builder import Builder
from preheat.errors import InputError, PreheatError
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.process.progress import progress
from preheat.store.base import UploadResult
from preheat.tools.cli.check import run_check
from preheat.tools.cli.keys import signing_key
from preheat.tools.cli.output import (
    columns,
    count,
    duration,
    print_error,
    print_json,
    print_line,
    print_message,
    size,
)
from preheat.tools.cli.programs import archs_option, coverage_option

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat bake kernels.toml --arch sm_90 --arch sm_100
  preheat bake kernels.toml --arch sm_90 -j 4 -o build/kernels.heat
  preheat bake kernels.toml --arch sm_90 --coverage weak
  preheat bake kernels.toml --arch sm_90 --sign
  preheat bake kernels.toml --arch sm_90 --check
  preheat bake kernels.toml --arch sm_90 --on dask://scheduler:8786
  preheat bake kernels.toml --arch sm_90 --on ray://auto
  preheat bake kernels.toml --arch sm_90 --shard 2/8
  preheat bundle merge kernels.*-of-8.heat -o kernels.heat

A bake needs no GPU. Programs in the cache are not compiled again, so a bake that was interrupted
continues where it stopped. The exit status is 1 if a program could not be baked; the bundle then has
the other programs. It is 2 if the manifest lists nothing.

A bundle that has code for an architecture that this bake does not make is not replaced without
--replace. To add architectures, bake for all of them: programs in the cache are not compiled again.

The table has one row for each ARCH: the number of PROGRAMS that were baked, how many of them were
COMPILED now, how many were FOUND in a cache or in the recording, the sum of the times of COMPILING, and
the SIZE in the bundle.

At the end, entries that a store in PREHEAT_REMOTE lacks are written to it. A store that fails does not
change the exit status: a message says what the store lacks, and --json has it under "stores".
"""


@click.command(epilog=_EPILOG)
@click.argument("manifest", type=click.Path(path_type=Path))
@archs_option("as recorded")
@coverage_option
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of compiles at the same time. Default: one for each processor.",
)
@click.option(
    "--on",
    "address",
    metavar="ADDRESS",
    help="Fleet that compiles: dask://HOST:PORT, ray://HOST:PORT, ray://auto, dask://local or ray://local.",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Bake only part I of N. 'auto' or 'auto/N' takes the part of this job in an array of Slurm or "
    "Kubernetes.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Bundle to write. Default: the manifest's name with .heat, or with .I-of-N.heat for a shard.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Replace the bundle even if it has code for architectures that this bake does not make.",
)
@click.option(
    "--with-sources",
    is_flag=True,
    help="Store the sources in the bundle, for the errors of sealed processes.",
)
@click.option("--sign", is_flag=True, help="Sign the bundle with the key in PREHEAT_SIGNING_KEY.")
@click.option("--check", is_flag=True, help="Compile nothing; check that the bundle has every program.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    manifest: Path,
    archs: tuple[str, ...],
    coverage: str | None,
    jobs: int | None,
    address: str | None,
    shard: str | None,
    output: Path | None,
    replace: bool,
    with_sources: bool,
    sign: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Compile the programs that MANIFEST lists, on all cores, into one bundle (.heat)."""
    if not manifest.name:  # such as `.`
        raise InputError(f"{manifest} is a directory", hint="name the manifest, such as kernels.toml")
    if address is not None and jobs is not None:
        raise InputError("-j is for this machine; the workers of a fleet say how many jobs they run")
    part = None if shard is None else Shard.parse(shard)
    output = output or _default_output(manifest, part)
    if check:
        if address is not None or part is not None:
            raise InputError("--check reads a whole bundle, and takes neither --on nor --shard")
        if not output.exists():
            raise PreheatError(f"{output} does not exist: nothing is baked yet")
        return run_check(manifest, archs, [output], as_json=as_json, coverage=coverage)
    key = signing_key() if sign else None  # Fail now and not after an hour of compiling.
    listed = with_coverage(require_programs(manifest), coverage)
    _show_closures(listed)
    settings = {"jobs": jobs, "executor": address, "shard": part, "key": key}
    where = {"output": output, "replace": replace, "with_sources": with_sources}
    baked = _bake(listed, [Arch.parse(arch) for arch in archs], **settings, **where)
    _report(listed, baked, output, as_json=as_json)
    return 0 if baked.ok else 1


def _default_output(manifest: Path, shard: Shard | None) -> Path:
    """Return the bundle beside the manifest. Shards may share a directory, so each has its own name."""
    if shard is None:
        return manifest.with_suffix(".heat")
    return manifest.with_suffix(f".{shard.number}-of-{shard.count}.heat")


def _bake(manifest: Manifest, archs: list[Arch], **settings: Any) -> BakeResult:
    """Bake with a progress bar, which names the running jobs and follows their estimated time."""
    todo = plan_all(manifest, archs, settings["shard"])
    running: dict[Job | ForeignJob, None] = {}
    workers: set[str] = set()
    done = 0

    with progress("baking", len(todo), work=sum(job.estimate for job in todo)) as bar:

        def started(job: Job | ForeignJob) -> None:
            running[job] = None
            if settings["executor"] is None:
                bar.step(_named(running), advance=0, work=0)

        def ended(job: Job | ForeignJob, row: BakedProgram | FailedProgram) -> None:
            nonlocal done
            done += 1
            del running[job]
            if isinstance(row, BakedProgram) and row.worker:
                workers.add(row.worker)
            bar.step(_on_workers(workers, job) if workers else _named(running), work=job.estimate)

        if settings["executor"] is not None:
            bar.step(f"waiting for workers of {settings['executor']}", advance=0, work=0)
        try:
            return bake(manifest, archs, **settings, on_start=started, on_done=ended)
        except KeyboardInterrupt:
            message = f"{done:,} of {len(todo):,} done; run it again to continue"
            raise KeyboardInterrupt(message) from None


def _show_closures(manifest: Manifest) -> None:
    """Print how many kernels each closure has, before they are compiled."""
    if not any(item.coverage == "closure" for item in manifest.foreign):
        return
    lines = (
        f"{item.title}: a closure of {count(number, 'kernel')} for each architecture"
        for item, number in closures(manifest, Builder.open())
    )
    for line in dict.fromkeys(lines):  # Several recorded variants of a function may have one closure.
        print_message(line)


def _named(running: dict[Job | ForeignJob, None]) -> str:
    return ", ".join(map(str, running))


def _on_workers(workers: set[str], last: Job | ForeignJob) -> str:
    """Return the progress on a fleet. Its engine does not say which jobs run."""
    return f"{count(len(workers), 'worker')}, last {last}"


def _report(manifest: Manifest, baked: BakeResult, output: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(_as_dict(baked))
    elif baked.rows:
        for line in columns(_summary(baked), right=(1, 2, 3, 4, 5)):
            print_line(line)
        if any(row.worker for row in baked.rows):
            print_line()
            for line in columns(_by_worker(baked), right=(1, 2, 3, 4)):
                print_line(line)
    requests = {item.title for item in manifest.foreign}
    for item in manifest.programs:
        if item.changed:
            file = os.path.relpath(item.program.path or item.program.label)
            print_message(f"{file} changed since it was recorded; its present content was baked")
    for row in baked.rows:
        if row.note and row.label in requests:
            print_message(f"{row.label} for {row.arch or 'any architecture'}: {row.note}")
        elif row.note:
            print_message(f"{row.label} for {row.arch} is compiled again by every bake: {row.note}")
    for text, hint in dict.fromkeys((str(error), error.hint) for _, _, error in baked.failures):
        print_error(text, hint)
    failed = f"; {len(baked.failures):,} failed" if baked.failures else ""
    if baked.path is None:
        print_message(f"{output} was not written{failed}")
    else:
        made = f"{len(baked.rows):,} baked, {size(baked.nbytes)}, in {duration(baked.seconds)}"
        print_message(f"{output}: {made}{failed}{' and are not in the bundle' if failed else ''}")
    for store in baked.stores:
        print_message(_on_store(store))
    if _lacks_signing_key(Config.from_env()):
        print_message("no shared store was filled, because PREHEAT_SIGNING_KEY is not set")


def _lacks_signing_key(config: Config) -> bool:
    """Return whether shared stores are read and not written, because there is no key to sign with."""
    return bool(config.remote and config.trusted_keys) and not (
        config.signing_key or config.remote_unsigned
    )


def _on_store(store: UploadResult) -> str:
    """Say how many of the baked entries a shared store has."""
    total = store.present + store.written + store.missing
    if store.missing:
        lacks = f"{store.missing:,} of {count(total, 'entry')}"
        return f"warning: the shared store {store.tier} lacks {lacks}: {store.reason}"
    copied = f", {store.written:,} of them copied from this machine" if store.written else ""
    return f"the shared store {store.tier} has {count(total, 'entry')}{copied}"


def _summary(baked: BakeResult) -> Iterator[tuple[str, ...]]:
    yield "ARCH", "PROGRAMS", "COMPILED", "FOUND", "COMPILING", "SIZE"
    archs = {row.arch for row in baked.rows}
    any_arch = [None] if None in archs else []  # entries that depend on none come last
    for arch in [*sorted(arch for arch in archs if arch is not None), *any_arch]:
        rows = [row for row in baked.rows if row.arch == arch]
        yield str(arch or "any"), *_counts(rows), size(sum(row.bytes for row in rows))


def _by_worker(baked: BakeResult) -> Iterator[tuple[str, ...]]:
    """Yield a row for each worker. Entries that were copied on this machine have none."""
    yield "WORKER", "PROGRAMS", "COMPILED", "FOUND", "COMPILING"
    for worker in sorted({row.worker for row in baked.rows}):
        rows = [row for row in baked.rows if row.worker == worker]
        yield worker or "this machine", *_counts(rows)


def _counts(rows: list[BakedProgram]) -> tuple[str, ...]:
    """Return the number of rows, of compiles and of hits, and the duration of the compiles."""
    made = [row for row in rows if row.source == "compiler"]
    spent = duration(sum(row.seconds for row in made)) if made else "-"
    return str(len(rows)), str(len(made)), str(len(rows) - len(made)), spent


def _as_dict(baked: BakeResult) -> dict[str, Any]:
    return {
        "bundle": baked.path,
        "bytes": baked.nbytes,
        "seconds": round(baked.seconds, 3),
        "baked": [row._asdict() for row in baked.rows],
        "failed": [
            {"program": title, "arch": arch, "error": str(error), "hint": error.hint}
            for title, arch, error in baked.failures
        ],
        "stores": [store._asdict() for store in baked.stores],
    }
