"""All that an audit found: modules, compilers, compiles, refusals, and what it did not see."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preheat import adapters
from preheat.audit.events import EventLog
from preheat.audit.images import Load
from preheat.audit.origins import Origin, Origins
from preheat.audit.processes import (
    Process,
    compilers,
    read_processes,
    starter,
    still_running,
)
from preheat.audit.sites import Caller, caller_of

__all__ = ["Activity", "LibraryRow", "Module", "Refusal", "Report", "make_report", "total_seconds"]

#: Programs that tell about the machine. Some are statically linked, and none of them loads a module.
_HARMLESS = {"ldconfig", "ldconfig.real", "nvidia-smi", "uname", "lscpu", "file", "getconf"}
#: Adapters by the name of the package that they are for, where the names differ.
_ADAPTERS = {"cuda.core": "cuda_core", "numba_cuda": "numba", "torch": "inductor"}


@dataclass(frozen=True)
class Module:
    """A module that reached the driver, and where it came from."""

    load: Load
    origin: Origin


@dataclass(frozen=True)
class Activity:
    """A compile: in the process, by a compiler that was started, or by the driver."""

    kind: str
    name: str
    by: Caller
    started: float
    ended: float
    pid: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.ended - self.started)


@dataclass(frozen=True)
class Refusal:
    """What a sealed process refused or, with a seal that warns, did."""

    what: str
    name: str
    by: Caller
    refused: bool


@dataclass(frozen=True)
class LibraryRow:
    """What the compiles of one library came to. `bake` is the command that makes them ahead of time."""

    library: str
    compiles: int
    seconds: float
    modules: int
    bake: str | None


@dataclass(frozen=True)
class Report:
    """The result of an audit. `unseen` says what the audit could not see, and why."""

    command: tuple[str, ...]
    status: int
    seconds: float
    processes: int
    modules: tuple[Module, ...]
    compilers: tuple[Process, ...]
    activities: tuple[Activity, ...]
    refusals: tuple[Refusal, ...]
    unseen: tuple[str, ...]
    capability: int | None = None
    resident: int = 0  # modules that a device got, as CUPTI counts them
    cupti: bool = False

    @property
    def loaded(self) -> tuple[Module, ...]:
        """The modules that the driver accepted."""
        return tuple(each for each in self.modules if each.load.is_module and not each.load.result)

    @property
    def unaccounted(self) -> tuple[Module, ...]:
        """The modules that came neither from a bundle or the store nor from an installed file."""
        return tuple(each for each in self.loaded if not each.origin.accounted or each.load.compiled)

    @property
    def clean(self) -> bool:
        """Whether nothing was compiled, nothing was refused, and every module is accounted for."""
        return not (self.activities or self.refusals or self.unaccounted)

    def libraries(self) -> tuple[LibraryRow, ...]:
        """Return what each library compiled, the one that lost the most time first."""
        names = {each.by.library for each in self.activities}
        loads = Counter(each.load.by.library for each in self.loaded)
        rows = []
        for name in names:
            mine = [each for each in self.activities if each.by.library == name]
            bake = self._bake(name)
            rows.append(LibraryRow(name, len(mine), total_seconds(mine), loads[name], bake))
        return tuple(sorted(rows, key=lambda row: (-row.seconds, row.library)))

    def _bake(self, library: str) -> str | None:
        if library != "preheat" and _ADAPTERS.get(library, library) not in adapters.known():
            return None
        arch = "" if self.capability is None else f" --arch sm_{self.capability}"
        words = shlex.join(self.command)
        return f"preheat record -- {words} && preheat bake kernels.toml{arch}"

    def json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "version": 1,
            "command": list(self.command),
            "exit_status": self.status,
            "seconds": round(self.seconds, 6),
            "processes": self.processes,
            "clean": self.clean,
            "compute_capability": self.capability,
            "cupti": self.cupti,
            "modules": [_module_json(each) for each in self.modules],
            "resident_modules": self.resident,
            "compilers": [_process_json(each) for each in self.compilers],
            "compiles": [_activity_json(each) for each in self.activities],
            "refused": [_refusal_json(each) for each in self.refusals],
            "libraries": [vars(row) for row in self.libraries()],
            "unseen": list(self.unseen),
        }


def total_seconds(activities: Iterable[Activity]) -> float:
    """Return how long at least one of the activities ran: those that overlap count once."""
    total, until = 0.0, float("-inf")
    for each in sorted(activities, key=lambda each: each.started):
        total += max(0.0, each.ended - max(each.started, until))
        until = max(until, each.ended)
    return total


def make_report(
    log: EventLog,
    loads: Sequence[Load],
    origins: Origins,
    *,
    command: Sequence[str],
    status: int,
    seconds: float,
    notes: Sequence[str] = (),
    cupti: bool = False,
) -> Report:
    """Join what the processes of a command have written. CUPTI was asked for, or not."""
    processes = read_processes(log)
    started = tuple(compilers(processes))
    compiles = [*_in_process(log), *_of_preheat(log)]
    activities = [*compiles, *_started(started, compiles, processes), *_by_driver(loads)]
    capability = next((int(event.number("capability")) for event in log.named("device")), None)
    return Report(
        tuple(command),
        status,
        seconds,
        sum(each.seen for each in processes.values()),
        tuple(Module(load, origins.of(load)) for load in loads),
        started,
        tuple(sorted(activities, key=lambda each: each.started)),
        tuple(_refusals(log, processes)),
        tuple(_unseen(log, processes, [*notes, *_without_cupti(log, cupti)])),
        capability,
        sum(1 for _ in log.named("resident")),
        any(True for _ in log.named("cupti")),
    )


# Compiles


def _in_process(log: EventLog) -> Iterator[Activity]:
    """Yield the compiles of NVRTC and others that the audit library or its Python side saw."""
    named = bool(log.preheat)
    for event in log.named("compile"):
        by = caller_of(event.text("site"), event.text("caller"))
        if named and by.library == "preheat":
            continue  # The events of preheat itself name the program.
        seconds, compiler = event.number("seconds"), event.text("compiler")
        name = event.text("name")
        yield Activity(compiler, name, by, event.time - seconds, event.time, event.pid)


def _of_preheat(log: EventLog) -> Iterator[Activity]:
    """Yield the compiles of preheat's own kernels, and the graphs of Inductor."""
    offset = time.time() - time.monotonic()
    for row in log.preheat:
        if row.get("event") != "compile":
            continue
        program, seconds = str(row.get("program", "")), float(row.get("seconds") or 0)
        kind = program.partition(" ")[0]
        if kind in adapters.known() and kind != "inductor":
            continue  # The library that compiled it was seen itself.
        ended = float(row.get("time") or 0) - offset
        by = Caller("torch" if kind == "inductor" else "preheat")
        yield Activity("preheat", program, by, ended - seconds, ended, 0)


