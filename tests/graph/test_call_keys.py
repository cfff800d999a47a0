"""Which calls of a graphed function share a graph."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.devices.operands import Pointer
from preheat.errors import InputError
from preheat.gpu import Gpu
from tests.graph.graphed_support import Batch, Frozen, Host, Late, Wrap, late
from tests.graph.support import axpy_case

# Keys


def test_another_array_of_the_same_shape_is_another_cached_graph_whatever_the_key_says(
    device: Gpu,
) -> None:
    made = axpy_case(device)
    outs = [device.array(made.ys) for _ in range(3)]

    @device.graphed(key=lambda x, *_: x.shape)
    def step(x: Any, y: Any) -> None:
        made.axpy[5, 64](3, x, y, made.n)

    for call in range(1, 5):
        for y in outs:
            step(made.x, y)
            np.testing.assert_array_equal(y.numpy(), made.ys + 3 * call * made.xs)
    assert len(step.graphs) == 3


def test_a_view_elsewhere_in_the_same_memory_is_another_cached_graph(device: Gpu) -> None:
    made = axpy_case(device, 64)

    @device.graphed()
    def step(y: Any) -> None:
        made.axpy[1, 32](1, made.x, y, 16)

    want = made.ys.astype(np.int64)
    for _ in range(4):
        for at in (0, 16, 48):
            step(made.y[at : at + 16])  # a new object each time
            want[at : at + 16] += made.xs[:16]
    np.testing.assert_array_equal(made.y.numpy(), want)
    assert len(step.graphs) == 3


class Pair(NamedTuple):
    """Arguments with names and places."""

    n: int
    y: Any


class Plain:
    """An object that is only equal to itself."""

    def __init__(self, y: Any) -> None:
        self.y = y


class Slotted:
    """One that cannot be held weakly, and is equal to every other."""

    __slots__ = ("y",)

    def __init__(self, y: Any) -> None:
        self.y = y

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def take(self) -> Any:
        """Return the fields."""
        return self.y


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y,),
        lambda y: [7, [y]],
        lambda y: {"deep": ({"er": y},)},
        lambda y: OrderedDict(y=y),
        lambda y: Batch(7, y),
        lambda y: Frozen((Batch(7, y),)),
        lambda y: Pair(7, y),
        lambda y: late(y),
    ],
)
def test_arrays_are_found_where_they_are_nested(wrap: Wrap, device: Gpu) -> None:
    made = axpy_case(device, 31)
    outs = [device.array(made.ys) for _ in range(2)]

    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return found(list(value.values()))
        if isinstance(value, Batch | Frozen | Late):
            return found(value.y)
        return found(value[-1]) if isinstance(value, tuple | list) else value

    @device.graphed(key=lambda *_, **__: "one")
    def step(given: Any, *, named: Any) -> None:
        made.axpy[1, 32](1, made.x, found(given), 31)
        made.axpy[1, 32](1, made.x, found(named), 31)

    for call in range(1, 5):
        for y in outs:
            step(wrap(y), named=wrap(y))
            np.testing.assert_array_equal(y.numpy(), made.ys + 2 * call * made.xs)
    assert len(step.graphs) == 2


def test_where_an_array_stands_is_part_of_the_key(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed(key=lambda *_, **__: "one")
    def step(x: Any = None, y: Any = None) -> None:
        made.axpy[1, 32](1 if y is None else 10, x or y, made.y, 31)

    for call in range(1, 4):
        step(made.x, None)
        step(None, made.x)
        step(y=made.x)
        made.check(21 * call)


@pytest.mark.parametrize(
    "values",
    [
        (1, 2), (1, 1.0), (1, True), (0.0, -0.0), ("a", "b"), (None, 0), ((1, 2), [1, 2]),
        ({"a": 1}, {"b": 1}), ((1, (2,)), ((1, 2),)), (np.float32(0.0), np.float32(-0.0)), (1, 1 + 0j),
    ],
)  # fmt: skip
def test_without_a_key_calls_with_other_values_never_share_a_graph(
    values: tuple[Any, Any], device: Gpu
) -> None:
    made = axpy_case(device, 31)

    @device.graphed()
    def step(value: Any) -> Any:
        made.launch()
        return repr(value)

    for _ in range(4):
        for value in values:
            assert step(value) == repr(value)
    assert len(step.graphs) == 2


def test_equal_values_share_a_graph(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed()
    def step(*given: Any, **named: Any) -> None:
        made.launch(len(given) + len(named) - 1)

    for _ in range(4):
        step(float("nan"), (1, "a"), [2.5], name={"k": None})
    assert len(step.graphs) == 1
    made.check(12)


def test_with_a_key_other_values_are_up_to_it(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = list[Any]()

    @device.graphed(key=lambda batch, *_: batch)
    def step(batch: int, note: Any) -> None:
        made.launch(batch * len(note))

    for call in range(1, 4):
        for batch in (1, 2):
            step(batch, [call])  # a list of values need not be hashed
    made.check(9)
    assert len(step.graphs) == 2
    graphs += step.graphs
    assert [repr(key) for key in graphs] == ["step 1", "step 2"]


@pytest.mark.parametrize("kind", [Plain, Slotted])
def test_with_a_key_another_object_is_another_cached_graph_whatever_it_holds(
    kind: Any, device: Gpu
) -> None:
    made = axpy_case(device, 31)

    @device.graphed(key=lambda *_: "one")
    def step(given: Any, take: Any) -> None:
        made.axpy[1, 32](3, made.x, (given or take.__self__).y, 31)

    outs = [device.array(made.ys) for _ in range(2)]
    objects = [kind(y) for y in outs]
    for call in range(1, 5):
        for one, y in zip(objects, outs, strict=True):
            step(one, 3)
            step(None, Slotted.take.__get__(one) if kind is Slotted else MethodType(repr, one))
            np.testing.assert_array_equal(y.numpy(), made.ys + 6 * call * made.xs)
    assert len(step.graphs) == 4


def test_with_a_key_an_object_at_the_address_of_a_dead_one_is_another(device: Gpu) -> None:
    made = axpy_case(device, 31)
    alive = list[Any]()

    @device.graphed(key=lambda _: "one")
    def step(given: Any) -> None:
        made.axpy[1, 32](3, made.x, given.y, 31)

    for _ in range(20):
        y = device.array(made.ys)
        given = Plain(y)
        alive.append(weakref.ref(given))
        for call in range(1, 4):
            step(given)
            np.testing.assert_array_equal(y.numpy(), made.ys + 3 * call * made.xs)
        del given
    gc.collect()
    assert [one() for one in alive] == [None] * 20


@pytest.mark.parametrize("value", [np.dtype("int32"), np.bool_(True), len, int, None, ..., b"x", 1.5])
def test_a_plain_value_is_left_to_the_key_and_without_a_key_is_part_of_it(
    value: Any, device: Gpu
) -> None:
    made = axpy_case(device, 31)

    @device.graphed(key=lambda *_: "one")
    def keyed(_: Any) -> None:
        made.launch()

    @device.graphed
    def step(_: Any) -> None:
        made.launch()

    for one in (value, 7, value):
        keyed(one)
        step(one)
    assert len(keyed.graphs) == 1
    assert len(step.graphs) == 1


@pytest.mark.parametrize("value", [Plain(1), object(), partial(len, ()), MethodType(repr, Plain(1))])
def test_without_a_key_an_object_that_is_equal_to_itself_alone_asks_for_one(
    value: Any, device: Gpu
) -> None:
    @device.graphed
    def step(_: Any) -> None:
        pytest.fail("ran")

    with pytest.raises(InputError, match="it is compared by identity") as refused:
        step([value])
    assert refused.value.hint is not None
    assert "key=" in refused.value.hint


def test_a_bare_address_is_memory_like_any_other(device: Gpu) -> None:
    made = axpy_case(device, 31)
    outs = [device.array(made.ys) for _ in range(2)]

    @device.graphed(key=lambda _: "one")
    def step(y: Any) -> None:
        made.axpy[1, 32](3, made.x, y, 31)

    for call in range(1, 4):
        for y in outs:
            step(Pointer(y.address))
            np.testing.assert_array_equal(y.numpy(), made.ys + 3 * call * made.xs)
    assert len(step.graphs) == 2


def test_an_array_is_no_key(device: Gpu) -> None:
    x = device.zeros(31)
    step = device.graphed(key=lambda x: ("k", x))(lambda _: pytest.fail("ran"))
    with pytest.raises(InputError, match="cannot be part of a key: it is an array") as refused:
        step(x)
    assert refused.value.hint == "use a property of the array instead, such as x.shape"


def test_a_key_is_called_with_the_arguments_of_the_call(device: Gpu) -> None:
    made = axpy_case(device, 31)
    seen = list[Any]()

    def key(*args: Any, **named: Any) -> str:
        seen.append((args, named))
        return "k"

    class Model:
        @device.graphed(key=key)
        def step(self, x: Any, *, a: int) -> None:
            made.axpy[1, 32](a, x, made.y, 31)

    Model().step(made.x, a=3)
    assert seen == [((made.x,), {"a": 3})]  # without the instance, which is the owner


@pytest.mark.parametrize("value", [{1, 2}, bytearray(b"x")])
def test_a_value_that_cannot_be_hashed_asks_for_a_key(value: Any, device: Gpu) -> None:
    @device.graphed()
    def step(given: Any) -> None:
        del given

    with pytest.raises(
        InputError, match=f"step: an argument of type {type(value).__name__}"
    ) as refused:
        step([value])
    assert refused.value.hint is not None
    assert "key=" in refused.value.hint


def test_host_memory_is_no_argument_to_a_graph(device: Gpu) -> None:
    @device.graphed()
    def step(given: Any) -> None:
        del given

    with pytest.raises(InputError, match="its memory is not on this device"):
        step(np.arange(3))
    keyed = device.graphed(key=len)(lambda given: int(given[::-1].sum()))
    assert keyed(np.arange(5)[::-1]) == 10


def test_host_memory_is_an_array_like_any_other_on_an_emulator_that_permits_it(
    permissive: Gpu,
) -> None:
    made = axpy_case(permissive, 31)
    outs = [made.ys.copy() for _ in range(2)]

    @permissive.graphed(key=lambda y: y.shape)
    def step(y: Host) -> None:
        made.axpy[1, 32](3, made.x, y, 31)

    for call in range(1, 5):
        for y in outs:
            step(y)
            np.testing.assert_array_equal(y, made.ys + 3 * call * made.xs)
    assert len(step.graphs) == 2


def test_cached_graphs_are_called_by_function_and_arguments(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed()
    def step(y: Any, n: int, *, mode: str) -> None:
        made.axpy[1, 32](len(mode), made.x, y, n)

    for _ in range(2):
        step(made.y, 31, mode="fast")
    place = f"{made.y.buffer.generation}+0"
    assert [repr(key) for key in step.graphs] == [f"step(int32[31]@{place}, 31, mode='fast')"]
