"""Bundles that are named with the SHA-256 of their file: `kernels.heat@sha256:<64 hexadecimal digits>`.

The pin is part of the name of a bundle everywhere. Code that does not handle pins does not find a file
of that name, so it cannot use a file that was not compared with its pin.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from preheat.errors import BundleError

__all__ = ["split_pin", "split_places"]

_MARK = "@sha256"
_PINNED = re.compile(rf"(.+){_MARK}:([0-9a-fA-F]{{64}})", re.DOTALL)
# The colon of a pin is the separator of PATH as well.
_SEPARATOR = re.compile(rf"(?<!{_MARK}){re.escape(os.pathsep)}")


def split_pin(place: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Return the path of a bundle and its pin or None; `BundleError` for an invalid pin."""
    text = os.fspath(place)
    if f"{_MARK}:" not in text:
        return Path(text), None
    pinned = _PINNED.fullmatch(text)
    if pinned is None:
        raise BundleError(
            f"{text}: a pin is {_MARK}: and 64 hexadecimal digits at the end",
            hint="'preheat bundle ls FILE' prints the name to use",
        )
    return Path(pinned[1]), pinned[2].lower()


def split_places(text: str) -> list[str]:
    """Split a list of bundles that are separated like PATH, each with or without a pin."""
    return [place for place in _SEPARATOR.split(text) if place.strip()]
