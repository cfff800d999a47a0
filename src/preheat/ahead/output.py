"""What a bake writes: its bundle, and the entries that shared stores lack.

The bundle does not replace one that has code for more architectures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from preheat.ahead.bundles import lost_archs, require_place, shard_at
from preheat.ahead.foreign import BakedForeign, ForeignJob
from preheat.ahead.jobs import Job, Output
from preheat.ahead.shards import Shard
from preheat.build.builder import Builder
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.store import Chain
from preheat.store.base import Upload, UploadResult
from preheat.store.bundle import write
from preheat.store.lock import FileLock
from preheat.store.signing.keys import SigningKey
from preheat.toolchain.headers.states import pack_states

__all__ = ["BundleOutput", "fill_stores"]

_WAIT = 30.0  # seconds for another bake that writes the same file


class BundleOutput:
    """The file of a bake.

    `whole` are the jobs of the whole bake, and `own` are this process's, which may bake one
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
        planned = _without_none(job.arch for job in own)
        self._of_other_shards = _without_none(job.arch for job in whole) - planned
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
            error = self._loss(_without_none(made))
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


def _without_none(archs: Iterable[Arch | None]) -> set[Arch]:
    return {arch for arch in archs if arch is not None}


# Shared stores


def fill_stores(
    outputs: Iterable[Output], foreign: Iterable[BakedForeign], builder: Builder
) -> tuple[UploadResult, ...]:
    """Write what was baked to the shared stores of `builder` that lack it.

    An entry that was found in a cache of this machine may never have been on a store.
    """
    if not builder.cache.shared:
        return ()
    entries = [*_list_programs(outputs, builder.cache), *_list_foreign(foreign)]
    return tuple(builder.cache.upload(entries))


def _list_programs(outputs: Iterable[Output], cache: Chain) -> Iterator[Upload]:
    """Yield the code of programs, with the lists of header states that lead to it."""
    for _, entry, request in outputs:
        if entry.untracked_reason or not request:
            continue  # No cache can store it.
        artifact = entry.artifact
        header_list = None
        if artifact.headers:
            own = partial(pack_states, request, artifact.label, [(entry.state, artifact.digest)])
            header_list = Upload(request, partial(_get_stored, cache, request, own))
        yield Upload(
            artifact.digest, partial(_get_stored, cache, artifact.digest, artifact.encode), header_list
        )


def _get_stored(cache: Chain, digest: str, make: Callable[[], bytes]) -> bytes:
    """Return an entry as a tier of this machine has it; it may have more than a bundle has."""
    found = next(cache.each(digest, cache.local), None)
    return make() if found is None else found.blob


def _list_foreign(foreign: Iterable[BakedForeign]) -> Iterator[Upload]:
    for each in foreign:
        for entry in each.entries:
            yield Upload(entry.digest, entry.encode)
