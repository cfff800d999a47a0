"""Each pitfall of docs/guides/graph-pitfalls.md is provoked, and preheat answers as the page says."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import preheat
from preheat.devices import active_capture
from preheat.devices.array import Array
from preheat.devices.kernel import Kernel
from preheat.errors import CaptureError, PreheatError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.kernels.decode import DecodeKernel, DecodeState
from tests.devices.support import KERNELS
from tests.graph.support import LegacyDefaultStream
from tests.shown_output import matches
from tests.threads import run_in_thread

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
RULES = (GUIDES / "graph-rules.md").read_text()
PAGE = (GUIDES / "graph-pitfalls.md").read_text()
N = 33


class Pitfall(NamedTuple):
    """One pitfall of the page. Without an `error`, preheat raises nothing."""

    does: str
    elsewhere: str
    error: str | None
    message: str | None
    hint: str | None


_PITFALL = re.compile(
    r"^- \*\*You (?P<does>.+?)\.\*\* Elsewhere, (?P<elsewhere>.+?)\.\n"
    r"  preheat raises (?:nothing: .+\.|"
    r"`(?P<error>\w+Error)`: (?P<message>`.+?`)(?: \(hint: (?P<hint>`.+`)\))?)$",
    re.M,
)


def pitfalls() -> list[Pitfall]:
    """Return the pitfalls of the page."""
    found = [Pitfall(**match.groupdict()) for match in _PITFALL.finditer(PAGE)]
    assert len(found) == PAGE.count("\n- ")
    return [
        each._replace(
            message=each.message and _text(each.message),
            hint=each.hint and _text(each.hint),
        )
        for each in found
    ]


def _text(span: str) -> str:
    """Return the text of a code span."""
    return span.strip("`") if not span.startswith("``") else span[2:-2].strip()


def table(head: str) -> list[tuple[str, ...]]:
    """Return the cells of the table under this head, on the page with the rules."""
    rows = RULES.partition(head)[2].partition("\n\n")[0].strip().splitlines()[1:]
    return [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in rows]


PITFALLS = pitfalls()


class Scene(NamedTuple):
    """A device with `add`, which makes `out` of `x`, and the numbers in `x`."""

    gpu: Gpu
    add: Kernel
    x: Array
    out: Array
    xs: np.ndarray[Any, Any]

    def launch(self, by: int = 5) -> None:
        """One launch."""
        self.add[2, 32](self.x, by, self.out, N)

    def captured(self) -> Graph:
        """Return a graph of one launch."""
        with self.gpu.capture(name="step") as graph:
            self.launch()
        return graph

    def check(self, by: int = 5) -> None:
        """Check that the work was done."""
        np.testing.assert_array_equal(self.out.numpy(), self.xs + by)

    def untouched(self) -> None:
        """Check that the work was not done."""
        np.testing.assert_array_equal(self.out.numpy(), np.full(N, -1))

    def cover(self) -> object:
        """Arrays that would lie where others were."""
        gc.collect()
        self.gpu.synchronize()
        return [self.gpu.array(np.full(N, -9, np.int32)) for _ in range(16)]


def scene(gpu: Gpu) -> Scene:
    xs = np.random.default_rng(N).integers(-1000, 1000, N, dtype=np.int32)
    add = gpu.kernel(KERNELS, "add")
    out = gpu.array(np.full(N, -1, np.int32))
    return Scene(gpu, add, gpu.array(xs), out, xs)


Misuse = Callable[[Scene], object]
MISUSES: dict[str, Misuse] = {}


def footgun(does: str) -> Callable[[Misuse], Misuse]:
    """Return the misuse of one pitfall, by its first sentence on the page."""

    def enter(misuse: Misuse) -> Misuse:
        MISUSES[does] = misuse
        return misuse

    return enter


def inside(does: str, act: Misuse) -> None:
    """A misuse inside a capture, whose error propagates out of the capture."""

    def misuse(s: Scene) -> None:
        with s.gpu.capture():
            s.launch()
            act(s)

    MISUSES[does] = misuse


inside("free an array inside the capture", lambda s: s.x.close())
inside("allocate inside the capture", lambda s: s.gpu.empty(N))
inside("synchronise inside the capture", lambda s: s.gpu.synchronize())
inside("read a result inside the capture", lambda s: s.out.numpy())
inside("write from the host inside the capture", lambda s: s.x.write(s.xs))
inside("time work inside the capture", lambda s: s.gpu.record(timing=True))
inside("begin a capture before the last one has ended", lambda s: s.gpu.capture().begin())


@footgun("free an array that a graph uses")
def _(s: Scene) -> None:
    graph = s.captured()
    s.x.close()
    graph.replay()


def replay_without_operand(s: Scene, make: Callable[[], object]) -> None:
    """Capture a launch on what `make` returns, drop it, and replay."""

    def capture() -> Graph:
        mine = make()
        with s.gpu.capture() as graph:
            s.add[2, 32](mine, 5, s.out, N)
        return graph

    graph = capture()
    over = s.cover()
    graph.replay()
    s.check()
    del over


@footgun("drop the last reference to an operand")
def _(s: Scene) -> None:
    replay_without_operand(s, lambda: s.gpu.array(s.xs))


class Tensor:
    """An array of some library, which speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._array.__dlpack_device__()
        return (int(kind), index)

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)


