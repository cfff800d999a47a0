"""Graphs of one torch model that share a memory pool of torch, and torch's side streams in captures."""
# ruff: noqa: PT012  (a capture that fails has a body of several statements)

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.errors import CaptureError, InputError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.graph.libraries import SharedPool
from tests.interop.support import SLOW, N, Torch, Work, distinct

pytestmark = pytest.mark.gpu

SIZES = range(16, 257, 16)
WIDTH = 2048
POOLS: dict[str, Callable[[Gpu, Any], Any]] = {
    "gpu.shared_pool()": lambda gpu, _: gpu.shared_pool(),
    "MemPool": lambda _, torch: torch.cuda.MemPool(),
    "graph_pool_handle": lambda _, torch: torch.cuda.graph_pool_handle(),
}
every_pool = pytest.mark.parametrize("kind", POOLS)


class Model:
    """An MLP with inputs of 16 batch sizes; its hidden tensors are much larger than its result."""

    def __init__(self, gpu: Gpu, torch: Any) -> None:
        self.gpu, self.torch = gpu, torch
        torch.manual_seed(0)
        nn = torch.nn
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.layers = nn.Sequential(up, nn.GELU(), down, nn.Linear(WIDTH, 8)).cuda().eval()
        self.inputs = {size: torch.randn(size, WIDTH, device="cuda") for size in SIZES}
        self.expected = {size: self(size).clone() for size in SIZES}
        torch.cuda.synchronize()

    def __call__(self, size: int) -> Any:
        with self.torch.no_grad():
            return self.layers(self.inputs[size])

    def check(self, size: int, found: Any) -> None:
        np.testing.assert_allclose(
            found.cpu().numpy(), self.expected[size].cpu().numpy(), rtol=1e-3, atol=1e-3
        )

    def reserved(self) -> int:
        gc.collect()
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        return int(self.torch.cuda.memory_reserved())


@pytest.fixture
def model(gpu: Gpu, torch_peer: Torch) -> Model:
    return Model(gpu, torch_peer.module)


@every_pool
def test_16_graphs_of_a_model_need_about_the_memory_of_one(kind: str, model: Model) -> None:
    before = model.reserved()
    shared = model.gpu.graphs(len(SIZES), pool=POOLS[kind](model.gpu, model.torch))
    shared.warm(SIZES, model)
    with_one = model.reserved() - before
    separate = model.gpu.graphs(len(SIZES))
    separate.warm(SIZES, model)
    with_many = model.reserved() - before - with_one
    assert 0 < with_one < with_many / 2
    for graphs in (shared, separate, shared):
        for size in (*SIZES, *reversed(SIZES)):
            model.check(size, graphs.run(size, lambda size=size: model(size)))  # type: ignore[misc]


@every_pool
def test_replays_in_two_streams_of_torch_do_not_overwrite_each_other(kind: str, model: Model) -> None:
    torch = model.torch
    graphs = model.gpu.graphs(2, pool=POOLS[kind](model.gpu, torch))
    sizes = (256, 240)
    graphs.warm(sizes, model)
    streams = {size: torch.cuda.Stream() for size in sizes}
    torch.cuda.synchronize()
    for _ in range(20):
        kept = {}
        for size, stream in streams.items():
            with torch.cuda.stream(stream):
                kept[size] = graphs.run(size, lambda size=size: model(size), copy=True)  # type: ignore[misc]
        torch.cuda.synchronize()
        for size, found in kept.items():
            model.check(size, found)


def test_the_memory_of_a_pool_goes_back_with_its_last_graph(model: Model) -> None:
    # The workspaces of cuBLAS are memory of whichever capture came first.
    clear_workspaces = model.torch._C._cuda_clearCublasWorkspaces
    clear_workspaces()
    before = model.reserved()
    graphs = model.gpu.graphs(4, pool=model.gpu.shared_pool())
    graphs.warm((256, 128), model)
    peak = model.reserved()
    assert peak > before
    graphs.invalidate(256)
    model.gpu.synchronize()
    model.check(128, graphs.run(128, lambda: model(128)))
    graphs.invalidate()
    del graphs
    gc.collect()
    for _ in range(2):
        model.gpu.synchronize()
    clear_workspaces()
    assert model.reserved() - before < (peak - before) / 2


