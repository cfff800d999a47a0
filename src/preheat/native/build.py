"""The hash of its sources that every native library contains, by which an old build is recognised.

`hatch_build.py` runs this file by itself, so it imports nothing of preheat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["BUILD_AGAIN", "MACRO", "hash_of", "is_stale", "sources_in"]

#: What to do about a library that was built from other sources.
BUILD_AGAIN = "run make in the source tree of preheat, or python hatch_build.py"

#: The macro that holds the hash while C code is compiled.
MACRO = "PREHEAT_SOURCES"
_MARK = "preheat sources "  # before the hash in `native_mark.c`


def hash_of(sources: Iterable[Path]) -> str:
    """Return the hash of the names and the content of these files."""
    digest = hashlib.sha256()
    for file in sources:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def sources_in(directory: Path) -> list[Path]:
    """Return the C sources in a directory, the files that they include, and lists of exported names."""
    return sorted(file for file in directory.iterdir() if file.suffix in (".c", ".h", ".def", ".map"))


def is_stale(library: Path, sources: Path) -> bool:
    """Return True if a library was not built from what this directory contains now."""
    return f"{_MARK}{hash_of(sources_in(sources))}".encode() not in library.read_bytes()
