"""The files that a compile may open, scanned before it, by following the includes of its texts."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from preheat.errors import InputError
from preheat.model.program import Program
from preheat.toolchain.headers.evidence import Evidence, FileHasher, Memo
from preheat.toolchain.headers.includes import (
    QUERIES,
    Include,
    has_include_macros,
    includes,
    line_names,
)
from preheat.toolchain.headers.states import ABSOLUTE, Place

__all__ = ["SOURCE_PLACE", "Survey"]

#: The directory that sources seem to be in, see worker.py. A quoted include searches there first.
SOURCE_PLACE = (ABSOLUTE, "preheat")

_NOT_FILES = ("/proc/", "/sys/", "/dev/pts/")  # Reading some of these never ends.
# The most files to scan before a compile. If there are more, the compiler's report says which matter.
_MAX_FILES = 5000


class _Text(NamedTuple):
    """A text with includes: the directory that its quoted includes search first, and the includes."""

    beside: Place | None
    includes: tuple[Include, ...]


class _File(NamedTuple):
    """A file as it was before the compile. `text` is kept for files outside the toolkit."""

    evidence: Evidence
    includes: tuple[Include, ...]
    text: str | None


class Survey:
    """The files that a compile may open, as they are before it.

    `roots` maps labels to directories in search order. `toolkit` lists the labels of the toolkit.
    """

    def __init__(
        self, program: Program, roots: Mapping[str, str], toolkit: Iterable[str], memo: Memo
    ) -> None:
        self.program = program
        self.roots = roots
        self._memo = memo
        self.toolkit_roots = {label for label in toolkit if label in roots}
        if own := roots.keys() - self.toolkit_roots:  # One of them may be a directory of the toolkit.
            directories = {os.path.realpath(roots[label]) for label in self.toolkit_roots}
            self.toolkit_roots |= {
                label for label in own if os.path.realpath(roots[label]) in directories
            }
        self.in_memory = dict(program.headers)
        self.texts = [_Text(SOURCE_PLACE, tuple(includes(program.source)))]
        for name, text in program.headers:
            beside = (ABSOLUTE, os.path.dirname(name).lstrip("/")) if name.startswith("/") else None
            self.texts.append(_Text(beside, tuple(includes(text))))
        self.files: dict[Place, _File] = {}
        self.macros: set[str] = set()  # Macros of the toolkit that wrap `__has_include`.
        self._is_file: dict[str, bool] = {}
        self._view = FileHasher(memo)
        self._scan_includes(self.texts)

    def add(self, places: Iterable[Place]) -> None:
        """Scan files that no include of the texts led to. Checks for existing files are repeated."""
        self._view = FileHasher(self._memo)
        self._is_file.clear()
        texts = []
        for place in places:
            if place not in self.files:
                self._scan(place)
                texts.append(self.text(place))
        self._scan_includes(texts)

    def text(self, place: Place) -> _Text:
        """Return the includes of a scanned file."""
        root, name = place
        return _Text((root, os.path.dirname(name)), self.files[place].includes)

    def find(self, include: Include, beside: Place | None) -> tuple[Place | None, list[Place]]:
        """Return the file that an include finds, and the names searched before it (not files)."""
        name = include.name
        passed: list[Place] = []
        if name is None or name in self.in_memory:
            return None, []
        if os.path.isabs(name):
            place = (ABSOLUTE, name.lstrip("/"))
            return (place, []) if self.is_file(place) else (None, [])
        candidates = [(root, name) for root in self.roots]
        if include.quoted and beside is not None:
            candidates.insert(0, (beside[0], os.path.join(beside[1], name)))
        for place in candidates:
            if self.is_file(place):
                return place, passed
            passed.append(place)
        return None, passed

    def is_file(self, place: Place) -> bool:
        """Return whether there was a file before the compile."""
        path = self.path(place)
        if path not in self._is_file:
            self._is_file[path] = _is_file(path)
        return self._is_file[path]

    def path(self, place: Place) -> str:
        root, name = place
        return f"{self.roots.get(root, '')}/{name}"

    def is_real(self, name: str) -> bool:
        """Return whether a name in the compiler's report is the name of a file.

        Headers in memory and names set by `#line` are not files. A name set by `#line` is recognised
        only if it cannot be a file: the compiler reports files by absolute names or names with `@`.
        """
        if name in self.in_memory:
            return name.startswith("/") and os.path.isfile(name)
        return name.startswith(("/", "@")) or not any(
            name in line_names(text) for text in self._user_texts()
        )

    def _user_texts(self) -> Iterator[str]:
        """Yield all texts outside the toolkit."""
        yield from self.program.texts
        for place, file in self.files.items():
            if self.is_user_file(place):
                yield file.text or ""

    def is_user_file(self, place: Place) -> bool:
        """Return whether a file is outside the toolkit."""
        return place[0] not in self.toolkit_roots

    def _scan_includes(self, texts: Iterable[_Text]) -> None:
        """Scan every file that includes lead to, also includes in branches that are not taken."""
        queue = deque(texts)
        while queue and len(self.files) < _MAX_FILES:
            beside, found = queue.popleft()
            for include in found:
                place, _ = self.find(include, beside)
                if place is None or place in self.files:
                    continue
                try:
                    self._scan(place)
                except OSError:  # The compiler reports the error if it needs the file.
                    continue
                queue.append(self.text(place))

    def _scan(self, place: Place) -> None:
        path = self.path(place)
        mine = self.is_user_file(place)
        if os.path.realpath(path).startswith(_NOT_FILES):
            raise OSError("it is a pseudo file of the kernel")
        evidence = self._view.evidence(path)
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            text = file.read()
        if not mine:
            self.macros |= has_include_macros(text, [*QUERIES, *self.macros])
        self.files[place] = _File(
            evidence,
            tuple(includes(text, exact=mine)),
            text if mine or "__has_include" in text else None,
        )


def _is_file(path: str) -> bool:
    """Return whether `path` is a regular file. Raise `InputError` for a pipe or socket."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise InputError(
            f"an include leads to {path}, which is a pipe: the compiler would wait for its writer"
        )
    return stat.S_ISREG(mode)
