"""Warm-ups of graphs: registered warmers, the keys they capture, and the names of keys in events."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.errors import (
    InputError,
    WarmError,
)
from preheat.gpu import Gpu
from tests.ahead.warmup_support import ONE, THREE, VERBS, WRONG, failures, manifest, program
from tests.conftest import Recorder
from tests.faulty import FaultyGpu
from tests.graph.support import axpy_case

# Graphs


def test_keys_are_captured_through_the_warmer_largest_first_and_then_replayed(
    faulty: FaultyGpu,
) -> None:
    made = axpy_case(faulty.gpu, 31)
    order = list[int]()
    graphs = faulty.gpu.graphs(name="decode")

    @graphs.warmer
    def decode(size: int) -> Any:
        order.append(size)
        made.launch(size)
        return made.y

    assert faulty.gpu.warm(manifest(decode=("2", "16", "4"))).graphs == 3
    assert order == [16, 16, 4, 4, 2, 2]  # executed once, captured once
    made.check(22)
    with faulty.count_calls(*VERBS) as calls:
        assert graphs.run(4, lambda: decode(4)) is made.y
        assert graphs.replay(16)
    assert calls == {}
    assert len(order) == 6
    made.check(42)


def test_keys_without_an_order_are_captured_as_listed(device: Gpu) -> None:
    made = axpy_case(device, 31)
    order = list[Any]()
    graphs = device.graphs(name="decode")

    @graphs.warmer
    def decode(key: Any) -> None:
        order.append(key)
        made.launch()

    listed = ("(1, 8)", "None", "'all'", "32")
    assert device.warm(manifest(decode=listed)).graphs == 4
    assert order[::2] == [(1, 8), None, "all", 32]


def test_one_call_warms_several_sources_and_each_key_once(device: Gpu, tmp_path: Path) -> None:
    made = axpy_case(device, 31)
    path = tmp_path / "kernels.toml"
    graphs = device.graphs(name="decode")
    graphs.warmer(made.launch)
    manifest(program(ONE), decode=("2", "3")).write(path)
    report = device.warm(path, manifest(program(THREE), decode=("3", "5")))
    assert (report.programs, report.modules, report.graphs) == (2, 2, 3)
    made.check(10)


def test_a_graphed_function_is_warmed_by_the_calls_its_warmer_gives(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu, 64)
    entered = list[int]()

    @faulty.gpu.graphed(key=lambda x: x.shape, copy_inputs=True)
    def step(x: Any) -> Any:
        entered.append(len(x))
        out = made.y
        made.axpy[1, 64](1, x, out, len(x))
        return out

    @step.warmer
    def example(shape: tuple[int, ...]) -> dict[str, Any]:
        return {"x": faulty.gpu.zeros(shape, "int32")}

    assert faulty.gpu.warm(manifest(step=("(8,)", "(64,)"))).graphs == 2
    assert entered == [64, 64, 8, 8]
    with faulty.count_calls(*VERBS) as calls:
        step(x=made.x)
    assert calls == {}
    assert len(entered) == 4
    made.check(1)
    assert faulty.gpu.warm(manifest(step=("(8,)",))).graphs == 0


def test_a_warmer_whose_arrays_no_later_call_has_is_a_failure(device: Gpu) -> None:
    made = axpy_case(device, 64)
    buffers = {8: device.zeros(8, "int32")}

    @device.graphed(key=lambda x: len(x))
    def step(x: Any) -> None:
        made.axpy[1, 64](1, x, made.y, len(x))

    step.warmer(lambda size: (device.zeros(size, "int32"),))
    with pytest.raises(WarmError, match="returns other arrays each time") as caught:
        device.warm(manifest(step=("8",)))
    assert "copy_inputs=True" in str(caught.value)
    step.warmer(lambda size: (buffers[size],))
    with pytest.raises(WarmError, match=r"graph 'step', 4: KeyError: 4"):
        device.warm(manifest(step=("4", "8")))
    assert len(step.graphs) == 1
    step.warmer(lambda _: (buffers[8],))
    with pytest.raises(WarmError, match="returns a call of another key: 8"):
        device.warm(manifest(step=("4",)))


def test_a_key_that_fails_does_not_stop_the_others(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(name="decode")

    @graphs.warmer
    def decode(size: int) -> None:
        if size == 5:
            raise RuntimeError("five\nis odd")
        made.launch(size)
        if size == 3:
            device.synchronize()

    with pytest.raises(WarmError) as caught:
        device.warm(manifest(decode=("2", "3", "5", "7", "f(x)")))
    assert failures(caught.value).keys() == {
        "graph 'decode', f(x)", "graph 'decode', 5", "graph 'decode', 3",
    }  # fmt: skip
    assert "graph 'decode', 5: RuntimeError: five\n" in str(caught.value)
    assert "synchronising inside a capture" in str(caught.value)
    assert "graph 'decode', f(x): this is not a Python literal" in str(caught.value)
    assert caught.value.report.graphs == 2
    assert sorted(graphs) == [2, 7]


def test_more_keys_than_slots_are_refused_rather_than_evicted(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(2, name="decode")
    graphs.warmer(made.launch)
    with pytest.raises(
        WarmError, match=r"3 keys do not fit into a cache of 2 graphs \(hint: capacity=3\)"
    ):
        device.warm(manifest(decode=("1", "2", "3")))
    made.check(0)


class OddError(Exception):
    """One that can be referred to weakly, unlike those of Python."""


def test_a_failed_key_keeps_no_memory_from_the_next(device: Gpu) -> None:
    made = axpy_case(device, 31)
    held = list[weakref.ref[Any]]()
    graphs = device.graphs(name="decode")

    @graphs.warmer
    def decode(size: int) -> None:
        if size > 2:
            room = device.zeros(size)
            held.append(weakref.ref(room))
            raise OddError(size)
        made.launch(size)

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(WarmError) as caught:
            device.warm(manifest(decode=("1", "2", "3")))
        assert [ref() for ref in held] == [None]
        ((_, failure),) = caught.value.failures
        assert traceback.extract_tb(failure.__traceback__)[-1].name == "decode"
        error = weakref.ref(failure)
        del caught, failure
        assert error() is None
    finally:
        gc.enable()


def test_an_error_that_the_caller_is_handling_keeps_what_its_frames_hold(device: Gpu) -> None:
    def fail(precious: str) -> None:
        raise OddError(len(precious))

    try:
        fail("value")
    except OddError as handled:
        with pytest.raises(WarmError):
            device.warm(manifest(program(WRONG), decode=("1",)))
        frames = [frame for frame, _ in traceback.walk_tb(handled.__traceback__)]
    assert frames[-1].f_locals == {"precious": "value"}


# Registering


def test_names_and_warmers_that_cannot_be_are_refused(device: Gpu) -> None:
    def hint(do: Callable[[], object]) -> tuple[str, str | None]:
        with pytest.raises(InputError) as caught:
            do()
        return str(caught.value), caught.value.hint

    graphs, other = device.graphs(name="decode"), device.graphs(name="decode")
    assert "without a name" in hint(lambda: device.graphs().warmer(print))[0]
    graphs.warmer(print)
    graphs.warmer(print)  # another one for the same graphs
    said, what = hint(lambda: other.warmer(print))
    assert said == "other graphs called 'decode' have a warmer already"
    assert what is not None
    assert "name=" in what
    for bad in ("", "  ", 5):
        assert "cannot be a name" in hint(lambda bad=bad: device.graphs(name=bad))[0]  # type: ignore[misc]
    plain = device.graphed(lambda x: x)
    assert "has no keys" in hint(lambda: plain.warmer(print))[0]


class Model:
    """Has a graphed method."""

    def __init__(self, gpu: Gpu) -> None:
        cls: Any = type(self)
        cls.step = gpu.graphed(key=lambda: None)(cls.forward)

    def forward(self) -> None:
        """Does nothing."""


def test_a_method_has_no_warmer(device: Gpu) -> None:
    model: Any = Model(device)
    for graphed in (model.step, Model.__dict__["step"]):
        with pytest.raises(InputError, match=r"Model\.forward is a method") as caught:
            graphed.warmer(print)
        assert caught.value.hint is not None
        assert "warm each instance" in caught.value.hint


def test_a_name_is_free_again_once_its_graphs_are_gone(device: Gpu) -> None:
    made = axpy_case(device, 31)
    first = device.graphs(name="decode")
    first.warmer(lambda size: first_used.append(size))
    first_used: list[int] = []
    gc.collect()
    del first
    gc.collect()
    second = device.graphs(name="decode")
    second.warmer(made.launch)
    device.warm(manifest(decode=("3",)))
    assert first_used == []
    made.check(3)
    with pytest.raises(WarmError, match=r"hint: did you mean 'decode'\?"):
        device.warm(manifest(decoed=("3",)))


# Names and keys in events


class Size(tuple[int, ...]):
    """A tuple that says something else of itself, as `torch.Size` does."""

    def __repr__(self) -> str:
        return f"Size({list(self)})"


class Pair(NamedTuple):
    """A tuple with names, which no literal has."""

    a: int
    b: int


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (8, "8"),
        ("8", "'8'"),
        ((1, None, (2.5,)), "(1, None, (2.5,))"),
        (True, "True"),
        (Size((4, 2)), "(4, 2)"),
        ((np.int64(3), Size((1,))), "(3, (1,))"),
        (Pair(1, 2), "Pair(a=1, b=2)"),
        (frozenset({1}), "frozenset({1})"),
    ],
)
def test_a_captured_key_is_reported_as_a_literal_where_one_exists(
    open_device: Callable[..., Gpu], builder: Builder, recorder: Recorder, key: Any, text: str
) -> None:
    gpu = open_device("emulator", builder=builder)
    x = gpu.zeros(4)
    graphs = gpu.graphs(name="decode")
    graphs.warm([key], lambda _: x.fill(1))

    @gpu.graphed(key=lambda _: key)
    def step(x: Any) -> None:
        x.fill(2)

    step.warmer(lambda _: (x,))
    step.warm([(x,)])
    reported = [(one["name"], one["key"]) for one in recorder.named("graph")]
    assert reported == [("decode", text), ("step", text)]


def test_a_graph_that_no_warmer_could_capture_has_no_name_in_events(
    open_device: Callable[..., Gpu], builder: Builder, recorder: Recorder
) -> None:
    gpu = open_device("emulator", builder=builder)
    x = gpu.zeros(4)
    owner = Model

    @gpu.graphed
    def plain(x: Any) -> None:
        x.fill(2)

    plain.warm([(x,)])
    gpu.graphs().warm([1], lambda _: x.fill(1))
    gpu.graphs(name="decode").warm([1], lambda _: x.fill(1), owner=owner)
    renamed = gpu.graphed(key=lambda _: None, name="mine")(lambda x: x.fill(3))
    renamed.warm([(x,)])
    reported = [(one["name"], one["key"]) for one in recorder.named("graph")]
    assert [name for name, _ in reported] == [None, None, None, "mine"]
    assert reported[0][1].startswith("plain(float32[4]")  # The key has no literal.
    assert reported[3][1] == "None"
