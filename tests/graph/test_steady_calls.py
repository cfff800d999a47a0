"""Calls that hit a cached graph do what the general path does: results, errors, order and counts."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.build.builder import Builder
from preheat.devices.array import Array
from preheat.devices.context import Context
from preheat.devices.operands import Pointer, is_plain_tensor
from preheat.emulator.device import EmulatorDevice
from preheat.errors import InputError, StaleBufferError
from preheat.gpu import Gpu
from preheat.graph import keys, trees
from tests.graph.cache_support import Step, cache_graphs
from tests.graph.graphed_support import Batch, Frozen
from tests.graph.support import KERNELS, axpy_case
from tests.standin import FakeTorch, introduce

N = 16
STEADY, GENERAL, EAGER = range(3)  # how a world does its steps


SLOT: Any = Context.__dict__["unrestricted"]


class GeneralContext(Context):
    """A context in which nothing takes a shortcut, as while another thread captures."""

    __slots__ = ()

    @property
    def unrestricted(self) -> bool:
        """Never True."""
        return False

    @unrestricted.setter
    def unrestricted(self, _: bool) -> None:
        SLOT.__set__(self, False)


class Owner:
    """Owns graphs."""


class World:
    """A device with arrays and with every way to use cached graphs."""

    def __init__(self, builder: Builder, number: int, capacity: int = 3) -> None:
        self.gpu = gpu = Gpu(EmulatorDevice(number, "sm_90"), builder)
        self.eager = number == EAGER
        if number == GENERAL:
            gpu._context.__class__ = GeneralContext
            gpu._context.unrestricted = True
        self.axpy = gpu.kernel(KERNELS, "axpy")
        self.step = gpu.scalar("int32", name="step")
        self.x = gpu.array(np.arange(N, dtype=np.int32) + 1)
        self.ys = [gpu.zeros(N, "int32") for _ in range(3)]
        self.owners = [None, Owner(), Owner()]
        self.graphs = gpu.graphs(capacity=capacity)
        self.events = list[Any]()
        gpu.builder.events.subscribe(self.note, "graph")
        add = self.add
        self.functions: list[Any] = [
            gpu.graphed(capacity=capacity)(lambda *args, **named: add("plain", *args, **named)),
            gpu.graphed(key=lambda *args, **_: len(args))(
                lambda *args, **named: add("keyed", *args, **named)
            ),
            gpu.graphed(copy_inputs=True, copy=True)(
                lambda *args, **named: add("copied", *args, **named)
            ),
        ]
        if self.eager:
            self.functions = [each.__wrapped__ for each in self.functions]

    def note(self, _: str, fields: Mapping[str, Any]) -> None:
        """Note an event about a graph of this device."""
        if fields["device"] == self.gpu.name:
            self.events.append(plain(repr(fields)))

    def add(self, *given: Any, **named: Any) -> Any:
        """Add x to the first array among the arguments, or to the first of all; return the arguments.

        Arguments that are copied are only read.
        """
        arrays = [item for _, item in trees.leaves((given, named)) if isinstance(item, Array)]
        one = arrays[0] if arrays else self.ys[0]
        if given[0] == "copied":
            self.axpy[1, N](1, one, self.ys[0], one.size)
        else:
            self.axpy[1, N](1, self.x, one, one.size)
        return {"first": arrays[:1], "text": [plain(repr((given, named)))], "rest": (1, (2.5,))}

    def close(self) -> None:
        """Close the device, and end what the test made of it."""
        self.gpu.builder.events.unsubscribe(self.note)
        self.gpu._context.__class__ = Context
        self.gpu._context.unrestricted = True
        self.gpu.close()


#: What a call of a graphed function may be given.
ARGUMENTS: list[Callable[[World], Any]] = [
    lambda w: w.ys[1], lambda w: w.ys[2], lambda w: w.ys[1][0:8], lambda w: w.ys[1][8:16],
    lambda w: w.ys[1].reshape(4, 4), lambda w: w.ys[2][0:8], lambda w: w.step,
    lambda _: 1, lambda _: True, lambda _: 1.0, lambda _: 0.0, lambda _: -0.0, lambda _: math.nan,
    lambda _: 1j, lambda _: "1", lambda _: b"1", lambda _: None, lambda _: ..., lambda _: int,
    lambda _: np.float32(1), lambda _: np.dtype("int32"), lambda w: (w.ys[1], 1),
    lambda w: [w.ys[1], 1], lambda w: {"y": w.ys[1]}, lambda w: {"x": w.ys[1]},
    lambda w: Batch(1, w.ys[1]), lambda w: Frozen(w.ys[2]), lambda _: (1, [2]),
    lambda w: Pointer(w.ys[1].address), lambda w: w.ys[1].reshape, lambda _: {1, 2}, lambda _: object(),
    lambda w: w.owners[1],
]  # fmt: skip
#: What a cache may be asked for.
KEYS: list[Callable[[World], Any]] = [
    lambda _: 1, lambda _: True, lambda _: 1.0, lambda _: "a", lambda _: ("a", 1), lambda _: ("a", 1.0),
    lambda _: (1, (2, None)), lambda _: frozenset((1, 2)), lambda _: None, lambda _: Frozen(1),
    lambda _: math.nan, lambda _: ("a", math.nan), lambda _: [1], lambda _: ("a", [1]), lambda w: w.x,
    lambda w: ("a", w.x), lambda w: frozenset((w.x,)), lambda w: w.x.shape, lambda _: np.int32(1),
]  # fmt: skip

Act = Callable[[World], Any]


def call(function: int, given: list[int], named: int | None, world: World) -> Any:
    """Call a graphed function."""
    more = {} if named is None else {"named": ARGUMENTS[named](world)}
    args = [ARGUMENTS[each](world) for each in given]
    result = world.functions[function](*args, **more)
    if function != 1:  # Its key says that values do not matter.
        kind = ("plain", "", "copied")[function]
        assert result["text"] == [plain(repr(((kind, *args), more)))]
    return result


def run(key: int, owner: int, copy: bool, world: World) -> Any:
    """Run a step of the cache."""
    body = partial(world.add, "run", world.step)
    if world.eager:
        return body()
    return world.graphs.run(KEYS[key](world), body, owner=world.owners[owner], copy=copy)


def replay(key: int, owner: int, scalars: dict[str, Any], world: World) -> Any:
    """Replay a graph of the cache."""
    if world.eager:
        world.step.fill(scalars.get("step", world.step.numpy()))
        return world.add("run", world.step)
    return world.graphs.replay(KEYS[key](world), owner=world.owners[owner], **scalars)


def replace_array(at: int, world: World) -> None:
    """Close an array that graphs may use, and make another one."""
    world.ys[at].close()
    world.ys[at] = world.gpu.zeros(N, "int32")


def drop_owner(at: int, world: World) -> None:
    """Drop an owner with its graphs."""
    world.owners[at] = Owner()


def in_capture(act: Act, world: World) -> Any:
    """Do something inside a capture."""
    if world.eager:
        return act(world)
    with world.gpu.capture() as graph:
        result = act(world)
    graph.replay()
    return result, len(graph)


def invalidate(key: int, world: World) -> None:
    """Forget a key."""
    if not world.eager:
        world.graphs.invalidate(KEYS[key](world))


def invalidate_function(at: int, world: World) -> None:
    """Forget all calls of a function."""
    if not world.eager:
        world.functions[at].invalidate()


places = st.integers(0, len(ARGUMENTS) - 1)
key_places = st.integers(0, len(KEYS) - 1)
owner_places = st.integers(0, 2)
scalars = st.sampled_from([{}, {}, {"step": 3}, {"step": "no"}, {"other": 1}])
calls = st.builds(
    partial, st.just(call), st.integers(0, 2), st.lists(places, max_size=3), st.none() | places
)
runs = st.builds(partial, st.just(run), key_places, owner_places, st.booleans())
replays = st.builds(partial, st.just(replay), key_places, owner_places, scalars)
uses: st.SearchStrategy[Act] = calls | runs | replays
changes: st.SearchStrategy[Act] = (
    st.builds(partial, st.just(replace_array), st.integers(0, 2))
    | st.builds(partial, st.just(drop_owner), st.integers(1, 2))
    | st.builds(partial, st.just(in_capture), uses)
    | st.builds(partial, st.just(invalidate), key_places)
    | st.builds(partial, st.just(invalidate_function), st.integers(0, 2))
)
# Few different calls, so that most of them are repeated until they hit.
programs = st.lists(uses, min_size=1, max_size=4).flatmap(
    lambda few: st.lists(
        st.sampled_from(few) | st.sampled_from(few) | changes, min_size=12, max_size=40
    )
)


def plain(text: str) -> str:
    """Return a text without addresses and numbers that count allocations or devices.

    A copied input is an array, also that of a scalar.
    """
    text = text.replace("Scalar 'step'", "Array")
    return re.sub(r"@?0x[0-9a-f]+|@\d+|address=\d+|emulator:\d", "…", text)


def outcome(act: Act, world: World) -> object:
    """Return what something returns or raises, as text."""
    try:
        return plain(repr(act(world)))
    except Exception as error:
        hint = getattr(error, "hint", None)
        return type(error).__name__, plain(str(error)), hint and plain(hint)


def contents(world: World) -> list[Any]:
    """Return the numbers in all arrays."""
    return [each.numpy().tolist() for each in (*world.ys, world.step)]


def described(world: World) -> object:
    """Return what the caches hold, the least recently used first, and what was told of them."""
    caches = [world.graphs, *(each.graphs for each in world.functions)]
    return [plain(str(each.report())) for each in caches], world.events


def check(worlds: Sequence[World], program: Iterable[Act]) -> None:
    """Compare all worlds after every step of a program."""
    steady, general, eager = worlds
    try:
        for act in program:
            done = outcome(act, steady)
            assert done == outcome(act, general), act
            if isinstance(done, str) and done != "False":  # It neither failed nor lacked a graph.
                act(eager)
            assert contents(steady) == contents(general) == contents(eager), act
        assert described(steady) == described(general)
    finally:
        for world in worlds:
            world.close()


@settings(max_examples=50, deadline=None)
@given(program=programs)
@pytest.mark.filterwarnings("ignore::preheat.errors.CaptureWarning")
def test_hits_do_what_the_general_path_and_the_step_itself_do(
    shared_builder: Builder, program: list[Act]
) -> None:
    check([World(shared_builder, number) for number in range(3)], program)


@pytest.mark.parametrize("function", range(3))
def test_every_argument_in_turn_finds_its_own_graph(function: int, shared_builder: Builder) -> None:
    each = range(len(ARGUMENTS))
    alone: list[Act] = [partial(call, function, [at], None) for at in each]
    named: list[Act] = [partial(call, function, [], at) for at in each]
    second: list[Act] = [partial(call, function, [0, at], None) for at in each]
    worlds = [World(shared_builder, number, 200) for number in range(3)]
    check(worlds, [act for acts in (alone, named, second) for act in (*acts * 3, *acts[::-1])])


def test_every_key_in_turn_finds_its_own_graph(shared_builder: Builder) -> None:
    each = range(len(KEYS))
    runs: list[Act] = [partial(run, at, owner, False) for at in each for owner in range(3)]
    replays: list[Act] = [partial(replay, at, owner, {}) for at in each for owner in range(3)]
    worlds = [World(shared_builder, number, 200) for number in range(3)]
    check(worlds, [*replays, *runs * 3, *replays * 2, *replays[::-1]])


def test_a_stale_graph_copies_no_inputs(device: Gpu) -> None:
    made = axpy_case(device)
    others = [device.array(made.xs) for _ in range(2)]

    @device.graphed(copy_inputs=True)
    def step(x: Any) -> None:
        made.axpy[5, 64](3, x, made.y, made.n)
        made.axpy[5, 64](3, others[-1], made.y, made.n)

    for _ in range(3):
        step(made.x)
    others.pop().close()
    made.x.close()
    with pytest.raises(StaleBufferError) as refused:
        step(made.x)
    assert "copy_from" not in str(refused.value)  # the step itself refuses it


def test_an_interrupted_replay_leaves_the_graph_usable(
    device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    step = Step(made)
    cache_graphs(graphs, step, "k")
    (cached,) = graphs._entries.graphs.values()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cached.graph, "replay", interrupted)
        for use in (partial(graphs.run, "k", step), partial(graphs.replay, "k")):
            with pytest.raises(KeyboardInterrupt):
                use()
    graphs.run("k", step)
    assert graphs.replay("k")
    made.check(12)
    assert step.entered == 2


def test_a_replay_that_copies_results_is_alone(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    cache_graphs(graphs, Step(made), "k")
    began = threading.Event()
    copy_arrays = trees.copy_arrays

    def slow(value: Any) -> Any:
        other.start()
        began.wait(300)
        time.sleep(0.02)  # The other thread replays now, unless it waits.
        return copy_arrays(value)

    def replay() -> None:
        began.set()
        graphs.run("k", Step(made))

    other = threading.Thread(target=replay, daemon=True)
    monkeypatch.setattr(trees, "copy_arrays", slow)
    result = graphs.run("k", Step(made), copy=True)
    other.join(300)
    np.testing.assert_array_equal(result.numpy(), made.ys + 9 * made.xs)
    made.check(12)


class Shape(tuple[int, ...]):
    """A tuple of another type, as torch has one."""


class Unhashable(tuple[int, ...]):
    """A tuple that cannot be a key."""

    __hash__ = None  # type: ignore[assignment]


class Exported(tuple[int, ...]):
    """A tuple that is an array to other libraries."""

    def __dlpack__(self) -> None:
        """Export nothing."""


parts = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.just(np.int8(1)),
    lambda items: st.builds(
        lambda kind, values: kind(values),
        st.sampled_from([tuple, list, Shape, Unhashable, Exported, frozenset]),
        st.lists(items.filter(lambda item: isinstance(item, Hashable)), max_size=3),
    ),
)


@given(value=parts)
def test_plain_keys_pass_without_a_closer_look_and_the_others_do_not(value: Any) -> None:
    def found() -> object:
        try:
            return keys.key_of(value) is value
        except (InputError, TypeError) as error:
            return type(error), str(error)

    with pytest.MonkeyPatch.context() as patch:
        first = found()
        patch.setattr(keys, "_is_plain", lambda _: False)
        assert found() == first


def test_tensors_have_the_same_memory_with_and_without_a_closer_look(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = open_device("emulator")
    torch = FakeTorch(gpu)
    introduce(torch, monkeypatch)
    negative = torch.full(4, 1)
    negative.negative = True
    sparse = torch.full(4, 1)
    sparse.layout = "torch.sparse_coo"
    conjugate = torch.full(4, 1)
    conjugate.conjugate = True
    moved = torch.full(4, 1)
    moved.set_data(torch.full(5, 2))
    foreign = torch.full(4, 1)
    foreign.get_device = lambda: 7
    given = [torch.full(4, 1), torch.full(8, 1)[2:4], torch.full(8, 1)[::2], moved]
    refused = [negative, sparse, conjugate, foreign]
    assert [is_plain_tensor(each, gpu._device.dlpack) for each in (*given, *refused)] == (
        [True] * len(given) + [False] * len(refused)
    )

    def found(tensor: Any) -> object:
        try:
            return trees.memory_of(tensor, gpu._device)
        except InputError as error:
            return str(error)

    first = list(map(found, (*given, *refused)))
    monkeypatch.setattr(trees, "is_plain_tensor", lambda *_: False)
    assert list(map(found, (*given, *refused))) == first
    assert len(set(first)) == len(first)
