"""The execution of thread blocks: which threads run next, divergence, barriers and calls.

A group of threads splits where only some of them take a branch, and merges again at the block where
both parts arrive. The group with the lowest position in the text runs first, so that groups merge soon.
A group that has run long while others are ready yields to them, so that spin locks work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from preheat.devices.base import Dim3, Geometry, Symbol
from preheat.devices.emulator import builtin, warp
from preheat.devices.emulator.addresses import StateSpace, host_view
from preheat.devices.emulator.barrier import Arrival, Barriers
from preheat.devices.emulator.cluster import ClusterBarrier
from preheat.devices.emulator.generate import CompiledBlock, CompiledFunction
from preheat.devices.emulator.group import Frame, Group
from preheat.devices.emulator.heap import Heap
from preheat.devices.emulator.layout import Layout
from preheat.devices.emulator.memory import POISON, Memory, Violation
from preheat.errors import EmulatorFault, UnsupportedInstructionError

__all__ = ["Program", "Wave", "block_of", "thread_of"]

Array = np.ndarray[Any, Any]

_TURN_BLOCKS = 64  # Basic blocks that other groups may run before a ready group gets its turn.
_MAX_CALL_DEPTH = 1024  # Nested calls.
_MAX_BUSY = 10  # A wave may make progress for this many times `patience` without a thread ending.
_NEVER = "waits for threads of its warp that never come"
_SAME_PLACE = "all threads of a mask must execute the same shuffle, vote or mma through the same calls"
_ARRIVALS = "each phase waits for as many arrivals as mbarrier.init was given"
_CLOCK = 1000  # Cycles between two readings, so that loops that wait for a time end soon.


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel that is ready to run: its code, the addresses of its variables, the valid memory."""

    kernel: str
    functions: dict[str, CompiledFunction]
    missing: dict[str, UnsupportedInstructionError]  # Functions that cannot run, and why.
    shared: dict[str, int]  # The offset of each variable in shared memory.
    shared_bytes: int  # Of a block, without dynamic shared memory.
    addresses: dict[str, int]  # Of module variables, and the values of function pointers.
    constants: tuple[Symbol, ...]
    memory: Memory
    heap: Heap
    reserved: int  # Bytes at the beginning of shared memory that are not for variables.
    patience: int  # Basic blocks that may run without progress.
    sanitize: bool  # Whether the code was generated with checks: see `sanitize`.
    located: Callable[..., EmulatorFault]  # Adds source lines to a fault; see `EmulatorModule.located`.


