"""What a bundle promises: an artifact for a request, and the files it was made from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from preheat import container
from preheat.artifact import Artifact, Provenance
from preheat.events import Events
from preheat.key import Part, explain
from preheat.store import LayerStore
from preheat.store.bundle import Bundle
from preheat.toolchain.headers import HeaderState, decode_states, encode_states

__all__ = ["Near", "Promise", "nearest", "promised", "promises", "search"]

_NONE: Mapping[str, Artifact] = MappingProxyType({})


@dataclass(frozen=True)
class Promise:
    """The answer to one request: `key` is the digest of its `bundle_key`.

    `entries` are the kernels that are wanted of it, `note` says why no cache could keep it, if so.
    """

    key: str
    artifact: Artifact
    state: HeaderState
    entries: tuple[str, ...] = ()
    note: str = ""

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
            "states": encode_states([(self.state, artifact.digest)]),
        }
        return {
            self.key: container.pack(self.key, meta, {}),
            artifact.digest: artifact.encode(),
        }


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


def _meta(bundle: Bundle, key: str) -> dict[str, Any] | None:
    """What a promise says; None where there is no such entry, or it is code."""
    blob = bundle.get(key)
    meta = {} if blob is None else container.unpack_checked(blob).meta
    return meta if meta.get("kind") == "promise" else None


def _whole(bundle: Bundle, key: str, meta: dict[str, Any], held: Mapping[str, Artifact]) -> Promise:
    try:
        ((state, digest),) = decode_states(meta)
        entries, note = meta["entries"], meta["note"]
        if not isinstance(entries, list):
            raise TypeError("its entries are not a list")
        _require_text(entries, (digest, note), state.roots, *state.headers, *state.absent)
        artifact = held.get(digest) or _code(bundle, digest)
    except container.DamagedEntryError:
        raise
    except (KeyError, TypeError, ValueError) as bad:
        raise container.DamagedEntryError(f"not a promise: {bad}") from None
    return Promise(key, artifact, state, tuple(entries), note)


def _code(bundle: Bundle, digest: str) -> Artifact:
    blob = bundle.get(digest)
    if blob is None:
        raise ValueError(f"its code {digest[:12]} is missing")
    artifact = Artifact.decode(digest, *container.unpack_checked(blob))
    _require_text((artifact.label, artifact.toolchain), *artifact.parts, *artifact.headers)
    return artifact


def _require_text(*rows: Iterable[str]) -> None:
    """`TypeError` where anything in `rows` is something else, as under a right checksum it may be."""
    "".join(chain.from_iterable(rows))


class Near(NamedTuple):
    """A stored artifact that is not the one asked for, and in what it differs, a line each."""

    artifact: Artifact
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.artifact.label} for {self.artifact.arch} ({self.artifact.digest[:12]})"


def nearest(wanted: tuple[Part, ...], label: str, stored: Iterable[Artifact]) -> Near | None:
    """The artifact that differs from `wanted` in the fewest parts; one called `label` if there is any.

    A request that names no compiler is compared without it.
    """
    known = {part.label for part in wanted}
    best: tuple[tuple[bool, int], Near] | None = None
    for artifact in stored:
        parts = [part for part in artifact.parts if part.label != "toolchain" or part.label in known]
        near = Near(artifact, explain(parts, wanted))
        rank = (artifact.label != label, len(near.differences))
        if best is None or rank < best[0]:
            best = rank, near
    return None if best is None else best[1]


def search(
    wanted: tuple[Part, ...],
    label: str,
    bundles: Iterable[Bundle],
    caches: Iterable[Path],
    *,
    seconds: float,
) -> Near | None:
    """The `nearest` there is: in bundles one called `label`, else wherever; after `seconds`, so far."""
    until = time.monotonic() + seconds
    found = nearest(wanted, label, _baked(bundles, until, label))
    return found or nearest(wanted, label, chain(_cached(caches, until), _baked(bundles, until)))


def _baked(bundles: Iterable[Bundle], until: float, label: str | None = None) -> Iterator[Artifact]:
    """What bundles have, under one label or any."""
    for bundle in bundles:
        for digest in bundle.digests():
            if time.monotonic() >= until:
                return
            with suppress(container.DamagedEntryError, OSError):
                meta = _meta(bundle, digest)
                if meta is not None and label in (None, meta.get("label")):
                    yield _whole(bundle, digest, meta, _NONE).artifact


def _cached(caches: Iterable[Path], until: float) -> Iterator[Artifact]:
    """What cache directories have, the most recently used first."""
    for cache in caches:
        reader = LayerStore(cache, Events())  # looking around uses no entry, and mends none
        with suppress(OSError):
            for item in sorted(reader.items(), key=lambda item: -item.last_read):
                if time.monotonic() >= until:
                    return
                if blob := reader.get(item.digest):  # else it is a note alone
                    with suppress(container.DamagedEntryError):
                        yield Artifact.decode(item.digest, *container.unpack_checked(blob))
