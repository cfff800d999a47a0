"""The error of a sealed process for a miss: the most similar artifact, what changed, and what to do."""

from __future__ import annotations

import hashlib
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from preheat.build import seal
from preheat.build.bundles import BundleEntry, bake_command, decode_entry, entry_meta, read_foreign
from preheat.build.lookup import HEADERS, Miss
from preheat.build.opening import unreachable_stores
from preheat.errors import SealedError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.key import Key, Part, explain, is_text
from preheat.process.callsite import shown_path
from preheat.process.files import read_whole
from preheat.process.messages import count, short_repr
from preheat.store import LayerStore

if TYPE_CHECKING:
    from preheat.build.builder import Builder
    from preheat.build.request import Request
    from preheat.store.bundle import Bundle

__all__ = [
    "Near",
    "Searched",
    "choose_nearest",
    "describe_differences",
    "explain_miss",
    "find_nearest",
    "search_bundles",
]

_SEARCH = 0.5  # seconds to look for the architectures of a program
_SHOWN = 4  # bundles with a line of their own
_NO_INCLUDE = "include: the bundle does not say for which directories it was baked; bake it again"
_HASHED = re.compile(r"(\d+) bytes, sha256 ([0-9a-f]{64})")
_NAME_DIGITS = 16  # of the digest in the name of a text beside a manifest


def explain_miss(
    builder: Builder, request: Request, miss: Miss, where: Mapping[str, str]
) -> SealedError:
    """Return the error of a sealed process for a miss. `where` says who requested the program."""
    program, arch = request.program, request.arch
    searched = search_bundles(builder.bundles, program.label)
    differences: tuple[str, ...] = ()
    if miss.reason.startswith(HEADERS):
        near, evidence = None, builder._stored.sealed_headers.evidence(request)
    else:
        near, evidence = builder.nearest(program, arch), searched.evidence()
    if near is not None:
        paths = [bundle.path for bundle in builder.bundles]
        differences = describe_differences(near, request.bundle_key, paths)
    return SealedError(
        reason="; ".join([miss.reason, *unreachable_stores(builder.cache)]),
        evidence=evidence,
        nearest=None if near is None else str(near),
        differences=differences,
        hint=searched.hint(miss.reason, differences, arch, file=program.path is not None),
        **where,
    )


class Searched(NamedTuple):
    """The bundles that were searched for a program, and the architectures that each has of it.

    `complete` is False if there was no time to read all of them.
    """

    title: str
    archs: dict[Bundle, set[str]]
    complete: bool

    def evidence(self) -> tuple[str, ...]:
        """Return a line for each bundle; those that have the program come first."""
        rows = sorted(self.archs.items(), key=lambda row: not row[1])
        lines = [self._line(bundle, archs) for bundle, archs in rows[:_SHOWN]]
        if len(rows) > _SHOWN:
            lines.append(f"searched {count(len(rows) - _SHOWN, 'bundle')} more")
        return tuple(lines)

    def _line(self, bundle: Bundle, archs: Iterable[str]) -> str:
        *first, last = sorted(archs, key=lambda arch: (len(arch), arch)) or [""]
        named = f"{', '.join(first)} and {last}" if first else last
        has = f", which has {self.title} for {named}" if last else ""
        if not has and self.complete:
            has = f", which does not have {self.title}"
        return f"searched {shown_path(str(bundle.path))}{has}"

    def hint(self, reason: str, differences: Sequence[str], arch: Arch | None, *, file: bool) -> str:
        """Return what to do about a miss. `file` says that a bake reads the present source file."""
        way_to_lift = seal.describe_how_to_lift()
        if not self.archs:
            return (
                "no bundle is mounted: record and bake what the process needs, and name the bundle "
                f"with PREHEAT_BUNDLE or 'preheat run --bundle'; or let it compile with {way_to_lift}"
            )
        bundle = max(self.archs, key=lambda each: bool(self.archs[each]))
        command = bake_command(bundle, arch)
        if reason.startswith(HEADERS):
            return f"bake again: {command}; or use the bundle as it is with PREHEAT_SEALED_HEADERS=warn"
        changed = {line.partition(": ")[0] for line in differences}
        if changed == {"arch"}:
            advice = f"bake for {arch} as well"
        elif file and changed and changed <= {"arch", "source"}:
            advice = "bake again"
        else:
            advice = "record and bake what the process needs"
        return f"{advice}: {command}; or let it compile with {way_to_lift}"


def search_bundles(bundles: Iterable[Bundle], title: str) -> Searched:
    """Return the architectures for which bundles have a program, or an entry of another library."""
    until = time.monotonic() + _SEARCH
    archs_of: dict[Bundle, set[str]] = {bundle: set() for bundle in bundles}
    for bundle, archs in archs_of.items():
        for digest in bundle.digests():
            if time.monotonic() >= until:
                return Searched(title, archs_of, complete=False)
            with suppress(codec.DamagedEntryError, OSError):
                if (entry := read_foreign(bundle, digest)) is not None:
                    archs |= {entry.target} if entry.title == title else set()
                elif (meta := entry_meta(bundle, digest)) is not None and meta.get("label") == title:
                    archs.add(str(meta.get("arch")))
    return Searched(title, archs_of, complete=True)


