"""What a bundle promises: an artifact for a request, and the files it was made from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from preheat.arch import Arch
from preheat.artifact import Artifact, Provenance
from preheat.cache import LayerStore, codec
from preheat.cache.bundle import Bundle
from preheat.cache.codec import text
from preheat.events import Events
from preheat.key import Part, explain, include_parts
from preheat.toolchain.headers import HeaderState, decode_states, encode_states

__all__ = ["Near", "Promise", "code_keys", "nearest", "promised", "promises", "search"]

_NONE: Mapping[str, Artifact] = MappingProxyType({})
_UNDIRECTED = "include: the bundle does not say for which directories it was baked; bake it anew"


@dataclass(frozen=True)
class Promise:
    """The answer to one request: `key` is the digest of its `bundle_key`.

    `entries` are the kernels that are wanted of it, `note` says why no cache could keep it, if so.
    `include` is the part of the request that `artifact` does not tell: the include directories as
    `preheat.spelling` spells them, none where the program includes no file. It is None in a bundle that
    was baked before include directories were part of requests.
    """

    key: str
    artifact: Artifact
    state: HeaderState
    entries: tuple[str, ...] = ()
    note: str = ""
    include: tuple[str, ...] | None = ()

    @property
    def request(self) -> tuple[Part, ...]:
        """What was asked for, and the compiler that answered it."""
        named = (Part.of(*part) for part in include_parts(self.include or ()))
        return (*self.artifact.parts, *named)

    def encode(self) -> dict[str, bytes]:
        """It as entries of a bundle, by digest; the same wherever and whenever it was compiled.

        Sources stay behind: a bundle is given to others, and line information needs no sources to run.
        """
        artifact = replace(self.artifact, provenance=Provenance(), sources={})
        meta = {
            "kind": "promise",
            "label": artifact.label,
            "arch": str(artifact.arch),
            "entries": self.entries,
            "note": self.note,
            "include": None if self.include is None else [*map(_writable, self.include)],
            "states": encode_states([(self.state, artifact.digest)]),
        }
        return {
            self.key: codec.pack(self.key, meta, {}),
            artifact.digest: artifact.encode(),
        }


def _writable(spelling: str) -> str:
    """A spelling for people to read; bytes of a directory's name that are not text are escaped."""
    return spelling.encode(errors="backslashreplace").decode()


def promised(bundle: Bundle, key: str, held: Mapping[str, Artifact] = _NONE) -> Promise | None:
    """What `bundle` answers to the request `key`; `DamagedEntryError` when that cannot be read.

    An artifact that is `held`, by digest, is not read again.
    """
    meta = _meta(bundle, key)
    return None if meta is None else _whole(bundle, key, meta, held)


def promises(bundle: Bundle) -> Iterator[Promise]:
    """Everything `bundle` answers, by key; `DamagedEntryError` when one cannot be read."""
    for digest in bundle.digests():
        promise = promised(bundle, digest)
        if promise is not None:
            yield promise


def code_keys(bundle: Bundle) -> dict[str, str]:
    """For each promise that can be read, by its digest: the digest of its code, which is its key."""
    found: dict[str, str] = {}
    for digest in bundle.digests():
        with suppress(codec.DamagedEntryError, OSError):
            meta = _meta(bundle, digest)
            for _, code in () if meta is None else decode_states(meta):
                found[digest] = code
    return found


def _meta(bundle: Bundle, key: str) -> dict[str, Any] | None:
    """What a promise says; None where there is no such entry, or it is code."""
    blob = bundle.get(key)
    meta = {} if blob is None else codec.unpack_checked(blob).meta
    return meta if meta.get("kind") == "promise" else None


