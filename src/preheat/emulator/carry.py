"""Arithmetic with the carry flag: `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc`, `madc`.

Each function takes the flag before and the unsigned operands, and returns the result and the flag
after. After a subtraction the flag is the carry of `a + ~b + 1`: it is set if there was no borrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.emulator.decode import Register
from preheat.emulator.integer import multiply_high

__all__ = ["FLAG", "FUNCTIONS", "initial"]

#: The condition code `CC.CF`. It is a register like any other.
FLAG = Register("%carry", "pred")


def _add(flag: Any, a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    result = total + flag
    return result, (total < a) | (result < total)


def _subtract(flag: Any, a: Any, b: Any) -> tuple[Any, Any]:
    return _add(flag, a, ~b)


def _multiply_low(flag: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    return _add(flag, a * b, c)


def _multiply_high(flag: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    return _add(flag, multiply_high(a, b), c)


def initial(base: str) -> bool:
    """Return the flag before an instruction that does not read it: `a - b` is `a + ~b + 1`."""
    return base == "sub"


#: The functions by mnemonic, without the `c` at its end, and the modifiers before the type.
FUNCTIONS: dict[tuple[str, ...], Callable[..., tuple[Any, Any]]] = {
    ("add",): _add,
    ("sub",): _subtract,
    ("mad", "lo"): _multiply_low,
    ("mad", "hi"): _multiply_high,
}
