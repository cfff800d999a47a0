"""Where the compilers are and which builds they are, without loading them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.config import environ
from preheat.errors import ToolchainNotFoundError
from preheat.toolchain.elf import build_id

if TYPE_CHECKING:
    from preheat.toolchain.pool import WorkerPool

__all__ = ["SEARCH_VARIABLES", "Library", "Located", "locate"]

#: What pathfinder's search depends on, besides the installed packages. The last two name the user's
#: site-packages, which it searches too.
SEARCH_VARIABLES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "HOME",
    "PYTHONUSERBASE",
)
_TITLES = {"nvrtc": "NVRTC", "nvJitLink": "nvJitLink"}


@dataclass(frozen=True, slots=True)
class Library:
    """A compiler library: its files, the build id that keys carry, its version for people."""

    title: str
    files: tuple[str, ...]  # its own, then those that it loads
    build: str
    version: str

    @property
    def path(self) -> str:
        return self.files[0]


@dataclass(frozen=True, slots=True)
class Located:
    """The toolchain of this machine. `roots` are its include directories, by label."""

    libraries: Mapping[str, Library]
    missing: Mapping[str, str]
    roots: Mapping[str, str]
    archs: tuple[int, ...] = ()  # compute capabilities NVRTC compiles for, 90 for 9.0

    def library(self, name: str) -> Library:
        """The library called `name`, or an error that says how to get it."""
        if name in self.libraries:
            return self.libraries[name]
        raise ToolchainNotFoundError(
            f"{_TITLES[name]} was not found: {self.missing.get(name, 'not installed')}",
            hint="pip install 'preheat[cu13]', or install the CUDA 13 toolkit and set CUDA_HOME",
        )


def locate(pool: Callable[[], WorkerPool], memo_dir: Path | None, *, fresh: bool = False) -> Located:
    """Find the compilers: from the memo while nothing it depends on changed, else by a worker."""
    memo = None if memo_dir is None else memo_dir / f"toolchain-{_surroundings()}.json"
    if memo is not None and not fresh and (known := _recall(memo)):
        return known
    found = pool().call({"do": "locate"}).message
    located = Located(
        libraries={
            name: Library(_TITLES[name], tuple(row["files"]), row["build"], row["version"])
            for name, row in found["libraries"].items()
        },
        missing=found["missing"],
        roots=found["roots"],
        archs=tuple(found["archs"]),
    )
    if memo is not None and located.libraries:
        _remember(memo, located)
    return located


def _surroundings() -> str:
    """A fingerprint of everything that decides where the search would look."""
    env = environ()
    seen: list[object] = [sys.prefix, sys.executable, sys.flags.no_user_site]
    seen += [env.get(variable, "") for variable in SEARCH_VARIABLES]
    for place in sys.path:
        if place.endswith("-packages"):  # installing or removing a package changes its stamp
            with suppress(OSError):
                seen += [place, os.stat(place).st_mtime_ns]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def _stamps(located: Located) -> list[list[int]]:
    files = [file for library in located.libraries.values() for file in library.files]
    return [[f.st_size, f.st_mtime_ns, f.st_ino] for f in map(os.stat, files)]


def _build_of(library: Library) -> str:
    """The build that the files of a library have now."""
    return "+".join(build_id(Path(file)) for file in library.files)


def _recall(memo: Path) -> Located | None:
    try:
        row = json.loads(memo.read_bytes())
        libraries = {
            name: Library(fields["title"], tuple(fields["files"]), fields["build"], fields["version"])
            for name, fields in row["libraries"].items()
        }
        known = Located(libraries, row["missing"], row["roots"], tuple(row["archs"]))
        stamps = _stamps(known)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if stamps == row["stamps"] else None


def _remember(memo: Path, located: Located) -> None:
    try:
        stamps = _stamps(located)
        if any(_build_of(library) != library.build for library in located.libraries.values()):
            return  # replaced since the worker loaded them
    except OSError:
        return
    row = {
        "libraries": {name: asdict(library) for name, library in located.libraries.items()},
        "missing": dict(located.missing),
        "roots": dict(located.roots),
        "archs": located.archs,
        "stamps": stamps,
    }
    staged = memo.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # only a memo: the next process searches again
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(row, file)
        os.replace(staged, memo)
