"""The native core does what Python code does: the same memory, errors, messages and graphs."""

from __future__ import annotations

import ctypes
import math
import shlex
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat import native
from preheat.build.builder import Builder
from preheat.devices.launch import Launch
from preheat.devices.operands import Pointer
from preheat.emulator.device import EmulatorDevice
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from tests.devices.native_worlds import (
    SCALARS,
    SOURCE,
    Operand,
    Outcome,
    World,
    open_worlds,
    outcome,
)
from tests.standin import FakeCuPy, FakeTorch, introduce

needs_core = pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")
Worlds = tuple[World, World]
Graphs = tuple[Graph, Graph]


def test_the_native_core_is_built_where_there_is_a_compiler() -> None:
    if native.reason == native.SWITCHED_OFF:
        pytest.skip(native.reason)
    compiler = sysconfig.get_config_var("CC") or "cc"
    if shutil.which(shlex.split(compiler)[0]) is None:
        pytest.skip(f"there is no C compiler: {compiler}")
    assert native.core is not None, f"run `python hatch_build.py`: {native.reason}"


@pytest.fixture(scope="module", params=[None, 5], ids=["in order", "deferred"])
def worlds(request: pytest.FixtureRequest, shared_builder: Builder) -> Iterator[Worlds]:
    with open_worlds(shared_builder, schedule=request.param) as made:
        yield made


def agree(worlds: Worlds, act: Any) -> Outcome:
    """Do the same in both worlds, compare what became of it, and return that."""
    found = []
    for world in worlds:
        with world.active():
            found.append(outcome(partial(act, world)))
    assert found[0] == found[1]
    return found[0]


def agree_on_contents(worlds: Worlds) -> None:
    found = []
    for world in worlds:
        with world.active():
            found.append(world.contents())
    assert found[0] == found[1]


# Arguments

BITS = (0, 7, 8, 15, 16, 31, 32, 63, 64)
INT_EDGES = sorted({sign * (1 << n) + by for n in BITS for sign in (1, -1) for by in (-1, 0, 1)})
RANGES = [(-(2 ** (n - 1)), 2 ** (n - 1) - 1) if signed else (0, 2**n - 1)
          for n in (8, 16, 32, 64) for signed in (True, False)]  # fmt: skip


class Integer(int):
    """An integer that is not plain."""


class Real(float):
    """A float that is not plain."""


DTYPES = (
    "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64", "bool", "complex64",
)  # fmt: skip
ODD: list[Any] = [
    None, "1", b"1", 1j, True, False, Integer(3), Real(2.5), [], object, 10**400, -(10**400), 1e39,
    -1e39, math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.0, 1.5, 3.4028235677973366e38, 3.4028235e38,
    *(np.dtype(name).type(1) for name in DTYPES), ctypes.c_int(4), ctypes.c_uint8(5),
    ctypes.c_float(1.5), ctypes.c_double(2.5), ctypes.c_bool(True), ctypes.c_void_p(8), Pointer(-1),
    Pointer(1 << 64),
]  # fmt: skip
NAMES = (
    "x", "y", "z", "d", "c", "out", "owned", "exported", "tensor of exported", "view", "whole",
    "reshaped", "strided", "pointer", "elsewhere", "closed", "ended", "tensor", "tensor 2", "part",
    "every other", "negative", "strided tensor", "host", "host integers", "cupy", "cupy 2", "cupy part",
    "cupy subclass", "strided cupy", "cupy elsewhere", "real cupy", "cupy to Strided",
)  # fmt: skip
OPERANDS = [Operand(name) for name in NAMES]
CONJUGATE = Operand("conjugate")  # A tensor of torch is conjugated only if its elements may be complex.
INTEGERS = st.sampled_from(INT_EDGES) | st.integers(-(2**70), 2**70)
REALS = st.floats() | st.floats(width=32) | st.integers(-(2**70), 2**70)
ANYTHING = INTEGERS | REALS | st.sampled_from(ODD) | st.sampled_from(OPERANDS)
NUMBERS = [
    *(st.integers(*ends) | st.sampled_from(ends) for ends in RANGES),
    st.booleans(),
    REALS,
    REALS,
    st.just(Operand("out")),
]


def operand(*names: str) -> st.SearchStrategy[Any]:
    return st.sampled_from([Operand(name) for name in names])


