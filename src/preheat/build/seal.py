"""Sealing: from now on, this process compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from preheat.model.config import SealMode, environ

__all__ = ["SEALED_BY", "describe_how_to_lift", "in_force", "seal", "sealed", "unseal"]

#: The variable by which `preheat run --sealed` marks a command that its option sealed.
SEALED_BY = "PREHEAT_SEALED_BY"

_fixed = SealMode.OFF
_inside: list[SealMode] = []


def seal(mode: str = "error") -> None:
    """Compile nothing from now on, in all threads of the process, until `unseal`.

    Args:
        mode: With `"error"`, a program that is not stored is a `SealedError`. With `"warn"`, it is
            compiled with a warning.

    Raises:
        InputError: The mode is another word.

    Examples:
        >>> preheat.seal()
        >>> preheat.compile("__global__ void late() {}", "sm_90", label="late.cu")
        Traceback (most recent call last):
        preheat.errors.SealedError: ...: late.cu (sm_90) cannot be compiled in this sealed process: ...
        >>> preheat.unseal()
    """
    global _fixed
    _fixed = SealMode.of(mode)


def unseal() -> None:
    """Undo `seal`. `PREHEAT_SEALED` and enclosing `sealed` blocks remain in force.

    Examples:
        >>> preheat.seal()
        >>> preheat.unseal()
    """
    global _fixed
    _fixed = SealMode.OFF


@contextmanager
def sealed(mode: str = "error") -> Iterator[None]:
    """Seal the process during a block, as `seal` does. The strictest of several active seals applies.

    Examples:
        >>> artifact = preheat.compile(SAXPY, "sm_90")
        >>> with preheat.sealed():
        ...     preheat.compile(SAXPY, "sm_90") == artifact
        True
    """
    wanted = SealMode.of(mode)
    _inside.append(wanted)
    try:
        yield
    finally:
        _inside.remove(wanted)


def describe_how_to_lift() -> str:
    """Return the call or the setting that lets this process compile with a warning."""
    if SealMode.ERROR in _inside:
        return 'preheat.sealed("warn")'
    if _fixed is SealMode.ERROR:
        return 'preheat.seal("warn")'
    if environ().get(SEALED_BY) == "run":  # The option has replaced the value of PREHEAT_SEALED.
        return "'preheat run --sealed warn'"
    return "PREHEAT_SEALED=warn"


def in_force() -> SealMode:
    """Return the strictest mode that is in force."""
    return max((_fixed, *_inside)) if _inside else _fixed