# The most similar artifact


class Near(NamedTuple):
    """A stored artifact other than the requested one, and the differences between the two requests."""

    artifact: Artifact
    differences: tuple[str, ...]
    texts: Mapping[str, str] = MappingProxyType({})  # of the artifact, by label, if they were baked

    def __str__(self) -> str:
        return f"{self.artifact.label} for {self.artifact.arch} ({self.artifact.digest[:12]})"


def choose_nearest(
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
        near = Near(artifact, _list_differences(each, wanted), texts)
        distance = abs(_number(artifact.arch) - _number(target))
        rank = (len(near.differences), artifact.label != label, distance)
        if best is None or rank < best[0]:
            best = rank, near
    return None if best is None else best[1]


def _number(arch: Arch) -> int:
    return 10 * arch.major + arch.minor


def _list_differences(stored: Artifact | BundleEntry, wanted: tuple[Part, ...]) -> tuple[str, ...]:
    """Return one line for each part in which the requests differ.

    Keys in a cache do not contain include directories, so a cached artifact is compared without them.
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


def find_nearest(
    wanted: tuple[Part, ...],
    label: str,
    bundles: Iterable[Bundle],
    caches: Iterable[LayerStore],
    *,
    seconds: float,
    namesake: bool = False,
) -> Near | None:
    """Return the nearest artifact among those in bundles and caches that can be read in `seconds`.

    With `namesake`, only artifacts called `label` are compared.
    """
    until = time.monotonic() + seconds
    alike = _read_bundles(bundles, until, lambda its: its == label)
    others = _read_bundles(bundles, until, lambda its: its != label)
    cached = _read_caches(caches, until)
    if namesake:
        return choose_nearest(
            wanted, label, chain(alike, (each for each in cached if each.label == label))
        )
    return choose_nearest(wanted, label, chain(alike, cached, others))


def _read_bundles(
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


def _read_caches(caches: Iterable[LayerStore], until: float) -> Iterator[Artifact]:
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


# The lines that changed


def describe_differences(near: Near, wanted: Key, bundles: Iterable[Path]) -> tuple[str, ...]:
    """Return the differences of a stored artifact from a request, with the changed lines of texts.

    The text of the stored one is in its bundle, or among the recorded sources beside one of `bundles`.
    If it is found nowhere, the sizes of both texts are shown.
    """
    stored, texts = dict(near.artifact.parts), dict(wanted.parts)
    lines = []
    for line in near.differences:
        label = line.partition(": ")[0]
        if is_text(label) and label in stored and label in texts:
            change = _describe_difference(label, stored[label], texts[label], near, bundles)
            line = line if change is None else f"{label}: {change}"
        lines.append(line)
    return tuple(lines)


def _describe_difference(
    label: str, old: str, new: bytes, near: Near, bundles: Iterable[Path]
) -> str | None:
    hashed = _HASHED.fullmatch(old)
    if hashed is None and Part.of(label, new).value == new.decode(errors="replace"):
        return None  # Both are short, and shown as they are.
    text = old if hashed is None else near.texts.get(label) or _read_recorded(hashed[2], bundles)
    if text is None:
        assert hashed is not None
        return f"{int(hashed[1]):,} bytes of {near.artifact.label} became {len(new):,} bytes"
    return _describe_change(text, new.decode(errors="replace"))


def _describe_change(old: str, new: str) -> str | None:
    pairs = zip_longest(old.split("\n"), new.split("\n"))
    for number, (before, after) in enumerate(pairs, 1):
        if before is None:
            return f"line {number} is new: {short_repr(after)}"
        if after is None:
            return f"line {number} is gone: {short_repr(before)}"
        if before != after:
            return f"line {number}: {short_repr(before)} became {short_repr(after)}"
    return None


def _read_recorded(digest: str, bundles: Iterable[Path]) -> str | None:
    """Return the text of a SHA-256 that a recording stored beside a bundle; None if there is none."""
    for bundle in bundles:
        for file in _list_candidates(bundle, digest):
            with suppress(OSError, UnicodeDecodeError):
                data = read_whole(file)
                if hashlib.sha256(data).hexdigest() == digest:
                    return data.decode()
    return None


def _list_candidates(bundle: Path, digest: str) -> Iterator[Path]:
    """Yield the files that may have a text: stored by the recording, or named in the manifest."""
    with suppress(OSError):
        yield from bundle.with_suffix(".sources").glob(f"{digest[:_NAME_DIGITS]}*")
    manifest = bundle.with_suffix(".toml")
    try:
        rows = tomllib.loads(read_whole(manifest).decode()).get("program", [])
    except (OSError, ValueError, RecursionError):
        return
    for row in rows if isinstance(rows, list) else ():
        if (
            isinstance(row, Mapping)
            and row.get("sha256") == digest
            and isinstance(row.get("file"), str)
        ):
            yield manifest.parent / row["file"]
