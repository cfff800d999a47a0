"""`preheat audit`: run a command and report what it compiled and loaded, as text or JSON."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from preheat.audit.processes import Process
from preheat.audit.report import Compile, Module, Refusal, Report, covered_seconds
from preheat.audit.session import audit_session
from preheat.errors import InputError
from preheat.model.config import environ
from preheat.store.publish import publish, unwritable_reason
from preheat.tools.cli.child import CannotRunError, run_command
from preheat.tools.cli.output import (
    attempt,
    columns,
    count,
    duration,
    hint_lines,
    print_error,
    print_json,
    print_message,
    size,
)

__all__ = ["command", "report_lines"]

_EPILOG = """\b
Examples:
  preheat audit -- python serve.py
  preheat audit --report audit.json -- torchrun --nproc-per-node 8 train.py
  preheat audit --json -- ./server | jq '.libraries'
  preheat audit -- preheat run --bundle kernels.heat --sealed -- python serve.py

\b
The command does not have to use preheat, and it runs as it does without the audit: nothing is stored,
and no adapter is installed unless PREHEAT_ADAPTERS names it. Its child processes are audited as well.
The report goes to stderr. With --json it goes to stdout, and the output of the command to stderr.

\b
The exit status is that of the command. It is 127 if there is no such command, and 1 if the command
succeeded but the report cannot be written. 'preheat run --sealed' refuses what this command reports.
"""

_STDERR = 2


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARG]..."
)
@click.option(
    "--report",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the whole report to FILE, as JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON at the end.")
@click.option(
    "--no-cupti",
    is_flag=True,
    help="Leave CUPTI to another profiler. Only loads that a library asks for are seen.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the events and copies of the modules in DIR.",
)
def command(
    words: tuple[str, ...], target: Path | None, as_json: bool, no_cupti: bool, keep: Path | None
) -> int:
    """Run COMMAND and report every module and every compiler of its processes."""
    if target is not None and (why := unwritable_reason(target.absolute())):
        raise InputError(f"cannot write {target}: {why}", hint="name another file with --report")
    with audit_session(environ(), cupti=not no_cupti, keep=keep) as session:
        try:
            output = _STDERR if as_json else None
            status = run_command(words, session.env, output=output, adapters="")
        except CannotRunError as error:
            print_error(str(error), error.hint)
            return error.status
        report = session.report(words, status)
    if as_json:
        printed = attempt(print_json, report.json())
    else:
        printed = attempt(print_message, "\n".join(["", *report_lines(report)]))
    if target is not None:
        try:
            text = json.dumps(report.json(), indent=2)
            publish(target.absolute(), [text.encode(), b"\n"], mode=0o600)
        except OSError as fault:
            attempt(print_error, f"cannot write {target}: {fault.strerror or fault}")
            return status or 1
    return status if printed else status or 1


_MAX_ROWS = 15
#: Compiles or compilers that a reader does not tell apart, by the cells that they have in common.
_Groups = Mapping[tuple[str, ...], Sequence[Compile | Process]]


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    command = shlex.join(report.command)
    ended = f"exit status {report.status} after {duration(report.seconds)}"
    yield f"{command}: {ended}, {_processes(report.processes)}"
    yield from _modules(report.modules)
    yield from _compiles(report.compiles)
    yield from _compilers(report.compilers)
    yield from _refused(report.refusals)
    yield from _libraries(report)
    yield from _unseen(report)


def _processes(number: int) -> str:
    return f"{number:,} {'process' if number == 1 else 'processes'}"


def _table(
    title: str, head: Sequence[str], rows: list[list[str]], right: Sequence[int]
) -> Iterator[str]:
    if rows:
        yield ""
        yield title
        yield from (f"  {line}" for line in columns([head, *rows[:_MAX_ROWS]], right=right))
        if len(rows) > _MAX_ROWS:
            yield f"  … and {len(rows) - _MAX_ROWS:,} more rows; --report FILE has all of them"


class _Group(NamedTuple):
    """Modules that a reader does not tell apart."""

    kind: str
    origin: str
    by: str
    library: str


def _modules(modules: Iterable[Module]) -> Iterator[str]:
    groups: dict[_Group, list[Module]] = {}
    for module in modules:
        load = module.load
        kind = load.image.kind
        if load.result:
            kind += f" (error {load.result})"
        elif load.compiled:
            kind += " (compiled)"
        groups.setdefault(_Group(kind, str(module.origin), str(load.by), load.by.library), []).append(
            module
        )
    ordered = sorted(groups.items(), key=_urgency)
    rows = [
        [
            group.kind,
            f"{len(found):,}",
            size(sum(each.load.image.bytes for each in found)),
            duration(sum(each.load.seconds for each in found)),
            _short(group.origin),
            group.by,
            group.library,
        ]
        for group, found in ordered
    ]
    head = ["KIND", "COUNT", "SIZE", "LOADING", "FROM", "BY", "LIBRARY"]
    yield from _table("Modules that reached the driver", head, rows, (1, 2, 3))


def _urgency(row: tuple[_Group, list[Module]]) -> tuple[bool, bool, float]:
    """Sort what was compiled first, then what is not accounted for, then by time."""
    found = row[1]
    compiled = any(each.load.compiled for each in found)
    accounted = all(each.origin.accounted for each in found)
    return not compiled, accounted, -sum(each.load.seconds for each in found)


def _short(text: str) -> str:
    kind, _, detail = text.partition(": ")
    if detail.startswith("/"):
        detail = os.path.join("…", *detail.split("/")[-2:]) if detail.count("/") > 3 else detail
    return f"{kind}: {detail}" if detail else kind


def _compiles(compiles: Iterable[Compile]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Compile]] = {}
    for each in compiles:
        if each.kind not in ("program", "driver"):
            row = each.kind, _name(each), str(each.by), each.by.library
            groups.setdefault(row, []).append(each)
    head = ["COMPILER", "NAME", "COUNT", "TIME", "BY", "LIBRARY"]
    yield from _table("Compiles inside processes", head, _rows(groups, 2), (2, 3))


def _rows(groups: _Groups, at: int) -> list[list[str]]:
    """Return a row for each group, the longest first, with its count and time from column `at` on."""
    ordered = sorted(groups.items(), key=lambda group: -_seconds(group[1]))
    return [[*cells[:at], f"{len(found):,}", _time(found), *cells[at:]] for cells, found in ordered]


def _seconds(group: Iterable[Compile | Process]) -> float:
    return covered_seconds(each.span for each in group)


def _time(group: Sequence[Compile | Process]) -> str:
    """Return the time of a group. It is longer than what is known if an end was not seen."""
    seconds = _seconds(group)
    if all(each.seconds is not None for each in group):
        return duration(seconds)
    return f"> {duration(seconds)}" if seconds else "?"


def _name(compile: Compile) -> str:
    return f"{compile.name} (rejected)".lstrip() if compile.rejected else compile.name


def _compilers(processes: Sequence[Process]) -> Iterator[str]:
    roots: dict[tuple[str, ...], list[Process]] = {}
    parts: dict[tuple[str, ...], list[Process]] = {}
    for each in processes:
        library = each.by.library if each.by else ""
        if each.role == "compiler" and not each.compiler:
            roots.setdefault((each.name, str(each.by), library), []).append(each)
        elif each.role == "compiler":
            parts.setdefault((each.name, each.compiler, library), []).append(each)
    head = ["PROGRAM", "COUNT", "TIME", "BY", "LIBRARY"]
    yield from _table("Compilers that were started", head, _rows(roots, 1), (1, 2))
    head = ["PROGRAM", "COUNT", "TIME", "STARTED BY", "LIBRARY"]
    title = "Compilers that those started, as a part of their time"
    yield from _table(title, head, _rows(parts, 1), (1, 2))
    probes = [each for each in processes if each.role == "probe" and not each.compiler]
    if probes:
        names = sorted({f"{each.name} {' '.join(each.argv[1:2])}".strip() for each in probes})
        queries = (
            "1 version or help query"
            if len(probes) == 1
            else f"{len(probes):,} version or help queries"
        )
        yield ""
        yield f"{queries} to compilers (nothing was compiled): {', '.join(names)}"


#: What a process does that only warns, in the past tense.
_DONE = {
    "start a compiler": "started a compiler",
    "run a compiler": "ran a compiler",
    "load code that the driver must compile": "loaded code that the driver had to compile",
    "compile": "compiled",
}


def _refused(refusals: Iterable[Refusal]) -> Iterator[str]:
    for each in dict.fromkeys(refusals):
        action = (
            f"refused to {each.what}"
            if each.refused
            else f"{_DONE.get(each.what, each.what)} (warning only)"
        )
        yield ""
        yield f"A sealed process {action}: {each.name}, called from {each.by} ({each.by.library})"


def _libraries(report: Report) -> Iterator[str]:
    libraries = report.libraries()
    yield ""
    if not libraries:
        loaded = count(len(report.loaded), "module")
        nothing = "No compile was seen" if report.hidden else "Nothing was compiled"
        yield f"{nothing}. {loaded} loaded, {len(report.unaccounted):,} not accounted for."
        return
    rows = [
        [row.library, f"{row.compiles:,}", duration(row.seconds), f"{row.modules:,}"]
        for row in libraries
    ]
    head = ["LIBRARY", "COMPILES", "TIME LOST", "MODULES"]
    yield from columns([head, *rows], right=(1, 2, 3))
    total = duration(_seconds(report.compiles))
    yield f"{count(len(report.compiles), 'compile')}, during {total} of {duration(report.seconds)}"
    bakes = {row.bake: row.library for row in reversed(libraries) if row.bake}
    for command, library in bakes.items():
        names = ", ".join(row.library for row in libraries if row.bake == command) or library
        yield ""
        yield f"hint: to compile the kernels of {names} ahead of time:"
        yield f"  {command}"
    yield from _not_baked(report, [row.library for row in libraries if not row.bake])


#: How a hint names what compiled, where that is not a program.
_WITH = {"driver": "the driver"}


def _not_baked(report: Report, libraries: Sequence[str]) -> Iterator[str]:
    """Say for which compiles there is no adapter, and what else can be done."""
    for library in libraries:
        mine = [each for each in report.compiles if each.by.library == library]
        by = {each.name if each.kind == "program" else _WITH.get(each.kind, each.kind) for each in mine}
        yield from hint_lines((library, name) for name in by)


def _unseen(report: Report) -> Iterator[str]:
    if report.unseen:
        yield ""
        yield "Not seen:"
        yield from (f"  {text}" for text in report.unseen)
