"""Graph caches: one graph for each key, and a step runs exactly once in a call."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.devices.context import Context
from preheat.errors import (
    CaptureError,
    GraphError,
    InputError,
)
from preheat.gpu import Gpu
from preheat.graph import cache_entries
from preheat.graph.keys import key_text, stable_repr
from tests.conftest import Recorder
from tests.faulty import FaultyGpu
from tests.graph.cache_support import Step, cache_graphs
from tests.graph.support import (
    axpy_case,
    nothing_left_open,
    runs_without_a_graph,
    scalar_log,
)

# Exactly once


def test_a_step_happens_once_a_call_eager_then_captured_then_replayed(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    step = Step(made)
    for call in range(1, 8):
        graphs.run("k", step)
        assert step.entered == min(call, 2)  # eager, captured, and never again
        assert ("k" in graphs) == (call > 1)
        made.check(3 * call)


def test_first_sight_runs_eagerly_so_that_kernels_may_be_loaded_and_memory_made(device: Gpu) -> None:
    made = axpy_case(device, 33)
    graphs = device.graphs()
    kept = dict[str, Any]()

    def step() -> None:
        if not kept:
            kept["y"] = device.array(made.ys)
            source = 'extern "C" __global__ void twice(int* y) { y[threadIdx.x] *= 2; }'
            kept["kernel"] = device.kernel(source, "twice")
        kept["kernel"][1, 33](kept["y"])

    for call in range(1, 5):
        graphs.run("k", step)
        np.testing.assert_array_equal(kept["y"].numpy(), made.ys * 2**call)
    assert graphs.report().quarantined == ()


def test_keys_have_cached_graphs_of_their_own(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs()
    steps = {a: Step(made, a) for a in (2, 5, 11)}
    total = 0
    for _ in range(4):
        for a, step in steps.items():
            graphs.run(a, step)
            total += a
            made.check(total)
    assert [step.entered for step in steps.values()] == [2, 2, 2]
    assert list(graphs) == [2, 5, 11]


def test_a_first_run_that_raises_is_no_sight(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    fail = [True]
    step = Step(made)

    def body() -> None:
        if fail.pop() if fail else False:
            raise KeyError("not yet")
        step()

    with pytest.raises(KeyError, match="not yet"):
        graphs.run("k", body)
    graphs.run("k", body)
    assert "k" not in graphs
    graphs.run("k", body)
    assert "k" in graphs
    made.check(6)


# What comes back


def test_what_comes_back_is_what_the_capture_returned_refreshed(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs()
    captured: dict[str, Any] = {"deep": [made.y, (made.x, 7)], "none": None}
    outputs: list[dict[str, Any]] = [captured, {"eager": 1}]

    def step() -> dict[str, Any]:
        made.launch()
        return outputs.pop()

    assert graphs.run("k", step) == {"eager": 1}
    for call in range(2, 5):
        got = graphs.run("k", step)
        assert got == captured
        np.testing.assert_array_equal(got["deep"][0].numpy(), made.ys + 3 * call * made.xs)


class Named(NamedTuple):
    """Two outputs with names."""

    first: Any
    second: Any


def test_copies_are_the_callers_own_wherever_arrays_are(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs()

    def step() -> tuple[Any, ...]:
        made.launch()
        return made.y, [made.y[3:9]], {"row": Named(made.y, "word")}, 7, None

    got = [graphs.run("k", step, copy=True) for _ in range(4)]
    for call, (whole, (part,), row, *rest) in enumerate(got, start=1):
        want = made.ys + 3 * call * made.xs  # not what later calls made of it
        np.testing.assert_array_equal(whole.numpy(), want)
        np.testing.assert_array_equal(part.numpy(), want[3:9])
        np.testing.assert_array_equal(row["row"].first.numpy(), want)
        assert isinstance(row["row"], Named)
        assert row["row"].second == "word"
        assert rest == [7, None]
    assert len({whole.address for whole, *_ in got}) == 4


@pytest.mark.parametrize("copy", [False, True])
def test_lists_and_dicts_are_the_callers_own_in_every_call(copy: bool, device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs()

    def step() -> Any:
        made.launch()
        return [1, {"two": [2]}, ("three", [3])]

    for _ in range(4):
        got = graphs.run("k", step, copy=copy)
        assert got == [1, {"two": [2]}, ("three", [3])]
        got[1]["two"].append(0)
        got[1]["more"] = 0
        got[2][1].append(0)
        got.append(0)
    assert "k" in graphs


def test_what_holds_no_list_and_no_array_comes_back_as_it_is(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs()
    plain = (1, ("two", None), Named(3, b"four"))

    def step() -> Any:
        made.launch()
        return plain

    for _ in range(3):
        assert graphs.run("k", step, copy=True) is plain


# replay, install, invalidate


def test_replay_says_whether_there_was_a_graph(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    assert graphs.replay("k") is False
    graphs.run("k", Step(made))
    assert graphs.replay("k") is False
    made.check(3)
    graphs.run("k", Step(made))
    assert graphs.replay("k") is True
    assert graphs.replay("other") is False
    made.check(9)


def test_replay_sets_named_scalars(device: Gpu) -> None:
    noted = scalar_log(device)
    graphs = device.graphs()
    graphs.install("k", noted.captured())
    for value in (5, -3, 12):
        assert graphs.replay("k", step=value)
    assert noted.seen() == [5, -3, 12]


def test_install_replaces_and_leaves_the_graph_to_its_owner(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    first, second = made.captured(2), made.captured(5)
    graphs.install("k", first)
    graphs.replay("k")
    graphs.install("k", second, outputs="given")
    assert graphs.run("k", Step(made, 1000)) == "given"
    made.check(7)
    assert len(graphs) == 1
    first.replay()  # A replaced graph is not closed, because its owner may still use it.
    made.check(9)


@pytest.mark.parametrize("verb", ["run", "replay"])
def test_a_graph_that_its_owner_closes_counts_as_absent(verb: str, device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    graph = made.captured(100)
    graphs.install("k", graph)
    graph.close()
    assert "k" not in graphs
    assert len(graphs) == 0
    if verb == "replay":
        assert graphs.replay("k") is False
    for _ in range(3):
        graphs.run("k", Step(made))
    made.check(9)


@pytest.mark.parametrize("verb", ["run", "replay"])
def test_a_graph_that_its_owner_closes_under_way_counts_as_absent(
    verb: str, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    graph = made.captured(100)
    graphs.install("k", graph)
    replay = graph.replay

    def close_then(**more: Any) -> None:
        graph.close()  # as another thread might, just now
        replay(**more)

    monkeypatch.setattr(graph, "replay", close_then)
    if verb == "replay":
        assert graphs.replay("k") is False
    else:
        graphs.run("k", Step(made))
    made.check(3 if verb == "run" else 0)


def test_a_value_that_is_no_graph_is_not_installed(device: Gpu) -> None:
    with pytest.raises(InputError, match="None is not a graph"):
        device.graphs().install("k", None)  # type: ignore[arg-type]


def test_only_a_usable_graph_of_this_device_and_life_is_installed(
    open_device: Callable[..., Gpu],
) -> None:
    gpu, other = open_device("emulator"), open_device("emulator")
    graphs = gpu.graphs()
    made = axpy_case(gpu)
    with pytest.raises(InputError, match="is not of this device, or was captured before its reset"):
        graphs.install("k", axpy_case(other).captured())
    with pytest.raises(GraphError, match="cannot be installed: it is new"):
        graphs.install("k", gpu.capture())
    closed, old = made.captured(), made.captured()
    closed.close()
    with pytest.raises(GraphError, match="cannot be installed: it is closed"):
        graphs.install("k", closed)
    gpu.reset()
    with pytest.raises(InputError, match="or was captured before its reset"):
        graphs.install("k", old)
    assert len(graphs) == 0


def test_invalidated_keys_begin_anew_and_absent_ones_are_no_ops(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    step = Step(made)
    cache_graphs(graphs, step, "a", "b", "c")
    graphs.invalidate("absent")
    graphs.invalidate("b", "absent")
    assert list(graphs) == ["a", "c"]
    graphs.run("b", step)
    assert "b" not in graphs  # first sight again
    graphs.invalidate()
    graphs.invalidate()
    assert len(graphs) == 0
    assert list(graphs) == []
    assert graphs.replay("a") is False
    made.check(21)


def test_a_key_that_cannot_be_hashed_is_refused_by_name(device: Gpu) -> None:
    graphs = device.graphs()
    for verb in (graphs.replay, graphs.invalidate, graphs.__contains__):
        with pytest.raises(InputError, match=r"\[1\] cannot be a key"):
            verb([1])  # type: ignore[operator, arg-type]


@dataclass(frozen=True)
class Frozen:
    """A key made of parts."""

    part: Any


def test_an_array_is_no_key_and_would_be_kept_alive(device: Gpu) -> None:
    graphs = device.graphs()
    x = device.zeros(31)
    keys: list[Any] = [x, ("k", (x,)), frozenset((x,)), Frozen(x), np.ones(3)]
    for key in keys:
        with pytest.raises(InputError, match=r"cannot be (part of )?a key") as refused:
            graphs.run(key, lambda: pytest.fail("ran"))
        assert refused.value.hint == "use a property of the array instead, such as x.shape"


@pytest.mark.parametrize("key", [float("nan"), (1, complex("nan")), (("a", np.float32("nan")),)])
def test_a_key_that_is_never_found_again_is_refused(key: Any, device: Gpu) -> None:
    with pytest.raises(InputError, match="cannot be part of a key: it is not equal to itself"):
        device.graphs().run(key, lambda: pytest.fail("ran"))


@pytest.mark.parametrize(
    ("capacity", "why"),
    [
        (0, "0 is not a number of graphs"),
        (-1, "-1 is not a number of graphs"),
        (1.5, "1.5 is not a number of graphs"),
        (None, "None is not a number of graphs"),
        ("8", "'8' is not a number of graphs"),
    ],
)
def test_a_capacity_is_a_number_of_cached_graphs(capacity: Any, why: str, device: Gpu) -> None:
    with pytest.raises(InputError, match=why) as refused:
        device.graphs(capacity)
    assert refused.value.hint == "capacity=1 or more"
    five: Any = np.int64(5)
    assert device.graphs(five).capacity == 5


def test_a_scalar_cannot_have_the_name_of_what_a_replay_takes(device: Gpu) -> None:
    for name in ("owner", "stream", "synchronize"):
        with pytest.raises(InputError, match=f"a scalar cannot be called '{name}'"):
            device.scalar("int32", name=name)


# Eviction


def test_the_least_recently_used_cached_graph_goes_first(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(capacity=3)
    step = Step(made)
    cache_graphs(graphs, step, "a", "b", "c")
    graphs.replay("a")
    graphs.run("b", step)  # uses it too
    cache_graphs(graphs, step, "d")
    assert list(graphs) == ["a", "b", "d"]
    graphs.install("e", made.captured())
    assert list(graphs) == ["b", "d", "e"]
    assert "b" in graphs  # asking is no use
    cache_graphs(graphs, step, "f")
    assert list(graphs) == ["d", "e", "f"]


def test_an_evicted_key_begins_anew(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(capacity=1)
    step = Step(made)
    cache_graphs(graphs, step, "a", "b")
    graphs.run("a", step)
    assert list(graphs) == ["b"]
    graphs.run("a", step)
    assert list(graphs) == ["a"]
    made.check(18)


def test_eviction_waits_for_nothing_and_gives_everything_back(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu, 31)
    with nothing_left_open(faulty):
        graphs = faulty.gpu.graphs(capacity=1)
        with faulty.count_calls() as calls:
            cache_graphs(graphs, Step(made), *range(6))
        assert calls["executable.close"] == 5
        assert not {"synchronize", "stream.synchronize"} & set(calls)
        del graphs
    made.check(36)


def test_a_graph_that_another_thread_replays_is_evicted_without_harm(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(capacity=1)
    step = Step(made)
    cache_graphs(graphs, step, "a")
    # As the other thread has it now.
    cached = graphs._entries.find(graphs._entries.entry_key("a", None))
    assert cached is not None
    cache_graphs(graphs, step, "b")
    assert "a" not in graphs
    cached.run((), False)
    made.check(15)


def test_cached_graphs_are_closed_outside_the_lock(
    device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(capacity=1)
    locked = list[bool]()
    drain = Context.drain

    def watched(context: Context, **more: Any) -> None:
        locked.append(graphs._entries.lock.locked())
        drain(context, **more)

    monkeypatch.setattr(Context, "drain", watched)
    cache_graphs(graphs, Step(made), "a", "b")
    graphs.install("b", made.captured())
    graphs.invalidate()
    assert len(locked) >= 3
    assert not any(locked)


def test_keys_seen_once_are_remembered_in_bounds(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_entries, "_REMEMBERED", 5)
    graphs = device.graphs(capacity=1)
    for key in range(20):
        graphs.run(key, lambda: None)
    assert [k.key for k in graphs._entries.uncaptured] == [15, 16, 17, 18, 19]


# Owners


class Model:
    """An owner."""


class Equal:
    """An owner that is equal to every other and cannot be hashed."""

    def __eq__(self, other: object) -> bool:
        return True


def test_owners_do_not_see_each_others_cached_graphs(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    owners: list[Any] = [None, Model(), Model(), Equal(), Equal(), "name", 7]
    for a, owner in enumerate(owners, start=1):
        cache_graphs(graphs, Step(made, a), "k", owner=owner)
    assert len(graphs) == len(owners)
    assert list(graphs) == ["k"] * len(owners)
    assert [cached.owner for cached in graphs.report().graphs] == owners
    total = 2 * sum(range(1, 8))
    for a, owner in enumerate(owners, start=1):
        assert graphs.replay("k", owner=owner)
        total += a
        made.check(total)
    graphs.invalidate("k", owner=owners[1])
    assert not graphs.replay("k", owner=owners[1])
    graphs.install("k", made.captured(100), owner=owners[1])
    assert graphs.replay("k", owner=owners[1])
    made.check(total + 100)


def test_devices_do_not_see_each_others_cached_graphs(open_device: Callable[..., Gpu]) -> None:
    cases = [axpy_case(open_device(f"emulator:{number}")) for number in range(2)]
    caches = [made.gpu.graphs() for made in cases]
    for factor, made, graphs in zip((3, 5), cases, caches, strict=True):
        for _ in range(3):
            graphs.run("k", lambda made=made, factor=factor: made.launch(factor))  # type: ignore[misc]
    caches[0].invalidate()
    assert not caches[0].replay("k")
    assert caches[1].replay("k")
    cases[0].check(3 * 3)
    cases[1].check(5 * 4)


def test_all_keys_of_an_owner_can_be_invalidated_at_once(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    owner = Model()
    cache_graphs(graphs, Step(made), "a", "b", owner=owner)
    cache_graphs(graphs, Step(made), "a", "b", owner=1000)
    cache_graphs(graphs, Step(made), "a")
    graphs.invalidate(owner=owner)
    assert [cached.owner for cached in graphs.report().graphs] == [1000, 1000, None]
    graphs.invalidate(owner=int("1000"))
    assert list(graphs) == ["a"]


def test_cached_graphs_of_a_dead_owner_go_at_once_with_what_they_hold(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu)
    graphs = faulty.gpu.graphs()
    owner = Model()
    cache_graphs(graphs, Step(made), "a", "b", owner=owner)
    cache_graphs(graphs, Step(made), "a")
    graphs.run("seen", Step(made), owner=owner)
    with faulty.count_calls("executable.close") as calls:
        del owner
        gc.collect()
        faulty.gpu._context.drain()
    assert calls == {"executable.close": 2}
    assert len(graphs) == 1
    assert not graphs._entries.owners
    assert [place.key for place in graphs._entries.uncaptured] == []


def test_an_owner_that_dies_while_the_lock_is_held_goes_with_the_next_call(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    owner = Model()
    cache_graphs(graphs, Step(made), "a", owner=owner)
    with graphs._entries.lock:  # as when the collector runs inside a verb
        del owner
        gc.collect()
        shown = repr(graphs)
    assert "1 of 64 graphs" in shown
    assert len(graphs) == 0


def test_a_new_owner_never_inherits_the_cached_graphs_of_one_at_its_address(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(capacity=8)
    for _ in range(20):
        owner = Model()
        assert not graphs.replay("k", owner=owner)
        cache_graphs(graphs, Step(made), "k", owner=owner)
        del owner
    assert len(graphs) == 0


def test_what_can_neither_be_held_weakly_nor_hashed_is_no_owner(device: Gpu) -> None:
    with pytest.raises(InputError, match=r"\[1\] cannot be an owner"):
        device.graphs().replay("k", owner=[1])


def test_dropping_the_cached_graphs_gives_everything_back(faulty: FaultyGpu) -> None:
    with nothing_left_open(faulty):
        made = axpy_case(faulty.gpu)
        owner = Model()
        graphs = faulty.gpu.graphs()
        cache_graphs(graphs, Step(made), "a", owner=owner)
        cache_graphs(graphs, Step(made), "a")
        del graphs
    made.check(12)


# Inside a capture


def test_inside_a_capture_the_body_becomes_part_of_it(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    step = Step(made)
    cache_graphs(graphs, step, "k")
    with device.capture() as graph:
        assert graphs.run("k", step) is made.y
        assert graphs.run("new", step, copy=True) is made.y
    assert len(graph) == 2
    assert list(graphs) == ["k"]
    made.check(6)
    graph.replay()
    made.check(12)


def test_a_step_of_steps_is_one_graph(device: Gpu) -> None:
    made = axpy_case(device)
    inner = device.graphs()
    outer = device.graphs()
    step = Step(made)

    def both() -> None:
        inner.run("a", step)
        inner.run("b", step)

    for call in range(1, 5):
        outer.run("k", both)
        made.check(6 * call)
    assert [cached.nodes for cached in outer.report().graphs] == [2]
    assert len(inner) == 0  # seen once, eagerly


def test_replaying_a_cached_graph_inside_a_capture_is_refused(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    cache_graphs(graphs, Step(made), "k")
    with pytest.raises(CaptureError, match="replaying a graph inside a capture"), device.capture():
        graphs.replay("k" if graphs.replay("absent") is False else "absent")


# warm


def test_warming_goes_largest_first_runs_each_body_once_and_captures_it(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    entered = list[int]()

    def body(a: int) -> Any:
        entered.append(a)
        made.launch(a)
        return made.y

    graphs.warm((4, 1, 8, 2, 4), body)
    assert entered == [8, 8, 4, 4, 2, 2, 1, 1]  # executed, then captured
    made.check(15)
    assert list(graphs) == [8, 4, 2, 1]
    assert [cached.replays for cached in graphs.report().graphs] == [0] * 4
    assert graphs.run(8, Step(made, 1000)) is made.y
    made.check(23)
    graphs.warm((1, 2, 16), body)
    assert entered[8:] == [16, 16]  # the others are there


def test_warming_lists_what_could_not_be_captured_after_trying_everything(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()

    def body(a: int) -> None:
        made.launch(a)
        if a in (2, 8):
            device.synchronize()

    with pytest.raises(GraphError, match="2 of 4 keys could not be captured") as refused:
        graphs.warm((1, 2, 4, 8), body)
    assert "8: CaptureError" in str(refused.value)
    assert "2: CaptureError" in str(refused.value)
    assert list(graphs) == [4, 1]
    assert {one.key for one in graphs.report().quarantined} == {2, 8}
    made.check(15)


def test_warming_tries_again_what_is_in_quarantine(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    fails = [True]

    def body(a: int) -> None:
        made.launch(a)
        if fails:
            device.synchronize()

    with pytest.raises(GraphError):
        graphs.warm((3,), body)
    fails.clear()
    graphs.warm((3,), body)
    assert 3 in graphs
    made.check(6)


def test_an_error_of_a_warming_body_propagates(device: Gpu) -> None:
    with pytest.raises(ZeroDivisionError):
        device.graphs().warm((0, -1), lambda a: 1 // a * 0 or 1 // 0)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (range(5), "5 keys do not fit into a cache of 4 graphs"),
        ((1, "a"), "must have an order"),
        (5, "5 is not a collection of keys"),
        ([[1]], r"\[1\] cannot be a key"),
    ],
)
def test_a_key_that_cannot_be_warmed_is_refused_before_anything_runs(
    keys: Any, why: str, device: Gpu
) -> None:
    with pytest.raises(InputError, match=why):
        device.graphs(4).warm(keys, lambda key: pytest.fail(f"ran {key}"))


def test_warming_inside_a_capture_is_refused(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    with pytest.raises(CaptureError, match="warming graphs inside a capture"), device.capture():
        graphs.warm((1,), made.launch)
    made.check(0)


# Reports


def test_the_report_has_key_nodes_bytes_and_replays(device: Gpu) -> None:
    made = axpy_case(device, 257)
    graphs = device.graphs()
    cache_graphs(graphs, Step(made), ("decode", 8))
    graphs.replay(("decode", 8))
    report = graphs.report()
    (cached,) = report.graphs
    assert cached == (("decode", 8), None, 1, made.x.nbytes + made.y.nbytes, 2)
    assert report.nbytes == 2 * 257 * 4
    assert str(report) == "('decode', 8): 1 node, 2,056 bytes, 2 replays"
    assert repr(graphs) == f"<GraphCache on {device.name}: 1 of 64 graphs>"
    assert str(device.graphs().report()) == "no graphs"


def test_the_report_counts_in_words(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs()
    cache_graphs(graphs, Step(made), "a")
    with runs_without_a_graph("nothing was captured"):
        for _ in range(2 + 15):
            graphs.run("b", lambda: None)
    cached, quarantined = str(graphs.report()).splitlines()
    assert cached == "'a': 1 node, 248 bytes, 1 replay"
    assert "'b': failed 1 time, tries again in 1 call: CaptureError" in quarantined


def test_captures_evictions_and_quarantine_are_events(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    recorder = Recorder()
    made = axpy_case(gpu)
    graphs = gpu.graphs(capacity=1)
    gpu.builder.events.subscribe(recorder)
    try:
        cache_graphs(graphs, Step(made), "a", "b")
        with runs_without_a_graph("synchronising inside a capture"):
            cache_graphs(graphs, gpu.synchronize, "c")
    finally:
        gpu.builder.events.unsubscribe(recorder)
    seen = recorder.named("graph")
    assert [(one["what"], one["key"]) for one in seen] == [
        ("captured", "'a'"), ("captured", "'b'"), ("evicted", "'a'"), ("quarantined", "'c'"),
    ]  # fmt: skip
    assert all(one["device"] == "emulator:0" for one in seen)
    assert "synchronising" in seen[-1]["reason"]


def test_a_cached_graph_is_called_by_its_key_in_errors(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs()
    cache_graphs(graphs, Step(made), ("decode", 8))
    with pytest.raises(InputError, match=r"graph \"\('decode', 8\)\" uses no scalar called 'step'"):
        graphs.replay(("decode", 8), step=3)


def test_a_key_as_text_is_the_literal_that_is_equal_to_it() -> None:
    for key in ("layer at 0x1f", ("a at 0x2>", 3), b"at 0x1"):
        assert ast.literal_eval(key_text(key)) == key
    assert " at 0x" not in stable_repr(object())
