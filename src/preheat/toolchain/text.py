"""Small text tools shared by the parsers."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["split_commas"]

_DEPTH = {**dict.fromkeys("([{<", 1), **dict.fromkeys(")]}>", -1)}


def split_commas(text: str) -> Iterator[str]:
    """The parts of `text` between commas that no bracket encloses, white space stripped."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += _DEPTH.get(char, 0)
        if char == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if last := text[start:].strip():
        yield last
