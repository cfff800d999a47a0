"""Comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from preheat.emulator.floating import TINY, flush
from preheat.emulator.integer import Array, ArrayFunction, choose, join

INTEGERS: dict[str, ArrayFunction] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _differ(a: Array, b: Array) -> Array:
    return (a < b) | (a > b)


# False if an operand is NaN; with a `u` at the end, true.
FLOATS: dict[str, ArrayFunction] = {
    "eq": np.equal,
    "ne": _differ,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~_differ(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}

PROPERTIES: dict[str, ArrayFunction] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= TINY[a.dtype]) | (a == 0)),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < TINY[a.dtype]),
}

BOOLEAN: dict[str, ArrayFunction] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def joined(test: ArrayFunction, operator: ArrayFunction) -> ArrayFunction:
    """Return `test` combined with a third operand."""
    return lambda a, b, c: operator(test(a, b), c)


def with_negation(test: ArrayFunction) -> ArrayFunction:
    """Return `test` and its negation."""

    def run(a: Array, b: Array) -> tuple[Array, Array]:
        true = test(a, b)
        return true, ~true

    return run


def both_joined(
    tests: Callable[..., tuple[Array, Array]], operator: ArrayFunction
) -> Callable[..., tuple[Array, Array]]:
    """Return both predicates of `tests`, each combined with a third operand."""

    def run(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        first, second = tests(a, b)
        return operator(first, c), operator(second, c)

    return run


def as_numbers(tests: Callable[..., tuple[Array, Array]], yes: Array) -> ArrayFunction:
    """Return `yes` in each half whose predicate holds, else zero."""
    to_number = as_number(lambda true: true, yes)
    return lambda *operands: join(*map(to_number, tests(*operands)))


def as_number(test: ArrayFunction, yes: Array) -> ArrayFunction:
    """Return `yes` where `test` holds, else zero."""
    return lambda *operands: choose(test(*operands), yes, yes.dtype.type(0))


def select(a: Array, b: Array, condition: Array) -> Array:
    """Return `a` where the condition holds, else `b`."""
    return choose(condition, a, b)


def select_by_sign(a: Array, b: Array, c: Array) -> Array:
    """Return `a` where c >= 0, else `b`."""
    return choose(c >= 0, a, b)


def select_by_flushed_sign(a: Array, b: Array, c: Array) -> Array:
    """Return `a` where c is not negative after flushing, else `b`."""
    return choose(flush(c) >= 0, a, b)
