"""A filesystem whose calls fail as those of a network filesystem do.

    files = FaultyFiles(tmp_path / "cache", monkeypatch)
    files.fail("replace", errno.ESTALE, times=2)
    files.calls["replace"]                            # how often it was called below that directory

Calls of `os` on paths below a directory are counted, and fail where a test wants that. All other calls
are as ever.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

__all__ = ["FaultyFiles"]

_BY_PATH = ("link", "listdir", "lstat", "mkdir", "open", "rename", "replace", "rmdir", "stat", "unlink")
_BY_DESCRIPTOR = ("fstat", "fsync", "ftruncate", "pwrite", "read", "write")


class FaultyFiles:
    """Calls below `root`. A call is named as in `os`; the status of a listed file is `entry.stat`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self._root = str(root)
        self._faults: dict[str, tuple[int, float]] = {}
        self._path_of_descriptor = partial(os.readlink)
        for name in (*_BY_PATH, *_BY_DESCRIPTOR):
            monkeypatch.setattr(os, name, partial(self._call, name, getattr(os, name)))
        monkeypatch.setattr(os, "scandir", partial(self._scandir, os.scandir))

    def fail(self, name: str, error: int, times: float) -> None:
        """Let the next `times` calls of `name` fail."""
        self._faults[name] = error, times

    def heal(self) -> None:
        """Let no further call fail, and count from zero."""
        self._faults.clear()
        self.calls.clear()

    def enter(self, name: str, path: str) -> None:
        """Count a call, and raise the error that it is to fail with."""
        self.calls[name] += 1
        error, times = self._faults.get(name, (0, 0))
        if times > 0:
            self._faults[name] = error, times - 1
            raise OSError(error, os.strerror(error), path)

    def _call(self, name: str, call: Callable[..., Any], place: Any, *args: Any, **more: Any) -> Any:
        if (path := self._path(name, place, more)).startswith(self._root):
            self.enter(name, path)
        return call(place, *args, **more)

    def _path(self, name: str, place: Any, more: dict[str, Any]) -> str:
        if name in _BY_DESCRIPTOR or isinstance(place, int):
            return self._path_of_descriptor(f"/proc/self/fd/{int(place)}")
        path = os.fsdecode(place)
        if (holder := more.get("dir_fd")) is not None:
            return os.path.join(self._path_of_descriptor(f"/proc/self/fd/{int(holder)}"), path)
        return path

    def _scandir(self, call: Callable[..., Any], path: str) -> _Listing:
        if path.startswith(self._root):
            self.enter("scandir", path)
        return _Listing(self, call(path))


class _Listing:
    """What `os.scandir` returns."""

    def __init__(self, files: FaultyFiles, listing: Any) -> None:
        self._files = files
        self._listing = listing

    def __enter__(self) -> _Listing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listing.close()

    def __iter__(self) -> Iterator[_Entry]:
        return (_Entry(self._files, entry) for entry in self._listing)


class _Entry:
    """A file in a listing."""

    def __init__(self, files: FaultyFiles, entry: os.DirEntry[str]) -> None:
        self._files = files
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        self._files.enter("entry.stat", self._entry.path)
        return self._entry.stat(follow_symlinks=follow_symlinks)
