"""The programs that a command started, and the compilers among them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from preheat.audit.events import Event, EventLog, birth_of, running_in
from preheat.audit.sites import Caller, caller_of_event

__all__ = [
    "STATIC",
    "Process",
    "Processes",
    "compilers",
    "read_processes",
    "starter",
    "still_running",
    "with_unseen_children",
]

#: Why a statically linked program is not seen. The audit library says the same.
STATIC = "it is statically linked, so the audit library was not loaded"

#: The calls of `popen` and `system` of each process.
Shells = dict[int, list[Event]]

_MAX_PARENTS = 64
_SHELLS = ("sh", "bash", "dash", "zsh")
#: Roles by rank. A process that has had several of them has the highest one.
_RANKS = {"build tool": 1, "probe": 2, "compiler": 3}
_COMPILING = ("probe", "compiler")
#: The file that starts the compiler processes of preheat, whose compiles preheat itself reports.
_WORKER = "/preheat/toolchain/process.py"


@dataclass(frozen=True)
class Process:
    """A program in a process. `role` is `compiler`, `probe` (a compiler that only answers a question),
    `build tool` (it starts compilers) or empty. `by` is the call that started it. `program` is the path
    of the program that ran last.
    """

    pid: int
    parent: int
    path: str
    argv: tuple[str, ...]
    role: str
    started: float
    role_since: float = 0.0  # A shell may execute a compiler as its last command.
    ended: float | None = None
    status: int | None = None
    by: Caller | None = None
    program: str = ""
    birth: int = 0  # the time of its start, in the units of the kernel; 0 if it is not known
    namespace: int = 0  # of its id; 0 if it is not known
    reported: bool = False  # It has loaded the audit library, at any time.
    seen: bool = False  # The program that ran last was started with the audit library.
    hidden: str = ""  # why it was not
    skipped: tuple[tuple[str, str], ...] = ()  # earlier programs that were not seen, and why
    worker: bool = False  # It is a compiler process of preheat.
    compiler: str = ""  # the name of the compiler that started it, if one did

    @property
    def name(self) -> str:
        """The name of the program."""
        return os.path.basename(self.argv[0] if self.argv else self.path) or self.path

    def ran(self, path: str) -> bool:
        """Return whether the program that ran last is the file at a path."""
        return self.reported and os.path.realpath(path) == self.program

    @property
    def span(self) -> tuple[float, float]:
        """The start and the end of its role. They are equal if its end was not seen."""
        return self.role_since, self.role_since if self.ended is None else self.ended

    @property
    def seconds(self) -> float | None:
        """How long it ran in its role, or None when its end was not seen."""
        return None if self.ended is None else max(0.0, self.ended - self.role_since)


class Processes:
    """All processes of a command. The kernel uses an id again when its process has ended."""

    def __init__(self) -> None:
        self._by_pid: dict[int, list[Process]] = {}
        self._before_exec: dict[int, Process | None] = {}

    def __iter__(self) -> Iterator[Process]:
        return (each for found in self._by_pid.values() for each in found)

    def at(self, pid: int, time: float) -> Process | None:
        """Return the process that had an id at a time."""
        found = self._by_pid.get(pid, [])
        return next((each for each in reversed(found) if each.started <= time), None)

    def parents(self, process: Process) -> set[int]:
        """Return the ids of the processes that led to a process."""
        found: set[int] = set()
        at: Process | None = process
        while at is not None and at.parent not in found:
            found.add(at.parent)
            at = self.at(at.parent, at.started)
        return found

    def apply(self, event: Event, shells: Shells) -> None:
        """Update the process that an event is about."""
        pid = int(event.number("child")) or event.pid
        found = self._by_pid.setdefault(pid, [])
        last = found[-1] if found else None
        if event.name == "exit" and last is not None:
            found[-1] = replace(last, ended=event.time)
        elif event.name == "reaped" and last is not None and last.status is None:
            ended = event.time if last.ended is None else last.ended
            found[-1] = replace(last, ended=ended, status=int(event.number("status")))
        elif event.name == "exec_failed" and pid in self._before_exec:
            before = self._before_exec.pop(pid)
            found[-1:] = [] if before is None else [before]
        elif event.name in ("process", "exec"):
            known = last if last is not None and _is_same(last, event) else None
            if event.name == "exec":
                self._before_exec[pid] = known
            made = _first(event, pid, shells) if known is None else _next(event, known)
            found[len(found) if known is None else -1 :] = [made]


def read_processes(log: EventLog) -> Processes:
    """Return the processes. A process that executes another program keeps its place and start."""
    found = Processes()
    shells: Shells = {}
    for event in log.named("shell"):
        shells.setdefault(event.pid, []).append(event)
    for event in log.named("process", "exec", "exec_failed", "exit", "reaped"):
        found.apply(event, shells)
    return found


def _is_same(known: Process, event: Event) -> bool:
    """Return whether an event is about a known process, and not about a later one with its id."""
    if known.ended is not None:
        return False
    before = known.birth, known.namespace
    now = int(event.number("birth")), int(event.number("namespace"))
    if any(a and b and a != b for a, b in zip(before, now, strict=True)):
        return False
    return not event.number("child")  # A process that was spawned is a new one.


def _caller(event: Event) -> Caller | None:
    return caller_of_event(event) if event.text("site") else None


def _first(event: Event, pid: int, shells: Shells) -> Process:
    """Return the process of its first event."""
    by = _caller(event)
    if by is None and event.name == "process":
        by = _shell_of(event, shells)
    return _observed(
        Process(
            pid, int(event.number("parent")), event.text("path"), event.words("argv"),
            event.text("role"), event.time, event.time, by=by,
        ),
        event,
    )  # fmt: skip


def _next(event: Event, known: Process) -> Process:
    """Return a process that executes another program, or reports itself."""
    role, by = event.text("role"), known.by or _caller(event)
    if by is None and role and not known.role and known.reported and known.name not in _SHELLS:
        by = Caller(known.name, known.name)  # The program became the compiler.
    known = replace(known, by=by)
    # A compiler may be a script: its interpreter has no role, and the process stays a compiler.
    if not known.role or _RANKS.get(role, 0) > _RANKS.get(known.role, 0):
        known = replace(
            known, path=event.text("path"), argv=event.words("argv"), role=role, role_since=event.time
        )
    return _observed(known, event)


def _observed(process: Process, event: Event) -> Process:
    """Note whether the program was started with the audit library. Only the program itself can tell."""
    before, path = process.program, event.text("path")
    birth = int(event.number("birth")) or process.birth
    namespace = int(event.number("namespace")) or process.namespace
    process = replace(process, birth=birth, namespace=namespace, program=path)
    if event.name == "exec":
        worker = process.worker or _WORKER in event.text("site")
        return replace(process, seen=False, hidden=event.text("hidden"), worker=worker)
    seen = bool(event.number("preloaded"))
    if process.hidden == STATIC and seen and os.path.realpath(before) != path:
        # The static program has executed this one.
        process = replace(process, skipped=(*process.skipped, (before, STATIC)))
    return replace(process, reported=True, seen=seen, hidden="" if seen else process.hidden)


def _shell_of(event: Event, shells: Shells) -> Caller | None:
    """Return who called `popen` or `system`, for the shell that the call started."""
    parent, argv = int(event.number("parent")), event.words("argv")
    for shell in reversed(shells.get(parent, [])):
        command = shell.text("command")
        if shell.time <= event.time and _has(argv, command):
            return caller_of_event(shell)
    return None


def _has(argv: tuple[str, ...], command: str) -> bool:
    """Return whether a command is an argument. Both are cut in events, and not at the same place."""
    return any(word == command or (word and command.startswith(word)) for word in argv[-1:])


def compilers(processes: Processes) -> Iterator[Process]:
    """Yield the compilers and probes, with the call that led to them, in the order of their starts."""
    for process in sorted(processes, key=lambda each: each.started):
        if process.role in _COMPILING:
            by, compiler = _origin(process, processes)
            yield replace(process, by=by, compiler=compiler)


def _origin(process: Process, processes: Processes) -> tuple[Caller, str]:
    """Return the call that led to a process by way of shells, build tools and compilers, and the name
    of the last compiler among them.
    """
    compiler, at = "", process
    for _ in range(_MAX_PARENTS):
        parent = processes.at(at.parent, at.started)
        if parent is None or parent.pid == at.pid:
            break
        if parent.role in _COMPILING and parent.role_since <= at.started:
            compiler = compiler or parent.name  # also if it called `system`, which has a caller itself
        elif at.by is not None and parent.role != "build tool":  # which may be a script in Python
            return at.by, compiler
        elif not parent.role and parent.name not in _SHELLS:
            return Caller(parent.name, parent.name), compiler
        at = parent
    return at.by or Caller(at.name, at.name), compiler


def starter(event: Event, processes: Processes) -> Caller:
    """Return the call that led to a process which may be a fork that executed no program."""
    pid, parent = event.pid, int(event.number("parent"))
    known = processes.at(pid, event.time)
    if known is not None and not known.role:
        return _origin(replace(known, pid=0, parent=pid, started=event.time, by=None), processes)[0]
    return _origin(known or Process(pid, parent, "", (), "", event.time), processes)[0]


def with_unseen_children(log: EventLog, processes: Processes) -> Iterator[str]:
    """Yield the names of the processes that have waited for a program which nothing has shown.

    A process says at its end that it has waited for a child whose end no function showed. The child may
    be known all the same: the C library has waited for a shell, or the child was refused a program.
    """
    refused = [(int(event.number("parent")), event.time) for event in log.named("refused")]
    for event in log.named("unseen_children"):
        parent = processes.at(event.pid, event.time)
        since = 0.0 if parent is None else parent.started
        known = [(each.parent, each.started) for each in processes if each.status is None]
        if not any(pid == event.pid and since <= time <= event.time for pid, time in known + refused):
            yield "a process" if parent is None else parent.name


def still_running(log: EventLog, processes: Processes) -> tuple[Process, ...]:
    """Return the processes that run on although the command has ended."""
    known = {each.pid: each for each in processes if each.ended is None}  # the latest one of each id
    found = [each for each in known.values() if each.birth and birth_of(each.pid) == each.birth]
    pids = {each.pid for each in found}
    found += (
        known.get(pid) or _forked(pid)
        for pid in running_in(log.directory)
        if pid not in pids and birth_of(pid) is not None
    )
    return tuple(each for each in found if each.role not in _COMPILING)


def _forked(pid: int) -> Process:
    """Return a process that was forked, has executed no program, and so has not reported itself."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        name = ""
    return Process(pid, 0, name or "a process", (), "", 0.0)