SMALL = st.integers(-100, 100)
MEMORY = [
    operand("x", "y", "view", "whole", "reshaped") | st.none(),
    operand("y", "x", "whole"),
    operand("z", "owned", "exported", "tensor", "tensor 2", "part", "cupy", "cupy 2") | st.none(),
    operand("z", "owned", "d", "tensor", "cupy") | st.none(),
    SMALL,
]
TENSORS = operand("tensor", "tensor 2", "part", "tensor of exported")
ARRAYS_OF_CUPY = operand("cupy", "cupy 2", "cupy part", "cupy subclass")
WORD = st.integers(-(2**31), 2**32 - 1) | st.floats()
RIGHT: dict[str, list[st.SearchStrategy[Any]]] = {
    "numbers": NUMBERS,
    "memory": MEMORY,
    "add": [
        TENSORS | ARRAYS_OF_CUPY | operand("z", "owned", "exported"),
        TENSORS | ARRAYS_OF_CUPY | operand("z", "owned"),
        SMALL,
    ],
    "touch": [
        TENSORS | ARRAYS_OF_CUPY | operand("conjugate", "x", "d", "c", "owned") | st.none(),
        SMALL,
    ],
    "keep": [
        operand("kept"),
        WORD,
        st.integers(-(2**63), 2**64 - 1) | operand("x", "z", "kept", "view") | st.floats(),
        REALS,
    ],
}
#: Such an argument would be used as an address.
BARE = {"keep": (0,)}


