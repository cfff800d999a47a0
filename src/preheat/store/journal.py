"""The counters of many processes: each has a file, and readers add them up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from preheat.model.events import Stats, merge
from preheat.process.locks import Lock
from preheat.store.filesystem import is_silly_renamed, retry_transient
from preheat.store.lock import hold
from preheat.store.publish import replace
from preheat.store.trust import make_private, read_file

__all__ = ["Journal"]

_MERGE_AT = 64  # number of files from which old ones are merged into one
_QUIET = 600.0  # seconds without a write after which a file counts as old
_TOTAL = "total.json"  # the sum of old files
_MAX_COUNT = 1e18  # the largest counter


class Journal:
    """The counters of this process in its own file. Two processes never write the same file."""

    def __init__(
        self,
        directory: Path,
        *,
        lock_dir: Path,
        trust: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._lock_dir = lock_dir
        self._trust = trust
        self._clock = clock
        self._lock = Lock()
        self._name = _new_name()
        self._base: Stats = {}  # the counts in earlier files of this process
        self._written: Stats = {}
        self._written_at = 0.0

    def for_child(self) -> Journal:
        """Return a journal for a forked child, with its own file."""
        return Journal(self._directory, lock_dir=self._lock_dir, trust=self._trust, clock=self._clock)

    def write(self, stats: Stats) -> None:
        """Write the counters to the disk. Raises `OSError` if that is not possible."""
        with self._lock:
            if stats == self._written or not stats:
                return
            make_private(self._directory, trust=self._trust)
            if self._written and self._is_abandoned():
                self._name = _new_name()
                self._base = self._written
            rest = {k: v - self._base.get(k, 0) for k, v in stats.items()}
            self._put(self._name, rest)
            self._written = dict(stats)
            self._written_at = self._clock()
            names = self._names()
            if len(names) > _MERGE_AT:
                self._merge_old_files(names)

    def total(self) -> Stats:
        """Return the sum of all counters in this directory; unreadable files are ignored."""
        with suppress(OSError):
            names = self._names()
            return merge(*(self._read(name) for name in names if _is_counter_file(name)))
        return {}

    def clear(self) -> None:
        """Remove all counters of the cache."""
        with suppress(FileNotFoundError):
            for name in self._names():
                with suppress(OSError):  # A directory does not belong to the journal.
                    (self._directory / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return [
            name for name in retry_transient(os.listdir, self._directory) if not is_silly_renamed(name)
        ]

    def _is_abandoned(self) -> bool:
        """Return whether the file was removed or merged, or is so old that it may be at any moment."""
        quiet = self._clock() - self._written_at > _QUIET / 2
        path = self._directory / self._name
        return quiet or path.is_symlink() or not path.is_file()

    def _merge_old_files(self, names: list[str]) -> None:
        """Merge old files into total.json, so that the number of files is bounded."""
        make_private(self._lock_dir, trust=self._trust)
        with hold(self._lock_dir / f"fold-{os.fsencode(self._directory).hex()[-120:]}", 0) as mine:
            if not mine:
                return
            old = []
            for name in names:
                with suppress(FileNotFoundError):
                    status = retry_transient(os.lstat, f"{self._directory}/{name}")
                    if name != _TOTAL and self._clock() - status.st_mtime > _QUIET:
                        old.append(name)
            self._put(
                _TOTAL, merge(*(self._read(name) for name in (_TOTAL, *old) if _is_counter_file(name)))
            )
            for name in old:
                with suppress(OSError):  # A directory does not belong to the journal.
                    (self._directory / name).unlink(missing_ok=True)

    def _put(self, name: str, stats: Stats) -> None:
        text = json.dumps(stats, sort_keys=True).encode()
        replace(f"{self._directory}/{name}", [text], durable=False)

    def _read(self, name: str) -> Stats:
        try:
            rows = json.loads(read_file(f"{self._directory}/{name}", trust=self._trust)[0])
            return {str(counter): value for counter, value in rows.items() if _is_count(value)}
        except (OSError, ValueError, AttributeError, RecursionError):
            return {}


def _new_name() -> str:
    return f"{os.getpid()}-{os.urandom(6).hex()}.json"


def _is_counter_file(name: str) -> bool:
    """Return whether this is a file of counters, and not one that is being written."""
    return name.endswith(".json")


def _is_count(value: object) -> bool:
    """Return whether this is a number that can be added to others."""
    return type(value) in (int, float) and -_MAX_COUNT < value < _MAX_COUNT  # type: ignore[operator]
