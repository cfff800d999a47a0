"""Finds the stored artifact that is most similar to a missing one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from preheat.build.bundle_entries import BundleEntry, decode_entry, entry_meta
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.key import Part, explain
from preheat.store import LayerStore
from preheat.store.bundle import Bundle

__all__ = ["Near", "nearest", "search"]

_NO_INCLUDE = "include: the bundle does not say for which directories it was baked; bake it again"


class Near(NamedTuple):
    """A stored artifact other than the requested one, and the differences between the two requests."""

    artifact: Artifact
    differences: tuple[str, ...]
    texts: Mapping[str, str] = MappingProxyType({})  # of the artifact, by label, if they were baked

    def __str__(self) -> str:
        return f"{self.artifact.label} for {self.artifact.arch} ({self.artifact.digest[:12]})"


def nearest(
    wanted: tuple[Part, ...], label: str, stored: Iterable[Artifact | BundleEntry]
) -> Near | None:
    """Return the artifact that differs from `wanted` in the fewest parts.

    The compiler is compared only if the request names one. If several artifacts differ in the same
    number of parts, one with this `label` is preferred, and then the closest architecture.
    """
    target = Arch.parse(dict(wanted)["arch"])
    best: tuple[tuple[int, bool, int], Near] | None = None
    for each in stored:
        artifact = each if isinstance(each, Artifact) else each.artifact
        texts = {} if isinstance(each, Artifact) else each.sources
        near = Near(artifact, _differences(each, wanted), texts)
        distance = abs(_number(artifact.arch) - _number(target))
        rank = (len(near.differences), artifact.label != label, distance)
        if best is None or rank < best[0]:
            best = rank, near
    return None if best is None else best[1]


def _number(arch: Arch) -> int:
    return 10 * arch.major + arch.minor


def _differences(stored: Artifact | BundleEntry, wanted: tuple[Part, ...]) -> tuple[str, ...]:
    """Return one line for each part in which the requests differ.

    Keys in a cache do not contain include directories, so those of a cached artifact are not compared.
    """
    known = {part.label for part in wanted}
    parts = stored.parts if isinstance(stored, Artifact) else stored.request
    parts = tuple(part for part in parts if part.label != "toolchain" or part.label in known)
    without_include = tuple(part for part in wanted if not part.label.startswith("include"))
    if isinstance(stored, Artifact):
        return explain(parts, without_include)
    if stored.include is None and without_include != wanted:
        return (*explain(parts, without_include), _NO_INCLUDE)
    return explain(parts, wanted)


def search(
    wanted: tuple[Part, ...],
    label: str,
    bundles: Iterable[Bundle],
    caches: Iterable[LayerStore],
    *,
    seconds: float,
    namesake: bool = False,
) -> Near | None:
    """Return the `nearest` artifact among those in bundles and caches that can be read in `seconds`.

    With `namesake`, only artifacts called `label` are compared.
    """
    until = time.monotonic() + seconds
    alike = _in_bundles(bundles, until, lambda its: its == label)
    others = _in_bundles(bundles, until, lambda its: its != label)
    cached = _in_caches(caches, until)
    if namesake:
        return nearest(wanted, label, chain(alike, (each for each in cached if each.label == label)))
    return nearest(wanted, label, chain(alike, cached, others))


def _in_bundles(
    bundles: Iterable[Bundle], until: float, chosen: Callable[[object], bool]
) -> Iterator[BundleEntry]:
    """Yield the entries of bundles whose label is `chosen`."""
    for bundle in bundles:
        for digest in bundle.digests():
            if time.monotonic() >= until:
                return
            with suppress(codec.DamagedEntryError, OSError):
                meta = entry_meta(bundle, digest)
                if meta is not None and chosen(meta.get("label")):
                    yield decode_entry(bundle, digest, meta)


def _in_caches(caches: Iterable[LayerStore], until: float) -> Iterator[Artifact]:
    """Yield the artifacts of cache directories, the most recently used one first."""
    for cache in caches:
        reader = cache.reader()
        with suppress(OSError):
            for item in sorted(reader.items(), key=lambda item: -item.last_read):
                if time.monotonic() >= until:
                    return
                with suppress(codec.DamagedEntryError, OSError):
                    if blob := reader.get(item.digest):  # An item may have only a note.
                        yield Artifact.decode(item.digest, *codec.unpack_checked(blob))
