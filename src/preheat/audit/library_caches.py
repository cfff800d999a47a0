"""Machine code in the caches of other libraries, which keep it in files of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from preheat.audit.images import canonical

__all__ = ["LibraryCaches"]

_MOST_FILES = 50_000


class LibraryCaches:
    """Finds a module among the files of the caches that an environment names. Files are read late."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._places = dict(_places(env))
        self._by_size: dict[int, list[tuple[str, Path]]] | None = None

    def find(self, digest: str | None, size: int) -> str | None:
        """Return the name of the library in whose cache a module is."""
        if digest is None:
            return None
        if self._by_size is None:
            self._by_size = {}
            for name, path, found in self._files():
                self._by_size.setdefault(found, []).append((name, path))
        for name, path in self._by_size.get(size, ()):
            try:
                if hashlib.sha256(canonical(path.read_bytes())).hexdigest() == digest:
                    return name
            except OSError:
                continue  # Another process has removed it.
        return None

    def _files(self) -> Iterator[tuple[str, Path, int]]:
        number = 0
        for name, place in self._places.items():
            for directory, _, files in os.walk(place):
                for file in files:
                    number += 1
                    path = Path(directory, file)
                    if file.endswith(".cubin") and number < _MOST_FILES:
                        try:
                            yield name, path, path.stat().st_size
                        except OSError:
                            continue


def _places(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = env.get("HOME", "")
    triton = env.get("TRITON_CACHE_DIR") or (f"{home}/.triton/cache" if home else "")
    if triton:
        yield "Triton", Path(triton)
    if inductor := env.get("TORCHINDUCTOR_CACHE_DIR"):
        yield "Inductor", Path(inductor)
