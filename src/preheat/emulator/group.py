"""Groups of threads that run together, and their registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator import special_registers
from preheat.emulator.generate import CompiledBlock, CompiledFunction
from preheat.emulator.warp import Warps

if TYPE_CHECKING:
    from preheat.emulator.wave import Wave

__all__ = ["Frame", "Group"]

Array = np.ndarray[Any, Any]


class Frame:
    """One activation of a function by any number of threads.

    Each of its `registers` is an array over all threads of the wave, a scalar that is the same for all,
    or None before the first write. `base` is the offset of its variables in local memory, `call` the
    call that created it, `call_path` the blocks of all calls around it, outermost first.
    """

    def __init__(
        self,
        wave: Wave,
        code: CompiledFunction,
        base: int,
        parent: Frame | None = None,
        call: CompiledBlock | None = None,
    ) -> None:
        self.wave = wave
        self.code = code
        self.base = base
        self.parent = parent
        self.call = call
        self.call_path: tuple[int, ...] = (*parent.call_path, call.index) if parent and call else ()
        self.children: dict[tuple[int, str], Frame] = {}
        self.owned: set[int] = set()  # Registers whose array has no other reference.
        self.registers: list[Any] = [None] * len(code.zeros)
        for slot, name in code.special_slots:
            self.registers[slot] = special_registers.value(wave, name)
        for slot, name in code.symbol_slots:
            self.registers[slot] = np.uint64(self._address(name))

    def _address(self, name: str) -> int:
        """Return the address of a variable in its own space, or the value of a function pointer."""
        if name in self.code.local_offsets:
            return self.base + self.code.local_offsets[name]
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
            count = self.wave.layout.count
            values = self.registers[slot]
            if values is None:
                values = np.zeros(count, value.dtype)
            else:
                values = values.copy() if values.ndim else np.full(count, values)
            self.registers[slot] = values
            self.owned.add(slot)
        self.registers[slot][lanes] = value


class Group:
    """Threads that are at the same basic block of the same frame.

    `lanes` are their indices in ascending order, or None for all threads of the wave: then the group
    uses the registers of the frame directly. Any other group copies a register when it first reads it,
    and writes its changes back when it splits or merges.
    """

    __slots__ = (
        "_cache",
        "_warps",
        "count",
        "dirty",
        "frame",
        "lanes",
        "last_ran",
        "pc",
        "registers",
        "wave",
    )

    def __init__(self, frame: Frame, pc: int, lanes: Array | None) -> None:
        self.wave = frame.wave
        self.frame = frame
        self.pc = pc
        self.lanes = lanes
        self.count = self.wave.layout.count if lanes is None else len(lanes)
        self.registers: list[Any] = frame.registers if lanes is None else [None] * len(frame.registers)
        self.dirty: set[int] = set()
        self.last_ran = 0  # The number of basic blocks that had run when it last ran.
        self._cache: dict[str, Array] = {}
        self._warps: Warps | None = None

    @property
    def block(self) -> CompiledBlock:
        """The basic block of the group."""
        return self.frame.code.blocks[self.pc]

    @property
    def all_lanes(self) -> Array:
        """The indices of its threads."""
        return np.arange(self.count) if self.lanes is None else self.lanes

    def fetch(self, slot: int) -> Any:
        """Return a register that the group has not copied yet, or zero if it was never written."""
        value = self.frame.registers[slot]
        if value is None:
            return self.frame.code.zeros[slot]
        if self.lanes is not None:
            if value.ndim:
                value = value.take(self.lanes)
            self.registers[slot] = value
        return value

    def set(self, slot: int, value: Any) -> None:
        """Write a register."""
        self.registers[slot] = value
        self.frame.owned.discard(slot)
        if self.lanes is not None:
            self.dirty.add(slot)

    def flush(self, live: frozenset[int]) -> None:
        """Write the registers that are still live back to the frame."""
        for slot in self.dirty & live:
            if self.registers[slot] is not None:
                self.frame.write(slot, self.all_lanes, self.registers[slot])
        self.dirty.clear()

    def split(self, chosen: Array) -> tuple[Group, Group]:
        """Return the chosen threads and the others, as two groups at the same position."""
        self.flush(self.block.live_in)
        lanes = self.all_lanes
        return Group(self.frame, self.pc, lanes[chosen]), Group(self.frame, self.pc, lanes[~chosen])

    def merged(self, other: Group) -> Group:
        """Return one group of the threads of two groups at the same position."""
        for group in (self, other):
            group.flush(self.block.live_in)
        lanes = np.concatenate((self.all_lanes, other.all_lanes))
        lanes.sort(kind="stable")  # Two sorted runs, which are merged in one pass.
        return Group(self.frame, self.pc, None if len(lanes) == self.wave.layout.count else lanes)

    def lanes_where(self, where: Array) -> Array | None:
        """Return the indices of some of its threads, or None if they are all threads of the wave."""
        return None if self.lanes is None and where.all() else self.all_lanes[where]

    def subgroup(self, positions: Array) -> Group:
        """Return some of the threads, by position, as a group for a query about them alone."""
        return Group(self.frame, self.pc, self.all_lanes[positions])

    def per_thread(self, name: str) -> Array:
        """Return an array of the layout for these threads: "block_index", "lane", "warp", …"""
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

    def host_origins(self, space: str) -> Array:
        """Return where each thread's shared or local memory begins in host memory."""
        base = self.wave.state_space(space)
        if space == "shared":
            return base.start + self.per_thread("block_index") * base.strides[0]
        return base.start + self.all_lanes * base.strides[-1]
