"""The entries of a bake on shared stores: those that a store does not have are written to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from preheat.ahead.foreign import BakedForeign
from preheat.ahead.jobs import Output
from preheat.build.builder import Builder
from preheat.store import Chain
from preheat.store.base import Upload, UploadResult
from preheat.toolchain.headers.states import pack_states

__all__ = ["fill_stores"]


def fill_stores(
    outputs: Iterable[Output], foreign: Iterable[BakedForeign], builder: Builder
) -> tuple[UploadResult, ...]:
    """Write what was baked to the shared stores of `builder` that lack it.

    An entry that was found in a cache of this machine may never have been on a store.
    """
    if not builder.cache.shared:
        return ()
    entries = [*_programs(outputs, builder.cache), *_foreign(foreign)]
    return tuple(builder.cache.upload(entries))


def _programs(outputs: Iterable[Output], cache: Chain) -> Iterator[Upload]:
    """Yield the code of programs, with the lists of header states that lead to it."""
    for _, entry, request in outputs:
        if entry.untracked_reason or not request:
            continue  # No cache can store it.
        artifact = entry.artifact
        header_list = None
        if artifact.headers:
            own = partial(pack_states, request, artifact.label, [(entry.state, artifact.digest)])
            header_list = Upload(request, partial(_stored, cache, request, own))
        yield Upload(
            artifact.digest, partial(_stored, cache, artifact.digest, artifact.encode), header_list
        )


def _stored(cache: Chain, digest: str, make: Callable[[], bytes]) -> bytes:
    """Return an entry as a tier of this machine has it; it may have more than a bundle has."""
    found = next(cache.each(digest, cache.local), None)
    return make() if found is None else found.blob


def _foreign(foreign: Iterable[BakedForeign]) -> Iterator[Upload]:
    for each in foreign:
        for entry in each.entries:
            yield Upload(entry.digest, entry.encode)
