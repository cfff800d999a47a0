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

from preheat.devices.base import Geometry, Limits, Symbol
from preheat.emulator import builtin, warp
from preheat.emulator.access import ArgumentSpec
from preheat.emulator.addresses import StateSpace, host_view
from preheat.emulator.allocator import Heap
from preheat.emulator.barrier import Arrival, Barriers
from preheat.emulator.cluster import ClusterBarrier
from preheat.emulator.generate import CompiledBlock, CompiledFunction
from preheat.emulator.group import Frame, Group
from preheat.emulator.layout import Layout
from preheat.emulator.memory import POISON, Memory, Violation, align_up
from preheat.emulator.surfaces import Surface
from preheat.emulator.textures import Texture
from preheat.errors import EmulatorFault, UnsupportedInstructionError

__all__ = ["Program", "Wave"]

Array = np.ndarray[Any, Any]

_TURN = 64  # Basic blocks that other groups may run before a ready group gets its turn.
_MAX_CALL_DEPTH = 1024  # Nested calls.
_MAX_WITHOUT_EXIT = 10  # Times `patience`: how long a wave may run without a thread ending.
_NEVER_COME = "waits for threads of its warp that never come"
_CONVERGE_HINT = (
    "all threads of a mask must execute the same shuffle, vote or mma through the same calls"
)
_ARRIVALS_HINT = "each phase waits for as many arrivals as mbarrier.init was given"
_CLOCK_CYCLES = 1000  # Cycles between two readings, so that loops that wait for a time end soon.


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel that is ready to run: its code, the addresses of its variables, the valid memory."""

    kernel: str
    arguments: tuple[ArgumentSpec, ...]
    functions: dict[str, CompiledFunction]
    missing: dict[str, UnsupportedInstructionError]  # Functions that cannot run, and why.
    shared: dict[str, int]  # The offset of each variable in shared memory.
    shared_bytes: int  # Of a block, without dynamic shared memory.
    addresses: dict[str, int]  # Of module variables, and the values of function pointers.
    constants: tuple[Symbol, ...]
    memory: Memory
    heap: Heap
    textures: dict[int, Texture | Surface]  # By handle.
    reserved: int  # Bytes at the beginning of shared memory that are not for variables.
    patience: int  # Basic blocks that may run without progress.
    limits: Limits
    sanitize: bool  # Whether the code was generated with checks: see `sanitize`.
    locate: Callable[..., EmulatorFault]  # Adds source lines to a fault; see `EmulatorModule.locate`.


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
        stride = align_up(shared, 16)
        self._shared = np.full(layout.blocks * stride, POISON, np.uint8)
        self.shadow = len(self._shared)  # The distance in bytes from shared memory to its shadow.
        if program.sanitize:
            self._shared = np.concatenate((self._shared, np.zeros_like(self._shared)))
        self.local = np.empty((layout.count, 0), np.uint8)
        self._local_top = 0
        strides = (stride, 0, 0) if layout.blocks > 1 else ()
        self._state_spaces = {
            "global": StateSpace(0),
            "shared": StateSpace(self._shared.ctypes.data, strides, shared),
        }
        self.exited = np.zeros(layout.count, np.bool_)
        # The frames, sites and indices of threads that have exited, if `sanitize`.
        self.exits: list[tuple[Frame, int, Array]] = []
        self.alive = np.full(layout.blocks, layout.threads)  # Threads of each block.
        self.alive_total = layout.count
        self.barriers = Barriers(self)
        self.running: Group | None = None
        self.ready: dict[tuple[Frame, int], Group] = {}
        self.waiting: dict[tuple[Frame, int], Group] = {}  # For threads of their warps.
        self.at_warp_barrier: list[tuple[Group, Array]] = []  # Groups and their masks.
        self.writes = self.blocks_run = 0
        self._turn = self._ticks = 0
        self._progress_watchdog = _Watchdog()
        self._exit_watchdog = _Watchdog()
        self._stall_watchdog = _Watchdog()
        self._stalled = 0  # Waits at mbarriers that did not succeed.

    def state_space(self, space: str) -> StateSpace:
        """Return a state space of this wave."""
        return self._state_spaces[space]

    def run(self) -> None:
        """Run every thread to its end, or raise the `Violation` of a thread."""
        code = self.program.functions[self.program.kernel]
        self._reserve(code.frame_bytes)
        group: Group | None = Group(Frame(self, code, 0), 0, None)
        while group is not None or (group := self._next_group()) is not None:
            if self.ready:
                group = self._choose(group)
            group = self._run_block(group)

    # Scheduling

    def make_ready(self, group: Group, branch: CompiledBlock | None = None) -> None:
        """Make a group ready to run, merged with a ready group at the same position.

        `branch` is the block that it comes from, if others have left it there.
        """
        assert group.count, "a group of no threads"
        if group.block.only_exits and group.frame.parent is None:
            self._exit(group, branch or group.block)
        else:
            self._merge_ready(group)

    def _merge_ready(self, group: Group) -> None:
        key = group.frame, group.pc
        if key in self.ready:
            group = group.merged(self.ready[key])
        group.last_ran = self.blocks_run
        self.ready[key] = group

    def _next_group(self) -> Group | None:
        """Return the group with the lowest position, or None if all threads have ended."""
        if self.ready:
            return self.ready.pop(min(self.ready, key=_program_order))
        for group in self.waiting.values():
            self.running = group
            raise Violation(_NEVER_COME, group.block.first_site, hint=_CONVERGE_HINT)
        for group, _ in self.at_warp_barrier:
            self.running = group
            raise Violation(_NEVER_COME, group.block.first_site)
        self.barriers.raise_if_waiting()
        return None

    def _choose(self, group: Group) -> Group:
        """Return this group, or another one that should run first."""
        self._turn += 1
        if self._turn < 0:
            return group
        self._merge_ready(group)
        if self._turn < _TURN:
            return self.ready.pop(min(self.ready, key=_program_order))
        self._turn = -_TURN
        group = min(self.ready.values(), key=lambda waiting: waiting.last_ran)
        return self.ready.pop((group.frame, group.pc))

    def _run_block(self, group: Group) -> Group | None:
        """Run the basic block of a group. Return the group that continues, if there is one."""
        block = group.block
        self.running = group
        self.blocks_run += 1
        if not self.blocks_run & 1023:
            self._check_progress(block)
        if group.lanes is not None and block.mask is not None:
            synchronized = self._synchronize_warp(group, block)
            if synchronized is None:
                return None
            self.running = group = synchronized
        if group.lanes is None:  # Waiting for its warps may have completed the group.
            group.frame.owned.clear()
        else:
            group.dirty |= block.defs
        result = block.run(group, group.registers, self)
        return _TERMINATORS[block.terminator](self, group, block, result)

    def _check_progress(self, block: CompiledBlock) -> None:
        patience = self.program.patience
        if self._progress_watchdog.steps_unchanged(self._progress(), self.blocks_run) > patience:
            what = "wrote global or shared memory, passed a barrier or ended"
            raise _no_progress(block, patience, what)
        patience *= _MAX_WITHOUT_EXIT
        if self._exit_watchdog.steps_unchanged((self.alive_total,), self.blocks_run) > patience:
            raise _no_progress(block, patience, "ended")

    def _progress(self) -> tuple[int, ...]:
        """Return numbers of which one changes when a thread has an effect that others can observe."""
        return self.alive_total, self.writes, self.barriers.releases

    def stall(self, site: int, position: int) -> None:
        """Let other groups run, because a thread of this group waits for them at an mbarrier."""
        self._turn = _TURN
        self._stalled += 1
        patience = self.program.patience // _TURN
        if self._stall_watchdog.steps_unchanged(self._progress(), self._stalled) > patience:
            message = "waits at an mbarrier for arrivals or bytes that never come"
            raise Violation(message, site, position, hint=_ARRIVALS_HINT)

    def _synchronize_warp(self, group: Group, block: CompiledBlock) -> Group | None:
        """Return the threads whose partners in the warp have all arrived. The others wait."""
        assert block.mask is not None
        if block.terminator == "warp_barrier":
            mask = block.mask(group, group.registers, self)
            self.at_warp_barrier.append((group, np.broadcast_to(mask, (group.count,))))
            self._release_warp_barriers()
            return None
        key = group.frame, group.pc
        if key in self.waiting:
            group = group.merged(self.waiting.pop(key))
        if group.lanes is None:
            return group
        absent = warp.absent(group, block.mask(group, group.registers, self))
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
        complete = np.zeros(self.layout.count, np.bool_)
        for group, mask in arrived:
            masks[group.all_lanes] = mask
        lanes = np.sort(np.concatenate([group.all_lanes for group, _ in arrived]))
        everyone = Group(arrived[0][0].frame, arrived[0][0].pc, lanes)
        complete[lanes] = warp.absent(everyone, masks[lanes]) == 0
        for group, mask in arrived:
            chosen = complete[group.all_lanes]
            if not chosen.all():
                going, staying = group.split(chosen)
                self.at_warp_barrier.append((staying, mask[~chosen]))
                if not going.count:
                    continue
                group = going
            group.pc = group.block.successors[0]
            released.append(group)
        for group in released:
            self.make_ready(group)

    # Terminators: what a group does after its basic block

    def _fall_through(self, group: Group, block: CompiledBlock, _result: Any) -> Group:
        group.pc = block.successors[0]
        return group

    def _branch(self, group: Group, block: CompiledBlock, taken: Any) -> Group | None:
        if taken.ndim:
            count = int(np.count_nonzero(taken))
            if 0 < count < group.count:
                return self._diverge(group, block, taken)
            taken = count > 0
        group.pc = block.successors[0] if taken else block.successors[1]
        return group

    def _diverge(self, group: Group, block: CompiledBlock, taken: Array) -> Group:
        group.flush(block.live_out)
        lanes = group.all_lanes
        jumps = Group(group.frame, block.successors[0], lanes[taken])
        falls = Group(group.frame, block.successors[1], lanes[~taken])
        first, second = (jumps, falls) if jumps.pc < falls.pc else (falls, jumps)
        self.make_ready(second, block)
        return first

    def _branch_table(self, group: Group, block: CompiledBlock, index: Any) -> Group | None:
        index = np.broadcast_to(index, (group.count,))
        if int(index.max()) >= len(block.successors):
            raise Violation(
                "an index beyond the end of its branch table", block.site, int(np.argmax(index))
            )
        group.flush(block.live_out)
        for value in np.unique(index):
            lanes = group.lanes_where(index == value)
            self.make_ready(Group(group.frame, block.successors[int(value)], lanes))
        return None

    def _barrier(self, group: Group, block: CompiledBlock, arrival: Arrival) -> Group | None:
        group.pc = block.successors[0]
        return self._continue(self.barriers.arrive(group, arrival))

    def _cluster_barrier(self, group: Group, block: CompiledBlock, verb: str) -> Group | None:
        group.pc = block.successors[0]
        if self.barriers.cluster is None:
            self.barriers.cluster = ClusterBarrier(self)
        if verb == "wait":
            groups = self.barriers.cluster.wait(group, block.site)
        else:
            groups = [group, *self.barriers.cluster.arrive(group, block.site)]
        return self._continue(groups)

    def _continue(self, groups: list[Group]) -> Group | None:
        """Return the only group that continues, or make all of several groups ready."""
        if len(groups) == 1:
            return groups[0]
        for group in groups:
            self.make_ready(group)
        return None

    def _exit(self, group: Group, block: CompiledBlock, _result: Any = None) -> None:
        self.alive_total -= group.count
        if not self.alive_total:
            return
        self.exited[group.all_lanes] = True
        if self.program.sanitize:
            self.exits.append((group.frame, block.site, group.all_lanes))
        self.alive -= np.bincount(group.per_thread("block_index"), minlength=len(self.alive))
        for released in self.barriers.release_all():
            self.make_ready(released)
        waiting = self.waiting
        self.waiting = {}
        for partner in waiting.values():
            self.make_ready(partner)
        if self.at_warp_barrier:
            self._release_warp_barriers()

    # Calls

    def _call(self, group: Group, block: CompiledBlock, pointer: Any) -> Group | None:
        group.flush(block.live_out)
        if block.callee is not None:
            return self._enter(group, block, block.callee)
        names = {address: name for name, address in self.program.addresses.items()}
        pointer = np.broadcast_to(pointer, (group.count,))
        for value in np.unique(pointer):
            same = pointer == value
            name = names.get(int(value), "")
            if name in self.program.missing:
                raise self.program.missing[name].with_traceback(None)
            if name not in self.program.functions:
                message = f"calls {int(value):#x}, which is not a function"
                raise Violation(message, block.site, int(np.argmax(same)))
            self.running = part = Group(group.frame, group.pc, group.lanes_where(same))
            self.make_ready(self._enter(part, block, name))
        return None

    def _enter(self, group: Group, block: CompiledBlock, name: str) -> Group:
        """Return the group at the start of a function, or after the call of a built-in function."""
        caller = group.frame
        offsets = [caller.base + caller.code.local_offsets[argument] for argument in block.arguments]
        if name in builtin.FUNCTIONS:
            function = builtin.FUNCTIONS[name]
            _check_sizes(caller.code, block, name, block.arguments, function.sizes)
            function.run(group, block, offsets)
            return Group(caller, block.successors[0], group.lanes)
        frame = caller.children.get((block.index, name)) or self._new_frame(caller, block, name)
        for source, (own, size) in zip(offsets, frame.code.arguments, strict=True):
            self._copy(group, source, frame.base + own, size)
        return Group(frame, 0, group.lanes)

    def _new_frame(self, caller: Frame, block: CompiledBlock, name: str) -> Frame:
        if len(caller.call_path) >= _MAX_CALL_DEPTH:
            raise Violation(f"more than {_MAX_CALL_DEPTH} nested calls", block.site)
        code = self.program.functions[name]
        top = caller.base + caller.code.frame_bytes
        base = align_up(top, code.local_align)
        for names, expected in ((block.arguments, code.arguments), (block.returns, code.returns)):
            _check_sizes(caller.code, block, name, names, tuple(size for _, size in expected))
        try:
            self._reserve(base + code.frame_bytes)
            frame = caller.children[block.index, name] = Frame(self, code, base, caller, block)
        except MemoryError:
            message = f"no memory for {len(caller.call_path) + 1} nested calls"
            raise Violation(message, block.site) from None
        return frame

    def _return(self, group: Group, block: CompiledBlock, _result: Any) -> Group | None:
        frame = group.frame
        call = frame.call
        caller = frame.parent
        if call is None or caller is None:
            self._exit(group, block)
            return None
        for name, (own, size) in zip(call.returns, frame.code.returns, strict=True):
            self._copy(group, frame.base + own, caller.base + caller.code.local_offsets[name], size)
        return Group(caller, call.successors[0], group.lanes)

    def _reserve(self, top: int) -> None:
        """Provide at least `top` bytes of local memory for every thread."""
        have = self.local.shape[1]
        if top > have:
            grown = np.full((self.layout.count, max(align_up(top, 16), 2 * have)), POISON, np.uint8)
            grown[:, :have] = self.local
            self.local = grown
        width = self.local.shape[1]
        strides = (self.shape[1] * self.shape[2] * width, self.shape[2] * width, width)
        self._local_top = max(top, self._local_top)
        self._state_spaces["local"] = StateSpace(self.local.ctypes.data, strides, self._local_top)

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
        self._ticks += _CLOCK_CYCLES
        return self._ticks + self.blocks_run


def _trap(_wave: Wave, _group: Group, block: CompiledBlock, _result: Any) -> None:
    raise Violation("the kernel trapped", block.site)


_TERMINATORS: dict[str, Callable[[Wave, Group, CompiledBlock, Any], Group | None]] = {
    "next": Wave._fall_through,
    "warp_barrier": Wave._fall_through,
    "branch": Wave._branch,
    "branch_table": Wave._branch_table,
    "barrier": Wave._barrier,
    "cluster_barrier": Wave._cluster_barrier,
    "call": Wave._call,
    "ret": Wave._return,
    "exit": Wave._exit,
    "trap": _trap,
}


class _Watchdog:
    """Measures for how many steps a value has not changed."""

    def __init__(self) -> None:
        self._value: tuple[int, ...] = ()
        self._since = 0

    def steps_unchanged(self, value: tuple[int, ...], now: int) -> int:
        """Return for how many steps the value has been `value`."""
        if value != self._value:
            self._value = value
            self._since = now
        return now - self._since


def _no_progress(block: CompiledBlock, blocks: int, what: str) -> Violation:
    return Violation(
        f"no progress: {blocks:,} basic blocks ran and no thread {what}",
        block.site,
        hint="an endless loop, or a thread that waits for a thread of a later block; "
        'preheat.device("emulator", patience=...) lets a kernel run longer',
    )


def _check_sizes(
    code: CompiledFunction,
    block: CompiledBlock,
    callee: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
) -> None:
    """Raise `Violation` unless the parameters of a call have the sizes that the callee declares."""
    if tuple(code.local_sizes[name] for name in names) != sizes:
        raise Violation(f"calls {callee} with parameters that differ from its declaration", block.site)


def _program_order(key: tuple[Frame, int]) -> tuple[int, ...]:
    return (*key[0].call_path, key[1])