@footgun("drop the last reference to a tensor of another library")
def _(s: Scene) -> None:
    replay_without_operand(s, lambda: Tensor(s.gpu.array(s.xs)))


@footgun("let the garbage collector run inside the capture")
def _(s: Scene) -> None:
    cycle: list[Any] = [s.gpu.array(s.xs), s.captured(), s.gpu.record(), s.gpu.stream()]
    cycle.append(cycle)
    with s.gpu.capture() as graph:
        s.launch()
        del cycle
        gc.collect()
    graph.replay()
    s.check()


@footgun("change a host buffer right after writing it to the device")
def _(s: Scene) -> None:
    graph = s.captured()
    host = s.xs.copy()
    s.x.write(host)
    host[:] = -5000
    graph.replay()
    s.check()


def stepped(s: Scene) -> tuple[Graph, Array]:
    """Return a graph that adds 100 to a scalar, with the line of the capture."""
    step = s.gpu.scalar("int32", name="step")
    out = s.gpu.empty(1, "int32")
    with s.gpu.capture(name="step") as graph:
        s.add[1, 1](step, 100, out, 1)
    return graph, out


@footgun("set a scalar inside the capture")
def _(s: Scene) -> None:
    step = s.gpu.scalar("int32", name="step")
    with s.gpu.capture():
        step.set(4)


@footgun("set a scalar for replays that are still queued")
def _(s: Scene) -> None:
    log = s.gpu.empty(100, "int32")
    count = s.gpu.zeros(1, "int32")
    source = 'extern "C" __global__ void note(const int* s, int* o, int* n) { o[(*n)++] = *s; }'
    step = s.gpu.scalar("int32", name="step")
    note = s.gpu.kernel(source, "note")
    with s.gpu.capture() as graph:
        note[1, 1](step, log, count)
    for value in range(100):
        graph.replay(step=value)
    assert log.numpy().tolist() == list(range(100))


@footgun("give two scalars one name")
def _(s: Scene) -> None:
    one, two = (s.gpu.scalar("int32", name="step") for _ in range(2))
    with s.gpu.capture():
        s.add[1, 1](one, 1, s.out, 1)
        s.add[1, 1](two, 1, s.out, 1)


@footgun("misspell a scalar")
def _(s: Scene) -> None:
    stepped(s)[0].replay(stpe=3)


@footgun("use a kernel that is not loaded yet inside the capture")
def _(s: Scene) -> None:
    with s.gpu.capture():
        s.gpu.kernel(KERNELS, "add", label="new.cu")[2, 32](s.x, 1, s.out, N)


@footgun("launch from another thread during the capture")
def _(s: Scene) -> None:
    with s.gpu.capture() as graph:
        s.launch(70)
        run_in_thread(s.launch)
        run_in_thread(s.check)  # done, at once
    assert [str(node.arguments[1]) for node in graph.nodes] == ["70"]
    graph.replay()
    s.check(70)


@footgun("launch in a stream other than the captured one")
def _(s: Scene) -> None:
    side = s.gpu.stream()
    with s.gpu.capture():
        s.add.launch(s.x, 5, s.out, N, grid=2, block=32, stream=side)


@footgun("wait inside the capture for an event that was recorded before it")
def _(s: Scene) -> None:
    before = s.gpu.record()
    with s.gpu.capture():
        s.launch()
        s.gpu.wait(before)


@footgun("query an event that was recorded inside the capture")
def _(s: Scene) -> None:
    with s.gpu.capture():
        s.launch()
        inside = s.gpu.record()
    inside.done()


@footgun("forget to join a side stream")
def _(s: Scene) -> None:
    side = s.gpu.stream()
    with s.gpu.capture():
        side.wait(s.gpu.record())
        s.add.launch(s.x, 5, s.out, N, grid=2, block=32, stream=side)


