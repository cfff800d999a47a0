"""Counters of many processes: a file each, added up when someone asks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from preheat.cache.lock import hold
from preheat.cache.publish import replace
from preheat.cache.trust import make_private, read_file
from preheat.events import Stats, merge
from preheat.locks import Lock

__all__ = ["Journal"]

_FOLD_AT = 64  # files from which on old ones are folded into one
_QUIET = 600.0  # seconds without a write after which a file counts as old
_TOTAL = "total.json"  # what old files were folded into
_MOST = 1e18  # no counter is larger


class Journal:
    """This process's counters in a file of its own. No file is ever shared by two writers."""

    def __init__(
        self,
        directory: Path,
        *,
        lock_dir: Path,
        trust: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._lock_dir, self._trust, self._clock = directory, lock_dir, trust, clock
        self._lock = Lock()
        self._name = _new_name()
        self._base: Stats = {}  # what earlier files of this process already hold
        self._written: Stats = {}
        self._written_at = 0.0

    def another(self) -> Journal:
        """A journal for a forked child, with a file of its own."""
        return Journal(self._directory, lock_dir=self._lock_dir, trust=self._trust, clock=self._clock)

    def write(self, stats: Stats) -> None:
        """Put the counters on disk. Raises `OSError` where that is not possible."""
        with self._lock:
            if stats == self._written or not stats:
                return
            make_private(self._directory, trust=self._trust)
            if self._written and self._given_up():
                self._name, self._base = _new_name(), self._written
            rest = {k: v - self._base.get(k, 0) for k, v in stats.items()}
            self._put(self._name, rest)
            self._written, self._written_at = dict(stats), self._clock()
            names = os.listdir(self._directory)
            if len(names) > _FOLD_AT:
                self._fold(names)

    def total(self) -> Stats:
        """All counters ever written here, added up; unreadable files count for nothing."""
        with suppress(OSError):
            names = os.listdir(self._directory)
            return merge(*(self._read(name) for name in names if _is_whole(name)))
        return {}

    def clear(self) -> None:
        """Start the cache's counters from nothing."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                with suppress(OSError):  # a directory is none of ours
                    (self._directory / name).unlink(missing_ok=True)

    def _given_up(self) -> bool:
        """Whether our file was cleared away or folded, or is so old that it may be any moment."""
        quiet = self._clock() - self._written_at > _QUIET / 2
        path = self._directory / self._name
        return quiet or path.is_symlink() or not path.is_file()

    def _fold(self, names: list[str]) -> None:
        """Add old files to the one called total.json, so that processes do not leave litter."""
        make_private(self._lock_dir, trust=self._trust)
        with hold(self._lock_dir / f"fold-{os.fsencode(self._directory).hex()[-120:]}", 0) as mine:
            if not mine:
                return
            old = []
            for name in names:
                with suppress(FileNotFoundError):
                    found = os.lstat(self._directory / name)
                    if name != _TOTAL and self._clock() - found.st_mtime > _QUIET:
                        old.append(name)
            self._put(_TOTAL, merge(*(self._read(name) for name in (_TOTAL, *old) if _is_whole(name))))
            for name in old:
                with suppress(OSError):  # a directory is none of ours
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


def _is_whole(name: str) -> bool:
    """Whether this is a file of counters and not one still being written."""
    return name.endswith(".json")


def _is_count(value: object) -> bool:
    """Whether this is a number that can be added to others."""
    return type(value) in (int, float) and -_MOST < value < _MOST  # type: ignore[operator]