def _started(
    started: Iterable[Process], compiles: Sequence[Activity], processes: Mapping[int, Process]
) -> Iterator[Activity]:
    """Yield the compilers that were started, but for those that are a part of another compile."""
    for process in started:
        if process.role != "compiler" or process.inside or process.by is None:
            continue
        parents = _parents(process, processes)
        if any(c.pid in parents and c.started <= process.started <= c.ended for c in compiles):
            continue
        ended = process.started if process.ended is None else process.ended
        yield Activity("program", process.name, process.by, process.started, ended, process.pid)


def _parents(process: Process, processes: Mapping[int, Process]) -> set[int]:
    found: set[int] = set()
    at: Process | None = process
    while at is not None and at.parent not in found:
        found.add(at.parent)
        at = processes.get(at.parent)
    return found


def _by_driver(loads: Iterable[Load]) -> Iterator[Activity]:
    """Yield the loads for which the driver compiled, and the links of them."""
    for load in loads:
        linked = load.call == "cuLinkComplete"
        if (load.compiled or linked) and not load.result:
            name = load.image.kind
            started = load.time - load.seconds
            yield Activity("driver", name, load.by, started, load.time, load.pid)


# The rest


def _refusals(log: EventLog, processes: Mapping[int, Process]) -> Iterator[Refusal]:
    """Yield each refusal once: a shell tries every directory of PATH."""
    seen: set[tuple[int, str, str]] = set()
    for event in log.named("refused"):
        what, name = event.text("what"), event.text("name")
        key = (event.pid, what, os.path.basename(name))
        if what != "let the driver compile" and key in seen:
            continue
        seen.add(key)
        by = caller_of(event.text("site"), event.text("caller"))
        if not event.text("site") and what.endswith("a compiler"):
            by = starter(event.pid, int(event.number("parent")), processes)
        yield Refusal(what, name, by, event.text("seal") == "error")


