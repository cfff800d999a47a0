"""The contenders of bench_replay: the same kernels as each library captures and replays them."""

from __future__ import annotations

import ctypes
import importlib
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import preheat
from bench_launch import Driver, names

SOURCE = """
extern "C" __global__ void tick(int* y, const int* x, int n, int cycles) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
    if (cycles) for (long long end = clock64() + cycles; clock64() < end;) {}
}
extern "C" __global__ void mix(
    int* y, const int* step, const int* token, const int* length, const int* seed, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += *step + 2 * *token + 4 * *length + 8 * *seed;
}
"""
N, NODES, GRID, BLOCK = 1000, 320, 4, 256
SCALARS = ("step", "token", "length", "seed")
VALUES, WEIGHTS = (7, 3, 8, 5), (1, 2, 4, 8)
NATIVE, BARE, OURS = "native C, cuGraphLaunch", "cuda.bindings, cuGraphLaunch", "preheat"
FLOOR = "native C on the graph of "
CACHED, TENSORS = "preheat, cached", f"{NODES} launches"
TORCH, CUPY, CORE = "torch.cuda.CUDAGraph", "CuPy", "cuda.core"


@dataclass
class Contender:
    """One way to do the work: a statement, the names in it, and its operands.

    `loop` takes the place of the timed statement in native C: it runs so many replays, and returns the
    microseconds of one.
    """

    title: str
    statement: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    x: int = 0
    y: int = 0
    loop: Callable[[int], float] | None = None
    replays: int = 1  # In one statement.
    adds: int = 0  # What the scalars add to each element in one replay.
    failure: str = ""
    hosts: list[float] = field(default_factory=list)  # Microseconds per replay, one entry per round.
    ends: list[float] = field(default_factory=list)

    @cached_property
    def _timer(
        self,
    ) -> timeit.Timer:  # One for all rounds, because the interpreter specialises its code.
        return timeit.Timer(self.statement, globals=self.names)

    def run(self, replays: int) -> float:
        """Return the microseconds of host time of a replay."""
        if self.loop is not None:
            return self.loop(replays)
        return self._timer.timeit(replays // self.replays) / replays * 1e6

    def prepared(self) -> Callable[[], object]:
        """Return a function that runs the statement once."""
        return partial(exec, compile(self.statement, self.title, "exec"), self.names)

    @property
    def host(self) -> float:
        return statistics.median(self.hosts)

    @property
    def end(self) -> float:
        return statistics.median(self.ends)


@dataclass
class Capturer:
    """One way to capture the work.

    `capture` returns the microseconds for each node, from the begin of the capture to its end, and a
    function that launches the graph once and drops it.
    """

    title: str
    statement: str = ""
    capture: Callable[[], tuple[float, Callable[[], object]]] | None = None
    x: int = 0
    y: int = 0
    failure: str = ""
    costs: list[float] = field(default_factory=list)
    replays: ClassVar[int] = 1  # as in `Contender`
    adds: ClassVar[int] = 0

    def prepared(self) -> Callable[[], object]:
        """Capture the work and return a function that runs it once."""
        assert self.capture is not None
        return self.capture()[1]

    @property
    def cost(self) -> float:
        return statistics.median(self.costs)


class NativeLoop:
    """The loop of `native/burst.c` in this process."""

    def __init__(self, library: Path) -> None:
        self._burst = ctypes.CDLL(str(library)).burst
        self._burst.restype = ctypes.c_double
        self._burst.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)

    def contender(self, title: str, graph: int, stream: int, like: Contender) -> Contender:
        """Return the contender that launches the graph of another one, in its stream."""
        burst = self._burst
        given = names(burst=burst, graph=graph, stream=stream, owner=like)
        loop: Callable[[int], float] = lambda count: burst(graph, stream, count)  # noqa: E731
        return Contender(title, "burst(graph, stream, 1)", given, like.x, like.y, loop)


