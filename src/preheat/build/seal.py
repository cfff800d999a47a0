"""Sealed: nothing may be compiled any more, in this process and from now on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from preheat.config import SealMode

__all__ = ["in_force", "seal", "sealed", "unseal"]


_fixed = SealMode.OFF
_inside: list[SealMode] = []


def seal(mode: str = "error") -> None:
    """Compile nothing from now on: what is not stored is a `SealedError`, or with "warn" a warning.

    Holds for the whole process, whatever thread asks, until `unseal`.
    """
    global _fixed
    _fixed = SealMode.of(mode)


def unseal() -> None:
    """Undo `seal`. What `PREHEAT_SEALED` or an enclosing `sealed` block says still holds."""
    global _fixed
    _fixed = SealMode.OFF


@contextmanager
def sealed(mode: str = "error") -> Iterator[None]:
    """`seal` for the time of a block; of several seals the strictest holds."""
    wanted = SealMode.of(mode)
    _inside.append(wanted)
    try:
        yield
    finally:
        _inside.remove(wanted)


def in_force() -> SealMode:
    """The strictest of the seals there are."""
    return max((_fixed, *_inside))
