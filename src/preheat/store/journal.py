"""Counters of many processes: a file each, added up when someone asks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from preheat.events import Stats, merge
from preheat.store.lock import hold
from preheat.store.trust import make_private

__all__ = ["Journal"]

_FOLD_AT = 64  # files from which on old ones are folded into one
_QUIET = 600.0  # seconds without a write after which a file counts as old


class Journal:
    """This process's counters in a file of its own. No file is ever shared by two writers."""

    def __init__(
        self, directory: Path, *, lock_dir: Path, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory, self._lock_dir, self._clock = directory, lock_dir, clock
        self._name = f"{os.getpid()}-{os.urandom(6).hex()}.json"
        self._base: Stats = {}  # what earlier files of this process already hold
        self._written: Stats = {}

    def another(self) -> Journal:
        """A journal for a forked child, with a file of its own."""
        return Journal(self._directory, lock_dir=self._lock_dir, clock=self._clock)

    def write(self, stats: Stats) -> None:
        """Put the counters on disk. Raises `OSError` where that is not possible."""
        if stats == self._written or not stats:
            return
        make_private(self._directory)
        path = self._directory / self._name
        if self._written and not path.exists():  # folded by another process: go on from there
            self._base = self._written
        _replace(path, {k: v - self._base.get(k, 0) for k, v in stats.items()})
        self._written = dict(stats)
        names = os.listdir(self._directory)
        if len(names) > _FOLD_AT:
            self._fold(names)

    def total(self) -> Stats:
        """All counters ever written here, added up; unreadable files count for nothing."""
        with suppress(FileNotFoundError):
            return merge(*(_read(self._directory / name) for name in os.listdir(self._directory)))
        return {}

    def clear(self) -> None:
        """Start the cache's counters from nothing."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                (self._directory / name).unlink(missing_ok=True)

    def _fold(self, names: list[str]) -> None:
        """Add old files to the one called total.json, so that processes do not leave litter."""
        make_private(self._lock_dir)
        with hold(self._lock_dir / f"fold-{str(self._directory).encode().hex()[-120:]}", 0) as mine:
            if not mine:
                return
            total = self._directory / "total.json"
            old = []
            for name in names:
                path = self._directory / name
                with suppress(FileNotFoundError):
                    if path != total and self._clock() - path.stat().st_mtime > _QUIET:
                        old.append(path)
            _replace(total, merge(_read(total), *map(_read, old)))
            for path in old:
                path.unlink(missing_ok=True)


def _read(path: Path) -> Stats:
    try:
        rows = json.loads(path.read_bytes())
        return {str(k): v for k, v in rows.items() if isinstance(v, int | float)}
    except (OSError, ValueError, AttributeError):
        return {}


def _replace(path: Path, stats: Stats) -> None:
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_text(json.dumps(stats, sort_keys=True))
    os.replace(staged, path)