class Raw:
    """The kernels as driver handles, for contenders without a loader."""

    def __init__(self, driver: Driver, cubin: bytes) -> None:
        self.cu, self.check = driver.api, driver.check
        module = self.check(self.cu.cuModuleLoadData(cubin))
        self._tick = self.check(self.cu.cuModuleGetFunction(module, b"tick"))
        self._mix = self.check(self.cu.cuModuleGetFunction(module, b"mix"))
        self._keep: list[object] = []

    def step(self, y: int, x: int, scalars: Sequence[int] = ()) -> Callable[[Any], None]:
        """Return a function that submits one step to a stream: the ticks, then the scalars."""
        tick = self._packed(y, x, ctypes.c_int(N), ctypes.c_int(0))
        mix = self._packed(y, *scalars, ctypes.c_int(N))

        def submit(stream: Any) -> None:
            for _ in range(NODES):
                self._launch(self._tick, stream, tick)
            if scalars:
                self._launch(self._mix, stream, mix)

        return submit

    def _packed(self, *values: Any) -> int:
        """Return the address of the array of addresses of the values, as the driver expects it."""
        boxes = [ctypes.c_void_p(each) if isinstance(each, int) else each for each in values]
        pointers = (ctypes.c_void_p * len(boxes))(*map(ctypes.addressof, boxes))
        self._keep += [boxes, pointers]
        return ctypes.addressof(pointers)

    def _launch(self, function: Any, stream: Any, packed: int) -> None:
        shape = (GRID, 1, 1, BLOCK, 1, 1)
        self.check(self.cu.cuLaunchKernel(function, *shape, 0, stream, packed, 0))

    def stream(self) -> Any:
        return self.check(self.cu.cuStreamCreate(int(self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def capture(self, step: Callable[[Any], None], stream: Any) -> Any:
        """Return the step as an instantiated and uploaded graph."""
        step(stream)
        self.check(self.cu.cuStreamSynchronize(stream))
        graph = self.captured(step, stream)
        ready = self.check(self.cu.cuGraphInstantiate(graph, 0))
        self.check(self.cu.cuGraphUpload(ready, stream))
        return ready

    def captured(self, step: Callable[[Any], None], stream: Any) -> Any:
        """Return the step as a graph."""
        mode = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.check(self.cu.cuStreamBeginCapture(stream, mode))
        step(stream)
        return self.check(self.cu.cuStreamEndCapture(stream))

    def launch_once(self, graph: Any, stream: Any) -> None:
        """Launch a graph once and destroy it."""
        ready = self.check(self.cu.cuGraphInstantiate(graph, 0))
        self.check(self.cu.cuGraphLaunch(ready, stream))
        self.check(self.cu.cuStreamSynchronize(stream))
        self.check(self.cu.cuGraphExecDestroy(ready))
        self.check(self.cu.cuGraphDestroy(graph))


class Ours:
    """The kernels and arrays of preheat, and graphs of them."""

    def __init__(self, gpu: preheat.Gpu) -> None:
        self.gpu = gpu
        self.tick = gpu.kernel(SOURCE, "tick")[GRID, BLOCK]
        self.mix = gpu.kernel(SOURCE, "mix")[GRID, BLOCK]
        self.x = gpu.array(np.arange(N, dtype=np.int32) % 37 + 1)
        self.y = gpu.zeros(N, "int32")
        self.scalars = [gpu.scalar("int32", name=name) for name in SCALARS]
        self.tick(self.y, self.x, N, 0)
        self.mix(self.y, *self.scalars, N)

    def step(self, y: Any, x: Any) -> None:
        """Launch all kernels of a step."""
        for _ in range(NODES):
            self.tick(y, x, N, 0)

    def graph(self, *, scalars: bool = False) -> Any:
        """Return the step as an instantiated and uploaded graph."""
        with self.gpu.capture() as graph:
            self.step(self.y, self.x)
            if scalars:
                self.mix(self.y, *self.scalars, N)
        return graph.upload()

    def contender(self, title: str, statement: str, **more: Any) -> Contender:
        given = {key: more.pop(key) for key in ("replays", "adds") if key in more}
        return Contender(title, statement, more, self.x.address, self.y.address, **given)


# One graph of 320 kernels


def bare(driver: Driver, raw: Raw) -> Iterator[Contender]:
    x = driver.allocate()
    y = driver.allocate()
    stream = raw.stream()
    given = names(launch=raw.cu.cuGraphLaunch, stream=stream)
    given |= names(ready=raw.capture(raw.step(y, x), stream))
    yield Contender(BARE, "launch(ready, stream)", given, x, y)


def native(loop: NativeLoop, like: Contender) -> Iterator[Contender]:
    """Return native C on the very graph, and in the very stream, of the bare call."""
    graph, stream = int(like.names["ready"]), int(like.names["stream"])
    yield loop.contender(NATIVE, graph, stream, like)


def preheat_replay(ours: Ours) -> Iterator[Contender]:
    yield ours.contender(OURS, "graph.replay()", graph=ours.graph())


def preheat_eager(ours: Ours) -> Iterator[Contender]:
    statement = f"for _ in range({NODES}): tick(y, x, {N}, 0)"
    yield ours.contender("preheat, eager", statement, tick=ours.tick, x=ours.x, y=ours.y)


class Torch:
    """Tensors of torch, on a stream that becomes the current one."""

    def __init__(self, raw: Raw) -> None:
        self.torch = importlib.import_module("torch")
        self.raw = raw
        self.stream = self.torch.cuda.Stream()
        self.torch.cuda.set_stream(self.stream)
        self.x, self.y, *self.scalars = (self._zeros(n) for n in (N, N, 1, 1, 1, 1))

    def _zeros(self, count: int) -> Any:
        return self.torch.zeros(count, dtype=self.torch.int32, device="cuda")

    def graph(self, scalars: Sequence[int] = ()) -> Any:
        step = self.raw.step(self.y.data_ptr(), self.x.data_ptr(), scalars)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.stream):
            step(self.stream.cuda_stream)
        return graph

    def contender(self, title: str, statement: str, adds: int = 0, **given: Any) -> Contender:
        return Contender(title, statement, given, self.x.data_ptr(), self.y.data_ptr(), adds=adds)


def torch_replay(torch: Torch) -> Iterator[Contender]:
    yield torch.contender(TORCH, "graph.replay()", graph=torch.graph())


class Cupy:
    """Kernels and arrays of CuPy, on a stream that becomes the current one."""

    def __init__(self, cubin: Path) -> None:
        self.cupy = importlib.import_module("cupy")
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        module = self.cupy.RawModule(path=str(cubin))
        self._tick, self._mix = module.get_function("tick"), module.get_function("mix")
        self.x, self.y, *self.scalars = (self.cupy.zeros(n, "i4") for n in (N, N, 1, 1, 1, 1))

    def _step(self, *, scalars: bool) -> None:
        for _ in range(NODES):
            self._tick((GRID,), (BLOCK,), (self.y, self.x, np.int32(N), np.int32(0)))
        if scalars:
            self._mix((GRID,), (BLOCK,), (self.y, *self.scalars, np.int32(N)))

    def graph(self, *, scalars: bool = False) -> Any:
        self._step(scalars=scalars)
        self.stream.synchronize()
        self.stream.begin_capture()
        self._step(scalars=scalars)
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        return graph

    def contender(self, title: str, statement: str, adds: int = 0, **given: Any) -> Contender:
        given |= names(stream=self.stream)
        return Contender(title, statement, given, self.x.data.ptr, self.y.data.ptr, adds=adds)


def cupy_replay(cupy: Cupy) -> Iterator[Contender]:
    yield cupy.contender(CUPY, "graph.launch(stream)", graph=cupy.graph())


def core_replay(driver: Driver, cubin: bytes) -> Iterator[Contender]:
    core = importlib.import_module("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    builder = device.create_graph_builder()
    x, y = driver.allocate(), driver.allocate()
    kernel = core.ObjectCode.from_cubin(cubin).get_kernel("tick")
    config = core.LaunchConfig(grid=GRID, block=BLOCK)
    args = (y, x, np.int32(N), np.int32(0))
    core.launch(stream, config, kernel, *args)
    stream.sync()
    builder.begin_building("thread_local")
    for _ in range(NODES):
        core.launch(builder, config, kernel, *args)
    graph = builder.end_building().complete()
    graph.upload(stream)
    given = names(graph=graph, stream=stream, keep=(kernel, builder))
    yield Contender(CORE, "graph.launch(stream)", given, x, y)


# The graphs of the others in native C, which shows what the graph itself costs the driver


def native_preheat(loop: NativeLoop, ours: Ours, like: Contender) -> Iterator[Contender]:
    """Return native C on a graph of preheat, from which the device makes its launch."""
    executable: Any = like.names["graph"]._replayer.executable.instantiate()
    stream = ours.gpu._context.stream.handle
    yield loop.contender(f"{FLOOR}{OURS}", int(executable._handle), stream, like)


def native_torch(loop: NativeLoop, torch: Torch, like: Contender) -> Iterator[Contender]:
    graph = like.names["graph"].raw_cuda_graph_exec()
    yield loop.contender(f"{FLOOR}{TORCH}", int(graph), torch.stream.cuda_stream, like)


def native_cupy(loop: NativeLoop, cupy: Cupy, like: Contender) -> Iterator[Contender]:
    graph = like.names["graph"].graphExec
    yield loop.contender(f"{FLOOR}{CUPY}", int(graph), cupy.stream.ptr, like)


def native_core(loop: NativeLoop, like: Contender) -> Iterator[Contender]:
    graph, stream = (int(like.names[each].handle) for each in ("graph", "stream"))
    yield loop.contender(f"{FLOOR}{CORE}", graph, stream, like)


# What the cache of graphs and the decorator cost beyond the replay


def cached(ours: Ours) -> Iterator[Contender]:
    """Return ways to replay through the cache; the first three replay the same graph."""
    gpu: Any = ours.gpu
    graph = ours.graph()
    graphs = gpu.graphs(capacity=8)
    graphs.install("step", graph)
    given = names(graph=graph, graphs=graphs, body=lambda: ours.step(ours.y, ours.x))
    given |= names(step=gpu.graphed(ours.step), y=ours.y, x=ours.x)
    given |= names(keyed=gpu.graphed(key=lambda y, _: y.shape)(ours.step))
    for title, statement in (
        ("graph.replay", "graph.replay()"),
        ("graphs.replay", "graphs.replay('step')"),
        ("graphs.run", "graphs.run('step', body)"),
        ("@graphed", "step(y, x)"),
        ("@graphed(key=…)", "keyed(y, x)"),
    ):
        yield Contender(f"{CACHED}, {title}", statement, given, ours.x.address, ours.y.address)


# Graphs on tensors of torch


def preheat_on_tensors(ours: Ours, torch: Torch) -> Iterator[Contender]:
    """Return replays of launches on our arrays, on tensors of torch, and on one of each."""
    ours_x, ours_y = (ours.x, ours.x.address), (ours.y, ours.y.address)
    torch_x, torch_y = ((each, each.data_ptr()) for each in (torch.x, torch.y))
    for title, (y, y_address), (x, x_address) in (
        ("preheat on our arrays", ours_y, ours_x),
        ("preheat on torch tensors", torch_y, torch_x),
        ("preheat on one of each", torch_y, ours_x),
    ):
        ours.tick(y, x, N, 0)
        with ours.gpu.capture() as graph:
            ours.step(y, x)
        title = f"{TENSORS}, {title}"
        yield Contender(title, "graph.replay()", names(graph=graph.upload()), x_address, y_address)


def torch_on_tensors(torch: Torch) -> Iterator[Contender]:
    yield torch.contender(f"{TENSORS}, torch", "graph.replay()", graph=torch.graph())


# Captures


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return the microseconds of a capture for each of its nodes, and what it returned."""
    started = time.perf_counter()
    made = act()
    return (time.perf_counter() - started) / NODES * 1e6, made


def preheat_capture(ours: Ours) -> Iterator[Capturer]:
    def record() -> Any:
        graph = ours.gpu.capture().begin()
        ours.step(ours.y, ours.x)
        return graph.end()

    def capture() -> tuple[float, Callable[[], object]]:
        cost, graph = timed(record)
        return cost, lambda: (graph.replay(synchronize=True), graph.close())

    statement = f"tick(y, x, {N}, 0)"
    yield Capturer(OURS, statement, capture, ours.x.address, ours.y.address)


def bare_capture(driver: Driver, raw: Raw) -> Iterator[Capturer]:
    x = driver.allocate()
    y = driver.allocate()
    stream = raw.stream()
    step = raw.step(y, x)

    def capture() -> tuple[float, Callable[[], object]]:
        cost, graph = timed(lambda: raw.captured(step, stream))
        return cost, lambda: raw.launch_once(graph, stream)

    yield Capturer("cuda.bindings", "cuLaunchKernel(…), prepacked", capture, x, y)


def core_capture(driver: Driver, cubin: bytes) -> Iterator[Capturer]:
    core = importlib.import_module("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    x, y = driver.allocate(), driver.allocate()
    kernel = core.ObjectCode.from_cubin(cubin).get_kernel("tick")
    config = core.LaunchConfig(grid=GRID, block=BLOCK)
    args = (y, x, np.int32(N), np.int32(0))

    def record() -> Any:
        builder = device.create_graph_builder()
        builder.begin_building("thread_local")
        for _ in range(NODES):
            core.launch(builder, config, kernel, *args)
        return builder.end_building()

    def capture() -> tuple[float, Callable[[], object]]:
        cost, builder = timed(record)

        def launch_once() -> None:
            graph = builder.complete()
            graph.launch(stream)
            stream.sync()

        return cost, launch_once

    yield Capturer(CORE, "launch(builder, config, kernel, *args)", capture, x, y)


def torch_capture(torch: Torch) -> Iterator[Capturer]:
    """Return captures of an operator of torch, which chooses its kernel."""
    x, y = torch.x, torch.y

    def record() -> Any:
        graph = torch.torch.cuda.CUDAGraph(keep_graph=True)  # It is not instantiated at the end.
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(NODES):
            y.add_(x)
        graph.capture_end()
        return graph

    def capture() -> tuple[float, Callable[[], object]]:
        cost, graph = timed(record)

        def launch_once() -> None:
            graph.instantiate()
            graph.replay()
            torch.stream.synchronize()

        return cost, launch_once

    yield Capturer(TORCH, "y.add_(x), torch's own kernel", capture, x.data_ptr(), y.data_ptr())


# Two graphs in turn


def bare_in_turn(driver: Driver, raw: Raw) -> Iterator[Contender]:
    x = driver.allocate()
    y = driver.allocate()
    stream = raw.stream()
    a, b = (raw.capture(raw.step(y, x), stream) for _ in "ab")
    given = names(launch=raw.cu.cuGraphLaunch, a=a, b=b, stream=stream)
    for title, second in (("one twice", "a"), ("two in turn", "b")):
        statement = f"launch(a, stream); launch({second}, stream)"
        yield Contender(f"cuda.bindings, {title}", statement, given, x, y, replays=2)


def graphs_in_turn(ours: Ours) -> Iterator[Contender]:
    a, b = ours.graph(), ours.graph()
    for title, second in (("one twice", "a"), ("two in turn", "b")):
        statement = f"a.replay(); {second}.replay()"
        yield ours.contender(f"preheat, {title}", statement, a=a, b=b, replays=2)


def slots_in_turn(ours: Ours) -> Iterator[Contender]:
    gpu: Any = ours.gpu
    slots = gpu.graphs(capacity=8)
    for key in "ab":
        slots.install(key, ours.graph())
    for title, second in (("one twice", "a"), ("two in turn", "b")):
        statement = f"slots.replay('a'); slots.replay('{second}')"
        yield ours.contender(f"preheat, slots, {title}", statement, slots=slots, replays=2)


# Scalars set between replays. Each contender sets more than the one before, so the sum is known.


def added(count: int) -> int:
    """Return what the first `count` scalars add to each element."""
    return sum(WEIGHTS[at] * VALUES[at] for at in range(count))


def fills(template: str, count: int) -> str:
    """Return statements that set the first `count` scalars."""
    return "".join(template.format(at=at, value=VALUES[at]) + "; " for at in range(count))


def preheat_scalars(ours: Ours) -> Iterator[Contender]:
    graph = ours.graph(scalars=True)
    for count in (0, 1, 2, 4):
        given = ", ".join(f"{SCALARS[at]}={VALUES[at]}" for at in range(count))
        statement = f"graph.replay({given})"
        yield ours.contender(f"preheat, {count}", statement, graph=graph, adds=added(count))


def bare_scalars(driver: Driver, raw: Raw) -> Iterator[Contender]:
    x = driver.allocate()
    y = driver.allocate()
    stream = raw.stream()
    words = driver.allocate()
    driver.write(words, np.zeros(N, np.int32))
    places = [words + 4 * at for at in range(4)]
    given = names(launch=raw.cu.cuGraphLaunch, fill=raw.cu.cuMemsetD32Async, stream=stream)
    given |= names(ready=raw.capture(raw.step(y, x, places), stream))
    given |= {f"p{at}": raw.cu.CUdeviceptr(place) for at, place in enumerate(places)}
    for count in (0, 1, 2, 4):
        statement = fills("fill(p{at}, {value}, 1, stream)", count) + "launch(ready, stream)"
        yield Contender(f"cuda.bindings, {count}", statement, given, x, y, adds=added(count))


def torch_scalars(torch: Torch) -> Iterator[Contender]:
    given = names(graph=torch.graph([each.data_ptr() for each in torch.scalars]))
    given |= {f"s{at}": each for at, each in enumerate(torch.scalars)}
    for count in (0, 1, 2, 4):
        statement = fills("s{at}.fill_({value})", count) + "graph.replay()"
        yield torch.contender(f"torch, {count}", statement, added(count), **given)


def torch_copied(torch: Torch) -> Iterator[Contender]:
    """Set four words with one copy from pinned memory, which must not change before it is done."""
    words = torch.torch.zeros(4, dtype=torch.torch.int32, device="cuda")
    pinned = torch.torch.tensor(VALUES, dtype=torch.torch.int32).pin_memory()
    places = [words.data_ptr() + 4 * at for at in range(4)]
    given = names(graph=torch.graph(places), words=words, pinned=pinned)
    statement = "words.copy_(pinned, non_blocking=True); graph.replay()"
    yield torch.contender("torch, 4 by copy_", statement, added(4), **given)


def cupy_scalars(cupy: Cupy) -> Iterator[Contender]:
    given = names(graph=cupy.graph(scalars=True))
    given |= {f"s{at}": each for at, each in enumerate(cupy.scalars)}
    for count in (0, 1, 2, 4):
        statement = fills("s{at}.fill({value})", count) + "graph.launch(stream)"
        yield cupy.contender(f"CuPy, {count}", statement, added(count), **given)
