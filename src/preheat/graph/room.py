"""Parts of a pool's blocks: those that nobody has, and those that frames hand out."""

from __future__ import annotations

from typing import NamedTuple

from preheat.runtime.memory import Buffer

__all__ = ["Room", "Scratch", "Stretch"]


class Stretch(NamedTuple):
    """Bytes of one block, side by side."""

    address: int
    size: int
    block: Buffer

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size

    def joins(self, other: Stretch) -> bool:
        """Whether `other` goes on where this one ends."""
        return self.block is other.block and self.end == other.address

    def overlaps(self, other: Stretch) -> bool:
        """Whether they have bytes in common."""
        return self.address < other.end and other.address < self.end

    def joined(self, other: Stretch) -> Stretch:
        """Both as one."""
        return Stretch(self.address, self.size + other.size, self.block)


class Room:
    """Stretches that nobody has, by address; those side by side are one."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []

    @property
    def largest(self) -> int:
        """Bytes of the longest stretch."""
        return max((each.size for each in self.stretches), default=0)

    def take(self, size: int, *, after: Stretch | None = None) -> Stretch | None:
        """The first `size` bytes there are, or those right `after` a stretch; None without."""
        for at, each in enumerate(self.stretches):
            if each.size >= size and (after is None or after.joins(each)):
                rest = Stretch(each.address + size, each.size - size, each.block)
                self.stretches[at : at + 1] = [rest] if rest.size else []
                return Stretch(each.address, size, each.block)
        return None

    def put(self, *stretches: Stretch) -> None:
        """Have these as well."""
        joined: list[Stretch] = []
        for each in sorted([*self.stretches, *stretches], key=lambda stretch: stretch.address):
            if joined and joined[-1].joins(each):
                joined[-1] = joined[-1].joined(each)
            else:
                joined.append(each)
        self.stretches = joined


class Scratch:
    """Stretches that a frame hands out from their beginning: the same place in every frame."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self.at = (0, 0)  # which of them comes next, and how much of it is handed out
        self.generations: dict[tuple[int, int], int] = {}  # by place: the same memory is no other

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return sum(each.size for each in self.stretches)

    def take(self, size: int) -> Stretch | None:
        """The next `size` bytes, or None where there are not so many."""
        at, taken = self.at
        for each in self.stretches[at:]:
            if taken + size <= each.size:
                self.at = (at, taken + size)
                return Stretch(each.address + taken, size, each.block)
            at, taken = at + 1, 0
        return None

    def left(self) -> int:
        """Bytes at the end of the last stretch that are not handed out."""
        at, taken = self.at
        last = len(self.stretches) - 1
        return self.stretches[last].size - (taken if at == last else 0)

    def put(self, more: Stretch) -> None:
        """Have one more stretch, or a longer last one."""
        if self.stretches and self.stretches[-1].joins(more):
            self.stretches[-1] = self.stretches[-1].joined(more)
        else:
            self.stretches.append(more)
