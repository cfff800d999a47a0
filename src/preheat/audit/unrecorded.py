"""The compiles of a recorded run whose results are in no recording, because no adapter covers them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from preheat import adapters
from preheat.ahead.manifest import Unrecorded
from preheat.audit.compiler_libraries import mapped_libraries
from preheat.audit.events import EventLog
from preheat.audit.processes import Processes, read_processes
from preheat.audit.report import Compile, covered_seconds, find_compiles, unseen_programs
from preheat.audit.sites import ADAPTER_OF

__all__ = ["find_unrecorded"]


@dataclass(frozen=True)
class _Making:
    """The time in which a process made an entry of an adapter, or of the program itself."""

    pid: int
    started: float
    ended: float
    kind: str

    def has(self, compile: Compile, processes: Processes) -> bool:
        """Return whether a compile was a part of it."""
        if compile.kind != "program":
            overlap = compile.started < self.ended and self.started < compile.ended
            return overlap and self.pid == compile.pid
        process = processes.at(compile.pid, compile.started)
        parents = set() if process is None else processes.parents(process)
        library = compile.by.library
        # An adapter may start the compiler itself, and then the library is preheat.
        own = library == "preheat" or self.kind in (library, ADAPTER_OF.get(library))
        known = own or self.kind not in adapters.known()
        return known and self.pid in parents and self.started <= compile.started <= self.ended


def find_unrecorded(log: EventLog) -> tuple[Unrecorded, ...]:
    """Return what a run compiled that a recording of it does not have.

    A compile is recorded if it is one of preheat, or a part of the making of an entry. A library
    or a program that may have compiled without being seen is listed without a compiler.
    """
    processes = read_processes(log)
    makings = list(_makings(log))
    found: dict[tuple[str, str], list[Compile]] = {}
    for each in find_compiles(log, processes):
        if each.kind != "preheat" and not any(making.has(each, processes) for making in makings):
            compiler = each.name if each.kind == "program" else each.kind
            found.setdefault((each.by.library, compiler), []).append(each)
    hidden = {library.name for library in mapped_libraries(log) if library.why}
    hidden |= {name for name, _ in unseen_programs(log, processes)}
    return (
        *(_row(*key, group) for key, group in sorted(found.items())),
        *(Unrecorded(name) for name in sorted(hidden)),
    )


def _row(library: str, compiler: str, group: list[Compile]) -> Unrecorded:
    seconds = covered_seconds(each.span for each in group)
    lines = tuple(sorted({each.by.line for each in group if each.by.line}))
    return Unrecorded(library, compiler, seconds, lines).merged(Unrecorded(library, compiler))


def _makings(log: EventLog) -> Iterator[_Making]:
    """Yield the time from each miss to the entry that was made for it."""
    missed: dict[tuple[int, str], float] = {}
    for event in log.named("preheat"):
        row = event.fields.get("row")
        if not isinstance(row, dict):
            continue
        key = event.pid, str(row.get("key"))
        if row.get("event") == "miss":
            missed[key] = event.time
        elif row.get("event") == "compile":
            kind, space, _ = str(row.get("program")).partition(" ")
            if not space:  # It is a program of preheat itself, which starts no such compiler.
                continue
            yield _Making(event.pid, missed.get(key, event.time), event.time, kind)
