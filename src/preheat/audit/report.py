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
from preheat.audit.compiler_libraries import MappedLibrary, mapped_libraries
from preheat.audit.events import EventLog
from preheat.audit.images import Load
from preheat.audit.origins import Origin, Origins
from preheat.audit.processes import (
    STATIC,
    Process,
    Processes,
    compilers,
    read_processes,
    starter,
    still_running,
    with_unseen_children,
)
from preheat.audit.sites import ADAPTER_OF, STARTS_COVERED, Caller, caller_of_event
from preheat.model.config import SealMode

__all__ = [
    "Compile",
    "LibraryRow",
    "Module",
    "Refusal",
    "Report",
    "covered_seconds",
    "find_compiles",
    "make_report",
    "unseen_programs",
]

#: Programs of the system that describe the machine. Some are statically linked. They load no module.
_CUPTI = "CUPTI"
_HARMLESS = {"ldconfig", "ldconfig.real", "nvidia-smi", "uname", "lscpu", "file", "getconf"}
_SYSTEM = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/")


@dataclass(frozen=True)
class Module:
    """A module that reached the driver, and where it came from."""

    load: Load
    origin: Origin


@dataclass(frozen=True)
class Compile:
    """A compile: in the process, by a compiler that was started, or by the driver."""

    kind: str
    name: str
    by: Caller
    started: float
    ended: float
    pid: int
    rejected: bool = False  # The compiler returned an error.

    @property
    def span(self) -> tuple[float, float]:
        """Its start and its end."""
        return self.started, self.ended

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.ended - self.started)


@dataclass(frozen=True)
class Refusal:
    """An action that the seal forbids. With a seal that only warns, it happened."""

    what: str
    name: str
    by: Caller
    refused: bool


@dataclass(frozen=True)
class LibraryRow:
    """Totals of one library: compiles, time and modules.

    `bake` is the command that compiles its kernels ahead of time.
    """

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
    compiles: tuple[Compile, ...]
    refusals: tuple[Refusal, ...]
    unseen: tuple[str, ...]
    capability: int | None = None
    resident: int = 0  # modules that a device got, as CUPTI counts them
    seen_by: str = ""  # what reported the loads of modules
    mapped: tuple[MappedLibrary, ...] = ()  # libraries with a compiler inside
    allowed: tuple[str, ...] = ()  # the names of libraries whose compiles need not be seen
    stale: tuple[Mapping[str, Any], ...] = ()  # events: a sealed process has used code of other headers
    header_policies: frozenset[str] = frozenset()  # those of sealed processes, other than "error"

    @property
    def hidden(self) -> tuple[MappedLibrary, ...]:
        """The libraries that may have compiled without being seen, and are not allowed to."""
        return tuple(each for each in self.mapped if each.why and each.name not in self.allowed)

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
        """Whether nothing was compiled, refused or unaccounted for, or could compile unseen."""
        return not (self.compiles or self.refusals or self.unaccounted or self.hidden)

    def libraries(self) -> tuple[LibraryRow, ...]:
        """Return the totals of each library that compiled, the one that lost the most time first."""
        names = {each.by.library for each in self.compiles}
        loads = Counter(each.load.by.library for each in self.loaded)
        rows = []
        for name in names:
            mine = [each for each in self.compiles if each.by.library == name]
            bake = self._bake(name, mine)
            seconds = covered_seconds(each.span for each in mine)
            rows.append(LibraryRow(name, len(mine), seconds, loads[name], bake))
        return tuple(sorted(rows, key=lambda row: (-row.seconds, row.library)))

    def _bake(self, library: str, compiles: Sequence[Compile]) -> str | None:
        if library != "preheat" and ADAPTER_OF.get(library, library) not in adapters.known():
            return None
        if library not in STARTS_COVERED and all(each.kind == "program" for each in compiles):
            return None  # The adapters for torch have no code for the CPU, and no extensions.
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
            "cupti": self.seen_by == _CUPTI,
            "modules": [_module_json(each) for each in self.modules],
            "resident_modules": self.resident,
            "compilers": [_process_json(each) for each in self.compilers],
            "compiles": [_compile_json(each) for each in self.compiles],
            "refused": [_refusal_json(each) for each in self.refusals],
            "libraries": [vars(row) for row in self.libraries()],
            "compiler_libraries": [each.json(self.allowed) for each in self.mapped],
            "unseen": list(self.unseen),
        }


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the spans of time lasted: those that overlap count once."""
    total, until = 0.0, float("-inf")
    for started, ended in sorted(spans):
        total += max(0.0, ended - max(started, until))
        until = max(until, ended)
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
    parent: int | None = None,
    static: str | None = None,
    seal: SealMode = SealMode.OFF,
    allowed: Sequence[str] = (),
) -> Report:
    """Join what the processes of a command have written.

    `cupti` says whether CUPTI was requested. `parent` is the process that started the command, `static`
    is the path of its program if that is statically linked, and `seal` is the seal of the command.
    `allowed` has the names of libraries whose compiles need not be seen.
    """
    processes = read_processes(log)
    started = tuple(compilers(processes))
    compiles = [*find_compiles(log, processes), *_by_driver(loads)]
    unseen = [*notes, *_root_unseen(processes, command, parent, static), *_without_cupti(log, cupti)]
    unseen += _without_seal(log, seal)
    capability = next((int(event.number("capability")) for event in log.named("device")), None)
    mapped = mapped_libraries(log)
    unseen += [str(each) for each in mapped if each.why and each.name not in allowed]
    return Report(
        tuple(command),
        status,
        seconds,
        sum(each.reported for each in processes),
        tuple(Module(load, origins.of(load)) for load in loads),
        started,
        tuple(sorted(compiles, key=lambda each: each.started)),
        (*_refusals(log, processes), *_refusals_by_preheat(log)),
        (*unseen, *_unseen(log, processes)),
        capability,
        sum(1 for _ in log.named("resident")),
        _seen_by(log),
        mapped,
        tuple(allowed),
        tuple(row for row in log.preheat if row.get("event") == "stale"),
        frozenset(str(row.get("policy")) for row in log.preheat if row.get("event") == "headers"),
    )


# Compiles


def find_compiles(log: EventLog, processes: Processes) -> list[Compile]:
    """Return all compiles but for those by the driver: those in processes first."""
    found = [*_in_process(log), *_by_preheat(log)]
    ran = _without_refused(compilers(processes), log)
    return [*found, *_started(ran, found, processes)]


def _in_process(log: EventLog) -> Iterator[Compile]:
    """Yield the compiles of NVRTC and others that the audit library or its Python side saw."""
    named = bool(log.preheat)
    for event in log.named("compile"):
        by = caller_of_event(event)
        if named and by.library == "preheat":
            continue  # The events of preheat itself name the program.
        started = event.time - event.number("seconds")
        rejected = bool(event.number("result"))
        yield Compile(
            event.text("compiler"), event.text("name"), by, started, event.time, event.pid, rejected
        )


def _by_preheat(log: EventLog) -> Iterator[Compile]:
    """Yield the compiles of preheat's own kernels, and the graphs of Inductor."""
    offset = time.time() - time.monotonic()
    for row in log.preheat:
        if row.get("event") not in ("compile", "reject"):
            continue
        program, seconds = str(row.get("program", "")), _number(row.get("seconds"))
        if _adapter_of(program) not in (None, "inductor"):
            continue  # The library that compiled it was seen itself.
        ended = _number(row.get("time")) - offset
        by, rejected = Caller(_library_of(program)), row["event"] == "reject"
        yield Compile("preheat", program, by, ended - seconds, ended, 0, rejected)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _adapter_of(program: str) -> str | None:
    """Return the adapter that a program of another library belongs to, by its first word."""
    kind = program.partition(" ")[0]
    return kind if kind in adapters.known() else None


