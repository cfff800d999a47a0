"""What a bundle promises: an artifact for a request, and the files it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from preheat import container
from preheat.artifact import Artifact, Provenance
from preheat.key import Part, explain
from preheat.store.bundle import Bundle
from preheat.toolchain.headers import HeaderState, decode_states, encode_states

__all__ = ["Near", "Promise", "nearest", "promised", "promises"]


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
        """It as entries of a bundle, by digest; the same wherever and whenever it was compiled."""
        artifact = replace(self.artifact, provenance=Provenance())
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


def promised(bundle: Bundle, key: str) -> Promise | None:
    """What `bundle` answers to the request `key`; `DamagedEntryError` when that cannot be read."""
    blob = bundle.get(key)
    if blob is None:
        return None
    meta = container.unpack_checked(blob).meta
    if meta.get("kind") != "promise":
        return None
    return _whole(bundle, key, meta)


def promises(bundle: Bundle) -> Iterator[Promise]:
    """Everything `bundle` answers, by key; `DamagedEntryError` when one cannot be read."""
    for digest in bundle.digests():
        promise = promised(bundle, digest)
        if promise is not None:
            yield promise


def _whole(bundle: Bundle, key: str, meta: dict[str, object]) -> Promise:
    try:
        ((state, digest),) = decode_states(meta)
        code = bundle.get(digest)
        if code is None:
            raise ValueError(f"its code {digest[:12]} is missing")
        entries, note = meta["entries"], meta["note"]
        if not isinstance(entries, list) or not all(isinstance(name, str) for name in entries):
            raise ValueError("entries are not names")
    except (KeyError, TypeError, ValueError) as bad:
        raise container.DamagedEntryError(f"not a promise: {bad}") from None
    artifact = Artifact.decode(digest, *container.unpack_checked(code))
    return Promise(key, artifact, state, tuple(entries), str(note))


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
