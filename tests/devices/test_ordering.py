"""The order of uses in streams of preheat and of other libraries.

Every test runs over several schedules. The other libraries are stand-ins that speak the protocols of
torch and CuPy: see `tests.standin`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from preheat.devices.libraries import StreamHandle
from preheat.errors import CaptureError
from tests.devices.ordering import N, World, every_schedule

# Streams of preheat


@every_schedule
def test_a_stream_waits_for_every_write_before_it(world: World) -> None:
    x = world.zeros()
    side = world.gpu.stream()
    for value in (1, 2, 3):
        world.set(x, value)
        assert world.read(x, side) == [value] * N
        world.set(x, value + 10, side)
        assert world.read(x) == [value + 10] * N


@every_schedule
def test_a_write_waits_for_reads_in_other_streams(world: World) -> None:
    x = world.zeros()
    outs = [world.zeros() for _ in range(3)]
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
    side = world.gpu.stream()
    theirs = StreamHandle(world.torch.default.handle)
    for first in (world.gpu.stream(), theirs):
        for value in (5, 6, 7):
            world.set(x, value)
            world.copy.launch(x, one, N, grid=1, block=64, stream=first)
            world.copy.launch(x, two, N, grid=1, block=64, stream=side)
            world.set(x, 77, side)
            assert one.numpy().tolist() == [value] * N


@every_schedule
def test_later_work_in_the_stream_of_its_allocation_is_noticed(world: World) -> None:
    side = world.gpu.stream()
    x = world.zeros(stream=side)
    for value in (1, 2, 3):
        world.set(x, value, side)
        assert world.read(x) == [value] * N


@every_schedule
def test_a_bound_launch_and_a_replay_notice_work_in_other_streams(world: World) -> None:
    x = world.zeros()
    out = world.zeros()
    side = world.gpu.stream()
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
    outs = []
    side = world.gpu.stream()
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
    x = world.zeros()
    y = world.zeros()
    side = world.gpu.stream()
    for value in (1, 2, 3):
        world.set(x, value, side)
        y.copy_from(x)
        x.fill(77)
        assert y.numpy().tolist() == [value] * N


@every_schedule
def test_scalars_of_replays_in_several_streams_reach_their_own_replay(world: World) -> None:
    step = world.gpu.scalar("int32", name="step")
    side = world.gpu.stream()
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
    step = world.gpu.scalar("int32")
    other = world.gpu.stream()
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
def test_a_replay_on_the_fast_path_notices_a_scalar_that_was_set_elsewhere(world: World) -> None:
    step = world.gpu.scalar("int32", name="step")
    side = world.gpu.stream()
    outs = world.zeros()
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
    step = world.gpu.scalar("int32", 4)
    stream = world.torch.default
    stream.begin_capture("relaxed")
    with pytest.raises(CaptureError, match="cannot be used inside another library's capture"):
        step.set(5, stream=StreamHandle(stream.handle))
    stream.end_capture().close()
    assert step.get() == 4


@every_schedule
def test_pieces_of_a_pool_are_handed_out_behind_their_uses(world: World) -> None:
    pool = world.gpu.pool(1 << 12)
    side = world.gpu.stream()
    outs = []
    for value in range(5):
        x = pool.empty(N, "int32")
        out = world.gpu.empty(N, "int32")
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
    outs = []
    side = world.gpu.stream()
    for value in range(5):
        pool = world.gpu.pool(1 << 12)
        out = world.gpu.empty(N, "int32")
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
    pool = world.gpu.pool(1 << 12)
    side = world.gpu.stream()
    outs = []
    for value in range(5):
        out = world.gpu.empty(N, "int32")
        with pool.frame():
            x = pool.empty(N, "int32")
            stream = side if value % 2 else None
            world.set(x, value, stream)
            world.copy.launch(x, out, N, grid=1, block=64, stream=stream)
        outs.append(out)
    assert [out.numpy().tolist() for out in outs] == [[value] * N for value in range(5)]


# Variables of modules


VARIABLE = """
__device__ int setting = 1;
extern "C" __global__ void get(int* out, int n) { if (threadIdx.x < n) out[threadIdx.x] = setting; }
extern "C" __global__ void change(int value) { setting = value; }
"""


@every_schedule
def test_a_variable_is_written_from_the_host_between_earlier_and_later_work(world: World) -> None:
    """No use of a variable is known, so that a write waits for all streams."""
    module = world.gpu.module(VARIABLE)
    get, setting = module["get"], module.symbol("setting", "int32")
    streams = [None, *(world.gpu.stream() for _ in range(3))]
    outs = []
    for value in (5, 6, 7):
        setting.write([value])
        for stream in streams:
            outs.append((value, world.zeros()))
            get.launch(outs[-1][1], N, grid=1, block=64, stream=stream)
    setting.write([8])
    assert [out.numpy().tolist() for _, out in outs] == [[value] * N for value, _ in outs]


@every_schedule
def test_a_variable_is_read_after_all_work(world: World) -> None:
    module = world.gpu.module(VARIABLE)
    change, setting = module["change"], module.symbol("setting", "int32")
    side = world.gpu.stream()
    for value, stream in ((5, side), (6, None), (7, side)):
        change.launch(value, grid=1, block=1, stream=stream)
        assert setting.numpy().tolist() == [value]


# Identity


@every_schedule
def test_a_new_stream_with_the_handle_of_a_destroyed_one_is_another_stream(world: World) -> None:
    x = world.zeros()
    handles = set()
    for value in range(1, 5):
        theirs = world.torch.new_stream()
        handles.add(theirs.handle)
        world.set(x, value)
        assert world.read(x, StreamHandle(theirs.handle)) == [value] * N
        world.torch.destroy(theirs)
    assert len(handles) == 1


@every_schedule
def test_short_lived_streams_of_others_leave_nothing_behind(world: World) -> None:
    x = world.zeros()
    order = world.gpu._context.order
    out = world.zeros()
    for _ in range(100):
        theirs = world.torch.new_stream()
        world.copy.launch(x, out, N, grid=1, block=64, stream=StreamHandle(theirs.handle))
        world.torch.destroy(theirs)
        world.gpu.synchronize()
    gc.collect()
    assert len(order._foreign_streams) <= 24
    assert len(x.buffer.uses._last_reads) <= 17
