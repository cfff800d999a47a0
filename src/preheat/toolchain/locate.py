"""Find the compilers and their builds, without loading them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.errors import ToolchainNotFoundError
from preheat.model import codec
from preheat.model.config import environ
from preheat.store.publish import replace
from preheat.store.trust import read_file
from preheat.toolchain.binaries.elf import build_id

if TYPE_CHECKING:
    from preheat.toolchain.pool import WorkerPool

__all__ = ["SEARCH_VARIABLES", "Library", "Located", "locate"]

#: The variables that pathfinder's search depends on, besides the installed packages. The last two
#: decide where the user's site-packages are, which it searches as well.
SEARCH_VARIABLES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "HOME",
    "PYTHONUSERBASE",
)
_TITLES = {"nvrtc": "NVRTC", "nvJitLink": "nvJitLink"}


class Library(NamedTuple):
    """A compiler library: its files, the build id that keys contain, and the version to display."""

    title: str
    files: tuple[str, ...]  # Its own file, then those that it loads.
    build: str
    version: str

    @property
    def path(self) -> str:
        return self.files[0]


class Located(NamedTuple):
    """The toolchain of this machine. `roots` are its include directories by label."""

    libraries: Mapping[str, Library]
    missing: Mapping[str, str]
    roots: Mapping[str, str]
    archs: tuple[int, ...] = ()  # The compute capabilities that NVRTC compiles for: 90 is 9.0.

    def library(self, name: str) -> Library:
        """Return the library `name`, or raise an error with a hint how to install it."""
        if name in self.libraries:
            return self.libraries[name]
        raise ToolchainNotFoundError(
            f"{_TITLES[name]} was not found: {self.missing.get(name, 'not installed')}",
            hint="pip install 'preheat[cu13]', or install the CUDA 13 toolkit and set CUDA_HOME",
        )


def locate(pool: Callable[[], WorkerPool], memo_dir: Path | None, *, fresh: bool = False) -> Located:
    """Return the compilers from the memo if it is still valid, else search for them in a worker."""
    # The surroundings are computed first, because they may change during the search.
    memo = None if memo_dir is None else _Memo(memo_dir, _surroundings())
    if memo is not None and not fresh and (known := memo.recall()):
        return known
    located = _search(pool())
    if memo is not None and located.libraries:
        memo.remember(located)
    return located


def _search(workers: WorkerPool) -> Located:
    answer = workers.call({"do": "locate"}).message
    return Located(
        libraries={
            name: Library(_TITLES[name], tuple(row["files"]), row["build"], row["version"])
            for name, row in answer["libraries"].items()
        },
        missing=answer["missing"],
        roots=answer["roots"],
        archs=tuple(answer["archs"]),
    )


def _surroundings() -> str:
    """Return a hash of everything that decides where the search looks, and of the user."""
    env = environ()
    parts: list[object] = [os.geteuid(), sys.prefix, sys.executable, sys.flags.no_user_site]
    parts += [env.get(variable, "") for variable in SEARCH_VARIABLES]
    for place in sys.path:
        if place.endswith("-packages"):  # Installing or removing a package changes its time.
            with suppress(OSError):
                parts += [place, os.stat(place).st_mtime_ns]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _stamps(located: Located) -> list[list[int]]:
    files = [file for library in located.libraries.values() for file in library.files]
    return [[f.st_size, f.st_mtime_ns, f.st_ino] for f in map(os.stat, files)]


def _build_of(library: Library) -> str:
    """Return the build of the files of a library as they are now."""
    return "+".join([build_id(Path(file)) for file in library.files])


class _Memo:
    """The result of a search, cached in a file with a checksum, because it names libraries to load."""

    def __init__(self, directory: Path, surroundings: str) -> None:
        # Earlier releases stored plain JSON under this name. Each release treats the file of the other
        # as damaged.
        self._path = f"{directory}/toolchain-{surroundings[:16]}.json"
        self._digest = surroundings

    def recall(self) -> Located | None:
        """Return the cached result, or None if the file is missing, damaged or outdated."""
        try:
            row = json.loads(codec.unpack(self._digest, read_file(self._path)[0]).sections["memo"])
            known = _decode(row)
            return known if _stamps(known) == row["stamps"] else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def remember(self, located: Located) -> None:
        """Store the result for the next process. If that fails, the next process searches again."""
        with suppress(OSError):
            if any(_build_of(library) != library.build for library in located.libraries.values()):
                return  # The files were replaced after the worker had loaded them.
            row = {
                "libraries": {name: library._asdict() for name, library in located.libraries.items()},
                "missing": dict(located.missing),
                "roots": dict(located.roots),
                "archs": located.archs,
                "stamps": _stamps(located),
            }
            # A section, because the order of roots matters.
            sections = {"memo": json.dumps(row).encode()}
            replace(self._path, [codec.pack(self._digest, {}, sections)], durable=False)


def _decode(row: Mapping[str, Any]) -> Located:
    """Return the result in a memo. Invalid data raises a built-in error, which `recall` catches."""
    libraries: dict[str, Library] = {}
    missing: dict[str, str] = row["missing"]
    roots: dict[str, str] = row["roots"]
    texts = [*missing, *missing.values(), *roots, *roots.values()]
    for name, fields in row["libraries"].items():
        library = Library(fields["title"], tuple(fields["files"]), fields["build"], fields["version"])
        texts += library.title, *library.files, library.build, library.version
        libraries[name] = library
    if not libraries or libraries.keys() - _TITLES.keys():
        raise ValueError(f"{list(libraries)} are not the compilers")
    archs = tuple(row["archs"])
    if set(map(type, archs)) - {int} or set(map(type, texts)) - {str}:
        raise TypeError("a memo has texts, and numbers of architectures")
    "".join(texts).encode()  # A lone surrogate, which JSON can contain, raises here.
    return Located(libraries, missing, roots, archs)
