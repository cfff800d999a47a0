"""A report of an audit as text: modules, compilers, and a closing table by library."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from preheat.audit.processes import Process
from preheat.audit.report import Activity, Module, Report, total_seconds
from preheat.cli.output import columns, count, duration, size

__all__ = ["report_lines"]

_MOST_ROWS = 15


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    command = shlex.join(report.command)
    ended = f"exit status {report.status} after {duration(report.seconds)}"
    yield f"{command}: {ended}, {_processes(report.processes)}"
    yield from _modules(report.modules)
    yield from _compiles(report.activities)
    yield from _compilers(report.compilers)
    yield from _refused(report)
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
        yield from (f"  {line}" for line in columns([head, *rows[:_MOST_ROWS]], right=right))
        if len(rows) > _MOST_ROWS:
            yield f"  … and {len(rows) - _MOST_ROWS:,} more rows; --report FILE has all of them"


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


def _compiles(activities: Iterable[Activity]) -> Iterator[str]:
    rows = [
        [each.kind, each.name, duration(each.seconds), str(each.by), each.by.library]
        for each in sorted(activities, key=lambda each: -each.seconds)
        if each.kind not in ("program", "driver")
    ]
    head = ["COMPILER", "NAME", "TIME", "BY", "LIBRARY"]
    yield from _table("Compiles inside of processes", head, rows, (2,))


def _compilers(processes: Sequence[Process]) -> Iterator[str]:
    roots = [each for each in processes if not each.inside and each.role == "compiler"]
    inside = sum(each.inside for each in processes)
    rows = [
        [
            each.name,
            "?" if each.seconds is None else duration(each.seconds),
            str(each.pid),
            str(each.parent),
            str(each.by),
            each.by.library if each.by else "",
        ]
        for each in sorted(roots, key=lambda each: -(each.seconds or 0))
    ]
    head = ["PROGRAM", "TIME", "PROCESS", "PARENT", "BY", "LIBRARY"]
    yield from _table("Compilers that were started", head, rows, (1, 2, 3))
    if rows and inside:
        yield f"  They started {count(inside, 'compiler')} themselves."
    probes = [each for each in processes if each.role == "probe" and not each.inside]
    if probes:
        names = sorted({f"{each.name} {' '.join(each.words[1:2])}".strip() for each in probes})
        yield ""
        asked = f"{count(len(probes), 'question')} to compilers"
        yield f"{asked}, which compile nothing: {', '.join(names)}"


def _refused(report: Report) -> Iterator[str]:
    for each in dict.fromkeys(report.refusals):
        verb = "refused to" if each.refused else "was not to"
        yield ""
        asked = f"asked by {each.by} ({each.by.library})"
        yield f"A sealed process {verb} {each.what}: {each.name}, {asked}"


def _libraries(report: Report) -> Iterator[str]:
    libraries = report.libraries()
    yield ""
    if not libraries:
        loaded = count(len(report.loaded), "module")
        yield f"Nothing was compiled. {loaded} loaded, {len(report.unaccounted):,} not accounted for."
        return
    rows = [
        [row.library, f"{row.compiles:,}", duration(row.seconds), f"{row.modules:,}"]
        for row in libraries
    ]
    head = ["LIBRARY", "COMPILES", "TIME LOST", "MODULES"]
    yield from columns([head, *rows], right=(1, 2, 3))
    total = duration(total_seconds(report.activities))
    yield f"{count(len(report.activities), 'compile')}, during {total} of {duration(report.seconds)}"
    bakes = {row.bake: row.library for row in reversed(libraries) if row.bake}
    for command, library in bakes.items():
        names = ", ".join(row.library for row in libraries if row.bake == command) or library
        yield ""
        yield f"hint: this bakes the kernels of {names} ahead of time:"
        yield f"  {command}"


def _unseen(report: Report) -> Iterator[str]:
    if report.unseen:
        yield ""
        yield "Not seen:"
        yield from (f"  {text}" for text in report.unseen)
