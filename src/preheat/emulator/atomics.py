"""Atomic operations: the updates of all threads, in the order of the threads.

Updates of one address are applied one after another, exactly and in the same order every time. If many
threads share few addresses, they are processed address by address, otherwise in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.emulator import access
from preheat.emulator.table import instruction
from preheat.emulator.variant import TYPES

if TYPE_CHECKING:
    from preheat.emulator.addresses import Addresses
    from preheat.emulator.group import Group

__all__ = ["EXCHANGE", "OPERATIONS", "Update", "atomic", "find_update"]

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]


class Update(NamedTuple):
    """How one operation changes words: `apply(old, *values)`.

    `ufunc` is the same operation in NumPy, if it has one. `scalar` works on Python's integers, if that
    is faster.
    """

    apply: Function
    ufunc: np.ufunc | None = None
    scalar: Function | None = None


EXCHANGE = Update(lambda _old, new: new, scalar=lambda _old, new: new)
_SWAP = Update(
    lambda old, expected, new: np.where(old == expected, new, old),
    scalar=lambda old, expected, new: new if old == expected else old,
)
_INCREMENT = Update(
    lambda old, limit: np.where(old >= limit, np.zeros_like(old), old + np.ones_like(old)),
    scalar=lambda old, limit: 0 if old >= limit else old + 1,
)
_DECREMENT = Update(
    lambda old, limit: np.where((old == 0) | (old > limit), limit, old - np.ones_like(old)),
    scalar=lambda old, limit: limit if old == 0 or old > limit else old - 1,
)
_INTEGER = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_OTHER = {"exch": EXCHANGE, "cas": _SWAP, "inc": _INCREMENT, "dec": _DECREMENT}
OPERATIONS = frozenset({*_INTEGER, *_OTHER})


@lru_cache(maxsize=256)
def find_update(operation: str, kind: str) -> Update | None:
    """Return the operation for a type, or None if there is none."""
    if kind not in TYPES or operation not in OPERATIONS or kind == "pred":
        return None
    if operation in _OTHER:
        return _OTHER[operation]
    if kind in ("f32", "f64") and operation == "add":
        return Update(np.add, np.add)
    if kind[0] in "usb" and not kind.endswith(("x2", "16", "8")):
        return Update(_INTEGER[operation], _INTEGER[operation])
    found = instruction(f"{operation}.rn.{kind}") or instruction(f"{operation}.{kind}")
    return Update(found.run) if found else None


def atomic(
    group: Group,
    at: Addresses,
    offset: int,
    dtype: np.dtype[Any],
    site: int,
    update: Update,
    returns_old: bool,
    *values: Any,
) -> Any:
    """Update memory for every thread. Return the words before the updates, if `returns_old`."""
    memory, index = access.check_atomic(group, at, offset, dtype, site)
    values = tuple(np.broadcast_to(value, (group.count,)) for value in values)
    if update.ufunc is not None and not returns_old:
        group.wave.writes += 1
        update.ufunc.at(memory, index, values[0])
        return None
    order = np.argsort(index, kind="stable")
    where = index[order]
    starts = np.flatnonzero(np.concatenate(([True], where[1:] != where[:-1])))
    sizes = np.diff(np.append(starts, len(where)))
    ordered = [value[order] for value in values]
    before = memory.take(where)
    if len(starts) == len(where):
        after = update.apply(before, *ordered)
    elif len(starts) <= int(sizes.max()):
        after = _by_address(update, before, ordered, starts, sizes)
    else:
        after = _in_rounds(update, before, ordered, starts, sizes)
    ends = starts + sizes - 1
    if (after[ends] != memory.take(where[ends])).any():
        group.wave.writes += 1
    memory[where[ends]] = after[ends]
    old = np.empty_like(before)
    old[order] = before
    return old


def _by_address(
    update: Update, before: Array, values: list[Array], starts: Array, sizes: Array
) -> Array:
    """Return the word after each update, address by address. Set `before` to the word before it."""
    after = np.empty_like(before)
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        mine = slice(start, start + size)
        word = before[start : start + 1]
        operands = [value[mine] for value in values]
        if update.ufunc is not None:
            chain = np.concatenate((word, *operands))
            after[mine] = update.ufunc.accumulate(chain, dtype=word.dtype)[1:]
        elif update.scalar is not None:
            numbers = [values.tolist() for values in operands]
            after[mine] = _successive_values(update.scalar, word.item(), numbers)
        else:
            columns = [values.reshape(-1, 1) for values in operands]
            after[mine] = np.concatenate(_successive_values(update.apply, word, columns))
        before[start + 1 : start + size] = after[start : start + size - 1]
    return after


def _successive_values(apply: Function, word: Any, values: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the value of one word after each of its updates."""
    return [word := apply(word, *operands) for operands in zip(*values, strict=True)]


def _in_rounds(
    update: Update, before: Array, values: list[Array], starts: Array, sizes: Array
) -> Array:
    """Do the same, but apply the first update of every address, then the second, and so on."""
    after = np.empty_like(before)
    words = before[starts]
    for turn in range(int(sizes.max())):
        going = sizes > turn
        at = starts[going] + turn
        before[at] = words[going]
        after[at] = words[going] = update.apply(words[going], *(value[at] for value in values))
    return after
