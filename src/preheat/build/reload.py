"""Detects that a file of a loaded program has changed, so that it is built again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from preheat.build.builder import Builder
from preheat.model.artifact import Artifact
from preheat.model.config import SealMode
from preheat.model.program import Program
from preheat.toolchain.headers.evidence import FileHasher, Memo

__all__ = ["TrackedFiles"]

_EVERY = 1.0  # seconds between two comparisons of the headers of one program

_sources = Memo()  # hashes of the source files of this process


class TrackedFiles:
    """The files that a loaded program was made from.

    The source file is compared at each call of `changed`, the headers at most once a second. The
    headers of the toolkit are not compared: replacing a toolkit needs a new process.
    """

    def __init__(self, builder: Builder, path: Path | None) -> None:
        """Hash the source file before the program is read from it."""
        self._builder = builder
        self._path = None if path is None else os.fspath(path)
        self._digest = _hash_file(self._path)
        self._header_change: Callable[[], str | None] | None = None
        self._due = 0.0
        self._changed = False

    def track(self, program: Program, artifact: Artifact) -> TrackedFiles | None:
        """Track the headers of `artifact` as well. Return None if there is no file to compare."""
        self._header_change = self._builder.header_change(program, artifact)
        self._due = monotonic() + _EVERY
        return None if self._path is None and self._header_change is None else self

    def changed(self) -> bool:
        """Return whether a file has changed since the program was loaded.

        In a sealed process the result is False, because changed programs could not be compiled.
        """
        if self._builder.sealed is SealMode.ERROR:
            return False
        if not self._changed:
            self._changed = _hash_file(self._path) != self._digest or self._compare_headers()
        return self._changed

    def _compare_headers(self) -> bool:
        if self._header_change is None or (now := monotonic()) < self._due:
            return False
        self._due = now + _EVERY
        return self._header_change() is not None


def _hash_file(path: str | None) -> str | None:
    """Return the hash of a file; None when it cannot be read."""
    if path is None:
        return None
    try:
        return FileHasher(_sources).evidence(path).digest
    except (OSError, ValueError):  # A name with a NUL character raises ValueError.
        return None
