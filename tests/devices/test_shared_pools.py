"""Graphs that share the memory of another library, on deferred streams beside stand-ins for torch."""
# ruff: noqa: PT012  (a capture that fails has a body of several statements)

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from preheat.devices.libraries import LIBRARIES, StreamHandle
from preheat.errors import CaptureError, InputError
from preheat.graph import trees
from preheat.graph.graph import Graph
from preheat.graph.libraries import SharedPool
from tests.conftest import needs_native_core
from tests.devices.ordering import N, World, every_schedule
from tests.graph.support import BodyError
from tests.standin import FakeTorch, introduce


def step(torch: FakeTorch, x: Any, y: Any, value: int) -> None:
    """Do the work of a model: intermediate tensors that it drops, and a result in `y`."""
    hidden = torch.full(N, value)
    more = torch.empty(N).copy_(hidden)
    y.copy_(more)
    x.copy_(more)


def capture(world: World, pool: Any, x: Any, y: Any, value: int) -> Graph:
    with world.gpu.capture(pool=pool) as graph:
        step(world.torch, x, y, value)
    return graph


def bytes_of_pools(torch: FakeTorch) -> int:
    return sum(segment["total_size"] for segment in torch.pools.snapshot())


one_schedule = pytest.mark.parametrize("world", [3], indirect=True)
KINDS = ["shared", "mempool", "id"]


def make(world: World, kind: str) -> Any:
    """Return a pool to share, in each of the forms that `pool=` takes."""
    cuda = world.torch.module.cuda
    return {
        "shared": world.gpu.shared_pool,
        "mempool": cuda.MemPool,
        "id": cuda.graph_pool_handle,
    }[kind]()


@pytest.mark.parametrize("kind", KINDS)
@every_schedule
def test_graphs_with_one_pool_need_the_memory_of_one(world: World, kind: str) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    before = bytes_of_pools(world.torch)
    pool = make(world, kind)
    first = capture(world, pool, x, y, 1)
    one = bytes_of_pools(world.torch) - before
    graphs = [first, *(capture(world, pool, x, y, value) for value in range(2, 17))]
    assert bytes_of_pools(world.torch) - before == one > 0
    for value, graph in enumerate(graphs, start=1):
        graph.replay()
        assert y.tolist() == [value] * N
    separate = [capture(world, None, x, y, value) for value in range(4)]
    assert bytes_of_pools(world.torch) - before == 5 * one
    del separate


@every_schedule
def test_replays_of_graphs_with_one_pool_are_ordered_in_any_streams(world: World) -> None:
    """The stand-in works in another stream at each replay, and does not order these streams."""
    torch = world.torch
    pool = world.gpu.shared_pool()
    results = [torch.full(N, 0) for _ in range(4)]
    others = [torch.full(N, 0) for _ in range(4)]
    torch.device.synchronize()
    graphs = [capture(world, pool, others[at], results[at], at + 1) for at in range(4)]
    streams = [torch.new_stream() for _ in graphs]
    for _ in range(2):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.stream(stream):
                graph.replay()
        for at, stream in enumerate(streams):
            with torch.stream(stream):
                assert results[at].tolist() == [at + 1] * N
    own = world.gpu.stream()
    for at, graph in enumerate(graphs):
        graph.replay(stream=own if at % 2 else StreamHandle(streams[at].handle))
    for at, stream in enumerate(streams):
        torch.order(stream)
        assert results[at].tolist() == [at + 1] * N


