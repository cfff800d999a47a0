"""The machine: thread blocks that are worked on together, and which of their threads run next.

Groups part where only some of their threads take a branch, and meet again at the block where both
arrive. The group furthest behind in the text runs first, which makes them meet soon; one that has run
long while others wait lets those go on, which makes spin locks work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from preheat.devices.base import Dim3, Geometry, Symbol
from preheat.devices.emulator import builtin, warp
from preheat.devices.emulator.access import Base, view
from preheat.devices.emulator.barrier import Arrival, Barriers
from preheat.devices.emulator.generate import Code, Step
from preheat.devices.emulator.group import Frame, Group
from preheat.devices.emulator.layout import Layout
from preheat.devices.emulator.memory import POISON, Memory, Violation

__all__ = ["Program", "Wave"]

Array = np.ndarray[Any, Any]

_TURN = 64  # basic blocks that groups run while one waits, before it has its turn
_DEEPEST = 1024  # calls inside one another


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel that is ready to run: its code, where its variables lie, the memory it may use."""

    kernel: str
    functions: dict[str, Code]
    shared: dict[str, int]  # offset of each variable in shared memory
    shared_bytes: int  # of a block, without what a launch adds
    addresses: dict[str, int]  # of module variables, and what stands for functions in pointers
    constants: tuple[Symbol, ...]
    memory: Memory
    patience: int  # basic blocks that may run without anything coming of it


