"""Text functions that the parsers share."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["split_commas"]

_DEPTH = {**dict.fromkeys("([{<", 1), **dict.fromkeys(")]}>", -1)}


def split_commas(text: str) -> Iterator[str]:
    """Yield the parts of `text` between commas outside brackets, without surrounding white space."""
    depth = start = 0
    for at, char in enumerate(text):
        depth += _DEPTH.get(char, 0)
        if char == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if last := text[start:].strip():
        yield last