def _library_of(program: str) -> str:
    kind = _adapter_of(program)
    return "preheat" if kind is None else "torch" if kind == "inductor" else kind


def _started(
    started: Iterable[Process], compiles: Sequence[Compile], processes: Processes
) -> Iterator[Compile]:
    """Yield the compilers that were started, except those that are a part of another compile."""
    for process in started:
        if process.role != "compiler" or process.compiler or process.by is None:
            continue
        parents, since = processes.parents(process), process.role_since
        if any(c.pid in parents and c.started <= since <= c.ended for c in compiles):
            continue
        yield Compile("program", process.name, process.by, *process.span, process.pid)


def _without_refused(started: Iterable[Process], log: EventLog) -> list[Process]:
    """Return the compilers but for those that ended at their start, because they were sealed."""
    refused = [
        (event.pid, event.time)
        for event in log.named("refused")
        if event.text("what") == "run a compiler" and event.text("seal") == "error"
    ]
    return [
        each
        for each in started
        if not any(pid == each.pid and at >= each.role_since for pid, at in refused)
    ]


def _by_driver(loads: Iterable[Load]) -> Iterator[Compile]:
    """Yield the loads for which the driver compiled, and the links of them."""
    for load in loads:
        linked = load.call == "cuLinkComplete"
        if (load.compiled or linked) and not load.result:
            name = load.image.kind
            started = load.time - load.seconds
            yield Compile("driver", name, load.by, started, load.time, load.pid)


# Refusals


def _refusals(log: EventLog, processes: Processes) -> Iterator[Refusal]:
    """Yield the refusals. A process that is refused a compiler may try each directory of PATH."""
    starts: set[tuple[int, str, str]] = set()
    for event in log.named("refused"):
        what, name = event.text("what"), event.text("name")
        by = caller_of_event(event)
        if what.endswith("a compiler"):
            start = (event.pid, os.path.basename(name), event.text("site"))
            if start in starts:
                continue
            starts.add(start)
            by = by if event.text("site") else starter(event, processes)
        yield Refusal(what, name, by, event.text("seal") == "error")


