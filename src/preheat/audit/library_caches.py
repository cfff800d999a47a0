"""Machine code in the caches of other libraries, which keep each module in its own file."""

from __future__ import annotations

import bisect
import getpass
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from preheat.audit.images import canonical

__all__ = ["LibraryCaches"]

_MAX_FILES = 50_000
_ELF = b"\x7fELF"
_MAX_BEFORE_CODE = 1 << 16  # bytes: CuPy writes a checksum and the names of kernels before the code


class _CachedFile(NamedTuple):
    """A file with machine code. Files are sorted by size."""

    size: int
    path: Path
    library: str


class LibraryCaches:
    """Finds a module among the files of the caches that an environment names.

    The directories are listed at the first question, and a file is read only if its size fits.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._directories = dict(_directories(env))
        self._listed: list[_CachedFile] | None = None

    def find(self, digest: str | None, size: int) -> str | None:
        """Return the name of the library in whose cache a module is."""
        if digest is None:
            return None
        # CuPy also leaves out the last byte of the code, so a file has at least `size - 1` bytes.
        files = self._files()
        first = bisect.bisect_left(files, size - 1, key=_size)
        last = bisect.bisect_right(files, size + _MAX_BEFORE_CODE, key=_size)
        for file in files[first:last]:
            try:
                content = file.path.read_bytes()
            except OSError:
                continue  # Another process has removed it.
            code = content[max(content.find(_ELF), 0) :]
            if hashlib.sha256(canonical(code)).hexdigest() == digest:
                return file.library
        return None

    def _files(self) -> list[_CachedFile]:
        if self._listed is None:
            self._listed = sorted(self._list_files())
        return self._listed

    def _list_files(self) -> Iterator[_CachedFile]:
        number = 0
        for library, place in self._directories.items():
            for directory, _, files in os.walk(place):
                for file in files:
                    number += 1
                    path = Path(directory, file)
                    if file.endswith(".cubin") and number < _MAX_FILES:
                        try:
                            yield _CachedFile(path.stat().st_size, path, library)
                        except OSError:
                            continue


def _size(file: _CachedFile) -> int:
    return file.size


def _directories(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = env.get("HOME", "")
    triton_home = env.get("TRITON_HOME") or home
    triton = env.get("TRITON_CACHE_DIR") or (f"{triton_home}/.triton/cache" if triton_home else "")
    if triton:
        yield "Triton", Path(triton)
    yield "Inductor", Path(env.get("TORCHINDUCTOR_CACHE_DIR") or _inductor_default(env))
    cupy = env.get("CUPY_CACHE_DIR") or (f"{home}/.cupy/kernel_cache" if home else "")
    if cupy:
        yield "CuPy", Path(cupy)


def _inductor_default(env: Mapping[str, str]) -> str:
    """Return the directory that Inductor uses without a setting: one for each user."""
    names = (env.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME"))
    try:
        user = next(filter(None, names), None) or getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # The user has no name.
    directory = env.get("TMPDIR") or tempfile.gettempdir()
    return os.path.join(directory, "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
