"""Sealing: from now on, this process compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from preheat.config import SealMode

__all__ = ["in_force", "seal", "sealed", "unseal"]


_fixed = SealMode.OFF
_inside: list[SealMode] = []


def seal(mode: str = "error") -> None:
    """Compile nothing from now on: a program that is not stored is a `SealedError`, or a warning.

    The seal holds for all threads of the process until `unseal`.
    """
    global _fixed
    _fixed = SealMode.of(mode)


def unseal() -> None:
    """Undo `seal`. `PREHEAT_SEALED` and enclosing `sealed` blocks remain in force."""
    global _fixed
    _fixed = SealMode.OFF


@contextmanager
def sealed(mode: str = "error") -> Iterator[None]:
    """Seal the process during a block. Of several seals, the strictest one holds."""
    wanted = SealMode.of(mode)
    _inside.append(wanted)
    try:
        yield
    finally:
        _inside.remove(wanted)


def in_force() -> SealMode:
    """Return the strictest mode that is in force."""
    return max((_fixed, *_inside)) if _inside else _fixed