def test_a_capture_that_fails_leaves_a_pool_of_torch_usable(model: Model) -> None:
    pool = model.torch.cuda.MemPool()
    with pytest.raises(CaptureError), model.gpu.capture(pool=pool):
        model(16)
        model.gpu.synchronize()
    with model.gpu.capture(pool=pool) as graph:
        found = model(16)
    graph.replay()
    model.check(16, found)


def test_one_pool_of_torch_is_known_by_its_id(model: Model) -> None:
    from preheat.graph.libraries import capture_memory

    pool = model.torch.cuda.MemPool()
    first = capture_memory(pool, model.gpu._context)
    assert isinstance(first, SharedPool)
    assert capture_memory(pool.id, model.gpu._context) is first


def test_an_id_whose_last_graph_is_gone_is_refused(model: Model) -> None:
    handle = model.torch.cuda.graph_pool_handle()
    with model.gpu.capture(pool=handle) as graph:
        model(16)
    graph.replay(synchronize=True)
    graph.close()
    del graph
    gc.collect()
    for _ in range(2):
        model.gpu.synchronize()
    with (
        pytest.raises(InputError, match="has ended with the last graph"),
        model.gpu.capture(pool=handle),
    ):
        model(16)


# Side streams


def test_a_side_stream_of_torch_is_a_branch_of_the_graph(gpu: Gpu, torch_peer: Torch) -> None:
    torch = torch_peer.module
    x, y, z = (torch.zeros(N, device="cuda") for _ in range(3))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with gpu.capture() as graph:
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW // 10)
            y.add_(x)
        z.add_(x)
        torch.cuda.current_stream().wait_stream(side)
        z.add_(y)
    assert [len(node.after) for node in graph.nodes] == [0, 1, 1, 1, 2]
    for turn in (1, 2, 3):
        graph.replay()
        total = sum(range(1, turn + 1))
        assert distinct(torch_peer.host(x)) == {float(turn)}
        assert distinct(torch_peer.host(y)) == {float(total)}
    assert distinct(torch_peer.host(z)) == {1.0 + 2.0 + 3.0 + 1.0 + 3.0 + 6.0}


def test_kernels_of_preheat_follow_torch_into_its_side_stream(work: Work, torch_peer: Torch) -> None:
    torch = torch_peer.module
    x, y = (torch.zeros(N, device="cuda") for _ in range(2))
    own, shared = work.gpu.zeros(N), work.gpu.zeros(N)
    view = torch_peer.take(shared)
    side = torch.cuda.Stream()
    work.copy(x, y)
    work.put(own, 0.0)
    work.gpu.synchronize()
    with work.gpu.capture() as graph:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW // 10)
            x.add_(1)
            work.copy(x, y)  # in the side stream
            view.copy_(x)
            work.copy(shared, own)  # waits for the side stream, because torch has the array
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        x.add_(1)
    for turn in (0, 1, 2):
        graph.replay()
        assert distinct(torch_peer.host(y)) == {3.0 * turn + 1}
        assert distinct(own.numpy()) == {3.0 * turn + 1}
        assert distinct(torch_peer.host(x)) == {3.0 * turn + 3}


def test_side_streams_of_preheat_are_branches_of_a_graph(work: Work) -> None:
    gpu = work.gpu
    a, b, c = (gpu.zeros(N) for _ in range(3))
    side = gpu.stream()
    with gpu.capture() as graph:
        work.put(a, 1.0)
        side.wait(gpu.record())
        work.linger(side, SLOW // 10)
        work.copy(a, b, side)
        work.put(c, 2.0)  # beside the branch
        work.copy(b, c)  # waits for it
        gpu.wait(side)
    assert [node.after for node in graph.nodes] == [(), (0,), (1,), (0,), (2, 3)]
    for _ in range(3):
        b.fill(9)
        graph.replay()
        assert distinct(c.numpy()) == {1.0}


def test_a_side_stream_that_torch_does_not_join_is_an_error(gpu: Gpu, torch_peer: Torch) -> None:
    torch = torch_peer.module
    x = torch.zeros(N, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph: Graph = gpu.capture().begin()
    x.add_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    with pytest.raises(CaptureError, match="another library forked a stream"):
        graph.end()
    x.add_(1)
    with torch.cuda.stream(side):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        x.add_(1)
    side.synchronize()
    assert distinct(torch_peer.host(x)) == {2.0}
