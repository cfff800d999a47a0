"""Operations on whole bundles: metadata, verification, signing and merging."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from preheat.ahead.manifest import GraphKeys, Manifest
from preheat.build.bundles import (
    BundleEntry,
    baked_archs,
    code_keys,
    entries_of,
    foreign_of,
    named,
    read,
    read_foreign,
)
from preheat.errors import BundleError, InputError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.codec import DamagedEntryError
from preheat.model.foreign import ForeignEntry
from preheat.model.key import explain
from preheat.store.bundle import MAGIC, Bundle, write
from preheat.store.publish import unwritable_reason
from preheat.store.signing.keys import SigningKey

__all__ = [
    "all_entries",
    "all_foreign",
    "faults",
    "graphs",
    "lost_archs",
    "merge",
    "merge_entries",
    "meta",
    "require_place",
    "shard_at",
    "sign",
]


def meta(
    toolchains: Iterable[str], targets: Iterable[Arch], keys: Iterable[GraphKeys]
) -> dict[str, Any]:
    """Return the metadata of a bundle. It is the same for every bake of the same programs."""
    return {
        "format": "preheat bundle",
        "toolchains": sorted(set(toolchains)),
        "archs": [str(arch) for arch in sorted(set(targets))],
        "graphs": [{"name": graph.name, "keys": list(graph.keys)} for graph in sorted(keys)],
    }


def graphs(bundle: Bundle) -> tuple[GraphKeys, ...]:
    """Return the graph keys of a bundle. Raises `BundleError` when they are invalid."""
    try:
        rows = bundle.meta.get("graphs", [])
        return tuple(GraphKeys(str(row["name"]), tuple(map(str, row["keys"]))) for row in rows)
    except (KeyError, TypeError):
        raise BundleError(f"bundle {bundle.path} lists graphs that cannot be read") from None


def all_entries(bundle: Bundle) -> Iterator[BundleEntry]:
    """Yield every program of a bundle. Raises `BundleError` when it is damaged."""
    with _naming(bundle):
        yield from entries_of(bundle)


def all_foreign(bundle: Bundle) -> Iterator[ForeignEntry]:
    """Yield every entry of another library in a bundle. Raises `BundleError` when it is damaged."""
    with _naming(bundle):
        yield from foreign_of(bundle)


@contextmanager
def _naming(bundle: Bundle) -> Iterator[None]:
    """Name the bundle in the error of a damaged entry."""
    try:
        yield
    except DamagedEntryError as bad:
        hint = f"'preheat bundle verify {bundle.path}' lists the damage; copy or bake it again"
        raise BundleError(f"bundle {bundle.path} is damaged: {bad}", hint=hint) from None


def faults(bundle: Bundle) -> list[str]:
    """Read a whole bundle and return one line for each fault.

    An entry is named by the key of its code, or by its own digest if it cannot be read.
    """
    keys = code_keys(bundle)
    wrong = bundle.verify().items() or _unmatched_entries(bundle)
    return [f"entry {keys.get(digest, digest)[:12]}: {why}" for digest, why in wrong]


def _unmatched_entries(bundle: Bundle) -> Iterator[tuple[str, str]]:
    """Yield digest and fault of requests without code and of code without a request."""
    reached: set[str] = set()
    for digest in bundle.digests():
        try:
            entry = read(bundle, digest)
            if entry is not None:
                reached |= {digest, entry.artifact.digest}
                for name in entry.entries:
                    entry.artifact.entry(name)
            elif read_foreign(bundle, digest) is not None:
                reached.add(digest)
        except (DamagedEntryError, InputError) as bad:
            reached.add(digest)
            yield digest, str(bad)
    yield from (
        (digest, "no entry refers to it") for digest in bundle.digests() if digest not in reached
    )


def lost_archs(path: Path, made: Iterable[Arch]) -> list[Arch]:
    """Return the architectures of the bundle at `path` that are not among those `made`.

    A file that no process can use has none.
    """
    try:
        with Bundle.open(path) as bundle:
            return sorted({*baked_archs(bundle)} - {*made})
    except BundleError:
        return []


def shard_at(path: Path) -> str | None:
    """Return the shard of a bake that the bundle at `path` is, such as "2/8", or None."""
    try:
        with Bundle.open(path) as bundle:
            shard = bundle.meta.get("shard")
            return shard if isinstance(shard, str) else None
    except BundleError:
        return None


def require_place(output: str | os.PathLike[str]) -> None:
    """Raise `InputError` unless a bundle can be written to `output`, new or in place of another."""
    path = Path(output)
    if why := unwritable_reason(path) or _not_to_replace(path):
        raise InputError(f"cannot write {output}: {why}", hint="name another file for the bundle")


def _not_to_replace(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        with open(path, "rb") as file:  # A truncated bundle counts as a bundle.
            return None if MAGIC.startswith(file.read(len(MAGIC))) else "it exists and is not a bundle"
    except OSError as fault:
        return fault.strerror or str(fault)


def merge(
    bundles: Sequence[Bundle],
    output: str | os.PathLike[str],
    *,
    prefer: str | None = None,
    key: SigningKey | None = None,
) -> tuple[int, int]:
    """Merge bundles into one file, and return the number of entries and the size of the file.

    `key` signs it, whoever signed the others. Two bundles with different code for one request are an
    error, unless `prefer` is "first" or "last". So is an `output` with code for an architecture that
    none of them has.
    """
    require_place(output)
    merged: dict[str, tuple[BundleEntry, Bundle]] = {}
    for bundle in reversed(bundles) if prefer == "last" else bundles:
        for entry in all_entries(bundle):
            known, other = merged.setdefault(entry.key, (entry, bundle))
            if known.artifact == entry.artifact:
                merged[entry.key] = merge_entries(known, entry), other
            elif prefer is None:
                raise _conflict((known.artifact, other), (entry.artifact, bundle))
    foreign = _merge_foreign(bundles, prefer)
    kept = [entry for entry, _ in merged.values()]
    made = [entry.artifact for entry in kept]
    keys = Manifest().merged(*(Manifest(graphs=graphs(bundle)) for bundle in bundles)).graphs
    targets = [*(a.arch for a in made), *(entry.arch for entry in foreign if entry.arch is not None)]
    if lost := lost_archs(Path(output), targets):
        raise InputError(
            f"{output} has code for {named(lost)}, which none of the bundles has: it would be lost",
            hint=f"name {output} among the bundles as well, or another file with -o",
        )
    about = meta((a.toolchain for a in made), targets, keys)
    entries = {digest: blob for entry in kept for digest, blob in entry.encode().items()}
    entries |= {entry.digest: entry.encode(provenance=False) for entry in foreign}
    return len(kept) + len(foreign), write(output, entries, about, key)


def sign(bundle: Bundle, key: SigningKey) -> int:
    """Replace the file of a bundle by the same one, signed by `key`, and return its size."""
    with _naming(bundle):
        entries = {digest: blob for digest in bundle.digests() if (blob := bundle.get(digest))}
    return write(bundle.path, entries, bundle.meta, key)


def _merge_foreign(bundles: Sequence[Bundle], prefer: str | None) -> list[ForeignEntry]:
    """Return the entries of other libraries of all bundles, each once."""
    merged: dict[str, tuple[ForeignEntry, Bundle]] = {}
    for bundle in reversed(bundles) if prefer == "last" else bundles:
        for entry in all_foreign(bundle):
            known, other = merged.setdefault(entry.digest, (entry, bundle))
            if prefer is None and (differences := [*known.differences(entry)]):
                title = f"{entry.title} for {entry.target}"
                raise _difference(title, other, bundle, differences)
    return [entry for entry, _ in merged.values()]


def merge_entries(a: BundleEntry, b: BundleEntry) -> BundleEntry:
    """Merge two entries of equal code: list the kernels of both. An empty list means all kernels."""
    both = tuple(sorted({*a.entries, *b.entries})) if a.entries and b.entries else ()
    return replace(a, entries=both)


def _conflict(a: tuple[Artifact, Bundle], b: tuple[Artifact, Bundle]) -> BundleError:
    one, first = a
    two, second = b
    differences = _differences(one, two) or ["the same request was compiled to different code"]
    return _difference(f"{one.label} for {one.arch}", first, second, differences)


def _difference(title: str, one: Bundle, other: Bundle, differences: Sequence[str]) -> BundleError:
    return BundleError(
        "\n  ".join([f"{title} differs between {one.path} and {other.path}:", *differences]),
        hint="bake both in the same way, or choose one: --prefer first or --prefer last",
    )


def _differences(a: Artifact, b: Artifact) -> list[str]:
    lines = [] if a.toolchain == b.toolchain else [f"compiler: {a.toolchain} and {b.toolchain}"]
    lines += explain(a.parts, b.parts) if not lines else ()
    left, right = ({(h.root, h.name): h.digest for h in each.headers} for each in (a, b))
    changed = (key for key in {**left, **right} if left.get(key) != right.get(key))
    return lines + [f"header {name} differs" for _, name in sorted(changed)]