class Wave:
    """Thread blocks that are worked on together."""

    program: Program
    geometry: Geometry
    layout: Layout
    shared_bytes: int  # of a block

    def __init__(
        self,
        program: Program,
        geometry: Geometry,
        layout: Layout,
        *,
        first: int,  # the number of its first block
        parameters: int,  # the address of the parameter block
        shared: int,  # bytes of shared memory of a block
    ) -> None:
        self.program, self.geometry, self.layout, self.memory = (
            program,
            geometry,
            layout,
            program.memory,
        )
        self.first, self.parameters_at, self.shared_bytes = first, parameters, shared
        self.shape = layout.shape
        room = _rounded(shared)
        self._shared = np.full(layout.blocks * room, POISON, np.uint8)
        self.local = np.empty((layout.count, 0), np.uint8)
        self._local_top = 0
        steps = (room, 0, 0) if layout.blocks > 1 else ()
        self._bases = {"global": Base(0), "shared": Base(self._shared.ctypes.data, steps, shared)}
        self.exited = np.zeros(layout.count, np.bool_)
        self.alive = np.full(layout.blocks, layout.threads)  # threads of each block
        self.alive_total = layout.count
        self.barriers = Barriers(self)
        self.running: Group | None = None
        self.ready: dict[tuple[Frame, int], Group] = {}
        self.waiting: dict[tuple[Frame, int], Group] = {}  # for other threads of their warps
        self.writes = self.steps = 0
        self._turn = self._ticks = 0
        self._progress, self._progress_at = (0, 0), 0

    def base(self, space: str) -> Base:
        """Where a space begins."""
        return self._bases[space]

    def run(self) -> None:
        """Run every thread to its end; `Violation` where one does what it must not."""
        code = self.program.functions[self.program.kernel]
        self._reserve(code.frame_bytes)
        group: Group | None = Group(Frame(self, code, 0), 0, None)
        while group is not None or (group := self._take()) is not None:
            if self.ready:
                group = self._choose(group)
            group = self._advance(group)

    # Who runs

    def put(self, group: Group) -> None:
        """Let a group wait for its turn, together with those at the same place."""
        if group.step.leaves and group.frame.parent is None:
            self._exit(group)
        else:
            self._store(group)

    def _store(self, group: Group) -> None:
        key = group.frame, group.pc
        if key in self.ready:
            group = group.merged(self.ready[key])
        group.seen = self.steps
        self.ready[key] = group

    def _take(self) -> Group | None:
        """The group furthest behind; None when all threads have ended."""
        if self.ready:
            return self.ready.pop(min(self.ready, key=_order))
        for group in self.waiting.values():
            self.running = group
            raise Violation("waits for threads of its warp that never come", group.step.first)
        self.barriers.complain()
        return None

    def _choose(self, group: Group) -> Group:
        """This group, or one that should run before it."""
        self._turn += 1
        if self._turn < 0:
            return group
        self._store(group)
        if self._turn < _TURN:
            return self.ready.pop(min(self.ready, key=_order))
        self._turn = -_TURN
        group = min(self.ready.values(), key=lambda waiting: waiting.seen)
        return self.ready.pop((group.frame, group.pc))

    def _advance(self, group: Group) -> Group | None:
        """Run the block a group stands at; the group to go on with, if there is one at once."""
        step = group.step
        self.running = group
        self.steps += 1
        if not self.steps & 1023:
            self._check_progress(step)
        if group.lanes is None:
            group.frame.owned.clear()
            return _ENDS[step.kind](self, group, step, step.run(group, group.regs, self))
        if step.mask is not None:
            gathered = self._rendezvous(group, step)
            if gathered is None:
                return None
            self.running = group = gathered
        result = step.run(group, group.regs, self)
        group.dirty |= step.writes
        return _ENDS[step.kind](self, group, step, result)

    def _check_progress(self, step: Step) -> None:
        progress = (self.writes + self.barriers.releases, self.alive_total)
        if progress != self._progress:
            self._progress, self._progress_at = progress, self.steps
        elif self.steps - self._progress_at > self.program.patience:
            raise Violation(
                f"no progress: {self.program.patience:,} basic blocks ran and no thread wrote memory, "
                "passed a barrier or exited",
                step.site,
                hint="an endless loop, or a thread that waits for one of a block that comes later",
            )

    def _rendezvous(self, group: Group, step: Step) -> Group | None:
        """The threads whose partners in the warp have all arrived; the others wait."""
        key = group.frame, group.pc
        if key in self.waiting:
            group = group.merged(self.waiting.pop(key))
        if group.lanes is None or step.mask is None:
            return group
        absent = warp.absent(group, step.mask(group, group.regs, self))
        if not absent.any():
            return group
        going, self.waiting[key] = group.split(absent == 0)
        return going if going.count else None

    # What becomes of a group after its block

    def _next(self, group: Group, step: Step, _result: Any) -> Group:
        group.pc = step.targets[0]
        return group

    def _branch(self, group: Group, step: Step, taken: Any) -> Group | None:
        if taken.ndim:
            count = int(np.count_nonzero(taken))
            if 0 < count < group.count:
                return self._part(group, step, taken)
            taken = count > 0
        group.pc = step.targets[0] if taken else step.targets[1]
        return group

    def _part(self, group: Group, step: Step, taken: Array) -> Group:
        group.flush(step.live_out)
        lanes = group.all_lanes
        jumps = Group(group.frame, step.targets[0], lanes[taken])
        falls = Group(group.frame, step.targets[1], lanes[~taken])
        behind, ahead = (jumps, falls) if jumps.pc < falls.pc else (falls, jumps)
        self.put(ahead)
        return behind

    def _jump_table(self, group: Group, step: Step, index: Any) -> Group | None:
        index = np.broadcast_to(index, (group.count,))
        if int(index.max()) >= len(step.targets):
            raise Violation(
                "an index past the end of its branch table", step.site, int(np.argmax(index))
            )
        group.flush(step.live_out)
        for value in np.unique(index):
            self.put(Group(group.frame, step.targets[int(value)], group.chosen(index == value)))
        return None

    def _barrier(self, group: Group, step: Step, arrival: Arrival) -> Group | None:
        group.pc = step.targets[0]
        groups = self.barriers.arrive(group, arrival)
        if len(groups) == 1:
            return groups[0]
        for released in groups:
            self.put(released)
        return None

    def _trap(self, _group: Group, step: Step, _result: Any) -> None:
        raise Violation("the kernel trapped", step.site)

    def _exit(self, group: Group, _step: Step | None = None, _result: Any = None) -> None:
        self.alive_total -= group.count
        if not self.alive_total:
            return
        self.exited[group.all_lanes] = True
        self.alive -= np.bincount(group.of("row"), minlength=len(self.alive))
        for released in self.barriers.release_all():
            self.put(released)
        waiting, self.waiting = self.waiting, {}
        for partner in waiting.values():
            self.put(partner)

    # Calls

    def _call(self, group: Group, step: Step, pointer: Any) -> Group | None:
        group.flush(step.live_out)
        if step.callee is not None:
            return self._enter(group, step, step.callee)
        names = {address: name for name, address in self.program.addresses.items()}
        pointer = np.broadcast_to(pointer, (group.count,))
        for value in np.unique(pointer):
            mine = pointer == value
            name = names.get(int(value), "")
            if name not in self.program.functions:
                message = f"calls {int(value):#x}, which is no function"
                raise Violation(message, step.site, int(np.argmax(mine)))
            self.put(self._enter(Group(group.frame, group.pc, group.chosen(mine)), step, name))
        return None

    def _enter(self, group: Group, step: Step, name: str) -> Group:
        """The group at the start of a function, or behind the call of one that the machine provides."""
        caller = group.frame
        offsets = [caller.base + caller.code.offsets[argument] for argument in step.arguments]
        if name in builtin.FUNCTIONS:
            builtin.FUNCTIONS[name](group, step, offsets)
            return Group(caller, step.targets[0], group.lanes)
        frame = caller.children.get((step.index, name)) or self._frame(caller, step, name)
        for source, (own, size) in zip(offsets, frame.code.arguments, strict=True):
            self._copy(group, source, frame.base + own, size)
        return Group(frame, 0, group.lanes)

    def _frame(self, caller: Frame, step: Step, name: str) -> Frame:
        if len(caller.order) >= _DEEPEST:
            raise Violation(f"more than {_DEEPEST} calls inside one another", step.site)
        code, base = self.program.functions[name], caller.base + caller.code.frame_bytes
        self._reserve(base + code.frame_bytes)
        frame = caller.children[step.index, name] = Frame(self, code, base, caller, step)
        return frame

    def _return(self, group: Group, step: Step, _result: Any) -> Group | None:
        frame, call, caller = group.frame, group.frame.call, group.frame.parent
        if call is None or caller is None:
            self._exit(group, step)
            return None
        for name, (own, size) in zip(call.returns, frame.code.returns, strict=True):
            self._copy(group, frame.base + own, caller.base + caller.code.offsets[name], size)
        return Group(caller, call.targets[0], group.lanes)

    def _reserve(self, top: int) -> None:
        """Have `top` bytes of local memory for every thread."""
        have = self.local.shape[1]
        if top > have:
            grown = np.full((self.layout.count, max(_rounded(top), 2 * have)), POISON, np.uint8)
            grown[:, :have] = self.local
            self.local = grown
        width = self.local.shape[1]
        strides = (self.shape[1] * self.shape[2] * width, self.shape[2] * width, width)
        self._local_top = max(top, self._local_top)
        self._bases["local"] = Base(self.local.ctypes.data, strides, self._local_top)

    def _copy(self, group: Group, source: int, target: int, size: int) -> None:
        """Copy bytes of each thread's local memory."""
        lanes: Any = slice(None) if group.lanes is None else group.lanes
        self.local[lanes, target : target + size] = self.local[lanes, source : source + size]

    # What blocks ask for

    def parameter(self, offset: int, dtype: np.dtype[Any]) -> Any:
        """A kernel parameter."""
        return view(dtype, self.parameters_at + offset)[()]

    def clock(self) -> int:
        """A counter that goes up whenever it is read."""
        self._ticks += 32
        return self._ticks + self.steps

    def block_of(self, lane: int) -> Dim3:
        """Coordinates in the grid of a thread's block."""
        return _coordinates(self.first + lane // self.layout.threads, self.geometry.grid)

    def thread_of(self, lane: int) -> Dim3:
        """Coordinates of a thread in its block."""
        return _coordinates(lane % self.layout.threads, self.layout.block)


_ENDS: dict[str, Callable[[Wave, Group, Step, Any], Group | None]] = {
    "next": Wave._next,
    "branch": Wave._branch,
    "table": Wave._jump_table,
    "barrier": Wave._barrier,
    "call": Wave._call,
    "ret": Wave._return,
    "exit": Wave._exit,
    "trap": Wave._trap,
}


def _order(key: tuple[Frame, int]) -> tuple[int, ...]:
    return (*key[0].order, key[1])


def _rounded(size: int) -> int:
    return -(-size // 16) * 16


def _coordinates(number: int, extent: Dim3) -> Dim3:
    x, y, _ = extent
    return number % x, number // x % y, number // (x * y)