@st.composite
def launches(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    """A kernel and its arguments, most of them right."""
    kernel = draw(st.sampled_from(list(RIGHT)))
    args = [draw(each) for each in RIGHT[kernel]]
    wrong = draw(st.integers(0, 3))
    if wrong == 1:
        at = draw(st.integers(0, len(args) - 1))
        if at not in BARE.get(kernel, ()):
            args[at] = draw(ANYTHING)
    elif wrong == 2 and draw(st.booleans()):
        args = args[: draw(st.integers(0, len(args)))] + draw(st.lists(ANYTHING, max_size=2))
        if kernel == "keep":
            args[:1] = [Operand("kept")]
    named = {"n": 1} if wrong == 3 and draw(st.integers(0, 4)) == 0 else {}
    return kernel, args, named


STREAMS = [f"{library} {number}" for library in ("torch", "cupy") for number in range(3)]
STEPS = launches() | st.sampled_from(["side", "fill", *STREAMS])


def take_step(world: World, step: Any) -> None:
    """Launch a kernel, or change what the next launch finds."""
    if step == "side":
        world.use_in_side_stream()
    elif step == "fill":
        world.operands["tensor"].fill_(7)
        world.operands["cupy"].fill(7)
    elif isinstance(step, str):
        library, number = step.split()
        if library == "torch":
            world.torch.current = world.streams[int(number)]
        else:
            world.cupy.current = world.cupy_streams[int(number)]
    else:
        world.launch(*step)


@needs_core
@settings(max_examples=150)
@given(steps=st.lists(STEPS, min_size=1, max_size=8))
def test_launches_agree(worlds: Worlds, steps: list[Any]) -> None:
    for step in steps:
        agree(worlds, lambda world, step=step: take_step(world, step))
    agree_on_contents(worlds)


GOOD: dict[str, list[Any]] = {
    "numbers": [1, 2, 3, 4, 5, 6, 7, 8, True, 1.5, 2.5, Operand("out")],
    "memory": [Operand("x"), Operand("y"), Operand("z"), Operand("d"), 3],
    "add": [Operand("tensor"), Operand("tensor 2"), 1],
    "touch": [Operand("tensor"), 1],
    "keep": [Operand("kept"), 1, 2, 3.5],
}


def odd_arguments(kernel: str, values: list[Any]) -> Iterator[list[Any]]:
    """Yield arguments with each value at each place where it is not used as an address."""
    for at in range(len(GOOD[kernel])):
        if at not in BARE.get(kernel, ()):
            for odd in values:
                args = [*GOOD[kernel]]
                args[at] = odd
                yield args


@needs_core
@pytest.mark.parametrize("kernel", GOOD)
def test_each_odd_argument_at_each_place_agrees(worlds: Worlds, kernel: str) -> None:
    for _ in range(3):
        assert agree(worlds, lambda world: world.launch(kernel, GOOD[kernel], {})) == Outcome(None)
    refused = 0
    operands = [*OPERANDS, *([CONJUGATE] if kernel == "touch" else ())]
    for args in odd_arguments(kernel, [*ODD, *INT_EDGES, *operands]):
        found = agree(worlds, lambda world, args=args: world.launch(kernel, args, {}))
        refused += found.kind is not None
    agree_on_contents(worlds)
    assert refused > 20


@needs_core
def test_each_world_launches_and_replays_in_its_own_way(worlds: Worlds, graphs: Graphs) -> None:
    for world, graph in zip(worlds, graphs, strict=True):
        with world.active():
            launcher = world.kernels["numbers"][1, 1]
        is_native = world.core is not None
        assert (type(launcher).__module__ == "preheat.native._core") == is_native
        assert (type(graph.replay).__module__ == "preheat.native._core") == is_native


# Captures


def agree_on_capture(worlds: Worlds, steps: list[Any], num_replays: int) -> Outcome:
    """Capture the same launches in both worlds, compare the graphs and the errors, and replay."""
    graphs: list[Any] = []

    def capture(world: World) -> None:
        with world.gpu.capture(name="g") as graph:
            for step in steps:
                tried.append(outcome(partial(world.launch, *step)))
        graphs.append(graph)

    found: list[list[Outcome]] = []
    ends = []
    for world in worlds:
        with world.active():
            tried: list[Outcome] = []
            ends.append(outcome(partial(capture, world)))
            found.append(tried)
    assert found[0] == found[1]
    assert ends[0] == ends[1]
    if graphs:
        of_native, of_python = (
            [describe(node, world) for node in graph.nodes]
            for graph, world in zip(graphs, worlds, strict=True)
        )
        assert of_native == of_python
        for _ in range(num_replays):
            agree_on_replay(worlds, (graphs[0], graphs[1]), {})
        agree_on_contents(worlds)
    for graph in graphs:
        graph.close()
    return ends[0]


@needs_core
@settings(max_examples=80)
@given(steps=st.lists(launches(), min_size=1, max_size=6), num_replays=st.integers(0, 4))
def test_captures_agree(worlds: Worlds, steps: list[Any], num_replays: int) -> None:
    agree_on_capture(worlds, steps, num_replays)


@needs_core
@pytest.mark.parametrize("kernel", ["memory", "touch", "numbers"])
def test_each_odd_argument_in_a_capture_agrees(worlds: Worlds, kernel: str) -> None:
    good: Any = (kernel, GOOD[kernel], {})
    assert agree_on_capture(worlds, [good, good], 2) == Outcome(None)
    refused = 0
    for args in odd_arguments(kernel, [None, True, 1.5, -1, 1 << 64, math.nan, *OPERANDS]):
        found = agree_on_capture(worlds, [good, (kernel, args, {}), good], 1)
        refused += found.kind is not None
    assert refused > 5


def describe(node: Any, world: World) -> tuple[Any, ...]:
    """Return what a node does, with names instead of addresses."""
    names = world.names()
    values = []
    for argument in node.arguments:
        number = int.from_bytes(argument.value, "little")
        values.append((argument.type, names.get(number, argument.value), argument.text))
    return (node.kind, node.name, node.where, values)


# Replays

SCALAR_VALUES = ANYTHING | st.integers(-300, 300) | st.booleans()


def agree_on_replay(worlds: Worlds, graphs: Graphs, scalars: dict[str, Any]) -> None:
    """Replay twice: the second call with the same names takes the short way."""
    for _ in range(2):
        found = []
        for world, graph in zip(worlds, graphs, strict=True):
            values = {name: world.resolve(value) for name, value in scalars.items()}
            with world.active():
                found.append(outcome(partial(graph.replay, **values)))
        assert found[0] == found[1]


@needs_core
@settings(max_examples=200)
@given(
    calls=st.lists(
        st.dictionaries(st.sampled_from([*SCALARS, "unknown"]), SCALAR_VALUES, max_size=4)
        | st.dictionaries(st.sampled_from(SCALARS), st.integers(0, 100), max_size=14),
        max_size=4,
    )
)
def test_replays_with_scalars_agree(
    worlds: Worlds, graphs: Graphs, calls: list[dict[str, Any]]
) -> None:
    for scalars in calls:
        agree_on_replay(worlds, graphs, scalars)
    agree_on_contents(worlds)
    assert graphs[0].num_replays == graphs[1].num_replays


@needs_core
@pytest.mark.parametrize("dtype", SCALARS)
def test_each_value_of_each_scalar_agrees(worlds: Worlds, graphs: Graphs, dtype: str) -> None:
    for value in [*ODD, *INT_EDGES, Operand("x")]:
        agree_on_replay(worlds, graphs, {dtype: value})
        seen = [repr(world.scalars[dtype].get()) for world in worlds]
        assert seen[0] == seen[1], value


@pytest.fixture(scope="module")
def graphs(worlds: Worlds) -> Iterator[Graphs]:
    """The same graph with all scalars in both worlds."""
    made = []
    for world in worlds:
        with world.active():
            made.append(world.watched())
    yield made[0], made[1]
    for graph in made:
        graph.close()


@needs_core
@pytest.mark.parametrize(
    "call",
    [
        lambda g, _: g.replay(1),
        lambda g, _: g.replay(None),
        lambda g, _: g.replay(stream=1),
        lambda g, w: g.replay(stream=w.side),
        lambda g, w: g.replay(stream=w.side, int32=5),
        lambda g, _: g.replay(synchronize=True),
        lambda g, _: g.replay(synchronize=True, int32=5),
        lambda g, _: g.replay(**dict[str, int]()),
        lambda g, _: g.replay(int32=5, nothing=6),
    ],
)
def test_other_arguments_of_a_replay_agree(worlds: Worlds, graphs: Graphs, call: Any) -> None:
    for _ in range(3):
        found = []
        for world, graph in zip(worlds, graphs, strict=True):
            with world.active():
                found.append(outcome(partial(call, graph, world)))
        assert found[0] == found[1]
    agree_on_contents(worlds)
    assert graphs[0].num_replays == graphs[1].num_replays


# Errors and libraries


class _Replayer:
    """What the native replay reads of a replayer and of a context."""

    __slots__ = ("last_replayed", "launch", "num_replays", "unrestricted")

    def __init__(self) -> None:
        self.num_replays = 0
        self.launch: Any = None
        self.unrestricted = True
        self.last_replayed: Any = None


@needs_core
def test_an_error_keeps_its_context_and_the_lock_is_released() -> None:
    replayer = _Replayer()
    lock = {0: True}
    inner = KeyError("before")

    def launch() -> tuple[int]:
        try:
            raise inner
        except KeyError:
            raise ZeroDivisionError("the launch") from None

    replayer.launch = launch
    kinds = (_Replayer, _Replayer)
    replay = native.core.Replay(replayer, None, None, None, replayer, "g", lock, (-1,), {}, *kinds)
    try:
        raise ValueError("handled meanwhile")
    except ValueError:
        with pytest.raises(ZeroDivisionError, match="the launch") as caught:
            replay()
    assert caught.value.__context__ is inner
    assert [entry.name for entry in caught.traceback][-1] == "launch"
    assert lock == {0: True}
    assert replayer.num_replays == 0


@needs_core
@pytest.mark.parametrize("schedule", range(6))
@pytest.mark.parametrize(
    ("first", "second"), [(FakeTorch, FakeTorch), (FakeTorch, FakeCuPy), (FakeCuPy, FakeCuPy)]
)
def test_tensors_of_two_libraries_are_ordered(
    first: Any, second: Any, schedule: int, shared_builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(EmulatorDevice(0, "sm_90", schedule=schedule), shared_builder)
    libraries: list[Any] = [first(gpu, "fakefirst"), second(gpu, "fakesecond")]
    for library in libraries:
        introduce(library, monkeypatch)
    x, y = (library.full(32, 0) for library in libraries)
    add = gpu.module(SOURCE)["add"]

    def fill(tensor: Any, value: int) -> None:
        (tensor.fill_ if hasattr(tensor, "fill_") else tensor.fill)(value)

    for tensor in (x, y):  # Each library's stream is prepared by launches with tensors of it alone.
        for _ in range(4):
            add[1, 4](tensor, tensor, 0)
    for value in range(10, 20):
        fill(x, value)
        fill(y, value)
        add[1, 4](x, y, 1)
        assert y.tolist()[:4] == [2 * value + 1] * 4
        fill(y, value)
        fill(x, value)
        add[1, 4](y, x, 1)
        assert x.tolist()[:4] == [2 * value + 1] * 4
    gpu.synchronize()
    gpu.close()


@needs_core
@pytest.mark.parametrize("stand_in", [FakeTorch, FakeCuPy])
def test_a_repeated_launch_with_tensors_of_a_library_needs_no_python_code(
    stand_in: Any, shared_builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(EmulatorDevice(0, "sm_90", schedule=3), shared_builder)
    library = stand_in(gpu)
    introduce(library, monkeypatch)
    add = gpu.module(SOURCE)["add"]
    x, y, other = (library.full(4, value) for value in (5, 0, 0))
    streams = [library.default, library.new_stream()]
    for stream in streams:
        with library.stream(stream):
            add[1, 4](x, y, 1)
            library.read(y.data_ptr() if stand_in is FakeTorch else y.data.ptr, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", lambda *_, **__: pytest.fail("the launch in Python"))
        for stream in streams:
            with library.stream(stream):
                add[1, 4](x, y, 1)
                assert y.tolist() == [6 * (3 + streams.index(stream))] * 4
    with library.stream(library.new_stream()):  # A new stream is prepared by Python code.
        add[1, 4](x, other, 1)
        assert other.tolist() == [6] * 4
    gpu.synchronize()
    gpu.close()


@needs_core
def test_a_launch_is_not_recorded_into_a_capture_that_nobody_can_end(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    add = gpu.module(SOURCE)["add"]
    x, y = gpu.zeros(32, "int32"), gpu.zeros(32, "int32")
    add[1, 32](x, y, 5)
    add[1, 32](x, y, 5)
    graph = gpu.capture().begin()
    assert graph._capture is not None
    graph._capture.interrupted = True
    add[1, 32](x, y, 7)  # This aborts the capture.
    assert y.numpy().tolist() == [17] * 32
