"""The machine: thread blocks that are worked on together, and which of their threads run next.

Groups part where only some of their threads take a branch, and meet again at the block where both
arrive. The group furthest behind in the text runs first, which makes them meet soon; one that has run
long while others wait lets those go on, which makes spin locks work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from preheat.devices.base import Dim3, Geometry, Symbol
from preheat.devices.emulator import builtin, warp
from preheat.devices.emulator.access import Base, view
from preheat.devices.emulator.barrier import Arrival, Barriers
from preheat.devices.emulator.cluster import ClusterBarrier
from preheat.devices.emulator.generate import Code, Step
from preheat.devices.emulator.group import Frame, Group
from preheat.devices.emulator.heap import Heap
from preheat.devices.emulator.layout import Layout
from preheat.devices.emulator.memory import POISON, Memory, Violation
from preheat.errors import EmulatorFault, UnsupportedInstructionError

__all__ = ["Program", "Wave"]

Array = np.ndarray[Any, Any]

_TURN = 64  # basic blocks that groups run while one waits, before it has its turn
_DEEPEST = 1024  # calls inside one another
_BUSY = 10  # times its patience a wave may write and pass barriers without any thread ending
_NEVER = "waits for threads of its warp that never come"
_SAME_PLACE = "those that a mask names must come to one shuffle, vote or mma, through the same calls"
_ARRIVALS = "each phase waits for as many arrivals as mbarrier.init was given"
_CLOCK = 1000  # cycles from one reading of the clock to the next: waits for a time are short


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel that is ready to run: its code, where its variables lie, the memory it may use."""

    kernel: str
    functions: dict[str, Code]
    missing: dict[str, UnsupportedInstructionError]  # functions that only pointers lead to, and why not
    shared: dict[str, int]  # offset of each variable in shared memory
    shared_bytes: int  # of a block, without what a launch adds
    addresses: dict[str, int]  # of module variables, and what stands for functions in pointers
    constants: tuple[Symbol, ...]
    memory: Memory
    heap: Heap
    reserved: int  # bytes at the beginning of shared memory that are not for variables
    patience: int  # basic blocks that may run without anything coming of it
    sanitize: bool  # its code was generated with checks: see `sanitize`
    located: Callable[..., EmulatorFault]  # a fault with its source lines; see `EmulatorModule.located`


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
        self.shadow = len(self._shared)  # bytes from shared memory to what is known of it
        if program.sanitize:
            self._shared = np.concatenate((self._shared, np.zeros_like(self._shared)))
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
        self.meeting: list[tuple[Group, Array]] = []  # at any barrier of their warp, with their masks
        self.writes = self.steps = 0
        self._turn = self._ticks = 0
        self._signs, self._ends, self._stalls = _Watch(), _Watch(), _Watch()
        self._stalled = 0  # waits at mbarriers that were in vain

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
        assert group.count, "a group of no threads"
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
            raise Violation(_NEVER, group.step.first, hint=_SAME_PLACE)
        for group, _ in self.meeting:
            self.running = group
            raise Violation(_NEVER, group.step.first)
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
        if group.lanes is not None and step.mask is not None:
            gathered = self._rendezvous(group, step)
            if gathered is None:
                return None
            self.running = group = gathered
        if group.lanes is None:  # maybe since its last threads have arrived
            group.frame.owned.clear()
            return _ENDS[step.kind](self, group, step, step.run(group, group.regs, self))
        result = step.run(group, group.regs, self)
        group.dirty |= step.writes
        return _ENDS[step.kind](self, group, step, result)

    def _check_progress(self, step: Step) -> None:
        patience = self.program.patience
        if self._signs.unchanged(self._progress(), self.steps) > patience:
            raise _endless(step, patience, "wrote global or shared memory, passed a barrier or ended")
        if self._ends.unchanged((self.alive_total,), self.steps) > _BUSY * patience:
            raise _endless(step, _BUSY * patience, "ended")

    def _progress(self) -> tuple[int, ...]:
        """Numbers of which one changes whenever a thread does what others can notice."""
        return self.alive_total, self.writes, self.barriers.releases

    def stall(self, site: int, position: int) -> None:
        """Let other groups run, because a thread of this one waits for them at an mbarrier."""
        self._turn = _TURN
        self._stalled += 1
        if self._stalls.unchanged(self._progress(), self._stalled) > self.program.patience // _TURN:
            message = "waits at an mbarrier for arrivals or bytes that never come"
            raise Violation(message, site, position, hint=_ARRIVALS)

    def _rendezvous(self, group: Group, step: Step) -> Group | None:
        """The threads whose partners in the warp have all arrived; the others wait."""
        assert step.mask is not None
        if step.kind == "meet":
            mask = step.mask(group, group.regs, self)
            self.meeting.append((group, np.broadcast_to(mask, (group.count,))))
            self._let_meet()
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

    def _let_meet(self) -> None:
        """Let those go on whose partners all wait at a barrier of their warp, wherever that is."""
        meeting, self.meeting, gone = self.meeting, [], []
        masks, free = np.zeros(self.layout.count, np.uint32), np.zeros(self.layout.count, np.bool_)
        for group, mask in meeting:
            masks[group.all_lanes] = mask
        lanes = np.sort(np.concatenate([group.all_lanes for group, _ in meeting]))
        everyone = Group(meeting[0][0].frame, meeting[0][0].pc, lanes)
        free[lanes] = warp.absent(everyone, masks[lanes]) == 0
        for group, mask in meeting:
            chosen = free[group.all_lanes]
            if not chosen.all():
                going, held = group.split(chosen)
                self.meeting.append((held, mask[~chosen]))
                if not going.count:
                    continue
                group = going
            group.pc = group.step.targets[0]
            gone.append(group)
        for group in gone:
            self.put(group)

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

    def _cluster_barrier(self, group: Group, step: Step, verb: str) -> Group | None:
        group.pc = step.targets[0]
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
        if self.meeting:
            self._let_meet()

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
            if name in self.program.missing:
                raise self.program.missing[name].with_traceback(None)
            if name not in self.program.functions:
                message = f"calls {int(value):#x}, which is no function"
                raise Violation(message, step.site, int(np.argmax(mine)))
            self.running = part = Group(group.frame, group.pc, group.chosen(mine))
            self.put(self._enter(part, step, name))
        return None

    def _enter(self, group: Group, step: Step, name: str) -> Group:
        """The group at the start of a function, or behind the call of one that the machine provides."""
        caller = group.frame
        offsets = [caller.base + caller.code.offsets[argument] for argument in step.arguments]
        if name in builtin.FUNCTIONS:
            function = builtin.FUNCTIONS[name]
            _check_sizes(caller.code, step, name, step.arguments, function.sizes)
            function.run(group, step, offsets)
            return Group(caller, step.targets[0], group.lanes)
        frame = caller.children.get((step.index, name)) or self._frame(caller, step, name)
        for source, (own, size) in zip(offsets, frame.code.arguments, strict=True):
            self._copy(group, source, frame.base + own, size)
        return Group(frame, 0, group.lanes)

    def _frame(self, caller: Frame, step: Step, name: str) -> Frame:
        if len(caller.order) >= _DEEPEST:
            raise Violation(f"more than {_DEEPEST} calls inside one another", step.site)
        code, top = self.program.functions[name], caller.base + caller.code.frame_bytes
        base = -(-top // code.align) * code.align
        for names, places in ((step.arguments, code.arguments), (step.returns, code.returns)):
            _check_sizes(caller.code, step, name, names, tuple(size for _, size in places))
        try:
            self._reserve(base + code.frame_bytes)
            frame = caller.children[step.index, name] = Frame(self, code, base, caller, step)
        except MemoryError:
            message = f"no room for {len(caller.order) + 1} calls inside one another"
            raise Violation(message, step.site) from None
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

    def no_parameter(self, offset: int, size: int, limit: int, site: int) -> NoReturn:
        """Refuse a load beside the kernel's parameters."""
        where = f"reads {size} bytes at parameter offset {offset}"
        raise Violation(f"{where}; the kernel has {limit} bytes of parameters", site)

    def clock(self) -> int:
        """A counter that goes up whenever it is read."""
        self._ticks += _CLOCK
        return self._ticks + self.steps

    def block_of(self, lane: int) -> Dim3:
        """Coordinates in the grid of a thread's block."""
        size, (cx, cy, cz) = self.layout.cluster_blocks, self.geometry.cluster or (1, 1, 1)
        cluster, rank = divmod(self.first + lane // self.layout.threads, size)
        width, height, depth = self.geometry.grid
        x, y, z = _coordinates(cluster, (width // cx, height // cy, depth // cz))
        inner = _coordinates(rank, (cx, cy, cz))
        return x * cx + inner[0], y * cy + inner[1], z * cz + inner[2]

    def thread_of(self, lane: int) -> Dim3:
        """Coordinates of a thread in its block."""
        return _coordinates(lane % self.layout.threads, self.layout.block)


_ENDS: dict[str, Callable[[Wave, Group, Step, Any], Group | None]] = {
    "next": Wave._next,
    "meet": Wave._next,
    "branch": Wave._branch,
    "table": Wave._jump_table,
    "barrier": Wave._barrier,
    "cluster": Wave._cluster_barrier,
    "call": Wave._call,
    "ret": Wave._return,
    "exit": Wave._exit,
    "trap": Wave._trap,
}


class _Watch:
    """Since when something is what it is, in steps."""

    def __init__(self) -> None:
        self._value: tuple[int, ...] = ()
        self._since = 0

    def unchanged(self, value: tuple[int, ...], now: int) -> int:
        """For how many steps it has been `value`."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


def _endless(step: Step, blocks: int, what: str) -> Violation:
    return Violation(
        f"no progress: {blocks:,} basic blocks ran and no thread {what}",
        step.site,
        hint="an endless loop, or a thread that waits for one of a block that comes later; "
        'preheat.device("emulator", patience=...) lets a kernel run longer',
    )


def _check_sizes(
    code: Code, step: Step, callee: str, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    """`Violation` unless the variables that a call names are as large as the function's own."""
    if tuple(code.sizes[name] for name in names) != sizes:
        raise Violation(f"calls {callee} with other parameters than it has", step.site)


def _order(key: tuple[Frame, int]) -> tuple[int, ...]:
    return (*key[0].order, key[1])


def _rounded(size: int) -> int:
    return -(-size // 16) * 16


def _coordinates(number: int, extent: Dim3) -> Dim3:
    x, y, _ = extent
    return number % x, number // x % y, number // (x * y)