@needs_native_core
@one_schedule
def test_replays_of_siblings_in_one_stream_take_the_short_path(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(LIBRARIES, world.cupy.name)  # The path is for graphs of one library.
    x, y = (world.torch.full(N, 0) for _ in range(2))
    pool = world.gpu.shared_pool()
    graphs = [capture(world, pool, x, y, value) for value in (1, 2, 3)]
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    replayers = [graph._replayer for graph in graphs]
    assert all(each is not None and each.launch is not None for each in replayers)
    with world.torch.stream(world.torch.new_stream()):
        graphs[0].replay()  # The others have to wait for it.
    for value, graph in enumerate(graphs, start=1):
        graph.replay()
        assert y.tolist() == [value] * N


@every_schedule
def test_a_closed_graph_leaves_the_memory_of_its_siblings_alone(world: World) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    pool = world.gpu.shared_pool()
    first, second = (capture(world, pool, x, y, value) for value in (1, 2))
    del pool
    first.replay()
    first.close()
    del first
    gc.collect()
    world.gpu.synchronize()
    strangers = [world.torch.full(N, 9) for _ in range(8)]  # They would get memory of the pool.
    second.replay()
    assert y.tolist() == [2] * N
    assert all(each.tolist() == [9] * N for each in strangers)


@pytest.mark.parametrize("kind", KINDS)
@one_schedule
def test_the_pool_ends_with_its_last_user(world: World, kind: str) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    pool = make(world, kind)
    graphs = [capture(world, pool, x, y, value) for value in (1, 2)]
    assert bytes_of_pools(world.torch) > 0
    ids = list(world.torch.pools.users)
    if kind != "id":
        del pool
    graphs.pop().close()
    gc.collect()
    world.gpu.synchronize()
    world.gpu.synchronize()
    assert bytes_of_pools(world.torch) > 0
    graphs.pop().close()
    gc.collect()
    world.gpu.synchronize()
    world.gpu.synchronize()
    assert bytes_of_pools(world.torch) == 0
    if kind == "id":  # torch accepts an id without users never again.
        assert [world.torch.pools.users[each] for each in ids] == [0]
        with pytest.raises(InputError, match="has ended with the last graph"):
            capture(world, pool, x, y, 3)


@pytest.mark.parametrize("kind", KINDS)
@one_schedule
def test_a_pool_that_is_dropped_inside_a_capture_ends_after_it(world: World, kind: str) -> None:
    """Where torch ends a pool, it waits for the GPU, and no capture survives that."""
    x, y = (world.torch.full(N, 0) for _ in range(2))
    pool = make(world, kind)
    graph = capture(world, pool, x, y, 1)
    with world.gpu.capture() as other:
        x.fill_(1)
        graph.close()
        del graph, pool
        gc.collect()
        assert bytes_of_pools(world.torch) > 0
    world.gpu.synchronize()
    world.gpu.synchronize()
    assert bytes_of_pools(world.torch) == 0
    other.replay()
    assert x.tolist() == [1] * N


@one_schedule
def test_one_pool_of_torch_is_one_pool_in_whatever_form_it_is_given(world: World) -> None:
    from preheat.graph.libraries import capture_memory

    context = world.gpu._context
    pool = world.torch.module.cuda.MemPool()
    first = capture_memory(pool, context)
    assert isinstance(first, SharedPool)
    assert capture_memory(pool, context) is first
    assert capture_memory(pool.id, context) is first
    assert capture_memory(first, context) is first
    assert capture_memory(world.torch.module.cuda.MemPool(), context) is not first


@one_schedule
def test_a_capture_that_fails_leaves_the_pool_usable(world: World) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    pool = world.torch.module.cuda.MemPool()
    shared = world.gpu.shared_pool()
    for each in (pool, shared):
        with pytest.raises(BodyError), world.gpu.capture(pool=each):
            step(world.torch, x, y, 1)
            raise BodyError
        with pytest.raises(CaptureError), world.gpu.capture(pool=each):
            step(world.torch, x, y, 1)
            world.gpu.synchronize()
        graph = capture(world, each, x, y, 2)
        graph.replay()
        assert y.tolist() == [2] * N
    assert world.torch.pools.users[pool.id] == 1


@every_schedule
def test_a_cache_shares_its_pool_among_all_keys_and_evicts_one_at_a_time(world: World) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    graphs = world.gpu.graphs(3, pool=world.gpu.shared_pool())
    before = bytes_of_pools(world.torch)
    sizes = []
    for value in [1, 2, 3, 4, 5, 1, 2] * 2:
        graphs.run(value, lambda value=value: step(world.torch, x, y, value))  # type: ignore[misc]
        assert y.tolist() == [value] * N
        sizes.append(bytes_of_pools(world.torch) - before)
    assert len(graphs) == 3
    assert {size for size in sizes if size} == {max(sizes)}


@every_schedule
def test_copies_of_results_are_made_before_a_sibling_overwrites_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the second graph lies where the first one has a tensor of its own."""
    torch = world.torch
    monkeypatch.setitem(trees._CLONES, torch.name, "clone")

    def first() -> Any:
        hidden, out = torch.full(N, 1), torch.empty(N)
        return out.copy_(hidden)

    def second() -> Any:
        return torch.full(N, 2)

    graphs = world.gpu.graphs(pool=world.gpu.shared_pool())
    graphs.warm([1], lambda _: first())
    graphs.warm([2], lambda _: second())
    torch.device.synchronize()
    streams = [torch.new_stream(), torch.new_stream()]
    for _ in range(4):
        with torch.stream(streams[0]):
            copied = graphs.run(2, second, copy=True)
        with torch.stream(streams[1]):
            graphs.run(1, first)
        with torch.stream(streams[0]):
            assert copied.tolist() == [2] * N


@one_schedule
def test_graphed_functions_take_a_pool(world: World) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))

    @world.gpu.graphed(key=lambda value: value, pool=world.torch.module.cuda.graph_pool_handle())
    def run(value: int) -> None:
        step(world.torch, x, y, value)

    for value in (1, 2, 1, 2, 1, 2):
        run(value)
        assert y.tolist() == [value] * N
    assert len(run.graphs) == 2


@every_schedule
def test_tensors_that_a_kernel_of_ours_uses_inside_are_shared_too(world: World) -> None:
    y = world.torch.full(N, 0)
    pool = world.gpu.shared_pool()
    before = bytes_of_pools(world.torch)

    def capture(value: int) -> Graph:
        with world.gpu.capture(pool=pool) as graph:
            hidden = world.torch.empty(N)
            world.put[1, 64](hidden, value, N)
            world.copy[1, 64](hidden, y, N)
        return graph

    graphs = [capture(1)]
    one = bytes_of_pools(world.torch) - before
    graphs += [capture(value) for value in (2, 3, 4)]
    assert bytes_of_pools(world.torch) - before == one > 0
    streams = [world.gpu.stream() for _ in graphs]
    for _ in range(2):
        for value, (graph, stream) in enumerate(zip(graphs, streams, strict=True), start=1):
            graph.replay(stream=stream)
            assert y.tolist() == [value] * N


@one_schedule
def test_captures_with_one_pool_take_turns(world: World) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    pool = world.gpu.shared_pool()
    began, entered = threading.Event(), threading.Event()
    graphs: list[Graph] = []

    def other() -> None:
        began.set()
        graph = world.gpu.capture(pool=pool).begin()
        entered.set()
        world.torch.fill(y.data_ptr(), N, 2)
        graphs.append(graph.end())

    first = world.gpu.capture(pool=pool).begin()
    world.torch.fill(y.data_ptr(), N, 1)
    thread = threading.Thread(target=other)
    thread.start()
    assert began.wait(300)
    assert not entered.wait(0.1)
    first.end()
    thread.join(300)
    assert entered.is_set()
    for value, graph in enumerate((first, *graphs), start=1):
        graph.replay()
        assert y.tolist() == [value] * N
    del x


@one_schedule
def test_a_capture_whose_thread_has_ended_gives_its_turn_up(world: World) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    pool = world.gpu.shared_pool()
    left: list[Graph] = []
    thread = threading.Thread(target=lambda: left.append(world.gpu.capture(pool=pool).begin()))
    thread.start()
    thread.join(300)
    world.torch.current = world.torch.default  # The thread left the stand-in in the captured stream.
    graph = capture(world, pool, x, y, 5)
    graph.replay()
    assert y.tolist() == [5] * N


@one_schedule
def test_a_capture_inside_another_is_refused_and_waits_for_nothing(world: World) -> None:
    pool = world.gpu.shared_pool()
    with pytest.raises(CaptureError, match="capturing already"), world.gpu.capture(pool=pool):
        world.gpu.capture(pool=pool).begin()


@one_schedule
def test_what_is_no_memory_pool_is_refused(world: World) -> None:
    for wrong in (7, "pool", object(), (1, 2, 3), (1.0, 2.0)):
        with pytest.raises(InputError, match="is not a pool of memory"):
            world.gpu.capture(pool=wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="is not a pool of memory"):
            world.gpu.graphs(pool=wrong)  # type: ignore[arg-type]


@one_schedule
def test_a_pool_of_a_library_that_is_imported_later_is_shared(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = world.gpu.shared_pool()
    assert repr(pool).startswith("<SharedPool of no library on emulator:")
    late = FakeTorch(world.gpu, "latetorch")
    introduce(late, monkeypatch)
    y = late.full(N, 0)
    graphs = []
    for value in (1, 2):
        with world.gpu.capture(pool=pool) as graph:
            late.copy(y.data_ptr(), late.full(N, value).data_ptr(), N)
        graphs.append(graph)
    assert "latetorch" in repr(pool)
    assert len(late.pools.snapshot()) == 1
    for value, graph in enumerate(graphs, start=1):
        graph.replay()
        assert y.tolist() == [value] * N