def _refusals_by_preheat(log: EventLog) -> Iterator[Refusal]:
    """Yield the requests for which preheat itself raised `SealedError`, or warned."""
    for row in log.preheat:
        if row.get("event") == "sealed":
            program, place = str(row.get("program", "")), str(row.get("caller") or "")
            by = Caller(_library_of(program), os.path.basename(place))
            yield Refusal("compile", program, by, row.get("mode") == "error")


# What was not seen


def _root_unseen(
    processes: Processes, command: Sequence[str], parent: int | None, static: str | None
) -> Iterator[str]:
    """Say that the command itself has not loaded the audit library.

    Its children may have, and so may a program that it has executed in its own process.
    """
    if not any(each.reported for each in processes):
        yield "everything: no process of the command loaded the audit library"
    elif parent not in (None, *(each.parent for each in processes if each.reported)):
        yield f"activity of {os.path.basename(command[0])}: the audit library was not loaded"
    elif static is not None and not any(each.ran(static) for each in processes):
        yield f"activity of {os.path.basename(command[0])}: {STATIC}"


def _seen_by(log: EventLog) -> str:
    """Return what reported the loads of modules. The CPU driver of preheat does so itself."""
    for event, name in (("cupti", _CUPTI), ("cpu_driver", "the CPU driver")):
        if any(True for _ in log.named(event)):
            return name
    return "the preload library"


def _without_cupti(log: EventLog, wanted: bool) -> Iterator[str]:
    """Say which processes used NVIDIA's driver although it did not start CUPTI in them."""
    told = {event.pid for event in log.named("cupti", "cpu_driver")}
    told |= {event.pid for event in log.named("unseen") if event.text("what") == "modules"}
    users = {event.pid for event in log.named("load", "driver")}
    for pid in sorted(users - told) if wanted else ():
        yield f"modules loaded by the CUDA runtime in process {pid}: CUPTI was not active there"


def unseen_programs(log: EventLog, processes: Processes) -> Iterator[tuple[str, str]]:
    """Yield the name of each program whose activity was not seen, and why."""
    for process in processes:
        for path, why in process.skipped:
            yield os.path.basename(path), why
        if not process.seen and not process.worker and not _is_harmless(process):
            yield _program_name(process), process.hidden or "the audit library was not loaded"
    for event in log.named("shell"):
        if why := event.text("hidden"):
            yield "a shell", why
    for name in with_unseen_children(log, processes):
        yield f"a program that {name} started", "no function showed its start and its end"


def _unseen(log: EventLog, processes: Processes) -> Iterator[str]:
    reasons: Counter[str] = Counter()
    for event in log.named("unseen"):
        reasons[f"{event.text('what')}: {event.text('why')}"] += 1
    reasons.update(f"activity of {name}: {why}" for name, why in unseen_programs(log, processes))
    for reason, number in reasons.items():
        yield reason + (f" ({number} times)" if number > 1 else "")
    for process in still_running(log, processes):
        yield f"{process.name} (process {process.pid}) was still running when the report was written"
    if log.incomplete:
        times = f" ({log.incomplete} times)" if log.incomplete > 1 else ""
        yield f"some events: a process could not write them{times}"
    if log.damaged:
        yield f"{log.damaged} events that were not written completely"
    if log.unread:
        yield f"the events of {log.unread} files, which are too large or were made by somebody else"


def _program_name(process: Process) -> str:
    """Return the name of the program that ran last, which may be the interpreter of a script."""
    return process.name if process.program == process.path else os.path.basename(process.program)


def _is_harmless(process: Process) -> bool:
    return process.program.startswith(_SYSTEM) and os.path.basename(process.program) in _HARMLESS


def _without_seal(log: EventLog, seal: SealMode) -> Iterator[str]:
    """Say which programs ran with a weaker seal than that of the command."""
    seals = {mode.name.lower(): mode for mode in SealMode}
    for event in log.named("process"):
        if seals.get(event.text("seal"), seal) < seal:
            name = os.path.basename(event.text("path"))
            yield f"refusals in {name}: it ran without the seal of the command"


# JSON


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
        "argv": list(process.argv),
        "probe": process.role == "probe",
        "started_by_compiler": bool(process.compiler),
        "compiler": process.compiler,
        "seconds": None if process.seconds is None else round(process.seconds, 6),
        "status": process.status,
        **_by_json(process.by),
    }


def _compile_json(compile: Compile) -> dict[str, Any]:
    return {
        "compiler": compile.kind,
        "name": compile.name,
        "seconds": round(compile.seconds, 6),
        "rejected": compile.rejected,
        **_by_json(compile.by),
    }


def _refusal_json(refusal: Refusal) -> dict[str, Any]:
    row = {"what": refusal.what, "name": refusal.name, "refused": refusal.refused}
    return {**row, **_by_json(refusal.by)}


def _by_json(by: Caller | None) -> dict[str, str]:
    return {"library": by.library if by else "unknown", "line": by.line if by else ""}
