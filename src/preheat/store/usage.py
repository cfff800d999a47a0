"""The running totals of a cache directory, as one small file."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

import xxhash

from preheat.process.locks import Lock

__all__ = ["Additions", "Usage", "pack", "unpack"]

_LAYOUT = struct.Struct("<5Q")
_MAX_NUMBER = (1 << 64) - 1


class Usage(NamedTuple):
    """The number of entries and their bytes, and what remained after the last sweep (`floor_…`)."""

    files: int = 0
    bytes: int = 0
    floor_files: int = 0
    floor_bytes: int = 0
    recounts: int = 0  # how often all entries were counted, so that a writer notices a recount

    def plus(self, files: int, size: int) -> Usage:
        """Return the totals with so many files and bytes added; they never become negative."""
        return self._replace(files=max(self.files + files, 0), bytes=max(self.bytes + size, 0))

    def over(self, limit: int, max_files: int) -> bool:
        """Return whether a sweep is due.

        A sweep cannot remove pinned entries. Where these exceed the limits, the next sweep is due when
        the usage has grown by a further 10 %.
        """
        return self.bytes > max(limit, self.floor_bytes * 1.1) or self.files > max(
            max_files, self.floor_files * 1.1
        )


def pack(usage: Usage) -> bytes:
    """Return the totals and their checksum as bytes; numbers beyond 64 bits are clamped."""
    front = _LAYOUT.pack(*map(min, usage, repeat(_MAX_NUMBER)))
    return front + xxhash.xxh3_128_digest(front)


def unpack(row: bytes) -> Usage | None:
    """Return the totals in `row`; None when they are damaged."""
    front, checksum = row[: _LAYOUT.size], row[_LAYOUT.size :]
    whole = len(front) == _LAYOUT.size and xxhash.xxh3_128_digest(front) == checksum
    return Usage(*_LAYOUT.unpack(front)) if whole else None


class _Addition:
    """What one thread adds to the totals, and the totals after that, or why there are none."""

    __slots__ = ("done", "fault", "files", "size", "usage")

    def __init__(self, files: int, size: int) -> None:
        self.files = files
        self.size = size
        self.usage: Usage | None = None
        self.fault: OSError | None = None
        self.done = False


class Additions:
    """Additions of the threads of a process to the totals. One thread adds for all that wait.

    Otherwise, each thread would poll for the lock of the file.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Addition] = deque()
        self._lock = Lock()

    def add(self, files: int, size: int, write: Callable[[int, int], Usage | None]) -> Usage | None:
        """Return the totals after `write` has added this, perhaps with the additions of others.

        Raises the `OSError` of `write`.
        """
        mine = _Addition(files, size)
        self._waiting.append(mine)
        with self._lock:
            if not mine.done:
                self._add_all(mine, write)
        if mine.fault is not None:
            raise mine.fault
        return mine.usage

    def _add_all(self, mine: _Addition, write: Callable[[int, int], Usage | None]) -> None:
        group = {mine}  # An interrupted thread may have removed it from the waiting additions.
        while self._waiting:
            group.add(self._waiting.popleft())
        usage = None
        fault = None
        try:
            usage = write(sum(each.files for each in group), sum(each.size for each in group))
        except OSError as error:
            fault = error
        for addition in group:
            addition.usage = usage
            addition.fault = fault
            addition.done = True
