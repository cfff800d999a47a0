"""Comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from preheat.devices.emulator.floating import TINY, flush
from preheat.devices.emulator.integer import Array, Run, choose, join

INTEGERS: dict[str, Run] = {
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
FLOATS: dict[str, Run] = {
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

PROPERTIES: dict[str, Run] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= TINY[a.dtype]) | (a == 0)),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < TINY[a.dtype]),
}

JOIN: dict[str, Run] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def joined(test: Run, join: Run) -> Run:
    """Return `test` combined with a third operand."""
    return lambda a, b, c: join(test(a, b), c)


def with_negation(test: Run) -> Run:
    """Return `test` and its negation."""

    def run(a: Array, b: Array) -> tuple[Array, Array]:
        true = test(a, b)
        return true, ~true

    return run


def joined_with_negation(test: Run, join: Run) -> Run:
    """Return `test` and its negation, each combined with a third operand."""

    def run(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        true = test(a, b)
        return join(true, c), join(~true, c)

    return run


def each_joined(
    tests: Callable[..., tuple[Array, Array]], join: Run
) -> Callable[..., tuple[Array, Array]]:
    """Return both predicates of `tests`, each combined with a third operand."""

    def run(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        low, high = tests(a, b)
        return join(low, c), join(high, c)

    return run


def marked_halves(tests: Callable[..., tuple[Array, Array]], yes: Array) -> Run:
    """Return `yes` in each half whose predicate holds, else zero."""
    mark = marked(lambda true: true, yes)
    return lambda *operands: join(*map(mark, tests(*operands)))


def marked(test: Run, yes: Array) -> Run:
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
