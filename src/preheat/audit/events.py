"""The events that the processes of an audited command have written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preheat.process.files import read_part

__all__ = [
    "Event",
    "EventLog",
    "birth_of",
    "lost_events",
    "prepare_losses",
    "read_events",
    "running_in",
]

#: The file in the directory of an audit in which its processes count the events that they cannot write.
_LOSSES = "losses"
_PAGE = 4096
_MAX_BYTES = 256 << 20  # of one file, which is more than a million events


@dataclass(frozen=True)
class Event:
    """One line of a process. `time` is in seconds of the monotonic clock, which processes share."""

    name: str
    time: float
    pid: int
    fields: dict[str, Any] = field(default_factory=dict)

    def text(self, key: str) -> str:
        """Return a field that is text; empty if there is none."""
        value = self.fields.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str, otherwise: float = 0) -> float:
        """Return a field that is a number."""
        value = self.fields.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise

    def words(self, key: str) -> tuple[str, ...]:
        """Return a field that is a list of texts."""
        value = self.fields.get(key)
        return tuple(map(str, value)) if isinstance(value, list) else ()


@dataclass(frozen=True)
class EventLog:
    """All events in the order of time. `preheat` has the events of preheat itself.

    `damaged` lines could not be read: a process was killed. `directory` is that of the audit, by which
    its processes are known. `incomplete` is the number of events for which a process had no memory, no
    descriptor or no space. `unread` files are not those of the audit, and were not read.
    """

    events: tuple[Event, ...]
    preheat: tuple[dict[str, Any], ...] = ()
    damaged: int = 0
    directory: Path | None = None
    incomplete: int = 0
    unread: int = 0

    def named(self, *names: str) -> Iterator[Event]:
        """Yield the events with these names."""
        return (event for event in self.events if event.name in names)


def read_events(directory: Path) -> EventLog:
    """Read what every process has appended. A line that is not whole is counted and left out."""
    events: list[Event] = []
    damaged = unread = 0
    for path in sorted(directory.glob("*.jsonl")):
        try:
            content = read_part(path, _MAX_BYTES, own=True)
        except OSError:
            unread += 1
            continue
        for line in filter(bytes.strip, content.split(b"\n")):
            event = _parse(line)
            if event is None:
                damaged += 1
            else:
                events.append(event)
    events.sort(key=lambda event: event.time)
    rows = (event.fields.get("row") for event in events if event.name == "preheat")
    own = tuple(row for row in rows if isinstance(row, dict))
    return EventLog(tuple(events), own, damaged, directory, lost_events(directory), unread)


def prepare_losses(directory: Path) -> None:
    """Make the file in which processes count the events that they cannot write."""
    (directory / _LOSSES).write_bytes(bytes(_PAGE))


def lost_events(directory: Path) -> int:
    """Return how many events could not be written. A process that cannot count makes an empty file."""
    try:
        count = int.from_bytes(read_part(directory / _LOSSES, _PAGE, own=True)[:4], "little")
    except OSError:
        count = 1  # Nobody knows.
    return count + sum(1 for _ in directory.glob("*.lost"))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parse(line: bytes) -> Event | None:
    row = _object(line)
    if row is None:
        return None
    name, time, pid = row.get("event"), row.get("time"), row.get("pid")
    if not isinstance(name, str) or not isinstance(pid, int) or not isinstance(time, int | float):
        return None
    return Event(name, float(time), pid, row)


def birth_of(pid: int) -> int | None:
    """Return the time at which a process was born, in the units of the kernel; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def running_in(directory: Path | None) -> Iterator[int]:
    """Yield the ids of the processes that run in the audit of a directory.

    Those of other users cannot be read, and neither can those that have overwritten their environment.
    """
    mark = f"PREHEAT_AUDIT={directory}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                env = Path(entry.path, "environ").read_bytes()
            except OSError:
                continue
            if mark in env.split(b"\0"):
                yield int(entry.name)
