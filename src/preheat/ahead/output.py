"""The bundle that a bake writes. It does not replace one that has code for more architectures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from preheat.ahead.bundles import lost_archs, require_place
from preheat.ahead.foreign import ForeignJob
from preheat.ahead.jobs import Job
from preheat.arch import Arch
from preheat.cache.bundle import write
from preheat.cache.lock import FileLock
from preheat.cache.signatures import Signer
from preheat.errors import InputError

__all__ = ["BundleOutput"]

_WAIT = 30.0  # seconds for another bake that writes the same file


class BundleOutput:
    """The file of a bake.

    `whole` are the jobs of the whole bake, of which this process may run one shard, and `own` are those
    of this process. With `replace`, the file may lose architectures. Raises `InputError` if it cannot
    be written, or would lose one even if no job fails.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        whole: Iterable[Job | ForeignJob],
        own: Iterable[Job | ForeignJob],
        *,
        replace: bool,
    ) -> None:
        require_place(path)
        self.path = Path(path)
        self._replace = replace
        planned = _known(job.arch for job in whole)
        self._of_other_shards = planned - _known(job.arch for job in own)
        if error := self._loss(planned):
            raise error

    def write(
        self,
        entries: Mapping[str, bytes],
        meta: Mapping[str, Any],
        made: Iterable[Arch | None],
        key: Signer | None,
    ) -> int | InputError:
        """Write the bundle and return its size; or write nothing and return which architecture it lost.

        `made` are the architectures of the entries. A bake in another process may have written the file
        meanwhile, so that it is compared again, under a lock.
        """
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), owner=sys._getframe())
        with suppress(OSError):  # Not every filesystem has locks.
            lock.acquire(_WAIT)
        try:
            error = self._loss(self._of_other_shards | _known(made))
            return write(self.path, entries, meta, key) if error is None else error
        finally:
            lock.release()

    def _loss(self, made: set[Arch]) -> InputError | None:
        """Return the error for architectures that the file has and that are not among those `made`."""
        lost = [] if self._replace else lost_archs(self.path, made)
        if not lost:
            return None
        named = ", ".join(map(str, lost))
        return InputError(
            f"{self.path} has code for {named}, which this bake does not make: it would be lost",
            hint=f"bake for {named} as well, name another file, or pass --replace (replace=True)",
        )


def _known(archs: Iterable[Arch | None]) -> set[Arch]:
    return {arch for arch in archs if arch is not None}
