"""Instructions in which the threads of a warp see one another.

All threads that an instruction's mask names have arrived when one of these functions runs, except
those that have exited: the machine sees to that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.device.emulator.layout import WARP

if TYPE_CHECKING:
    from preheat.device.emulator.group import Group

__all__ = [
    "REDUCTIONS",
    "SHUFFLES",
    "VOTES",
    "absent",
    "active",
    "elect",
    "match",
    "reduce",
    "shuffle",
    "vote",
]

Array = np.ndarray[Any, Any]
_LANES = np.arange(WARP, dtype=np.int64)


def _rows(group: Group, values: Any, fill: Any = 0) -> Array:
    """Values of the threads as one row of 32 for each warp; `fill` where no thread of the group is."""
    layout = group.wave.layout
    if group.lanes is None and layout.whole:
        found: Array = np.broadcast_to(values, (group.count,)).reshape(-1, WARP)
        return found
    table = np.full(layout.warps * WARP, fill, values.dtype)
    table[group.of("slot")] = values
    return table.reshape(-1, WARP)


def _bits(rows: Array) -> Array:
    """A word for each warp from rows of booleans; lane 0 is the lowest bit."""
    return np.packbits(rows, axis=1, bitorder="little").view(np.uint32)[:, 0]


def _present(group: Group) -> Array:
    """Which lanes of each warp are in the group, as words."""
    return _bits(_rows(group, np.bool_(True), False))


def absent(group: Group, mask: Any) -> Any:
    """Lanes that each thread's `mask` names and that have neither arrived nor exited."""
    layout = group.wave.layout
    there = np.zeros(layout.warps * WARP, np.bool_)
    there[layout.slot] = ~group.wave.exited
    missing = _bits(there.reshape(-1, WARP)) & ~_present(group)
    return missing.take(group.of("warp")) & mask


def active(group: Group) -> Array:
    """The lanes of each thread's warp that run with it."""
    return _present(group).take(group.of("warp"))


# Shuffles


SHUFFLES = frozenset(("up", "down", "bfly", "idx"))


def shuffle(group: Group, mode: str, value: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """The value of another lane, and whether that lane is in range; a thread's own where it is not."""
    if b.ndim == c.ndim == 0:
        source, valid = _pattern(mode, int(b) & 31, int(c))
        if group.lanes is None and group.wave.layout.whole:
            found = value.take(_permutation(source.tobytes(), group.count)) if value.ndim else value
            return found, np.bool_(True) if valid.all() else np.tile(valid, group.wave.layout.warps)
        lane = group.of("lane")
        source, valid = source.take(lane), valid.take(lane)
    else:
        source, valid = _sources(mode, group.of("lane").astype(np.int64), b, c)
    if not value.ndim:
        return value, valid
    warps = group.of("warp")
    here = _rows(group, np.bool_(True), False)[warps, source]
    return np.where(here, _rows(group, value)[warps, source], value), valid


def _sources(mode: str, lane: Array, b: Any, c: Any) -> tuple[Array, Array]:
    """The lane that each lane reads from, its own where that is out of range; whether it is not."""
    b, c = b.astype(np.int64) & 31, c.astype(np.int64)
    keep = (c >> 8) & 31
    low = lane & keep
    limit = low | (c & 31 & ~keep)
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~keep)}[mode]
    valid = source >= limit if mode == "up" else source <= limit
    return np.where(valid, source, lane), np.broadcast_to(valid, lane.shape)


@functools.lru_cache(maxsize=256)
def _pattern(mode: str, b: int, c: int) -> tuple[Array, Array]:
    return _sources(mode, _LANES, np.int64(b), np.int64(c))


@functools.lru_cache(maxsize=32)
def _permutation(source: bytes, count: int) -> Array:
    """Where each of `count` threads reads when every warp does as `source` says."""
    rows = np.arange(0, count, WARP)[:, None] + np.frombuffer(source, np.int64)
    return rows.reshape(-1)


# Votes and the like

VOTES = frozenset(("all", "any", "uni", "ballot"))


def vote(group: Group, mode: str, predicate: Any, mask: Any) -> Any:
    """A vote among the threads that `mask` names."""
    warps = group.of("warp")
    true = _bits(_rows(group, predicate, False)).take(warps) & mask
    named = active(group) & mask
    answers = {"all": true == named, "any": true != 0, "uni": (true == named) | (true == 0)}
    return true if mode == "ballot" else answers[mode]


def match(group: Group, mode: str, value: Any, mask: Any) -> tuple[Array, Any]:
    """The threads of the mask that have the same value; for `all` only when every one has it."""
    warps, rows = group.of("warp"), _rows(group, value)
    same = np.zeros(group.count, np.uint32)
    for lane in range(WARP):
        same |= (rows[:, lane].take(warps) == value).astype(np.uint32) << np.uint32(lane)
    named = active(group) & mask
    same &= named
    if mode == "any":
        return same, np.bool_(True)
    agreed = same == named
    return np.where(agreed, named, np.uint32(0)), agreed


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce(group: Group, verb: str, value: Any, mask: Any) -> Array:
    """One value from all threads that the mask names."""
    warps, rows, named = group.of("warp"), _rows(group, value), active(group) & mask
    total = np.zeros(group.count, value.dtype)
    begun = np.zeros(group.count, np.bool_)
    for lane in range(WARP):
        has = (named >> np.uint32(lane)) & np.uint32(1) != 0
        other = rows[:, lane].take(warps)
        total = np.where(has, np.where(begun, REDUCTIONS[verb](total, other), other), total)
        begun |= has
    return total


def elect(group: Group, mask: Any) -> tuple[Array, Array]:
    """The lowest lane that the mask names, and whether a thread is it."""
    named = active(group) & mask
    lowest = named & (~named + np.uint32(1))
    leader = np.log2(np.maximum(lowest, 1).astype(np.float64)).astype(np.uint32)
    return leader, leader == group.of("lane")