def _without_cupti(log: EventLog, wanted: bool) -> Iterator[str]:
    """Say which processes loaded modules although the driver did not start CUPTI in them."""
    told = {event.pid for event in log.named("cupti", "unseen")}
    pids = sorted({event.pid for event in log.named("load")} - told)
    if wanted and pids:
        yield f"modules that the CUDA runtime loads: no CUPTI in {', '.join(map(str, pids))}"


def _unseen(log: EventLog, processes: Mapping[int, Process], notes: Sequence[str]) -> Iterator[str]:
    yield from notes
    if not processes:
        yield "all of it: no process of the command loaded the audit library"
    reasons: Counter[str] = Counter()
    for event in log.named("unseen"):
        reasons[f"{event.text('what')}: {event.text('why')}"] += 1
    for process in processes.values():
        if process.hidden and not process.seen and not _is_known(process):
            reasons[f"what {process.name} does: {process.hidden}"] += 1
    for reason, number in reasons.items():
        yield reason + (f" ({number} times)" if number > 1 else "")
    for process in still_running(log, processes):
        yield f"what {process.name} (process {process.pid}) does from now on: it still runs"
    if log.damaged:
        yield f"{log.damaged} events that were not written completely"


def _is_known(process: Process) -> bool:
    """Return whether it is known what a program does: it is harmless, or a compiler of preheat."""
    return process.name in _HARMLESS or (process.by is not None and process.by.library == "preheat")


def _module_json(module: Module) -> dict[str, Any]:
    load = module.load
    return {
        "pid": load.pid,
        "call": load.call,
        "kind": load.image.kind,
        "contents": load.image.contents,
        "compiled_by_driver": load.compiled,
        "bytes": load.image.bytes,
        "sha256": load.image.digest,
        "milliseconds": round(load.seconds * 1e3, 3),
        "result": load.result,
        "origin": module.origin.kind,
        "from": module.origin.detail or load.image.file,
        "accounted": module.origin.accounted and not load.compiled,
        **_by_json(load.by),
    }


def _process_json(process: Process) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "parent": process.parent,
        "path": process.path,
        "argv": list(process.words),
        "probe": process.role == "probe",
        "started_by_compiler": process.inside,
        "seconds": None if process.seconds is None else round(process.seconds, 6),
        "status": process.status,
        **_by_json(process.by),
    }


def _activity_json(activity: Activity) -> dict[str, Any]:
    return {
        "compiler": activity.kind,
        "name": activity.name,
        "seconds": round(activity.seconds, 6),
        **_by_json(activity.by),
    }


def _refusal_json(refusal: Refusal) -> dict[str, Any]:
    row = {"what": refusal.what, "name": refusal.name, "refused": refusal.refused}
    return {**row, **_by_json(refusal.by)}


def _by_json(by: Caller | None) -> dict[str, str]:
    return {"library": by.library if by else "unknown", "line": by.line if by else ""}
