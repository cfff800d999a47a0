"""Instructions in which the threads of a warp exchange values.

When one of these functions runs, all threads in the mask of the instruction have arrived, except those
that have exited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator.layout import WARP

if TYPE_CHECKING:
    from preheat.emulator.group import Group

__all__ = [
    "REDUCTIONS",
    "SHUFFLES",
    "VOTES",
    "Warps",
    "absent",
    "active",
    "elect",
    "match",
    "reduce",
    "shuffle",
    "sources",
    "vote",
]

Array = np.ndarray[Any, Any]
_LANES = np.arange(WARP, dtype=np.int64)
_ALL = np.uint32(0xFFFFFFFF)


class Warps:
    """The threads of a group as rows of 32, one for each warp.

    If all threads of every warp are there, values are rows as they are; otherwise there is a row for
    each warp of the wave, and `padded_index` is each thread's index in the rows.
    """

    def __init__(self, group: Group) -> None:
        layout = group.wave.layout
        self.padded_index: Array | None = None
        self.present: Any = _ALL  # The lanes of each row that are there.
        if group.lanes is None and layout.full_warps:
            self.count = layout.warps
            self.row = layout.warp
            return
        warps = group.per_thread("warp")
        if (
            layout.full_warps
            and group.count % WARP == 0
            and (warps[::WARP] == warps[WARP - 1 :: WARP]).all()
        ):
            self.count = group.count // WARP
            self.row = np.arange(group.count) // WARP
            return
        self.count = layout.warps
        self.row = warps
        self.padded_index = group.per_thread("padded_index")
        self.present = _bits(self.rows(np.bool_(True)))

    def rows(self, values: Any) -> Array:
        """Return values of the threads as rows, zero where there is no thread."""
        if self.padded_index is None:
            found: Array = np.broadcast_to(values, (self.count * WARP,)).reshape(-1, WARP)
            return found
        table = np.zeros(self.count * WARP, values.dtype)
        table[self.padded_index] = values
        return table.reshape(-1, WARP)

    def per_thread(self, words: Any) -> Any:
        """Return for each thread the word of its warp."""
        return words.take(self.row) if words.ndim else words


def _bits(rows: Array) -> Array:
    """Return a word for each warp from rows of booleans. Lane 0 is the lowest bit."""
    return np.packbits(rows, axis=1, bitorder="little").view(np.uint32)[:, 0]


def absent(group: Group, mask: Any) -> Any:
    """Return the lanes in each thread's `mask` that have neither arrived nor exited."""
    warps = group.warps
    if warps.padded_index is None:
        return np.uint32(0)
    layout = group.wave.layout
    there = np.zeros(layout.warps * WARP, np.bool_)
    there[layout.padded_index] = ~group.wave.exited
    return warps.per_thread(_bits(there.reshape(-1, WARP)) & ~warps.present) & mask


def active(group: Group) -> Any:
    """Return the lanes of each thread's warp that run with it."""
    return group.warps.per_thread(group.warps.present)


# Shuffles


SHUFFLES = frozenset(("up", "down", "bfly", "idx"))


def shuffle(group: Group, mode: str, value: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """Return the value of another lane, and whether that lane is in range.

    A thread whose source is out of range gets its own value. A lane that does not take part yields
    zero: CUDA leaves that undefined, and an H200 yields zero.
    """
    warps = group.warps
    if b.ndim == c.ndim == 0:
        source, valid = _sources_in_warp(mode, int(b) & 31, int(c))
        if warps.padded_index is None:
            found = value.take(_permutation(source.tobytes(), group.count)) if value.ndim else value
            return found, np.bool_(True) if valid.all() else np.tile(valid, warps.count)
        lane = group.per_thread("lane")
        source, valid = source.take(lane), valid.take(lane)
    else:
        source, valid = sources(mode, group.per_thread("lane").astype(np.int64), b, c)
    if not value.ndim:  # The same in all lanes, as in a uniform register on a GPU.
        return value, valid
    at = warps.row * WARP + source
    found = warps.rows(value).take(at)
    if warps.padded_index is None:
        return found, valid
    return np.where(warps.rows(np.bool_(True)).take(at), found, value.dtype.type(0)), valid


def sources(mode: str, lane: Array, b: Any, c: Any) -> tuple[Array, Array]:
    """Return the lane that each lane reads from, its own if out of range, and the validity."""
    b = b.astype(np.int64) & 31
    c = c.astype(np.int64)
    keep = (c >> 8) & 31
    low = lane & keep
    limit = low | (c & 31 & ~keep)
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~keep)}[mode]
    valid = source >= limit if mode == "up" else source <= limit
    return np.where(valid, source, lane), np.broadcast_to(valid, lane.shape)


@functools.lru_cache(maxsize=256)
def _sources_in_warp(mode: str, b: int, c: int) -> tuple[Array, Array]:
    return sources(mode, _LANES, np.int64(b), np.int64(c))


@functools.lru_cache(maxsize=32)
def _permutation(source: bytes, count: int) -> Array:
    """Return the index that each of `count` threads reads if every warp reads as in `source`."""
    rows = np.arange(0, count, WARP)[:, None] + np.frombuffer(source, np.int64)
    return rows.reshape(-1)


# Votes, matches and reductions

VOTES = frozenset(("all", "any", "uni", "ballot"))


def vote(group: Group, mode: str, predicate: Any, mask: Any) -> Any:
    """Return a vote among the threads in `mask`."""
    warps = group.warps
    true = warps.per_thread(_bits(warps.rows(predicate))) & mask
    named = active(group) & mask
    answers = {"all": true == named, "any": true != 0, "uni": (true == named) | (true == 0)}
    return true if mode == "ballot" else answers[mode]


def match(group: Group, mode: str, value: Any, mask: Any) -> tuple[Array, Any]:
    """Return the threads in the mask with the same value; for `all`, only if every one has it."""
    warps = group.warps
    rows = warps.rows(value)
    same = np.zeros(group.count, np.uint32)
    for lane in range(WARP):
        same |= (warps.per_thread(rows[:, lane]) == value).astype(np.uint32) << np.uint32(lane)
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


def reduce(group: Group, combine: Callable[[Any, Any], Any], value: Any, mask: Any) -> Array:
    """Return the values of all threads in the mask, combined in the order of the lanes."""
    warps = group.warps
    named = active(group) & mask
    rows = warps.rows(value)
    total = np.zeros(group.count, value.dtype)
    started = np.zeros(group.count, np.bool_)
    for lane in range(WARP):
        has = (named >> np.uint32(lane)) & np.uint32(1) != 0
        other = warps.per_thread(rows[:, lane])
        total = np.where(has, np.where(started, combine(total, other), other), total)
        started |= has
    return total


def elect(group: Group, mask: Any) -> tuple[Any, Array]:
    """Return the lowest lane in the mask, and whether a thread is in that lane."""
    named = active(group) & mask
    lowest = named & (~named + np.uint32(1))
    leader = np.log2(np.maximum(lowest, 1).astype(np.float64)).astype(np.uint32)
    return leader, leader == group.per_thread("lane")
