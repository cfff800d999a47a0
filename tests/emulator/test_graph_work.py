"""Graphs of work on the emulator: child graphs, events, and memory that graphs allocate and free."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.emulator.device import EmulatorDevice
from preheat.emulator.graph_work import (
    ChildGraph,
    EventRecord,
    EventWait,
    GraphWork,
    Work,
    do_nothing,
    expand,
)

SEEDS = range(16)


def noting(seen: list[str], name: str) -> Work:
    """Return work that notes its name."""
    return lambda: seen.append(name)


def orders(make: Callable[[list[str]], GraphWork]) -> set[tuple[str, ...]]:
    """Return the orders in which replays of a graph execute its work."""
    found = set()
    for seed in SEEDS:
        seen: list[str] = []
        device = EmulatorDevice(schedule=seed)
        stream = device.stream()
        replay = device.executable(make(seen)).prepare(stream)
        for _ in range(4):
            assert replay() == (0,)
            stream.synchronize()
            found.add(tuple(seen))
            seen.clear()
        device.close()
    return found


def test_pieces_of_a_child_graph_are_executed_between_others() -> None:
    def make(seen: list[str]) -> GraphWork:
        child = GraphWork([noting(seen, "a"), noting(seen, "b")], [(), (0,)])
        return GraphWork([ChildGraph(child), noting(seen, "x")], [(), ()])

    allowed = {order for order in itertools.permutations("abx") if order.index("a") < order.index("b")}
    assert orders(make) == allowed


def test_whatever_depends_on_a_child_graph_follows_all_of_it() -> None:
    def make(seen: list[str]) -> GraphWork:
        inner = GraphWork([noting(seen, "b"), noting(seen, "c")], [(), ()])
        child = GraphWork([ChildGraph(GraphWork([], [])), ChildGraph(inner)], [(), (0,)])
        return GraphWork([noting(seen, "a"), ChildGraph(child), noting(seen, "d")], [(), (0,), (1,)])

    assert orders(make) == {("a", "b", "c", "d"), ("a", "c", "b", "d")}


def test_an_empty_child_graph_orders_what_is_around_it() -> None:
    def make(seen: list[str]) -> GraphWork:
        empty = ChildGraph(GraphWork([], []))
        return GraphWork([noting(seen, "a"), empty, noting(seen, "b")], [(), (0,), (1,)])

    assert orders(make) == {("a", "b")}


trees = st.recursive(st.just(None), lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=10)


@given(trees, st.data())
def test_expanded_graphs_keep_every_dependency(tree: object, data: st.DataObject) -> None:
    """Each piece reaches, through its dependencies, all pieces of what its place depends on."""
    needs: list[tuple[Work, Work]] = []

    def build(part: tuple[object, ...]) -> tuple[GraphWork, list[Work]]:
        work: list[Work] = []
        after: list[tuple[int, ...]] = []
        leaves: list[list[Work]] = []
        for at, each in enumerate(part):
            before = data.draw(st.sets(st.integers(0, at - 1))) if at else set()
            if isinstance(each, tuple):
                inner, below = build(each)
                work.append(ChildGraph(inner))
            else:
                piece: Work = lambda: None  # noqa: E731  (Each is another object.)
                work.append(piece)
                below = [piece]
            needs.extend((b, a) for other in before for b in leaves[other] for a in below)
            after.append(tuple(sorted(before)))
            leaves.append(below)
        return GraphWork(work, after), [leaf for below in leaves for leaf in below]

    graph, leaves = build(tree if isinstance(tree, tuple) else (tree,))
    flat = expand(graph)
    assert [piece for piece in flat.work if piece is not do_nothing] == leaves
    reached: list[set[Work]] = []
    for before in flat.after:
        reached.append({*(flat.work[at] for at in before), *(p for at in before for p in reached[at])})
    place = {piece: at for at, piece in enumerate(flat.work)}
    assert all(earlier in reached[place[later]] for earlier, later in needs)


@pytest.mark.parametrize("schedule", [None, *range(8)])
def test_events_of_a_graph_order_it_with_other_streams(schedule: int | None) -> None:
    device = EmulatorDevice(schedule=schedule)
    ours, theirs = device.stream(), device.stream()
    start, end = device.event(), device.event()
    seen: list[str] = []
    device.submit("host", theirs, noting(seen, "before"))
    theirs.record(reuse=start)
    graph = GraphWork(
        [EventWait(start), noting(seen, "inside"), EventRecord(end), noting(seen, "late")],
        [(), (0,), (1,), (2,)],
    )
    before = end.recorded
    assert device.executable(graph).prepare(ours)() == (0,)
    assert (before, end.recorded) == (False, True)
    theirs.wait(end)
    device.submit("host", theirs, noting(seen, "after"))
    theirs.synchronize()
    assert [each for each in seen if each != "late"] == ["before", "inside", "after"]
    device.synchronize()
    assert sorted(seen) == ["after", "before", "inside", "late"]


def test_work_that_does_not_depend_on_an_event_does_not_wait_for_it() -> None:
    found = set()
    for seed in SEEDS:
        device = EmulatorDevice(schedule=seed)
        ours, theirs, event = device.stream(), device.stream(), device.event()
        seen: list[str] = []
        device.submit("host", theirs, noting(seen, "before"))
        theirs.record(reuse=event)
        work: list[Work] = [EventWait(event), noting(seen, "after"), noting(seen, "free")]
        device.executable(GraphWork(work, [(), (0,), ()])).prepare(ours)()
        ours.synchronize()
        found.add(tuple(seen))
    assert {order for order in found if order[0] == "free"}
    assert all(order.index("before") < order.index("after") for order in found)


@pytest.mark.parametrize("schedule", [None, 1, 2])
def test_a_graph_frees_what_another_graph_has_allocated(schedule: int | None) -> None:
    device = EmulatorDevice(schedule=schedule)
    stream = device.stream()
    made = device.allocator.graph_allocation(64)
    allocate = device.executable(GraphWork([made], [()])).prepare(stream)
    free = device.executable(GraphWork([device.allocator.graph_free(made)], [()])).prepare(stream)
    assert free() == (1,)  # It is not allocated.
    for _ in range(3):
        assert allocate() == (0,)
        assert allocate() == (1,)
        device.synchronize()
        assert device.allocator.graph_bytes() == 64
        device.allocator.trim_graphs()
        assert device.allocator.graph_bytes() == 64
        assert free() == (0,)
        device.synchronize()
        assert (device.allocator.graph_bytes(), device.allocator.used) == (64, 0)
    device.allocator.trim_graphs()
    assert device.allocator.graph_bytes() == 0
    assert device.allocator.max_graph_bytes == 64


def test_a_new_graph_uses_memory_of_graphs_that_are_gone() -> None:
    device = EmulatorDevice()
    stream = device.stream()
    for size in (64, 32, 128):
        made = device.allocator.graph_allocation(size)
        work: list[Work] = [made, device.allocator.graph_free(made)]
        device.executable(GraphWork(work, [(), (0,)])).prepare(stream)()
        assert device.allocator.graph_bytes() == size
        del made, work


def test_an_executable_takes_other_work_for_later_replays() -> None:
    device = EmulatorDevice(schedule=1)
    stream, seen = device.stream(), list[str]()
    executable = device.executable(GraphWork([noting(seen, "old")], [()]))
    replay = executable.prepare(stream)
    replay()
    executable.renew(GraphWork([noting(seen, "new")], [()]))
    replay()
    stream.synchronize()
    assert seen == ["old", "new"]
    executable.close()
    assert replay() == (400,)
