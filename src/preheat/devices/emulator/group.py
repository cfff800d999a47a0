"""Threads that run together, and where their registers live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.devices.emulator import special
from preheat.devices.emulator.generate import Code, Step
from preheat.devices.emulator.warp import Warps

if TYPE_CHECKING:
    from preheat.devices.emulator.wave import Wave

__all__ = ["Frame", "Group"]

Array = np.ndarray[Any, Any]


class Frame:
    """One activation of a function by any number of threads.

    `home` holds each register: an array of all threads of the wave, a scalar that is the same for all,
    None before anything was written. `base` is where its variables begin in local memory, `call` the
    call that made it, `order` the places of all calls around it.
    """

    def __init__(
        self, wave: Wave, code: Code, base: int, parent: Frame | None = None, call: Step | None = None
    ) -> None:
        self.wave, self.code, self.base, self.parent, self.call = wave, code, base, parent, call
        self.order: tuple[int, ...] = (*parent.order, call.index) if parent and call else ()
        self.children: dict[tuple[int, str], Frame] = {}
        self.owned: set[int] = set()  # registers whose array nothing else refers to
        self.home: list[Any] = [None] * len(code.zeros)
        for slot, name in code.special:
            self.home[slot] = special.value(wave, name)
        for slot, name in code.symbols:
            self.home[slot] = np.uint64(self._address(name))

    def _address(self, name: str) -> int:
        """Where a variable lies in its own space, or what stands for a function."""
        if name in self.code.offsets:
            return self.base + self.code.offsets[name]
        if name in self.code.parameters:
            return self.wave.parameters_at + self.code.parameters[name]
        program = self.wave.program
        for known in (f"{self.code.name}.{name}", name):
            if known in program.shared:
                return program.shared[known]
        return program.addresses[name]

    def write(self, slot: int, lanes: Array, value: Any) -> None:
        """Set a register of some threads."""
        if slot not in self.owned:
            count, home = self.wave.layout.count, self.home[slot]
            if home is None:
                home = np.zeros(count, value.dtype)
            else:
                home = home.copy() if home.ndim else np.full(count, home)
            self.home[slot] = home
            self.owned.add(slot)
        self.home[slot][lanes] = value


class Group:
    """Threads that stand at the same block of the same frame.

    `lanes` are their numbers in ascending order, None for all threads of the wave: such a group works
    on the frame's own registers. Any other fetches a register when it first reads it, and puts back
    what it wrote when it parts or meets another.
    """

    __slots__ = ("_cache", "_warps", "count", "dirty", "frame", "lanes", "pc", "regs", "seen", "wave")

    def __init__(self, frame: Frame, pc: int, lanes: Array | None) -> None:
        self.wave = frame.wave
        self.frame, self.pc, self.lanes = frame, pc, lanes
        self.count = self.wave.layout.count if lanes is None else len(lanes)
        self.regs: list[Any] = frame.home if lanes is None else [None] * len(frame.home)
        self.dirty: set[int] = set()
        self.seen = 0  # when it last ran
        self._cache: dict[str, Array] = {}
        self._warps: Warps | None = None

    @property
    def step(self) -> Step:
        """The block it stands at."""
        return self.frame.code.steps[self.pc]

    @property
    def all_lanes(self) -> Array:
        """The numbers of its threads."""
        return np.arange(self.count) if self.lanes is None else self.lanes

    def fetch(self, slot: int) -> Any:
        """A register that the group does not hold yet; zero when nothing was ever written to it."""
        value = self.frame.home[slot]
        if value is None:
            return self.frame.code.zeros[slot]
        if self.lanes is not None:
            if value.ndim:
                value = value.take(self.lanes)
            self.regs[slot] = value
        return value

    def set(self, slot: int, value: Any) -> None:
        """Write a register."""
        self.regs[slot] = value
        self.frame.owned.discard(slot)
        if self.lanes is not None:
            self.dirty.add(slot)

    def flush(self, live: frozenset[int]) -> None:
        """Put the registers that are still needed back into the frame."""
        for slot in self.dirty & live:
            if self.regs[slot] is not None:
                self.frame.write(slot, self.all_lanes, self.regs[slot])
        self.dirty.clear()

    def split(self, chosen: Array) -> tuple[Group, Group]:
        """The threads that are chosen, and the others, both where this group stood."""
        self.flush(self.step.live_in)
        lanes = self.all_lanes
        return Group(self.frame, self.pc, lanes[chosen]), Group(self.frame, self.pc, lanes[~chosen])

    def merged(self, other: Group) -> Group:
        """One group of the threads of two that stand at the same place."""
        for group in (self, other):
            group.flush(self.step.live_in)
        lanes = np.concatenate((self.all_lanes, other.all_lanes))
        lanes.sort(kind="stable")  # two runs: merged in one pass
        return Group(self.frame, self.pc, None if len(lanes) == self.wave.layout.count else lanes)

    def chosen(self, where: Array) -> Array | None:
        """The numbers of some of its threads; None when they are all threads of the wave."""
        return None if self.lanes is None and where.all() else self.all_lanes[where]

    def part(self, positions: Array) -> Group:
        """Some of the threads, by position, for a question about them alone."""
        return Group(self.frame, self.pc, self.all_lanes[positions])

    def of(self, name: str) -> Array:
        """An array of the layout, of these threads alone: "row", "rank", "lane", "warp", "thread", …"""
        found: Array = getattr(self.wave.layout, name)
        if self.lanes is None:
            return found
        if name not in self._cache:
            self._cache[name] = found.take(self.lanes)
        return self._cache[name]

    @property
    def warps(self) -> Warps:
        """Its threads as rows of 32."""
        if self._warps is None:
            self._warps = Warps(self)
        return self._warps

    def origin(self, space: str) -> Array:
        """Where each thread's shared or local memory begins in the host's."""
        base = self.wave.base(space)
        if space == "shared":
            return base.start + self.of("row") * base.strides[0]
        return base.start + self.all_lanes * base.strides[-1]
