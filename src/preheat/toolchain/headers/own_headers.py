"""Compare the header files of a program's own include directories with a state, without a compiler.

A sealed process does this before it uses the code of a bundle. It need not have a toolkit or headers,
so only files that are present count: a header that differs, and a file that is found instead of one.
Each file is read once, and its result is kept.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from preheat.model.artifact import Header
from preheat.model.program import Program
from preheat.process.callsite import shown_path
from preheat.process.lazy import LazyModule
from preheat.toolchain.headers.evidence import file_digest
from preheat.toolchain.headers.states import ABSOLUTE, HeaderState, Place, is_toolkit, part_of, path_of

if TYPE_CHECKING:
    from preheat.toolchain.headers import includes
else:
    includes = LazyModule("preheat.toolchain.headers.includes")  # Most processes compare no text.

__all__ = ["HeaderChange", "OwnHeaders", "line_that_includes", "toolkit_places"]

#: A directory that has this file is an include directory of a toolkit, perhaps among other headers.
_TOOLKIT_FILE = "cuda_runtime_api.h"


class HeaderChange(NamedTuple):
    """A header file that differs from a state: its name there, its path here, and what happened."""

    header: Header
    path: str
    reason: str


class OwnHeaders:
    """The header files of this machine as they were when they were first compared."""

    def __init__(self) -> None:
        self._digests: dict[str, str | OSError | None] = {}  # by path; None: a compiler finds no file
        self._directories: dict[str, bool] = {}

    def change(
        self,
        program: Program,
        state: HeaderState,
        own: Mapping[str, str],
        toolkit: Collection[Place] = (),
    ) -> HeaderChange | None:
        """Return the first header by which `state` differs from this machine, or None.

        `own` are the program's own include directories by label, and `toolkit` has the `toolkit_places`
        in them, as they were at the bake.
        """
        known = {*toolkit}
        headers = [h for h in state.headers if not is_toolkit(h.root) and (h.root, h.name) not in known]
        gone: list[Header] = []
        for header in headers:
            if (path := path_of(own, header.root, header.name)) is None:
                continue
            digest = self._digest(path) if self._is_directory(own.get(header.root, "/")) else None
            if isinstance(digest, OSError):
                reason = f"header {header.name} cannot be read: {digest.strerror or digest}"
                return HeaderChange(header, path, reason)
            if digest is None:
                gone.append(header)
            elif digest != header.digest:
                return HeaderChange(header, path, f"header {header.name} has changed since the bake")
        for header in gone:
            if (replacement := self._replacement(program, state, header, own)) is not None:
                return replacement
        return self._new_file(state, headers, own, {root for root, name in known if not name})

    def _new_file(
        self,
        state: HeaderState,
        headers: Sequence[Header],
        own: Mapping[str, str],
        toolkits: Collection[str],
    ) -> HeaderChange | None:
        """Return a file that was absent and that a compile would find now, perhaps before a header.

        In the directories of `toolkits`, only the names of `headers` count: another release of a
        toolkit may have more files.
        """
        for root, name in state.absent:
            place = path_of(own, root, name)
            if place is None or not self._is_directory(own.get(root, "/")):
                continue
            names = [""]
            if name.endswith("/"):  # It stands for all names in it. Only names of headers count.
                if not self._is_directory(place):
                    continue
                counted = headers if root in toolkits else state.headers
                names = [tail for header in counted for tail in _tails(header.name)]
            elif root in toolkits and not any(name in _tails(header.name) for header in headers):
                continue
            for rest in names:
                if self._digest(place + rest) is not None:
                    reason = f"header {shown_path(place + rest)} is new since the bake"
                    return HeaderChange(Header(root, name + rest, ""), place + rest, reason)
        return None

    def _replacement(
        self, program: Program, state: HeaderState, gone: Header, own: Mapping[str, str]
    ) -> HeaderChange | None:
        """Return another file that an include now finds instead of a header that is gone."""
        spelled: set[str] | None = None
        if gone.root == ABSOLUTE:
            return None
        for tail in _tails(gone.name):
            for root in own:
                if part_of(root) != part_of(gone.root):
                    continue
                path = f"{own[root]}/{tail}"
                if not self._is_directory(own[root]) or self._digest(path) in (None, gone.digest):
                    continue
                if spelled is None:
                    spelled = {name for *_, name in _includes(program, state, own, gone.root)}
                if tail in spelled or tail == gone.name:
                    reason = f"header {gone.name} is gone, and {shown_path(path)} is found instead"
                    return HeaderChange(gone, path, reason)
        return None

    def _digest(self, path: str) -> str | OSError | None:
        """Return the hash of a file, the error of one that cannot be read, or None without a file."""
        if path not in self._digests:
            self._digests[path] = _digest_now(path)
        return self._digests[path]

    def _is_directory(self, path: str) -> bool:
        if path not in self._directories:
            self._directories[path] = os.path.isdir(path)
        return self._directories[path]


def toolkit_places(
    state: HeaderState, own: Mapping[str, str], located: Collection[str]
) -> tuple[Place, ...]:
    """Return the headers of a toolkit in the program's own include directories, which may have others.

    `located` are the include directories of the toolkit that compiles: a header is one of a toolkit if
    they have a file of its name. A directory itself is a place without a name.
    """
    places: list[Place] = []
    for root, directory in own.items():
        if _has_toolkit(directory):
            places.append((root, ""))
            names = [header.name for header in state.headers if header.root == root]
            places += [(root, name) for name in names if _is_in_any(located, name)]
    return tuple(places)


def _has_toolkit(directory: str) -> bool:
    real = os.path.realpath(directory)
    places = [real, os.path.dirname(real)] if os.path.basename(real) == "cccl" else [real]
    return any(os.path.isfile(f"{place}/{_TOOLKIT_FILE}") for place in places)


def _is_in_any(directories: Iterable[str], name: str) -> bool:
    steps = name.split("/")
    return ".." not in steps and any(os.path.isfile(f"{each}/{name}") for each in directories)


def line_that_includes(
    program: Program, state: HeaderState, roots: Mapping[str, str], header: Header
) -> str | None:
    """Return the include of a header as `file:line: text`, or None if no text here has it."""
    tails = _tails(header.name)
    lines = [
        (tails.index(name), f"{file}:{number}: {line}")
        for file, number, line, spelled in _includes(program, state, roots, header.root)
        if (name := spelled.lstrip("/")) in tails
    ]
    return min(lines)[1] if lines else None


def _includes(
    program: Program, state: HeaderState, roots: Mapping[str, str], root: str
) -> Iterator[tuple[str, int, str, str]]:
    """Yield file, line number, line and name of each include of a part of a program and its headers."""
    for file, text in _texts(program, state, roots, part_of(root)):
        for number, line, name in includes.include_lines(text):
            yield file, number, line, name


def _texts(
    program: Program, state: HeaderState, roots: Mapping[str, str], part: str
) -> Iterator[tuple[str, str]]:
    """Yield the texts of a part of a program, and of its own headers, with the names of their files."""
    sources = getattr(program, "sources", {})
    own = sources.get(int(part), program) if part else program
    yield own.label if own.path is None else shown_path(own.path), own.source
    yield from own.headers
    for header in state.headers:
        path = path_of(roots, header.root, header.name)
        if path is None or part_of(header.root) != part or not os.path.isfile(path):
            continue
        with suppress(OSError, ValueError), open(path, encoding="utf-8", errors="replace") as file:
            yield shown_path(path), file.read()


def _tails(name: str) -> list[str]:
    """Return the ends of a relative path by which an include may name it, the longest first."""
    steps = name.split("/")
    return ["/".join(steps[at:]) for at in range(len(steps))]


def _digest_now(path: str) -> str | OSError | None:
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return None
    except (OSError, ValueError):  # A compiler does not find it either.
        return None
    try:
        return file_digest(path)
    except FileNotFoundError:
        return None
    except OSError as fault:
        return fault
