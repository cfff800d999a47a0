"""Sealed: nothing may be compiled any more, in this process and from now on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from preheat.errors import InputError

__all__ = ["Mode", "in_force", "seal", "sealed", "unseal"]


class Mode(IntEnum):
    """What becomes of a compile: it is done, it is done and told, or it is a `SealedError`."""

    OFF = 0
    WARN = 1
    ERROR = 2

    @classmethod
    def of(cls, text: str | Mode) -> Mode:
        """`"warn"` or `"error"`; anything else is an `InputError`."""
        if isinstance(text, Mode):
            return text
        if text not in ("warn", "error"):
            raise InputError(f"a seal is 'error' or 'warn', not {text!r}")
        return cls.WARN if text == "warn" else cls.ERROR


_fixed = Mode.OFF
_inside: list[Mode] = []


def seal(mode: str = "error") -> None:
    """Compile nothing from now on: what is not stored is a `SealedError`, or with "warn" a warning.

    Holds for the whole process, whatever thread asks, until `unseal`.
    """
    global _fixed
    _fixed = Mode.of(mode)


def unseal() -> None:
    """Undo `seal`. What `PREHEAT_SEALED` or an enclosing `sealed` block says still holds."""
    global _fixed
    _fixed = Mode.OFF


@contextmanager
def sealed(mode: str = "error") -> Iterator[None]:
    """`seal` for the time of a block; of several seals the strictest holds."""
    wanted = Mode.of(mode)
    _inside.append(wanted)
    try:
        yield
    finally:
        _inside.remove(wanted)


def in_force() -> Mode:
    """The strictest of the seals there are."""
    return max((_fixed, *_inside))
