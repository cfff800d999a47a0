"""The programs that a command started, and the compilers among them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from preheat.audit.events import Event, EventLog, is_running
from preheat.audit.sites import Caller, caller_of

__all__ = ["Process", "compilers", "read_processes", "starter", "still_running"]

_MOST_PARENTS = 64


@dataclass(frozen=True)
class Process:
    """A program in a process. `role` is `compiler`, `probe` (a compiler that is asked a question) or
    empty. `by` is the call that started it, and `hidden` says why the program itself is not seen.
    """

    pid: int
    parent: int
    path: str
    words: tuple[str, ...]
    role: str
    started: float
    ended: float | None = None
    status: int | None = None
    by: Caller | None = None
    hidden: str = ""
    seen: bool = False  # It has loaded the audit library.
    inside: bool = field(default=False)  # A compiler started it.

    @property
    def name(self) -> str:
        """The name of the program."""
        return os.path.basename(self.words[0] if self.words else self.path) or self.path

    @property
    def seconds(self) -> float | None:
        """How long it ran, or None when its end was not seen."""
        return None if self.ended is None else max(0.0, self.ended - self.started)


def read_processes(log: EventLog) -> dict[int, Process]:
    """Return the processes by id. A process that executes another program keeps its place and start."""
    found: dict[int, Process] = {}
    shells = list(log.named("shell"))
    for event in log.named("process", "exec", "exit", "reaped"):
        pid = int(event.number("child")) or event.pid
        known = found.get(pid)
        if event.name == "exit" and known is not None:
            found[pid] = replace(known, ended=event.time)
        elif event.name == "reaped" and known is not None:
            ended = known.ended if known.ended is not None else event.time
            found[pid] = replace(known, ended=ended, status=int(event.number("status")))
        elif event.name in ("process", "exec"):
            found[pid] = _started(event, pid, known, shells)
    return found


def _started(event: Event, pid: int, known: Process | None, shells: list[Event]) -> Process:
    role, words = event.text("role"), event.words("argv")
    by = caller_of(event.text("site"), event.text("caller")) if event.text("site") else None
    if known is None or known.status is not None:  # The id of a process that ended may be used again.
        if by is None and event.name == "process":
            by = _shell_of(event, shells)
        parent = int(event.number("parent"))
        seen = event.name == "process"
        return Process(
            pid, parent, event.text("path"), words, role, event.time, by=by,
            hidden=event.text("hidden"), seen=seen,
        )  # fmt: skip
    if known.role and not role:
        # A compiler may be a script: its interpreter has no role, and the process stays a compiler.
        return replace(known, seen=known.seen or event.name == "process", by=known.by or by)
    path = known.path if known.role else event.text("path")
    return replace(
        known, path=path, words=known.words if known.role else words, role=known.role or role,
        by=known.by or by, hidden=event.text("hidden") or known.hidden, ended=None,
        seen=known.seen or event.name == "process",
    )  # fmt: skip


def _shell_of(event: Event, shells: list[Event]) -> Caller | None:
    """Return who called `popen` or `system`, for the shell that the call started."""
    parent = int(event.number("parent"))
    calls = [
        shell
        for shell in shells
        if shell.pid == parent
        and shell.time <= event.time
        and shell.text("command") in event.words("argv")
    ]
    return caller_of(calls[-1].text("site"), calls[-1].text("caller")) if calls else None


def compilers(processes: Mapping[int, Process]) -> Iterator[Process]:
    """Yield the compilers and probes, with the call that led to them, in the order of their starts."""
    for process in sorted(processes.values(), key=lambda each: each.started):
        if process.role:
            by, inside = _origin(process, processes)
            yield replace(process, by=by, inside=inside)


def _origin(process: Process, processes: Mapping[int, Process]) -> tuple[Caller, bool]:
    """Return the call at the top of a chain of shells and compilers, and if a compiler is in it."""
    inside, at = False, process
    for _ in range(_MOST_PARENTS):
        if at.by is not None:
            return at.by, inside
        parent = processes.get(at.parent)
        if parent is None or parent.pid == at.pid:
            break
        inside = inside or bool(parent.role)
        if not parent.role and parent.name not in ("sh", "bash", "dash", "zsh"):
            return Caller(parent.name, parent.name), inside
        at = parent
    return Caller(at.name, at.name), inside


def starter(pid: int, parent: int, processes: Mapping[int, Process]) -> Caller:
    """Return the call that led to a process which may be a fork that executed no program."""
    known = processes.get(pid)
    if known is not None and not known.role:
        return _origin(replace(known, pid=0, parent=pid, by=None), processes)[0]
    return _origin(known or Process(pid, parent, "", (), "", 0.0), processes)[0]


def still_running(log: EventLog, processes: Mapping[int, Process]) -> tuple[Process, ...]:
    """Return the processes that run on although the command has ended."""
    left = (each for each in processes.values() if each.status is None and not each.role)
    return tuple(each for each in left if is_running(each.pid, log.directory))