@footgun("use one array in two branches of a graph without a join")
def _(s: Scene) -> None:
    side = s.gpu.stream()
    s.out.fill(0)
    with s.gpu.capture() as graph:
        side.wait(s.gpu.record())
        s.add.launch(s.x, 5, s.out, N, grid=2, block=32, stream=side)
        s.out.fill(3)
    graph.replay()
    assert set(s.out.numpy().tolist()) == {3}


@footgun("replay graphs that share a pool in two streams")
def _(s: Scene) -> None:
    """The tests with another library are in `tests/devices/test_shared_pools.py`."""
    pool = s.gpu.shared_pool()
    graphs = []
    for _ in range(2):
        with s.gpu.capture(pool=pool) as graph:
            s.launch()
        graphs.append(graph)
    for graph in graphs:
        graph.replay(stream=s.gpu.stream())


@footgun("replay a graph inside a capture")
def _(s: Scene) -> None:
    graph = s.captured()
    with s.gpu.capture():
        s.launch()
        graph.replay()


@footgun("forget to end the capture")
def _(s: Scene) -> None:
    graph = s.gpu.capture().begin()
    s.launch()
    try:
        s.out.numpy()
    finally:
        with suppress(CaptureError):
            graph.end()


@footgun("end the capture in another thread")
def _(s: Scene) -> None:
    graph = s.gpu.capture().begin()
    s.launch()
    try:
        run_in_thread(graph.end)
    finally:
        graph.end()


@footgun("raise an exception in the body")
def _(s: Scene) -> None:
    def failing() -> None:
        with s.gpu.capture():
            s.launch()
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        failing()
    assert not hasattr(caught.value, "__notes__")
    s.untouched()
    s.launch()
    s.check()


@footgun("catch an error inside the capture and go on")
def _(s: Scene) -> None:
    with s.gpu.capture():
        s.launch()
        with suppress(CaptureError):
            s.out.numpy()
        with suppress(CaptureError):
            s.gpu.synchronize()
        s.launch()


@footgun("capture nothing")
def _(s: Scene) -> None:
    with s.gpu.capture():
        run_in_thread(s.launch)


@footgun("capture the default stream")
def _(s: Scene) -> None:
    with s.gpu.capture(stream=LegacyDefaultStream(0)):
        s.launch()


@footgun("trim or unload a program that a graph uses")
def _(s: Scene) -> None:
    def capture() -> Graph:
        add = s.gpu.kernel(KERNELS, "add", label="mine.cu")
        with s.gpu.capture() as graph:
            add[2, 32](s.x, 5, s.out, N)
        return graph

    graph = capture()
    gc.collect()
    s.gpu.trim()
    graph.replay()
    s.check()


@footgun("replay a graph that was closed")
def _(s: Scene) -> None:
    graph = s.captured()
    graph.replay()
    graph.close()
    graph.replay()


@footgun("replay after the device was reset")
def _(s: Scene) -> None:
    if s.gpu.name.startswith("cuda"):
        pytest.skip("resetting a GPU ends it for everybody in the process")
    graph = s.captured()
    s.gpu.reset()
    graph.replay()


@footgun("write into an argument that the graph has a copy of")
def _(s: Scene) -> None:
    @s.gpu.graphed(copy_inputs=True)
    def step(out: Array) -> None:
        s.add[2, 32](s.x, 5, out, N)

    for _ in range(2):
        step(s.out)


class Options:
    """An object that holds an array."""

    def __init__(self, out: Array) -> None:
        self.out = out


@footgun("pass arrays inside an object, under a key that is the same")
def _(s: Scene) -> None:
    @s.gpu.graphed(key=lambda options: options.out.shape)
    def step(options: Options) -> None:
        s.add[2, 32](s.x, 5, options.out, N)

    for _ in range(3):
        step(Options(s.gpu.empty(N, "int32")))
    step(Options(s.out))
    s.check()


@footgun("pass an object that may change, without a key")
def _(s: Scene) -> None:
    @s.gpu.graphed
    def step(options: Options) -> None:
        s.add[2, 32](s.x, 5, options.out, N)

    step(Options(s.out))


@footgun("use an array as a key")
def _(s: Scene) -> None:
    s.gpu.graphs().run(s.x, s.launch)


@footgun("return another array than the one captured, with checked=True")
def _(s: Scene) -> None:
    graphs = s.gpu.graphs(checked=True)

    def step(out: Array) -> Array:
        s.launch()
        return out

    for out in (s.out, s.out, s.out, s.x):
        graphs.run(8, partial(step, out))


