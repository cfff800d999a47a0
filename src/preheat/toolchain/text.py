"""Text functions that the parsers share."""

from __future__ import annotations

import re

__all__ = ["split_commas"]

_SEPARATOR = re.compile(r"[,(\[{<>}\])]")


def split_commas(text: str) -> list[str]:
    """Return the parts of `text` between commas outside brackets, without surrounding white space."""
    parts = []
    depth = start = 0
    for found in _SEPARATOR.finditer(text):
        char = found[0]
        if char in "([{<":
            depth += 1
        elif char != ",":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    if last := text[start:].strip():
        parts.append(last)
    return parts
