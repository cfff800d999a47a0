"""`preheat compile`: compile files into the cache, and write cubins where requested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from preheat.build.builder import Builder
from preheat.build.compile_lock import Attempt
from preheat.build.lookup import Hit
from preheat.build.parallel import Task, run_all
from preheat.errors import InputError, PreheatError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.events import logged_events
from preheat.model.program import Program
from preheat.process.progress import progress
from preheat.tools.cli.output import (
    count,
    duration,
    print_error,
    print_json,
    print_line,
    print_message,
    size,
)
from preheat.tools.cli.programs import (
    LinkOptions,
    ProgramOptions,
    archs_option,
    link_options,
    program_options,
    targets,
)

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat compile saxpy.cu --arch sm_90
  preheat compile kernels/*.cu --arch sm_90 --arch sm_100 -I include -o build
  preheat compile gemm.cu --arch sm_90a --name 'gemm<float, 64>' -X=-use_fast_math
  preheat compile main.cu helper.cu libdevice.a --link --arch sm_90

The compiler searches the directory of each file for headers first. With --link and -o, the result has
the name of the first file. The exit status is 1 if a file does not compile; the other files are still
compiled. A file without kernels causes a warning: name the instances of its templates with --name.
"""
# Where a tier keeps its entries, as text.
_PLACES = {
    "bundle": "in a bundle",
    "memory": "in memory",
    "layer": "in a layer",
    "disk": "on disk",
    "remote": "in the shared store",
}


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@archs_option("that of the first GPU")
@program_options
@link_options
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to which .cubin and .ptx files are written.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    files: tuple[str, ...],
    archs: tuple[str, ...],
    given: ProgramOptions,
    link: LinkOptions,
    output: Path | None,
    as_json: bool,
) -> int:
    """Compile CUDA C++ (.cu) or PTX (.ptx) files into the cache, unless they are in it already."""
    if link.wanted:
        programs: list[tuple[str, Program]] = [(files[0], given.read_linked(files, link))]
        files = files[:1]
    else:
        programs = [(file, given.read(file)) for file in files]
    jobs = [(file, program, arch) for file, program in programs for arch in targets(program, archs)]
    if output is not None:
        _make_directory(output, files)
    uncached: list[Mapping[str, Any]] = []
    events = logged_events()
    events.subscribe(lambda _, fields: uncached.append(fields), "uncached")
    builder = Builder.open(events=events)
    rows: list[dict[str, Any]] = []
    failures: list[tuple[str, Arch, PreheatError]] = []
    running: dict[int, str] = {}
    with progress("compiling", len(jobs)) as bar:

        def started(index: int) -> None:
            running[index] = jobs[index][0]
            bar.step(", ".join(sorted(set(running.values()))), advance=0)

        def ended(index: int, _: Task[Hit]) -> None:
            del running[index]
            bar.step(", ".join(sorted(set(running.values()))))

        def compile_one(job: tuple[str, Program, Arch], attempt: Attempt) -> Hit:
            return builder.obtain(job[1], job[2], attempt=attempt)

        tasks = run_all(jobs, compile_one, on_start=started, on_done=ended)
    reasons = {(fields["program"], fields["arch"]): fields["reason"] for fields in uncached}
    warnings: dict[str, None] = {}
    for (file, _, arch), task in zip(jobs, tasks, strict=True):
        try:
            hit = task.outcome()
            rows.append(_row(file, arch, hit, reasons, output))
            if not hit.artifact.entries:
                warnings[_without_kernels(file, hit.artifact)] = None
        except PreheatError as error:
            failures.append((file, arch, error))
    _report(rows, failures, as_json=as_json)
    for warning in warnings:
        print_message(f"warning: {warning}")
    return 1 if failures else 0


def _make_directory(output: Path, files: tuple[str, ...]) -> None:
    stems = [Path(file).stem for file in dict.fromkeys(files)]
    for stem in stems:
        if stems.count(stem) > 1:
            raise InputError(f"two files would be written as {output}/{stem}.*")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise InputError(f"cannot write to {output}: {fault.strerror or fault}") from None


def _row(
    file: str, arch: Arch, hit: Hit, uncached: Mapping[tuple[str, str], str], output: Path | None
) -> dict[str, Any]:
    artifact = hit.artifact
    written = []
    if output is not None:
        for kind, blob in (("cubin", artifact.cubin), ("ptx", artifact.ptx)):
            path = output / f"{Path(file).stem}.{arch}.{kind}"
            _write(path, blob)
            written.append(str(path))
    return {
        "file": file,
        "arch": str(arch),
        "key": artifact.digest,
        "from": hit.tier,
        "uncached": uncached.get((artifact.label, str(arch))),
        "seconds": artifact.provenance.seconds,
        "bytes": len(artifact.cubin),
        "kernels": [entry.prototype for entry in artifact.entries],
        "written": written,
    }


def _without_kernels(file: str, artifact: Artifact) -> str:
    """Return the warning about a file whose code has no kernels."""
    templates = [f"{name.partition('<')[0]}<…>" for name in artifact.templates]
    if not templates:
        return f"{file} has no kernels"
    named = ", ".join(dict.fromkeys(templates))
    whose = "its templates" if len(templates) > 1 else "its template"
    verb = "need" if len(templates) > 1 else "needs"
    return f"{file} has no kernels: {whose} {named} {verb} --name"


def _write(path: Path, blob: bytes) -> None:
    try:
        path.write_bytes(blob)
    except OSError as fault:
        raise InputError(f"cannot write {path}: {fault.strerror or fault}") from None


def _place(tier: str) -> str:
    """Return where a tier keeps its entries, as text. The second shared store is `remote.2`."""
    name, _, number = tier.partition(".")
    if name == "remote" and number:
        return f"in shared store {number}"
    return _PLACES.get(tier, f"in tier {tier}")


def _report(
    rows: list[dict[str, Any]], failures: list[tuple[str, Arch, PreheatError]], *, as_json: bool
) -> None:
    if as_json:
        failed = [{"file": f, "arch": str(a), "error": str(e)} for f, a, e in failures]
        print_json({"compiled": rows, "failed": failed})
    for row in () if as_json else rows:
        tier = row["from"]
        seconds = duration(row["seconds"])
        place = _place(tier)
        how = f"compiled in {seconds}" if tier == "compiler" else f"found {place}, {seconds} saved"
        print_line(f"{row['file']}  {row['arch']}  {row['key'][:12]}  {size(row['bytes'])}  {how}")
        if row["uncached"]:
            print_message(f"{row['file']} was not cached: {row['uncached']}")
    for _, _, error in failures:
        print_error(str(error), error.hint)
    made = sum(row["from"] == "compiler" for row in rows)
    summary = f"{count(made, 'program')} compiled, {len(rows) - made} found in the cache"
    print_message(summary + (f", {len(failures)} failed" if failures else ""))