@footgun("use a value that is not part of the key, with checked=True")
def _(s: Scene) -> None:
    graphs = s.gpu.graphs(checked=True)
    for by in (5, 5, 5, 6):
        graphs.run(8, partial(s.launch, by))


@footgun("pad a batch for a larger graph")
def _(s: Scene) -> None:
    sizes = preheat.buckets(N)
    graph = s.captured()
    for count in (31, 7):  # the second is smaller
        assert preheat.bucket(count, sizes[-1:]) == N
        s.x.write(preheat.padded(s.xs[:count], N, fill=-3))
        graph.replay()
        expected = np.concatenate([s.xs[:count], np.full(N - count, -3)]) + 5
        np.testing.assert_array_equal(s.out.numpy(), expected)


@footgun("have a batch that no bucket holds")
def _(s: Scene) -> None:
    del s
    preheat.bucket(41, preheat.buckets(40))


@footgun("take memory from a pool that is sealed")
def _(s: Scene) -> None:
    pool = s.gpu.pool(4096)
    pool.seal()
    pool.empty(N)


@footgun("capture with a pool that is sealed")
def _(s: Scene) -> None:
    pool = s.gpu.pool(4096)
    pool.seal()
    with s.gpu.capture(pool=pool):
        s.launch()


@footgun("take more memory inside the capture than the pool has")
def _(s: Scene) -> None:
    pool = s.gpu.pool(4096)
    with s.gpu.capture():
        s.launch()
        pool.empty(1 << 20)


@footgun("replay a graph over scratch memory that is in use")
def _(s: Scene) -> None:
    pool = s.gpu.pool(4096)
    with s.gpu.capture(name="step") as graph, pool.frame():
        pool.zeros(N, "int32")
    with pool.frame():
        pool.zeros(N, "int32")
        graph.replay()


@footgun("leave a scratch frame before one that began later")
def _(s: Scene) -> None:
    pool = s.gpu.pool(4096)
    first, second = pool.frame(), pool.frame()
    first.__enter__()
    second.__enter__()
    try:
        first.__exit__(None, None, None)
    finally:
        second.__exit__(None, None, None)


@footgun("pass a decode state by value after the device has advanced it")
def _(s: Scene) -> None:
    state = DecodeState(s.gpu)
    with s.gpu.capture() as graph:
        state.advance()
    state.set(3, 4)
    graph.replay()
    state.by_value()


@footgun("capture a decode step by value")
def _(s: Scene) -> None:
    source = """
        extern "C" __global__ void value(int* out, int token, int position, int length) {
            *out = position;
        }
        extern "C" __global__ void device(int* out, int* token, int* position, int* length) {
            *out = *position;
        }
    """
    both = DecodeKernel(s.gpu.kernel(source, "value"), s.gpu.kernel(source, "device"))
    state = DecodeState(s.gpu)
    with s.gpu.capture():
        both[1, 1](s.out, state=state, device_state=False)


@pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda pitfall: pitfall.does)
def test_a_footgun_is_answered_as_the_page_says(pitfall: Pitfall, device: Gpu) -> None:
    made = scene(device)
    misuse = MISUSES[pitfall.does]
    if pitfall.error is None:
        misuse(made)
        return
    with pytest.raises(PreheatError) as caught:
        misuse(made)
    assert type(caught.value).__name__ == pitfall.error
    said = str(caught.value).partition("\n")[0]
    assert matches(str(pitfall.message), said), said
    assert getattr(caught.value, "hint", None) == pitfall.hint
    where = getattr(caught.value, "where", None)
    assert where is None or where.startswith("tests/graph/test_footguns.py:")
    if made.gpu._context is made.x.buffer.context:  # no reset
        fresh = scene(device)
        fresh.launch()
        fresh.check()
        fresh.captured().replay(synchronize=True)


def test_every_footgun_of_the_page_is_tried_and_every_one_tried_is_on_the_page() -> None:
    assert sorted(MISUSES) == sorted(pitfall.does for pitfall in PITFALLS)
    assert f"This page lists {len(PITFALLS)} mistakes" in PAGE


def test_the_page_lists_what_a_capture_refuses() -> None:
    acts = [
        act for act in vars(active_capture).values() if isinstance(act, active_capture.RefusedOperation)
    ]
    listed = table("| what | in the thread that captures | in other threads |")
    assert listed == [
        (
            act.name,
            "refused, unless relaxed" if act.relaxed else "refused",
            "refused by a global capture" if act.unsafe else "fine",
        )
        for act in acts
    ]
