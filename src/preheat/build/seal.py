"""Sealing: from now on, this process compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from preheat.config import SealMode, environ

__all__ = ["SEALED_BY", "hint", "in_force", "seal", "sealed", "unseal"]

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


def hint(*, has_bundle: bool, headers_changed: bool = False) -> str:
    """Return the hint of a `SealedError`: it names what has sealed this process, in the mode "warn".

    `has_bundle` is False if no bundle is mounted. `headers_changed` is True if a bundle has code
    from other header files.
    """
    if headers_changed:
        return "bake again, or use the code in the bundle with PREHEAT_SEALED_HEADERS=warn"
    lifted_by = "PREHEAT_SEALED=warn"
    if SealMode.ERROR in _inside:
        lifted_by = 'preheat.sealed("warn")'
    elif _fixed is SealMode.ERROR:
        lifted_by = 'preheat.seal("warn")'
    elif environ().get(SEALED_BY) == "run":  # The option has replaced the value of PREHEAT_SEALED.
        lifted_by = "'preheat run --sealed warn'"
    if not has_bundle:
        return (
            "no bundle is mounted: record and bake what the process needs, and name the bundle with "
            f"PREHEAT_BUNDLE or 'preheat run --bundle'; or let it compile with {lifted_by}"
        )
    return f"record and bake what the process needs, or let it compile with {lifted_by}"


def in_force() -> SealMode:
    """Return the strictest mode that is in force."""
    return max((_fixed, *_inside)) if _inside else _fixed