class Wave:
    """Thread blocks that run together."""

    program: Program
    geometry: Geometry
    layout: Layout
    shared_bytes: int  # Of a block.

    def __init__(
        self,
        program: Program,
        geometry: Geometry,
        layout: Layout,
        *,
        first: int,  # The index of its first block.
        parameters: int,  # The address of the parameter buffer.
        shared: int,  # Bytes of shared memory of a block.
    ) -> None:
        self.program = program
        self.geometry = geometry
        self.layout = layout
        self.memory = program.memory
        self.first = first
        self.parameters_at = parameters
        self.shared_bytes = shared
        self.shape = layout.shape
        stride = _rounded(shared)
        self._shared = np.full(layout.blocks * stride, POISON, np.uint8)
        self.shadow = len(self._shared)  # The distance in bytes from shared memory to its shadow.
        if program.sanitize:
            self._shared = np.concatenate((self._shared, np.zeros_like(self._shared)))
        self.local = np.empty((layout.count, 0), np.uint8)
        self._local_top = 0
        steps = (stride, 0, 0) if layout.blocks > 1 else ()
        self._bases = {
            "global": StateSpace(0),
            "shared": StateSpace(self._shared.ctypes.data, steps, shared),
        }
        self.exited = np.zeros(layout.count, np.bool_)
        self.alive = np.full(layout.blocks, layout.threads)  # Threads of each block.
        self.alive_total = layout.count
        self.barriers = Barriers(self)
        self.running: Group | None = None
        self.ready: dict[tuple[Frame, int], Group] = {}
        self.waiting: dict[tuple[Frame, int], Group] = {}  # For threads of their warps.
        self.at_warp_barrier: list[tuple[Group, Array]] = []  # Groups and their masks.
        self.writes = self.steps = 0
        self._turn = self._ticks = 0
        self._progress_steps = _StepsUnchanged()
        self._exit_steps = _StepsUnchanged()
        self._stalls = _StepsUnchanged()
        self._stalled = 0  # Waits at mbarriers that did not succeed.

    def state_space(self, space: str) -> StateSpace:
        """Return where a space begins."""
        return self._bases[space]

    def run(self) -> None:
        """Run every thread to its end, or raise the `Violation` of a thread."""
        code = self.program.functions[self.program.kernel]
        self._reserve(code.frame_bytes)
        group: Group | None = Group(Frame(self, code, 0), 0, None)
        while group is not None or (group := self._take()) is not None:
            if self.ready:
                group = self._choose(group)
            group = self._advance(group)

    # Scheduling

    def put(self, group: Group) -> None:
        """Make a group ready to run, merged with a ready group at the same position."""
        assert group.count, "a group of no threads"
        if group.step.only_exits and group.frame.parent is None:
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
        """Return the group with the lowest position, or None if all threads have ended."""
        if self.ready:
            return self.ready.pop(min(self.ready, key=_order))
        for group in self.waiting.values():
            self.running = group
            raise Violation(_NEVER, group.step.first_site, hint=_SAME_PLACE)
        for group, _ in self.at_warp_barrier:
            self.running = group
            raise Violation(_NEVER, group.step.first_site)
        self.barriers.raise_if_waiting()
        return None

    def _choose(self, group: Group) -> Group:
        """Return this group, or another one that should run first."""
        self._turn += 1
        if self._turn < 0:
            return group
        self._store(group)
        if self._turn < _TURN_BLOCKS:
            return self.ready.pop(min(self.ready, key=_order))
        self._turn = -_TURN_BLOCKS
        group = min(self.ready.values(), key=lambda waiting: waiting.seen)
        return self.ready.pop((group.frame, group.pc))

    def _advance(self, group: Group) -> Group | None:
        """Run the basic block of a group. Return the group that continues, if there is one."""
        step = group.step
        self.running = group
        self.steps += 1
        if not self.steps & 1023:
            self._check_progress(step)
        if group.lanes is not None and step.mask is not None:
            gathered = self._rendezvous(group, step)
            if gathered is None:
                return None
            self.running = group = gathered
        if group.lanes is None:  # This may be so since its last threads have arrived.
            group.frame.owned.clear()
            return _TERMINATORS[step.terminator](self, group, step, step.run(group, group.regs, self))
        result = step.run(group, group.regs, self)
        group.dirty |= step.defs
        return _TERMINATORS[step.terminator](self, group, step, result)

    def _check_progress(self, step: CompiledBlock) -> None:
        patience = self.program.patience
        if self._progress_steps.unchanged(self._progress(), self.steps) > patience:
            raise _endless(step, patience, "wrote global or shared memory, passed a barrier or ended")
        if self._exit_steps.unchanged((self.alive_total,), self.steps) > _MAX_BUSY * patience:
            raise _endless(step, _MAX_BUSY * patience, "ended")

    def _progress(self) -> tuple[int, ...]:
        """Return numbers of which one changes when a thread has an effect that others can observe."""
        return self.alive_total, self.writes, self.barriers.releases

    def stall(self, site: int, position: int) -> None:
        """Let other groups run, because a thread of this group waits for them at an mbarrier."""
        self._turn = _TURN_BLOCKS
        self._stalled += 1
        patience = self.program.patience // _TURN_BLOCKS
        if self._stalls.unchanged(self._progress(), self._stalled) > patience:
            message = "waits at an mbarrier for arrivals or bytes that never come"
            raise Violation(message, site, position, hint=_ARRIVALS)

    def _rendezvous(self, group: Group, step: CompiledBlock) -> Group | None:
        """Return the threads whose partners in the warp have all arrived. The others wait."""
        assert step.mask is not None
        if step.terminator == "warp_barrier":
            mask = step.mask(group, group.regs, self)
            self.at_warp_barrier.append((group, np.broadcast_to(mask, (group.count,))))
            self._release_warp_barriers()
            return None
        key = group.frame, group.pc
        if key in self.waiting:
            group = group.merged(self.waiting.pop(key))
        if group.lanes is None:
            return group
        absent = warp.absent(group, step.mask(group, group.regs, self))
        if not absent.any():
            return group
        going, self.waiting[key] = group.split(absent == 0)
        return going if going.count else None

    def _release_warp_barriers(self) -> None:
        """Release the threads whose partners have all arrived at a barrier of their warp."""
        arrived = self.at_warp_barrier
        self.at_warp_barrier = []
        released = []
        masks = np.zeros(self.layout.count, np.uint32)
        free = np.zeros(self.layout.count, np.bool_)
        for group, mask in arrived:
            masks[group.all_lanes] = mask
        lanes = np.sort(np.concatenate([group.all_lanes for group, _ in arrived]))
        everyone = Group(arrived[0][0].frame, arrived[0][0].pc, lanes)
        free[lanes] = warp.absent(everyone, masks[lanes]) == 0
        for group, mask in arrived:
            chosen = free[group.all_lanes]
            if not chosen.all():
                going, staying = group.split(chosen)
                self.at_warp_barrier.append((staying, mask[~chosen]))
                if not going.count:
                    continue
                group = going
            group.pc = group.step.successors[0]
            released.append(group)
        for group in released:
            self.put(group)

    # What a group does after its basic block

    def _next(self, group: Group, step: CompiledBlock, _result: Any) -> Group:
        group.pc = step.successors[0]
        return group

    def _branch(self, group: Group, step: CompiledBlock, taken: Any) -> Group | None:
        if taken.ndim:
            count = int(np.count_nonzero(taken))
            if 0 < count < group.count:
                return self._diverge(group, step, taken)
            taken = count > 0
        group.pc = step.successors[0] if taken else step.successors[1]
        return group

    def _diverge(self, group: Group, step: CompiledBlock, taken: Array) -> Group:
        group.flush(step.live_out)
        lanes = group.all_lanes
        jumps = Group(group.frame, step.successors[0], lanes[taken])
        falls = Group(group.frame, step.successors[1], lanes[~taken])
        behind, ahead = (jumps, falls) if jumps.pc < falls.pc else (falls, jumps)
        self.put(ahead)
        return behind

    def _branch_table(self, group: Group, step: CompiledBlock, index: Any) -> Group | None:
        index = np.broadcast_to(index, (group.count,))
        if int(index.max()) >= len(step.successors):
            raise Violation(
                "an index beyond the end of its branch table", step.site, int(np.argmax(index))
            )
        group.flush(step.live_out)
        for value in np.unique(index):
            self.put(Group(group.frame, step.successors[int(value)], group.chosen(index == value)))
        return None

    def _barrier(self, group: Group, step: CompiledBlock, arrival: Arrival) -> Group | None:
        group.pc = step.successors[0]
        groups = self.barriers.arrive(group, arrival)
        if len(groups) == 1:
            return groups[0]
        for released in groups:
            self.put(released)
        return None

    def _cluster_barrier(self, group: Group, step: CompiledBlock, verb: str) -> Group | None:
        group.pc = step.successors[0]
        if self.barriers.cluster is None:
            self.barriers.cluster = ClusterBarrier(self)
        if verb == "wait":
            groups = self.barriers.cluster.wait(group, step.site)
        else:
            groups = [group, *self.barriers.cluster.arrive(group, step.site)]
        if len(groups) == 1:
            return groups[0]
        for released in groups:
            self.put(released)
        return None

    def _trap(self, _group: Group, step: CompiledBlock, _result: Any) -> None:
        raise Violation("the kernel trapped", step.site)

    def _exit(self, group: Group, _step: CompiledBlock | None = None, _result: Any = None) -> None:
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
        if self.at_warp_barrier:
            self._release_warp_barriers()

    # Calls

    def _call(self, group: Group, step: CompiledBlock, pointer: Any) -> Group | None:
        group.flush(step.live_out)
        if step.callee is not None:
            return self._enter(group, step, step.callee)
        names = {address: name for name, address in self.program.addresses.items()}
        pointer = np.broadcast_to(pointer, (group.count,))
        for value in np.unique(pointer):
            mine = pointer == value
            name = names.get(int(value), "")
            if name in self.program.missing:
                raise self.program.missing[name].with_traceback(None)
            if name not in self.program.functions:
                message = f"calls {int(value):#x}, which is not a function"
                raise Violation(message, step.site, int(np.argmax(mine)))
            self.running = part = Group(group.frame, group.pc, group.chosen(mine))
            self.put(self._enter(part, step, name))
        return None

    def _enter(self, group: Group, step: CompiledBlock, name: str) -> Group:
        """Return the group at the start of a function, or after the call of a built-in function."""
        caller = group.frame
        offsets = [caller.base + caller.code.local_offsets[argument] for argument in step.arguments]
        if name in builtin.FUNCTIONS:
            function = builtin.FUNCTIONS[name]
            _check_sizes(caller.code, step, name, step.arguments, function.sizes)
            function.run(group, step, offsets)
            return Group(caller, step.successors[0], group.lanes)
        frame = caller.children.get((step.index, name)) or self._frame(caller, step, name)
        for source, (own, size) in zip(offsets, frame.code.arguments, strict=True):
            self._copy(group, source, frame.base + own, size)
        return Group(frame, 0, group.lanes)

    def _frame(self, caller: Frame, step: CompiledBlock, name: str) -> Frame:
        if len(caller.order) >= _MAX_CALL_DEPTH:
            raise Violation(f"more than {_MAX_CALL_DEPTH} nested calls", step.site)
        code = self.program.functions[name]
        top = caller.base + caller.code.frame_bytes
        base = -(-top // code.local_align) * code.local_align
        for names, places in ((step.arguments, code.arguments), (step.returns, code.returns)):
            _check_sizes(caller.code, step, name, names, tuple(size for _, size in places))
        try:
            self._reserve(base + code.frame_bytes)
            frame = caller.children[step.index, name] = Frame(self, code, base, caller, step)
        except MemoryError:
            message = f"no memory for {len(caller.order) + 1} nested calls"
            raise Violation(message, step.site) from None
        return frame

    def _return(self, group: Group, step: CompiledBlock, _result: Any) -> Group | None:
        frame = group.frame
        call = frame.call
        caller = frame.parent
        if call is None or caller is None:
            self._exit(group, step)
            return None
        for name, (own, size) in zip(call.returns, frame.code.returns, strict=True):
            self._copy(group, frame.base + own, caller.base + caller.code.local_offsets[name], size)
        return Group(caller, call.successors[0], group.lanes)

    def _reserve(self, top: int) -> None:
        """Provide at least `top` bytes of local memory for every thread."""
        have = self.local.shape[1]
        if top > have:
            grown = np.full((self.layout.count, max(_rounded(top), 2 * have)), POISON, np.uint8)
            grown[:, :have] = self.local
            self.local = grown
        width = self.local.shape[1]
        strides = (self.shape[1] * self.shape[2] * width, self.shape[2] * width, width)
        self._local_top = max(top, self._local_top)
        self._bases["local"] = StateSpace(self.local.ctypes.data, strides, self._local_top)

    def _copy(self, group: Group, source: int, target: int, size: int) -> None:
        """Copy bytes within the local memory of each thread."""
        lanes: Any = slice(None) if group.lanes is None else group.lanes
        self.local[lanes, target : target + size] = self.local[lanes, source : source + size]

    # Functions for generated code

    def parameter(self, offset: int, dtype: np.dtype[Any]) -> Any:
        """Return a kernel parameter."""
        return host_view(dtype, self.parameters_at + offset)[()]

    def no_parameter(self, offset: int, size: int, limit: int, site: int) -> NoReturn:
        """Raise for a load outside the kernel's parameters."""
        where = f"reads {size} bytes at parameter offset {offset}"
        raise Violation(f"{where}; the kernel has {limit} bytes of parameters", site)

    def clock(self) -> int:
        """Return a counter that increases whenever it is read."""
        self._ticks += _CLOCK
        return self._ticks + self.steps


def block_of(wave: Wave, lane: int) -> Dim3:
    """Return the coordinates of a thread's block in the grid."""
    cx, cy, cz = wave.geometry.cluster or (1, 1, 1)
    cluster, rank = divmod(wave.first + lane // wave.layout.threads, wave.layout.cluster_blocks)
    width, height, depth = wave.geometry.grid
    x, y, z = _coordinates(cluster, (width // cx, height // cy, depth // cz))
    inner = _coordinates(rank, (cx, cy, cz))
    return x * cx + inner[0], y * cy + inner[1], z * cz + inner[2]


def thread_of(wave: Wave, lane: int) -> Dim3:
    """Return the coordinates of a thread in its block."""
    return _coordinates(lane % wave.layout.threads, wave.layout.block)


_TERMINATORS: dict[str, Callable[[Wave, Group, CompiledBlock, Any], Group | None]] = {
    "next": Wave._next,
    "warp_barrier": Wave._next,
    "branch": Wave._branch,
    "branch_table": Wave._branch_table,
    "barrier": Wave._barrier,
    "cluster_barrier": Wave._cluster_barrier,
    "call": Wave._call,
    "ret": Wave._return,
    "exit": Wave._exit,
    "trap": Wave._trap,
}


class _StepsUnchanged:
    """Counts the steps since a value changed."""

    def __init__(self) -> None:
        self._value: tuple[int, ...] = ()
        self._since = 0

    def unchanged(self, value: tuple[int, ...], now: int) -> int:
        """Return for how many steps the value has been `value`."""
        if value != self._value:
            self._value = value
            self._since = now
        return now - self._since


def _endless(step: CompiledBlock, blocks: int, what: str) -> Violation:
    return Violation(
        f"no progress: {blocks:,} basic blocks ran and no thread {what}",
        step.site,
        hint="an endless loop, or a thread that waits for a thread of a later block; "
        'preheat.device("emulator", patience=...) lets a kernel run longer',
    )


def _check_sizes(
    code: CompiledFunction,
    step: CompiledBlock,
    callee: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
) -> None:
    """Raise `Violation` unless the parameters of a call have the sizes that the callee declares."""
    if tuple(code.local_sizes[name] for name in names) != sizes:
        raise Violation(f"calls {callee} with parameters that differ from its declaration", step.site)


def _order(key: tuple[Frame, int]) -> tuple[int, ...]:
    return (*key[0].order, key[1])


def _rounded(size: int) -> int:
    return -(-size // 16) * 16


def _coordinates(number: int, extent: Dim3) -> Dim3:
    x, y, _ = extent
    return number % x, number // x % y, number // (x * y)
