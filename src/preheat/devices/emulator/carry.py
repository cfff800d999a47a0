"""Arithmetic with the carry flag: `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc`, `madc`.

Each function takes the flag before and the unsigned operands, and returns the result and the flag
after. After a subtraction the flag is the carry of `a + ~b + 1`: it is set if there was no borrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.devices.emulator.decode import Register

__all__ = ["FORMS", "REGISTER", "initial"]

#: The flag is a register like any other.
REGISTER = Register("%carry", "pred")


def _add(flag: Any, a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    result = total + flag
    return result, (total < a) | (result < total)


def _subtract(flag: Any, a: Any, b: Any) -> tuple[Any, Any]:
    return _add(flag, a, ~b)


def _multiply_low(flag: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    return _add(flag, a * b, c)


def _multiply_high(flag: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    return _add(flag, _high(a, b), c)


def _high(a: Any, b: Any) -> Any:
    """Return the upper half of a product of unsigned words."""
    half = a.dtype.type(a.dtype.itemsize * 4)
    low = a.dtype.type((1 << int(half)) - 1)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half)


def initial(base: str) -> bool:
    """Return the flag for an instruction that takes none: a subtraction adds 1 to `a + ~b`."""
    return base == "sub"


#: By mnemonic without its `c`, and the modifiers before the type.
FORMS: dict[tuple[str, ...], Callable[..., tuple[Any, Any]]] = {
    ("add",): _add,
    ("sub",): _subtract,
    ("mad", "lo"): _multiply_low,
    ("mad", "hi"): _multiply_high,
}
