"""Compares output that the documentation shows with the output of a run."""

from __future__ import annotations

import re

__all__ = ["compare", "matches"]

_KEY = re.compile(r"\b[0-9a-f]{12,64}\b")
_MEASURED = re.compile(
    r"\d[\d.,]*[ \t]*(?:µs|ms|min|s|B|KiB|MiB|GiB|registers)\b|(?<=\"ready\": )[\d.]+"
)
#: The version of a program or library that is installed, before its place.
_VERSION = re.compile(r"\b\d+\.\d+\.\w+(?= at )")
_NUMBER = re.compile(r"(?<![\w])\d[\d,.]*(?![\w])")


def _normalized(text: str, *, exactly: bool) -> list[str]:
    """Output with what varies made equal: keys, times, sizes, versions, spacing.

    Numbers are made equal, too, unless `exactly`.
    """
    text = _MEASURED.sub("N", _VERSION.sub("N", _KEY.sub("KEY", text)))
    if not exactly:
        text = _NUMBER.sub("N", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def matches(shown: str, real: str) -> bool:
    """Return whether a line is the one that is shown, in which `…` stands for any text."""
    pattern = re.escape(shown).replace(re.escape("…"), ".*")
    return re.fullmatch(pattern, real) is not None


def compare(shown: str, real: str) -> None:
    """Fail unless it is the same; numbers may differ where the output has keys, times or sizes."""
    exactly = not (_KEY.search(shown) or _MEASURED.search(shown))
    expected, got = _normalized(shown, exactly=exactly), _normalized(real, exactly=exactly)
    assert len(expected) == len(got), f"shown:\n{shown}\nreal:\n{real}"
    for a, b in zip(expected, got, strict=True):
        assert matches(a, b), f"shown: {a}\nreal:  {b}"
