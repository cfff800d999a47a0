"""Random programs over memory of preheat and other libraries, compared with sequential execution.

A program makes arrays, tensors, views and exports, launches kernels in several streams, fills, copies,
captures, replays, sets scalars, drops names and reads. Captures have side streams, of preheat and of
the other libraries, and some of them share a memory pool. Each piece of memory has a model, a plain
list of numbers, on which every step is done at once and in order. Whatever the program reads must be
what the model holds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preheat.devices.array import Array
from preheat.devices.libraries import StreamHandle
from preheat.gpu import Gpu
from tests.programs.libraries import SPIN, STREAMS, Library

__all__ = ["SOURCE", "Programs"]

N = 8
MASK = 0xFFFF
# `mix` does not commute, so that a result depends on the order of the work.
SOURCE = (
    SPIN
    + """
extern "C" __global__ void put(int* x, int value, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = value;
}
extern "C" __global__ void copy(const int* x, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void mix(const int* x, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = (y[threadIdx.x] * 5 + x[threadIdx.x] + 1) & 0xffff;
}
extern "C" __global__ void add(const int* s, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = (y[threadIdx.x] * 3 + *s) & 0xffff;
}
"""
)

Step = Callable[[], None]  # what a piece of work does to the models


@dataclass(eq=False)
class Item:
    """An array of preheat, a tensor of another library, or a view of either."""

    value: Any
    model: list[int]  # of the whole memory
    start: int = 0
    library: Library | None = None  # of a tensor
    exported: Library | None = None  # the library to which memory of preheat was exported
    root: Item | None = None  # of a view or an export

    def get(self) -> list[int]:
        return self.model[self.start : self.start + N]

    def set(self, values: Sequence[int]) -> None:
        self.model[self.start : self.start + N] = values

    @property
    def base(self) -> Item:
        return self if self.root is None else self.root.base


@dataclass(eq=False)
class Captured:
    """A graph, and what a replay does to the models."""

    graph: Any
    steps: list[Step] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)  # tensors of libraries that work inside it
    scalar: bool = False
    pooled: bool = False  # Its memory of other libraries is shared.
    forked: list[Any] = field(default_factory=list)  # streams of preheat
    aside: list[Library] = field(default_factory=list)  # libraries that work in a side stream
    events: list[Any] = field(default_factory=list)


number = st.integers(0, 999)
small = st.integers(1, MASK)


class Programs(RuleBasedStateMachine):
    """One program. A subclass says on which device and beside which libraries it runs."""

    def open(self, schedule: int) -> tuple[Gpu, list[Library]]:
        """Open the device and the other libraries."""
        raise NotImplementedError

    def shut(self) -> None:
        """Close the device."""

    @initialize(schedule=st.integers(0, 2**32 - 1))
    def begin(self, schedule: int) -> None:
        self.gpu, self.libraries = self.open(schedule)
        module = self.gpu.module(SOURCE)
        self.kernels = {name: module[name] for name in ("put", "copy", "mix", "add", "spin")}
        self.streams = [None, *(self.gpu.stream() for _ in range(2))]
        self.pool = self.gpu.pool(1 << 14)
        self.shared = self.gpu.shared_pool()
        self.step = self.gpu.scalar("int32", 7, name="step")
        self.scalar = [7]
        self.items: list[Item] = []
        self.graphs: list[Captured] = []
        self.bound: list[tuple[Any, Step, Any]] = []
        self.capturing: Captured | None = None
        self._warm()
        for home in self.streams:
            self.items.append(self._ours(self.gpu.zeros(2 * N, "int32", stream=home), [0] * 2 * N))

    def _warm(self) -> None:
        """Launch every kernel until it takes the short path."""
        x, y = (self.gpu.zeros(N, "int32") for _ in range(2))
        for _ in range(3):
            self.kernels["put"][1, 32](x, 0, N)
            for name in ("copy", "mix"):
                self.kernels[name][1, 32](x, y, N)
        for library in self.libraries:
            library.copy(library.full(N, 0), library.full(N, 1))

    def _ours(self, array: Array, model: list[int]) -> Item:
        return Item(array, model)

    def teardown(self) -> None:
        if not hasattr(self, "gpu"):
            return
        try:
            for item in self.items:
                self._compare(item)
            self.gpu.synchronize()
        finally:
            self.items, self.graphs, self.bound = [], [], []
            gc.collect()
            self.shut()

    # Choosing

    def _item(self, at: int) -> Item:
        return self.items[at % len(self.items)]

    def _stream(self, at: int) -> Any:
        """Choose None, a stream of preheat, or the handle of the current stream of a library."""
        choices: list[Any] = [*self.streams, *self.streams, *self.libraries]
        chosen = choices[at % len(choices)]
        return StreamHandle(chosen.handle()) if chosen in self.libraries else chosen

    def _stream_of_launch(self, at: int) -> Any:
        """Choose a stream for a launch, in a capture None or one that was forked."""
        if self.capturing is None:
            return self._stream(at)
        choices = [None, *self.capturing.forked]
        return choices[at % len(choices)]

    def _address(self, item: Item) -> Any:
        """Return the operand: the first N numbers from where the item begins."""
        if isinstance(item.value, Array):
            return item.value[item.start : item.start + N] if item.root is None else item.value
        return item.value

    # Memory

    @rule(where=number, value=small, how=st.sampled_from(["zeros", "array", "empty", "pool"]))
    def make(self, where: int, value: int, how: str) -> None:
        """Create an array of preheat, in any stream or from a pool."""
        if self.capturing or len(self.items) > 14:
            return
        home = self.streams[where % len(self.streams)]
        if how == "pool":
            made = self.pool.empty(2 * N, "int32").fill(value)
        elif how == "array":
            made = self.gpu.array([value] * 2 * N, "int32", stream=home)
        else:
            made = getattr(self.gpu, how)(2 * N, "int32", stream=home).fill(value)
        self.items.append(self._ours(made, [value] * 2 * N))

    @rule(which=number, value=small)
    def tensor(self, which: int, value: int) -> None:
        """A tensor of a library."""
        if self.capturing or len(self.items) > 14:
            return
        library = self.libraries[which % len(self.libraries)]
        self.items.append(Item(library.full(N, value), [value] * N, library=library))

    @rule(at=number, half=st.booleans())
    def view(self, at: int, half: bool) -> None:
        """Create a view of an array of preheat."""
        item = self._item(at)
        if not isinstance(item.value, Array) or item.root is not None or len(self.items) > 14:
            return
        start = N if half else 0
        part = item.value[start : start + N]
        self.items.append(Item(part, item.model, start, exported=item.exported, root=item))

    @rule(at=number, which=number)
    def export(self, at: int, which: int) -> None:
        """Export an array of preheat to another library; each array is exported to one at most."""
        item = self._item(at)
        library = self.libraries[which % len(self.libraries)]
        whole = isinstance(item.value, Array) and item.root is None
        if self.capturing or not whole or item.exported not in (None, library) or len(self.items) > 14:
            return
        item.exported = library
        taken = library.take(item.value[:N])
        self.items.append(Item(taken, item.model, library=library, root=item))

    @precondition(lambda self: len(self.items) > 4)
    @rule(at=number, collect=st.booleans())
    def drop(self, at: int, collect: bool) -> None:
        """Forget a name."""
        del self.items[at % len(self.items)]
        if collect:
            gc.collect()

    # Work

    def _do(self, step: Step) -> None:
        """Do it to the models: now, or at every replay."""
        if self.capturing is not None:
            self.capturing.steps.append(step)
        else:
            step()

    def _operand(self, item: Item) -> Any:
        if self.capturing is not None:
            self.capturing.keep.append(item)
        return self._address(item)

    @rule(at=number, value=small, stream=number)
    def put(self, at: int, value: int, stream: int) -> None:
        """A kernel writes."""
        self._launch("put", [self._item(at)], value, stream)

    @rule(source=number, into=number, stream=number, how=st.sampled_from(["copy", "mix"]))
    def work(self, source: int, into: int, stream: int, how: str) -> None:
        """A kernel reads one operand and writes another."""
        x, y = self._item(source), self._item(into)
        if x.base is y.base:
            return
        self._launch(how, [x, y], None, stream)

    @rule(into=number, stream=number)
    def add(self, into: int, stream: int) -> None:
        """A kernel reads a scalar of the device."""
        item = self._item(into)
        operand = self._operand(item)
        scalar = self.scalar
        if self.capturing is not None:
            self.capturing.scalar = True
        chosen = self._stream_of_launch(stream)
        self.kernels["add"].launch(self.step, operand, N, grid=1, block=32, stream=chosen)
        self._do(lambda: item.set([(n * 3 + scalar[0]) & MASK for n in item.get()]))

    def _launch(self, name: str, items: list[Item], value: int | None, stream: int) -> None:
        operands = [self._operand(item) for item in items]
        args = (operands[0], value, N) if name == "put" else (*operands, N)
        chosen = self._stream_of_launch(stream)
        if chosen is None:
            self.kernels[name][1, 32](*args)
        else:
            self.kernels[name].launch(*args, grid=1, block=32, stream=chosen)
        self._do(lambda: _apply(name, items, value))

    @rule(at=number, value=small)
    def fill(self, at: int, value: int) -> None:
        """A fill, by whoever has the memory."""
        item = self._item(at)
        operand = self._operand(item)
        if item.library is None:
            operand.fill(value)
        else:
            item.library.fill(operand, value)
        self._do(lambda: item.set([value] * N))

    @rule(source=number, into=number)
    def transfer(self, source: int, into: int) -> None:
        """Copy inside one library, or inside preheat."""
        x, y = self._item(source), self._item(into)
        if x.base is y.base or x.library is not y.library:
            return
        if y.library is None:
            self._operand(y).copy_from(self._operand(x))
        else:
            y.library.copy(self._operand(y), self._operand(x))
        self._do(lambda: y.set(x.get()))

    @rule(at=number, value=small)
    def write(self, at: int, value: int) -> None:
        """Numbers from the host."""
        item = self._item(at)
        if item.library is not None or self.capturing is not None:
            return
        self._address(item).write([value] * N)
        item.set([value] * N)

    @rule(value=small, stream=number)
    def scalar_set(self, value: int, stream: int) -> None:
        """A new value of the scalar, in any stream."""
        if self.capturing is None:
            self.step.set(value, stream=self._stream(stream))
            self.scalar[0] = value

    @rule(which=number, to=st.integers(0, STREAMS - 1))
    def switch(self, which: int, to: int) -> None:
        """A library works in another stream from here on."""
        if self.capturing is None:
            self.libraries[which % len(self.libraries)].switch(to)

    @rule(which=number)
    def slow(self, which: int) -> None:
        """Keep a stream busy, so that later work in it is delayed."""
        if self.capturing is not None:
            return
        if which % 2:
            self.libraries[which // 2 % len(self.libraries)].slow()
        else:
            stream = self.streams[which // 2 % len(self.streams)]
            cycles = 2_000_000 if self.spins else 0
            self.kernels["spin"].launch(cycles, grid=1, block=1, stream=stream)

    spins = False  # whether spinning takes time on this device

    # Captures

    @precondition(lambda self: self.capturing is None and len(self.graphs) < 4)
    @rule(relaxed=st.booleans(), pooled=st.booleans())
    def capture(self, relaxed: bool, pooled: bool) -> None:
        """Work becomes part of a graph from here on."""
        mode = "relaxed" if relaxed else "thread_local"
        pool = self.shared if pooled else None
        self.capturing = Captured(self.gpu.capture(mode=mode, pool=pool), pooled=pooled)
        self.capturing.graph.begin()

    @precondition(lambda self: self.capturing is not None)
    @rule(which=number)
    def mark(self, which: int) -> None:
        """An event in the captured stream, or in one that was forked."""
        captured = self.capturing
        assert captured is not None
        streams = [self.gpu, *captured.forked]
        captured.events.append(streams[which % len(streams)].record())

    @precondition(lambda self: self.capturing is not None)
    @rule(which=number, event=number)
    def fork(self, which: int, event: int) -> None:
        """A stream of preheat waits for an event of the capture, which may be an old one."""
        captured = self.capturing
        assert captured is not None
        side = self.streams[1 + which % (len(self.streams) - 1)]
        assert side is not None
        events = captured.events or [self.gpu.record()]
        side.wait(events[event % len(events)])
        if side not in captured.forked:
            captured.forked.append(side)

    @precondition(lambda self: self.capturing is not None and self.capturing.forked)
    @rule(which=number)
    def join(self, which: int) -> None:
        """The captured stream waits for a side stream, which may be used again."""
        captured = self.capturing
        assert captured is not None
        self.gpu.wait(captured.forked[which % len(captured.forked)])

    @precondition(lambda self: self.capturing is not None)
    @rule(which=number, to=st.integers(1, STREAMS - 1))
    def step_aside(self, which: int, to: int) -> None:
        """A library works in a side stream of the capture, or in the captured stream again."""
        captured = self.capturing
        assert captured is not None
        library = self.libraries[which % len(self.libraries)]
        if library in captured.aside:
            captured.aside.remove(library)
            library.join()
        else:
            captured.aside.append(library)
            library.fork(to)

    @precondition(lambda self: self.capturing is not None and self.capturing.pooled)
    @rule(into=number, value=small, by_kernel=st.booleans())
    def inside(self, into: int, value: int, by_kernel: bool) -> None:
        """The first library allocates inside the capture, from memory that graphs share."""
        library = self.libraries[0]
        item = self._item(into)
        if item.library is not library and not by_kernel:
            return
        hidden = library.full(N, value)
        operand = self._operand(item)
        if by_kernel:
            self.kernels["copy"][1, 32](hidden, operand, N)
        else:
            library.copy(operand, hidden)
        self._do(lambda: item.set([value] * N))

    @precondition(lambda self: self.capturing is not None)
    @rule()
    def end(self) -> None:
        """The graph is ready."""
        self._end()

    def _end(self) -> None:
        captured = self.capturing
        self.capturing = None
        assert captured is not None
        for library in captured.aside:
            library.join()
        for side in captured.forked:
            self.gpu.wait(side)
        if not captured.steps:
            captured.graph.__exit__(ValueError, ValueError("nothing was captured"), None)
            return
        captured.graph.end().instantiate()
        self.graphs.append(captured)

    @precondition(lambda self: self.capturing is None and self.graphs)
    @rule(at=number, stream=number, value=st.none() | small, times=st.integers(1, 3))
    def replay(self, at: int, stream: int, value: int | None, times: int) -> None:
        """Replay a graph, with a scalar set or not."""
        captured = self.graphs[at % len(self.graphs)]
        given = {"step": value} if value is not None and captured.scalar else {}
        for _ in range(times):
            captured.graph.replay(stream=self._stream(stream), **given)
            if given:
                self.scalar[0] = value or 0
            for step in captured.steps:
                step()

    @precondition(lambda self: self.capturing is None and self.graphs)
    @rule(at=number)
    def forget(self, at: int) -> None:
        """Drop a graph, maybe while it is replayed."""
        del self.graphs[at % len(self.graphs)]

    # Bound launches

    @precondition(lambda self: self.capturing is None and len(self.bound) < 4)
    @rule(source=number, into=number, stream=number)
    def bind(self, source: int, into: int, stream: int) -> None:
        """Fix a launch."""
        x, y = self._item(source), self._item(into)
        if x.base is not y.base:
            operands = (self._address(x), self._address(y), N)
            made = self.kernels["mix"].bind(*operands, grid=1, block=32, stream=self._stream(stream))
            self.bound.append((made, lambda: _apply("mix", [x, y], None), (x, y)))

    @precondition(lambda self: self.capturing is None and self.bound)
    @rule(at=number, times=st.integers(1, 3))
    def call(self, at: int, times: int) -> None:
        """Launch it."""
        bound, step, _ = self.bound[at % len(self.bound)]
        for _ in range(times):
            bound()
            step()

    # Reading

    @precondition(lambda self: self.capturing is None)
    @rule(at=number)
    def read(self, at: int) -> None:
        """Check that the program reads what the model holds."""
        self._compare(self._item(at))

    def _compare(self, item: Item) -> None:
        if self.capturing is not None:
            self._end()
        if item.library is None:
            found = [int(n) for n in self._address(item).numpy()]
        else:
            found = item.library.read(item.value)
        assert found == item.get(), f"read {found}, in sequence it is {item.get()}"

    @invariant()
    def alive(self) -> None:
        """The device lives."""
        if hasattr(self, "gpu"):
            assert self.gpu._context.lost is None


def _apply(name: str, items: list[Item], value: int | None) -> None:
    """Apply the effect of a kernel to the models."""
    if name == "put":
        items[0].set([value or 0] * N)
        return
    x, y = items
    if name == "copy":
        y.set(x.get())
    else:
        y.set([(b * 5 + a + 1) & MASK for a, b in zip(x.get(), y.get(), strict=True)])
