"""Work of preheat inside captures of other libraries.

Every test runs over several schedules. The other libraries are stand-ins that speak the protocols of
torch and CuPy: see `tests.standin`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from preheat.devices.libraries import StreamHandle, Torch
from preheat.errors import CaptureError
from tests.devices.ordering import SOURCE, N, World, every_schedule

# Captures of other libraries


class Capture(NamedTuple):
    """A capture that another library began, and what was captured."""

    stream: Any
    end: Callable[[], Any]


def begin(world: World) -> Capture:
    stream = world.torch.new_stream()
    stream.begin_capture("global")
    return Capture(stream, stream.end_capture)


@every_schedule
def test_launches_on_its_tensors_become_part_of_another_librarys_capture(world: World) -> None:
    x, y = world.torch.full(N, 1), world.torch.full(N, 0)
    for _ in range(4):
        world.copy[1, 64](x, y, N)
    for cold in (True, False):
        capture = begin(world)
        with world.torch.stream(capture.stream):
            launch = world.gpu.kernel(SOURCE, "copy")[1, 60] if cold else world.copy[1, 64]
            launch(x, y, N)
        graph = capture.end()
        assert len(graph.nodes()) == 1
        replay = graph.instantiate().prepare(world.torch.default)
        for value in (3, 4):
            x.fill_(value)
            replay()
            assert y.tolist() == [value] * N


@every_schedule
def test_a_graph_on_its_tensors_is_not_replayed_inside_another_librarys_capture(world: World) -> None:
    x = world.torch.full(N, 0)
    graph = world.captured_put(x, 5)
    stream = world.torch.new_stream()
    for _ in range(3):
        with world.torch.stream(stream):
            graph.replay()
    stream.begin_capture("global")
    with world.torch.stream(stream), pytest.raises(CaptureError, match="another library's capture"):
        graph.replay()
    assert stream.end_capture().num_nodes() == 0
    with world.torch.stream(stream):
        x.fill_(0)
        graph.replay()
        assert x.tolist() == [5] * N


@every_schedule
def test_a_graph_is_destroyed_after_the_capture_of_the_stream_of_its_last_replay(world: World) -> None:
    x = world.torch.full(N, 0)
    graph = world.captured_put(x, 5)
    stream = world.torch.new_stream()
    with world.torch.stream(stream):
        world.torch.order(world.torch.default)
        graph.replay()
        graph.replay()
    stream.begin_capture("global")
    graph.close()
    assert stream.end_capture().num_nodes() == 0
    world.gpu.synchronize()
    assert x.tolist() == [5] * N
    assert not world.gpu._context.deferred_cleanups


@every_schedule
def test_arrays_of_preheat_are_refused_in_another_librarys_capture_which_survives(world: World) -> None:
    a = world.zeros()
    x = world.torch.full(N, 1)
    given = world.zeros()
    world.torch.from_dlpack(given)
    gc.collect()
    held = world.torch.from_dlpack(given)
    capture = begin(world)
    with world.torch.stream(capture.stream):
        for refused in (
            lambda: world.copy[1, 64](a, x, N),
            lambda: world.torch.from_dlpack(a),
            lambda: given.fill(3),
            lambda: given.numpy(),
            lambda: world.set(given, 4),
            lambda: world.gpu.synchronize(),
        ):
            with pytest.raises(CaptureError) as caught:
                refused()
            assert caught.value.hint
        world.put[1, 64](x, 6, N)
        world.set(a, 8)  # in a stream of preheat, which the capture does not affect
        world.gpu.empty(N).close()
    graph = capture.end()
    graph.instantiate().prepare(world.torch.default)()
    assert x.tolist() == [6] * N
    assert a.numpy().tolist() == [8] * N
    assert held.tolist() == [0] * N


@every_schedule
def test_frees_wait_until_another_librarys_capture_is_over(world: World) -> None:
    a = world.zeros()
    t = world.torch.from_dlpack(a)
    t.fill_(1)
    capture = begin(world)
    with world.torch.stream(capture.stream):
        world.torch.full(N, 2)
        del a, t
        gc.collect()
        world.gpu.empty(N, "int32").fill(5)
        assert world.gpu._context.deferred_cleanups
    capture.end().close()
    world.gpu.empty(N, "int32")
    world.gpu.synchronize()
    assert not world.gpu._context.deferred_cleanups


# Several GPUs


def test_a_pool_of_torch_is_made_on_the_gpu_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    made = list[tuple[str, int]]()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before = current[0]
        current[0] = index
        yield
        current[0] = before

    def make() -> object:
        made.append(("pool", current[0]))
        return object()

    @contextmanager
    def use(_: object, device: int) -> Iterator[None]:
        made.append(("use", device))
        yield

    cuda = SimpleNamespace(
        device=device, MemPool=make, use_mem_pool=use, is_initialized=lambda: True,
        ExternalStream=lambda handle, device: (handle, device), stream=lambda _: nullcontext(),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "othertorch", SimpleNamespace(cuda=cuda))
    library = Torch("othertorch")
    pools = []
    for index in (1, 0, 1):
        with ExitStack() as stack:
            pools.append(library.redirect(stack, StreamHandle(7), index))
        if index == 1:
            library.keep_unused_pool(pools[-1], index)
    assert made == [("pool", 1), ("use", 1), ("pool", 0), ("use", 0), ("use", 1)]
    assert pools[2] is pools[0]  # The pool that was kept is of the same GPU.