def _whole(bundle: Bundle, key: str, meta: dict[str, Any], held: Mapping[str, Artifact]) -> Promise:
    try:
        ((state, digest),) = decode_states(meta)
        entries, note, include = meta["entries"], text(meta["note"]), meta.get("include")
        if not isinstance(entries, list) or not isinstance(include, list | None):
            raise TypeError("its entries or include directories are not a list")
        for each in (*entries, *(include or ())):
            text(each)
        artifact = held.get(digest) or _code(bundle, digest)
    except codec.DamagedEntryError:
        raise
    except (KeyError, TypeError, ValueError) as bad:
        raise codec.DamagedEntryError(f"not a promise: {bad}") from None
    named = None if include is None else tuple(include)
    return Promise(key, artifact, state, tuple(entries), note, named)


def _code(bundle: Bundle, digest: str) -> Artifact:
    blob = bundle.get(digest)
    if blob is None:
        raise ValueError(f"its code {digest[:12]} is missing")
    return Artifact.decode(digest, *codec.unpack_checked(blob))


class Near(NamedTuple):
    """A stored artifact that is not the one asked for, and in what it differs, a line each."""

    artifact: Artifact
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.artifact.label} for {self.artifact.arch} ({self.artifact.digest[:12]})"


def nearest(wanted: tuple[Part, ...], label: str, stored: Iterable[Artifact | Promise]) -> Near | None:
    """The artifact that differs from `wanted` in the fewest parts.

    A request that names no compiler is compared without it. Of several that differ in as many parts,
    the nearest is one called `label`, then one for the closest architecture, then the first.
    """
    target = Arch.parse(dict(wanted)["arch"])
    best: tuple[tuple[int, bool, int], Near] | None = None
    for each in stored:
        artifact = each if isinstance(each, Artifact) else each.artifact
        near = Near(artifact, _differences(each, wanted))
        apart = abs(_number(artifact.arch) - _number(target))
        rank = (len(near.differences), artifact.label != label, apart)
        if best is None or rank < best[0]:
            best = rank, near
    return None if best is None else best[1]


def _number(arch: Arch) -> int:
    return 10 * arch.major + arch.minor


def _differences(stored: Artifact | Promise, wanted: tuple[Part, ...]) -> tuple[str, ...]:
    """In what `wanted` differs, a line each. A cache goes by no include directories."""
    known = {part.label for part in wanted}
    parts = stored.parts if isinstance(stored, Artifact) else stored.request
    parts = tuple(part for part in parts if part.label != "toolchain" or part.label in known)
    undirected = tuple(part for part in wanted if not part.label.startswith("include"))
    if isinstance(stored, Artifact):
        return explain(parts, undirected)
    if stored.include is None and undirected != wanted:
        return (*explain(parts, undirected), _UNDIRECTED)
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
    """The `nearest` of what bundles and caches have, as far as that can be read in `seconds`.

    With `namesake` it is one called `label`.
    """
    until = time.monotonic() + seconds
    alike = _baked(bundles, until, lambda its: its == label)
    others = _baked(bundles, until, lambda its: its != label)
    cached = _cached(caches, until)
    if namesake:
        return nearest(wanted, label, chain(alike, (each for each in cached if each.label == label)))
    return nearest(wanted, label, chain(alike, cached, others))


def _baked(
    bundles: Iterable[Bundle], until: float, chosen: Callable[[object], bool]
) -> Iterator[Promise]:
    """What bundles have under the labels that are `chosen`."""
    for bundle in bundles:
        for digest in bundle.digests():
            if time.monotonic() >= until:
                return
            with suppress(codec.DamagedEntryError, OSError):
                meta = _meta(bundle, digest)
                if meta is not None and chosen(meta.get("label")):
                    yield _whole(bundle, digest, meta, _NONE)


def _cached(caches: Iterable[LayerStore], until: float) -> Iterator[Artifact]:
    """What cache directories have, the most recently used first."""
    for cache in caches:
        reader = cache.reader(Events())
        with suppress(OSError):
            for item in sorted(reader.items(), key=lambda item: -item.last_read):
                if time.monotonic() >= until:
                    return
                if blob := reader.get(item.digest):  # else it is a note alone
                    with suppress(codec.DamagedEntryError):
                        yield Artifact.decode(item.digest, *codec.unpack_checked(blob))
