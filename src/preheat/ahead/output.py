"""The bundle that a bake writes. It does not replace one that has code for more architectures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from preheat.ahead.bundles import lost_archs, require_place, shard_at
from preheat.ahead.foreign import ForeignJob
from preheat.ahead.jobs import Job
from preheat.ahead.shards import Shard
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.store.bundle import write
from preheat.store.lock import FileLock
from preheat.store.signing.keys import SigningKey

__all__ = ["BundleOutput"]

_WAIT = 30.0  # seconds for another bake that writes the same file


class BundleOutput:
    """The file of a bake.

    `whole` are the jobs of the whole bake, and `own` are those of this process, which may bake one
    `shard`. The bundle of a shard names it: the next bake of the same shard may have given some of its
    architectures to other shards. With `replace`, the file may lose any architecture. Raises
    `InputError` if it cannot be written, or would lose one even if no job fails.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        whole: Iterable[Job | ForeignJob],
        own: Iterable[Job | ForeignJob],
        *,
        shard: Shard | None = None,
        replace: bool,
    ) -> None:
        require_place(path)
        self.path = Path(path)
        self._shard = None if shard is None else str(shard)
        self._replace = replace
        planned = _known(job.arch for job in own)
        self._of_other_shards = _known(job.arch for job in whole) - planned
        if error := self._loss(planned):
            raise error

    def write(
        self,
        entries: Mapping[str, bytes],
        meta: Mapping[str, Any],
        made: Iterable[Arch | None],
        key: SigningKey | None,
    ) -> int | InputError:
        """Write the bundle and return its size; or write nothing and return which architecture it lost.

        `made` are the architectures of the entries. A bake in another process may have written the file
        meanwhile, so that it is compared again, under a lock.
        """
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), owner=sys._getframe())
        with suppress(OSError):  # Not every filesystem has locks.
            lock.acquire(_WAIT)
        try:
            error = self._loss(_known(made))
            about = meta if self._shard is None else {**meta, "shard": self._shard}
            return write(self.path, entries, about, key) if error is None else error
        finally:
            lock.release()

    def _loss(self, made: set[Arch]) -> InputError | None:
        """Return the error for architectures that the file has and that are not among those `made`."""
        if self._replace:
            return None
        if self._shard is not None and shard_at(self.path) == self._shard:
            made = made | self._of_other_shards
        lost = lost_archs(self.path, made)
        if not lost:
            return None
        named = ", ".join(map(str, lost))
        by, remedy = "this bake", f"bake for {named} as well, name another file,"
        if self._shard is not None:
            by, remedy = f"shard {self._shard}", "name another file for the shard,"
        return InputError(
            f"{self.path} has code for {named}, which {by} does not make: it would be lost",
            hint=f"{remedy} or pass --replace (replace=True)",
        )


def _known(archs: Iterable[Arch | None]) -> set[Arch]:
    return {arch for arch in archs if arch is not None}
