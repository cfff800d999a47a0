"""The order of uses, beside other libraries: on deferred streams a missing wait is a wrong number.

Every test runs over several schedules. The other libraries are stand-ins that speak the protocols of
torch and CuPy: see `tests.standin`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from preheat.build.builder import Builder
from preheat.devices.emulator.device import EmulatorDevice
from preheat.errors import CaptureError, LaunchError
from preheat.gpu import Gpu
from preheat.runtime.array import Array
from preheat.runtime.kernel import Kernel
from preheat.runtime.libraries import StreamHandle, Torch
from preheat.runtime.operands import strided, tensor_kind
from tests.standin import FakeCuPy, FakeTorch, introduce

pytestmark = pytest.mark.usefixtures("frozen_heap")  # many tests here collect

N = 33
SEEDS = range(40 if os.environ.get("PREHEAT_TEST_ALL") else 4)
SOURCE = """
extern "C" __global__ void put(int* x, int value, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = value;
}
extern "C" __global__ void copy(const int* x, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void spread(const int* s, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = *s;
}
"""


class World(NamedTuple):
    """A device with deferred streams, and two other libraries that work on it."""

    gpu: Gpu
    torch: FakeTorch
    cupy: FakeCuPy
    put: Kernel
    copy: Kernel
    spread: Kernel

    def set(self, x: Any, value: int, stream: object = None) -> None:
        """Set every number of an array, by a kernel."""
        self.put.launch(x, value, N, grid=1, block=64, stream=stream)

    def read(self, x: Any, stream: object = None) -> list[int]:
        """What a kernel sees in an array."""
        out = self.gpu.zeros(N, "int32")
        self.copy.launch(x, out, N, grid=1, block=64, stream=stream)
        return [int(n) for n in out.numpy()]

    def zeros(self, **more: Any) -> Array:
        """An array of ours that launches have used, so that they take the short path from here on."""
        made = self.gpu.zeros(N, "int32", **more)
        self.warm(made)
        return made

    def warm(self, x: Any) -> None:
        """Launch the kernels on an array until they take the short path."""
        out = self.gpu.zeros(N, "int32")
        for _ in range(4):
            self.put[1, 64](x, 0, N)
            self.copy[1, 64](x, out, N)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, shared_builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    gpu = Gpu(EmulatorDevice(0, "sm_90", schedule=request.param), shared_builder)
    torch, cupy = FakeTorch(gpu), FakeCuPy(gpu)
    introduce(torch, monkeypatch)
    introduce(cupy, monkeypatch)
    kernels = (gpu.kernel(SOURCE, name) for name in ("put", "copy", "spread"))
    yield World(gpu, torch, cupy, *kernels)
    gpu.synchronize()
    gpu.close()


every_schedule = pytest.mark.parametrize("world", SEEDS, indirect=True)
every_consumer = pytest.mark.parametrize("consumer", ["torch", "cupy"])


def shared(world: World, consumer: str, array: Array) -> Any:
    """The array as another library has it."""
    return world.torch.from_dlpack(array) if consumer == "torch" else world.cupy.asarray(array)


def fill(tensor: Any, value: int) -> None:
    """Fill a tensor by its own library."""
    (tensor.fill_ if hasattr(tensor, "fill_") else tensor.fill)(value)


def is_shared(array: Array) -> bool:
    """Whether another library may use the memory at any time."""
    return array.buffer.uses.shared


# Streams of ours


@every_schedule
def test_a_stream_waits_for_every_write_before_it(world: World) -> None:
    x, side = world.zeros(), world.gpu.stream()
    for value in (1, 2, 3):
        world.set(x, value)
        assert world.read(x, side) == [value] * N
        world.set(x, value + 10, side)
        assert world.read(x) == [value + 10] * N


@every_schedule
def test_a_write_waits_for_reads_in_other_streams(world: World) -> None:
    x, outs = world.zeros(), [world.zeros() for _ in range(3)]
    sides = [world.gpu.stream() for _ in outs]
    world.set(x, 5)
    for side, out in zip(sides, outs, strict=True):
        world.copy.launch(x, out, N, grid=1, block=64, stream=side)
    world.set(x, 6)
    assert [out.numpy().tolist() for out in outs] == [[5] * N] * 3


@every_schedule
def test_a_write_waits_for_reads_in_streams_of_other_libraries(world: World) -> None:
    outs = []
    for value in range(5):
        x, out = world.zeros(), world.zeros()
        world.set(x, value)
        theirs = StreamHandle(world.cupy.default.handle if value % 2 else world.torch.default.handle)
        world.copy.launch(x, out, N, grid=1, block=64, stream=theirs)
        world.set(x, 77)
        outs.append(out)
    assert [out.numpy().tolist() for out in outs] == [[value] * N for value in range(5)]


@every_schedule
def test_a_reader_that_writes_later_waits_for_the_other_readers(world: World) -> None:
    x, one, two = world.zeros(), world.zeros(), world.zeros()
    side, theirs = world.gpu.stream(), StreamHandle(world.torch.default.handle)
    for first in (world.gpu.stream(), theirs):
        for value in (5, 6, 7):
            world.set(x, value)
            world.copy.launch(x, one, N, grid=1, block=64, stream=first)
            world.copy.launch(x, two, N, grid=1, block=64, stream=side)
            world.set(x, 77, side)
            assert one.numpy().tolist() == [value] * N


@every_schedule
def test_later_work_in_the_home_stream_is_noticed(world: World) -> None:
    side = world.gpu.stream()
    x = world.zeros(stream=side)
    for value in (1, 2, 3):
        world.set(x, value, side)
        assert world.read(x) == [value] * N


@every_schedule
def test_a_bound_launch_and_a_replay_notice_work_in_other_streams(world: World) -> None:
    x, out, side = world.zeros(), world.zeros(), world.gpu.stream()
    bound = world.copy.bind(x, out, N, grid=1, block=64)
    bound()
    with world.gpu.capture() as graph:
        world.copy[1, 64](x, out, N)
    for run in (bound, graph.replay, bound, graph.replay):
        run()
        world.set(x, 1, side)
        run()
        world.set(x, 2, side)
        assert out.numpy().tolist() == [1] * N


@every_schedule
def test_memory_is_freed_after_its_uses_in_other_streams(world: World) -> None:
    outs, side = [], world.gpu.stream()
    for value in range(6):
        x = world.gpu.empty(N, "int32")
        out = world.gpu.empty(N, "int32")
        world.set(x, value)
        world.copy.launch(x, out, N, grid=1, block=64, stream=side)
        outs.append(out)
        del x
        world.gpu.empty(N, "int32").fill(99)
    assert [out.numpy().tolist() for out in outs] == [[value] * N for value in range(6)]


@every_schedule
def test_a_copy_and_a_fill_are_ordered_like_launches(world: World) -> None:
    x, y, side = world.zeros(), world.zeros(), world.gpu.stream()
    for value in (1, 2, 3):
        world.set(x, value, side)
        y.copy_from(x)
        x.fill(77)
        assert y.numpy().tolist() == [value] * N


@every_schedule
def test_scalars_of_replays_in_several_streams_reach_their_own_replay(world: World) -> None:
    step, side = world.gpu.scalar("int32", name="step"), world.gpu.stream()
    outs = [world.gpu.zeros(N, "int32") for _ in range(4)]
    graphs = []
    for out in outs:
        with world.gpu.capture() as graph:
            world.spread[1, 64](step, out, N)
        graphs.append(graph)
    for turn in range(3):
        for at, graph in enumerate(graphs):
            graph.replay(stream=side if at % 2 else None, step=10 * turn + at)
        assert [int(out.numpy()[0]) for out in outs] == [10 * turn + at for at in range(4)]


@every_schedule
@pytest.mark.parametrize("where", ["ours", "library"])
def test_a_scalar_that_is_set_in_a_stream_is_seen_by_what_follows_it(world: World, where: str) -> None:
    step, other = world.gpu.scalar("int32"), world.gpu.stream()
    side: Any = world.gpu.stream() if where == "ours" else StreamHandle(world.torch.default.handle)
    outs = [world.zeros() for _ in range(12)]
    with world.gpu.capture() as graph:
        world.spread[1, 64](step, outs[-1], N)
    for value, (one, two, three) in enumerate(zip(*[iter(outs[:9])] * 3, strict=True)):
        step.set(3 * value)
        world.spread.launch(step, one, N, grid=1, block=64, stream=other)
        step.set(3 * value + 1, stream=side)
        world.spread.launch(step, two, N, grid=1, block=64)
        step.set(3 * value + 2, stream=other)
        world.spread.launch(step, three, N, grid=1, block=64, stream=side)
    step.set(9, stream=side)
    graph.replay()  # which is queued when the next value is set, and must not see it
    step.set(10, stream=other)
    assert outs[-1].numpy().tolist() == [9] * N
    assert [out.numpy().tolist() for out in outs[:9]] == [[n] * N for n in range(9)]
    graph.replay()
    assert outs[-1].numpy().tolist() == [10] * N
    assert step.get() == 10


@every_schedule
def test_a_replay_on_the_short_path_notices_a_scalar_that_was_set_elsewhere(world: World) -> None:
    step, side, outs = world.gpu.scalar("int32", name="step"), world.gpu.stream(), world.zeros()
    with world.gpu.capture() as graph:
        world.spread[1, 64](step, outs, N)
    for value in range(4):
        graph.replay()
        graph.replay()
        step.set(value, stream=side)
        graph.replay()
        assert outs.numpy().tolist() == [value] * N
        graph.replay(step=value + 50)
        assert outs.numpy().tolist() == [value + 50] * N


@every_schedule
def test_a_scalar_is_not_set_in_a_stream_that_another_library_captures(world: World) -> None:
    step, stream = world.gpu.scalar("int32", 4), world.torch.default
    stream.begin_capture("relaxed")
    with pytest.raises(CaptureError, match="cannot be used inside another library's capture"):
        step.set(5, stream=StreamHandle(stream.handle))
    stream.end_capture().close()
    assert step.get() == 4


@every_schedule
def test_pieces_of_a_pool_are_handed_out_behind_their_uses(world: World) -> None:
    pool, side, outs = world.gpu.pool(1 << 12), world.gpu.stream(), []
    for value in range(5):
        x, out = pool.empty(N, "int32"), world.gpu.empty(N, "int32")
        world.set(x, value, side)
        world.copy.launch(x, out, N, grid=1, block=64, stream=side)
        outs.append(out)
        del x
        pool.empty(N, "int32").fill(99)
    pool.close()
    assert [out.numpy().tolist() for out in outs] == [[value] * N for value in range(5)]


@every_schedule
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_pool_is_freed_after_the_uses_of_its_pieces(world: World, how: str) -> None:
    outs, side = [], world.gpu.stream()
    for value in range(5):
        pool, out = world.gpu.pool(1 << 12), world.gpu.empty(N, "int32")
        x = pool.empty(N, "int32")
        world.set(x, value, side)
        world.copy.launch(x, out, N, grid=1, block=64, stream=side)
        outs.append(out)
        del x
        if how == "close":
            pool.close()
        del pool
        world.gpu.empty(1 << 12, "uint8").fill(99)
    assert [out.numpy().tolist() for out in outs] == [[value] * N for value in range(5)]


@every_schedule
def test_frames_of_a_pool_follow_one_another_in_any_stream(world: World) -> None:
    pool, side, outs = world.gpu.pool(1 << 12), world.gpu.stream(), []
    for value in range(5):
        out = world.gpu.empty(N, "int32")
        with pool.frame():
            x = pool.empty(N, "int32")
            stream = side if value % 2 else None
            world.set(x, value, stream)
            world.copy.launch(x, out, N, grid=1, block=64, stream=stream)
        outs.append(out)
    assert [out.numpy().tolist() for out in outs] == [[value] * N for value in range(5)]


# Memory given away


@every_consumer
@every_schedule
def test_uses_of_shared_memory_wait_for_its_consumer(world: World, consumer: str) -> None:
    a = world.zeros()
    t = shared(world, consumer, a)
    with world.gpu.capture() as graph:
        world.put[1, 64](a, 50, N)
    for value in (1, 2):
        fill(t, value)
        assert a.numpy().tolist() == [value] * N
        fill(t, value + 10)
        assert world.read(a) == [value + 10] * N
        world.set(a, value + 20)
        assert t.tolist() == [value + 20] * N
        a.fill(value + 30)
        assert t.tolist() == [value + 30] * N
        graph.replay()
        assert t.tolist() == [50] * N


@every_consumer
@every_schedule
def test_the_first_launch_after_an_export_leaves_the_short_path(world: World, consumer: str) -> None:
    for launch_reads in (True, False):
        a, out = world.zeros(), world.zeros()
        t = shared(world, consumer, a)
        if launch_reads:
            fill(t, 3)
            world.copy[1, 64](a, out, N)
            assert out.numpy().tolist() == [3] * N
        else:
            world.put[1, 64](a, 4, N)
            assert t.tolist() == [4] * N


@every_consumer
@every_schedule
def test_views_share_with_the_array(world: World, consumer: str) -> None:
    a = world.gpu.zeros(2 * N, "int32")
    t, half = shared(world, consumer, a), a[N:]
    world.warm(half)
    fill(t, 4)
    assert world.read(half) == [4] * N
    world.set(half, 5)
    assert t.tolist() == [4] * N + [5] * N


@every_schedule
def test_released_memory_is_ordered_for_every_later_stream(world: World) -> None:
    theirs, side = StreamHandle(world.cupy.new_stream().handle), world.gpu.stream()
    for value in (3, 4, 5):
        a = world.zeros()
        t = world.torch.from_dlpack(a)
        world.read(a)
        t.fill_(value)
        del t
        gc.collect()
        for stream in (theirs, side, None):  # Each one waits for the consumer, not only the first.
            assert world.read(a, stream) == [value] * N


@every_schedule
def test_an_export_waits_for_earlier_consumers(world: World) -> None:
    for held in (True, False):
        a = world.zeros()
        t = world.torch.from_dlpack(a)
        t.fill_(3)
        if not held:
            del t
            gc.collect()
        c = world.cupy.asarray(a)
        assert c.tolist() == [3] * N
    a = world.zeros()
    t = world.torch.from_dlpack(a).fill_(6)
    del t
    gc.collect()
    with world.torch.stream(world.torch.new_stream()):
        assert world.torch.from_dlpack(a).tolist() == [6] * N


@every_schedule
def test_a_library_that_waits_for_the_stream_of_an_interface_sees_all_earlier_uses(
    world: World,
) -> None:
    a, side, device = world.zeros(), world.gpu.stream(), world.gpu._device
    world.set(a, 5, side)
    theirs = device.stream()  # of a library that preheat does not know
    theirs.wait(device.adopt(a.__cuda_array_interface__["stream"]).record())
    with world.cupy.stream(theirs):
        assert world.cupy.read(a.address, N) == [5] * N


@pytest.mark.parametrize("world", [1], indirect=True)
def test_exports_that_come_and_go_leave_nothing_behind(world: World) -> None:
    a = world.zeros()
    for _ in range(50):
        t = world.torch.from_dlpack(a)
        del t
    gc.collect()
    assert len(a.buffer.uses.released_streams) <= 4
    free = world.gpu.memory().free
    a.close()  # It was exported and released, so it is freed.
    world.gpu.synchronize()
    assert world.gpu.memory().free > free


@every_schedule
def test_a_pool_waits_for_consumers_of_its_pieces(world: World) -> None:
    for _ in range(3):
        pool = world.gpu.pool(1 << 12)
        x = pool.empty(N, "int32")
        t = world.torch.from_dlpack(x)
        t.fill_(7)
        del t, x
        pool.close()
        world.gpu.empty(1 << 12, "uint8").fill(9)
    world.gpu.synchronize()


@every_schedule
def test_frames_that_grow_wait_for_who_had_the_memory(world: World) -> None:
    for captured in (False, True):
        pool, side = world.gpu.pool(1 << 12), world.gpu.stream()
        out = world.zeros()
        with pool.frame():
            world.set(pool.empty(N, "int32"), 1, side)
        piece = pool.empty(N, "int32")
        world.set(piece, 5)
        world.copy[1, 64](piece, out, N)
        del piece
        with pool.frame():
            pool.empty(N, "int32")
            more = pool.empty(N, "int32")  # where the piece was
            if captured:
                with world.gpu.capture() as graph:
                    world.set(more, 2)
                graph.replay(stream=side)
            else:
                world.set(more, 2, side)
        assert out.numpy().tolist() == [5] * N


@every_schedule
def test_released_memory_waits_once_for_where_its_consumer_worked(world: World) -> None:
    a = world.zeros()
    with world.torch.stream(world.torch.new_stream()):
        t = world.torch.from_dlpack(a)
        t.fill_(3)
        assert is_shared(a)
        del t
        gc.collect()
    assert world.read(a) == [3] * N
    assert not is_shared(a)
    world.set(a, 4)
    assert a.uses.writer is world.gpu._context.stream  # The short path is back.


@every_consumer
@every_schedule
def test_shared_memory_is_freed_after_its_consumer(world: World, consumer: str) -> None:
    results = []
    for value in range(4):
        a = world.gpu.empty(N, "int32")
        t = shared(world, consumer, a)
        fill(t, value)
        kept = world.torch.empty(N) if consumer == "torch" else world.cupy.empty(N)
        (kept.copy_ if consumer == "torch" else kept.copy_from)(t)
        results.append(kept)
        del a, t
        gc.collect()
        world.gpu.empty(N, "int32").fill(99)
    assert [kept.tolist() for kept in results] == [[value] * N for value in range(4)]


@every_schedule
def test_memory_that_was_given_away_never_takes_the_short_path(world: World) -> None:
    a = world.zeros()
    t = world.torch.from_dlpack(a)
    for _ in range(5):
        world.set(a, 1)
        assert a.uses.writer is None
        assert not a.uses.readers
    bound = world.put.bind(a, 2, N, grid=1, block=64)
    for _ in range(3):
        bound()
        assert t.tolist() == [2] * N
        t.fill_(1)


# Memory taken in


@every_schedule
def test_operands_are_ordered_with_their_librarys_current_stream(world: World) -> None:
    side, theirs = world.gpu.stream(), world.torch.new_stream()
    for stream in (None, side):
        for current in (world.torch.default, theirs):
            with world.torch.stream(current):
                x = world.torch.full(N, 3)
                assert world.read(x, stream) == [3] * N
                world.set(x, 4, stream)
                assert x.tolist() == [4] * N
                y = world.torch.empty(N)
                world.copy.launch(x, y, N, grid=1, block=64, stream=stream)
                x.fill_(9)
                assert y.tolist() == [4] * N


@every_schedule
def test_two_libraries_in_one_launch_are_ordered_with_both(world: World) -> None:
    x, y = world.torch.full(N, 3), world.cupy.full(N, 0)
    for value in (5, 6, 7):
        x.fill_(value)
        world.copy[1, 64](x, y, N)
        assert y.tolist() == [value] * N
        y.fill(value + 20)
        world.copy[1, 64](y, x, N)
        assert x.tolist() == [value + 20] * N


@every_schedule
def test_our_arrays_beside_tensors_are_ordered_in_every_direction(world: World) -> None:
    a, x = world.zeros(), world.torch.full(N, 0)
    for value in (1, 2, 3, 4):
        world.set(a, value)
        world.copy[1, 64](a, x, N)
        assert x.tolist() == [value] * N
        x.fill_(value + 10)
        world.copy[1, 64](x, a, N)
        x.fill_(77)
        assert a.numpy().tolist() == [value + 10] * N


@every_schedule
def test_a_subclass_of_a_tensor_is_a_tensor(world: World) -> None:
    class Parameter(world.torch.Tensor):  # type: ignore[misc, name-defined]
        """Defined outside its library, as serving frameworks do."""

    x = world.torch.full(N, 1)
    mine = Parameter(world.torch, x._storage, N)
    kind = tensor_kind(mine)
    assert kind is not None
    assert kind.source is world.torch.library
    for value in (2, 3, 4):
        world.put[1, 64](mine, value, N)
        assert x.tolist() == [value] * N


@every_schedule
def test_a_graph_keeps_the_memory_of_a_tensor_whose_data_was_replaced(world: World) -> None:
    x = world.torch.full(N, 0)
    world.put[1, 64](x, 1, N)
    with world.gpu.capture() as graph:
        world.put[1, 64](x, 5, N)
    graph.replay()
    x.set_data(world.torch.full(4, 0))
    others = [world.torch.full(N, 3) for _ in range(3)]
    graph.replay()
    assert [other.tolist() for other in others] == [[3] * N] * 3


@every_schedule
def test_an_operand_dropped_at_once_is_kept_until_the_launch_has_ended(world: World) -> None:
    outs, side = [], world.gpu.stream()
    for value in range(4):
        out = world.gpu.zeros(N, "int32")
        with world.torch.stream(world.torch.new_stream()):
            x = world.torch.full(N, value)
            current = world.torch.current
        world.torch.order(current)
        world.copy.launch(x, out, N, grid=1, block=64, stream=side)
        del x
        with world.torch.stream(current):  # where that memory is handed out again
            world.torch.full(N, 99)
        outs.append(out)
    assert [out.numpy().tolist() for out in outs] == [[value] * N for value in range(4)]


@every_schedule
def test_replays_are_ordered_with_the_libraries_of_their_operands(world: World) -> None:
    x, out = world.torch.full(N, 0), world.zeros()
    world.copy[1, 64](x, out, N)
    with world.gpu.capture() as graph:
        world.copy[1, 64](x, out, N)
        world.put[1, 64](x, 8, N)
    for value in (1, 2, 3):
        x.fill_(value)
        graph.replay()
        assert x.tolist() == [8] * N
        x.fill_(9)
        assert out.numpy().tolist() == [value] * N


@every_schedule
def test_work_of_a_library_inside_a_capture_is_part_of_it_and_keeps_its_memory(world: World) -> None:
    for library, full in ((world.torch, world.torch.full), (world.cupy, world.cupy.full)):
        x = full(N, 1)
        with world.gpu.capture(mode="relaxed") as graph:
            inside = full(N, 6)
            (x.copy_ if library is world.torch else x.copy_from)(inside)
        place = inside.data_ptr() if library is world.torch else inside.data.ptr
        del inside
        others = [full(N, 3) for _ in range(3)]
        assert place not in [
            other.data_ptr() if library is world.torch else other.data.ptr for other in others
        ]
        fill(x, 2)
        graph.replay()
        assert x.tolist() == [6] * N
        assert [other.tolist() for other in others] == [[3] * N] * 3


# Identity


@every_schedule
def test_a_new_stream_with_the_handle_of_a_destroyed_one_is_another_stream(world: World) -> None:
    x = world.zeros()
    for value in range(1, 5):
        theirs = world.torch.new_stream()
        world.set(x, value)
        assert world.read(x, StreamHandle(theirs.handle)) == [value] * N
        world.torch.destroy(theirs)


@every_schedule
def test_short_lived_streams_of_others_leave_nothing_behind(world: World) -> None:
    x, order = world.zeros(), world.gpu._context.order
    out = world.zeros()
    for _ in range(100):
        theirs = world.torch.new_stream()
        world.copy.launch(x, out, N, grid=1, block=64, stream=StreamHandle(theirs.handle))
        world.torch.destroy(theirs)
        world.gpu.synchronize()
    gc.collect()
    assert len(order._foreign_streams) <= 24
    assert len(x.buffer.uses._last_reads) <= 17


# What is refused


@pytest.mark.parametrize("world", [0], indirect=True)
def test_tensors_whose_memory_is_not_their_value_are_refused(world: World) -> None:
    conjugated, negated, gaps = (world.torch.full(N, 1) for _ in range(3))
    conjugated.conjugate, negated.negative, gaps.step = True, True, 2
    for warm in (0, 4):
        for _ in range(warm):
            world.put[1, 64](world.torch.full(N, 0), 1, N)
        for tensor, words, hint in (
            *([(conjugated, "conjugated", "x.resolve_conj()")] if not warm else []),  # real numbers
            (negated, "negated", "x.resolve_neg()"),
            (gaps, "not contiguous", "preheat.strided(x)"),
        ):
            with pytest.raises(LaunchError, match=words) as refused:
                world.put[1, 64](tensor, 1, N)
            assert hint in str(refused.value.hint)
    column = world.cupy.full(N, 1)
    column._c_contiguous = False
    with pytest.raises(LaunchError, match="not contiguous"):
        world.put[1, 64](column, 1, N)


@every_schedule
def test_a_strided_tensor_keeps_its_order_and_its_owner(world: World) -> None:
    x = world.torch.full(2 * N, 7)
    out = world.zeros()
    for value in (1, 2, 3):
        x.fill_(value)
        world.copy[1, 64](strided(x[::2]), out, N)
        x.fill_(50)
        assert out.numpy().tolist() == [value] * N


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
def test_arrays_of_ours_are_refused_in_another_librarys_capture_which_survives(world: World) -> None:
    a, x, given = world.zeros(), world.torch.full(N, 1), world.zeros()
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
        world.set(a, 8)  # in a stream of ours, which the capture does not concern
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
    current, made = [0], list[tuple[str, int]]()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
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
