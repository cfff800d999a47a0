"""The first line in which a text of a request differs from the one that a bundle was baked from."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from preheat.build.nearest import Near
from preheat.model.key import Key, Part, is_text
from preheat.process.files import read_whole
from preheat.process.messages import short_repr

__all__ = ["differences_in_words"]

_HASHED = re.compile(r"(\d+) bytes, sha256 ([0-9a-f]{64})")
_NAME_DIGITS = 16  # of the digest in the name of a text beside a manifest


def differences_in_words(near: Near, wanted: Key, bundles: Iterable[Path]) -> tuple[str, ...]:
    """Return the differences of a stored artifact from a request, with the changed lines of texts.

    The text of the stored one is in its bundle, or among the recorded sources beside one of `bundles`.
    If it is found nowhere, the sizes of both texts are shown.
    """
    stored, texts = dict(near.artifact.parts), dict(wanted.parts)
    lines = []
    for line in near.differences:
        label = line.partition(": ")[0]
        if is_text(label) and label in stored and label in texts:
            change = _difference(label, stored[label], texts[label], near, bundles)
            line = line if change is None else f"{label}: {change}"
        lines.append(line)
    return tuple(lines)


def _difference(label: str, old: str, new: bytes, near: Near, bundles: Iterable[Path]) -> str | None:
    hashed = _HASHED.fullmatch(old)
    if hashed is None and Part.of(label, new).value == new.decode(errors="replace"):
        return None  # Both are short, and shown as they are.
    text = old if hashed is None else near.texts.get(label) or _recorded(hashed[2], bundles)
    if text is None:
        assert hashed is not None
        return f"{int(hashed[1]):,} bytes of {near.artifact.label} became {len(new):,} bytes"
    return _first_change(text, new.decode(errors="replace"))


def _first_change(old: str, new: str) -> str | None:
    pairs = zip_longest(old.split("\n"), new.split("\n"))
    for number, (before, after) in enumerate(pairs, 1):
        if before is None:
            return f"line {number} is new: {short_repr(after)}"
        if after is None:
            return f"line {number} is gone: {short_repr(before)}"
        if before != after:
            return f"line {number}: {short_repr(before)} became {short_repr(after)}"
    return None


def _recorded(digest: str, bundles: Iterable[Path]) -> str | None:
    """Return the text of a SHA-256 that a recording stored beside a bundle; None if there is none."""
    for bundle in bundles:
        for file in _candidates(bundle, digest):
            with suppress(OSError, UnicodeDecodeError):
                data = read_whole(file)
                if hashlib.sha256(data).hexdigest() == digest:
                    return data.decode()
    return None


def _candidates(bundle: Path, digest: str) -> Iterator[Path]:
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
