"""The order of uses of memory that preheat and other libraries share.

Every test runs over several schedules. The other libraries are stand-ins that speak the protocols of
torch and CuPy: see `tests.standin`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from preheat import native
from preheat.devices.libraries import StreamHandle
from preheat.devices.operands import strided, tensor_kind
from preheat.errors import LaunchError, StaleGraphError
from tests.conftest import needs_native_core
from tests.counting import count_calls
from tests.devices.ordering import N, World, every_consumer, every_schedule, fill, is_shared, shared

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
def test_the_first_launch_after_an_export_leaves_the_fast_path(world: World, consumer: str) -> None:
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
    t = shared(world, consumer, a)
    half = a[N:]
    world.warm(half)
    fill(t, 4)
    assert world.read(half) == [4] * N
    world.set(half, 5)
    assert t.tolist() == [4] * N + [5] * N


@every_schedule
def test_released_memory_is_ordered_for_every_later_stream(world: World) -> None:
    theirs = StreamHandle(world.cupy.new_stream().handle)
    side = world.gpu.stream()
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
    a = world.zeros()
    side = world.gpu.stream()
    device = world.gpu._device
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
def test_frames_that_grow_wait_for_the_previous_users_of_the_memory(world: World) -> None:
    for captured in (False, True):
        pool = world.gpu.pool(1 << 12)
        side = world.gpu.stream()
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
def test_memory_that_was_given_away_never_takes_the_fast_path(world: World) -> None:
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
    side = world.gpu.stream()
    theirs = world.torch.new_stream()
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
    x = world.torch.full(N, 3)
    y = world.cupy.full(N, 0)
    for value in (5, 6, 7):
        x.fill_(value)
        world.copy[1, 64](x, y, N)
        assert y.tolist() == [value] * N
        y.fill(value + 20)
        world.copy[1, 64](y, x, N)
        assert x.tolist() == [value + 20] * N


@every_schedule
def test_arrays_of_preheat_beside_tensors_are_ordered_in_every_direction(world: World) -> None:
    a = world.zeros()
    x = world.torch.full(N, 0)
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
    graph = world.captured_put(x, 5)
    graph.replay()
    x.set_data(world.torch.full(4, 0))
    others = [world.torch.full(N, 3) for _ in range(3)]
    graph.replay()
    assert [other.tolist() for other in others] == [[3] * N] * 3


@every_schedule
def test_an_operand_dropped_at_once_is_kept_until_the_launch_has_ended(world: World) -> None:
    outs = []
    side = world.gpu.stream()
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
    x = world.torch.full(N, 0)
    out = world.zeros()
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


# Refused arguments


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


# Graphs that use tensors of one other library alone


@every_schedule
def test_replays_follow_the_current_stream_of_the_library(world: World) -> None:
    x = world.torch.full(N, 0)
    y = world.torch.full(N, 0)
    graph = world.captured_copy(x, y)
    streams = [world.torch.default, world.torch.new_stream()]
    for value in range(6):
        with world.torch.stream(streams[value % 2]):
            x.fill_(value)
            graph.replay()
            assert y.tolist() == [value] * N
    assert graph.num_replays == 6


@needs_native_core
@every_schedule
def test_a_repeated_replay_on_tensors_of_one_library_takes_no_section(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = world.torch.full(N, 0)
    graph = world.captured_put(x, 5)
    graph.replay()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a repeated replay is ordered by the stream alone")

    with monkeypatch.context() as patch:
        patch.setattr(type(world.gpu._context.order), "section", refuse)
        graph.replay()
    x.fill_(0)
    graph.replay()
    assert x.tolist() == [5] * N


@every_schedule
def test_a_stream_that_its_owner_may_destroy_is_checked_each_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.torch.library), "current_is_permanent", lambda *_: False)
    x = world.torch.full(N, 0)
    graph = world.captured_put(x, 5)
    for _ in range(3):
        x.fill_(0)
        graph.replay()
        assert x.tolist() == [5] * N
        assert graph._replayer is not None
        assert graph._replayer.launch is None


# Graphs that use tensors of one other library and arrays of preheat


def section_is_refused(world: World, patch: pytest.MonkeyPatch) -> None:
    """Let work that is ordered by a section fail from now on."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a repeated replay waits for nothing")

    patch.setattr(type(world.gpu._context.order), "section", refuse)


@needs_native_core
@every_schedule
def test_repeated_replays_that_write_an_array_are_ordered_with_its_other_uses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    graph = world.captured_copy(x, a)
    side = world.gpu.stream()
    for value in range(10, 100, 10):
        graph.replay()
        for more in range(3):
            x.fill_(value + more)
            with monkeypatch.context() as patch:
                section_is_refused(world, patch)
                graph.replay()
        assert world.read(a, side if value % 20 else None) == [value + 2] * N
        world.set(a, 1, side if value % 30 else None)
        assert world.read(a) == [1] * N
    assert graph.num_replays == 4 * 9


@needs_native_core
@every_schedule
def test_repeated_replays_that_read_an_array_are_ordered_with_its_other_uses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    graph = world.captured_copy(a, x)
    for value in range(1, 6):
        world.set(a, value)
        graph.replay()
        with monkeypatch.context() as patch:
            section_is_refused(world, patch)
            graph.replay()
            graph.replay()
        world.set(a, 100)  # after the replays have read it
        assert x.tolist() == [value] * N


@every_consumer
@every_schedule
def test_a_repeated_replay_waits_for_what_another_library_does_with_the_array(
    world: World, consumer: str
) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    graph = world.captured_copy(x, a)
    graph.replay()
    graph.replay()
    t = shared(world, consumer, a)
    for value in (1, 2, 3):
        fill(t, 50)
        x.fill_(value)
        graph.replay()
        assert t.tolist() == [value] * N
    del t
    gc.collect()
    for value in (4, 5, 6):
        x.fill_(value)
        graph.replay()
        assert world.read(a) == [value] * N


@every_schedule
def test_a_write_follows_a_read_in_a_third_stream_between_repeated_replays(world: World) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    out = world.cupy.full(N, 0)
    graph = world.captured_copy(x, a)
    for value in range(1, 6):
        x.fill_(value)
        graph.replay()
        graph.replay()
        world.copy[1, 64](a, out, N)  # in the stream of the other library
        x.fill_(100)
        graph.replay()
        assert out.tolist() == [value] * N


@every_schedule
def test_a_closed_array_makes_a_repeated_replay_stale(world: World) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    graph = world.captured_copy(x, a)
    for _ in range(3):
        graph.replay()
    a.close()
    with pytest.raises(StaleGraphError, match="was closed after the capture"):
        graph.replay()


@every_schedule
def test_a_stream_that_waited_for_earlier_work_waits_for_a_repeated_replay_too(world: World) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    b = world.zeros()
    graph = world.captured_copy(x, a)
    for value in range(1, 6):
        graph.replay()
        world.copy[1, 64](x, b, N)
        world.read(b)  # Our stream has waited for the stream of the library now.
        x.fill_(value)
        graph.replay()
        assert world.read(a) == [value] * N


@needs_native_core
@every_schedule
def test_an_interrupted_repeated_replay_is_ordered_with_the_uses_after_it(world: World) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    b = world.zeros()
    graph = world.captured_copy(x, a)
    graph.replay()
    world.copy[1, 64](x, b, N)
    world.read(b)  # Our stream has waited for the stream of the library now.
    assert graph._replayer is not None
    ((stream, submit),) = graph._replayer._library_streams.values()
    use: Any = getattr(submit, "__self__")  # noqa: B009  (mypy takes it for any function)
    launch = use._launch
    launch_unmarked = graph._replayer.executable.instantiate().prepare(stream)

    def interrupted() -> tuple[int, ...]:
        launch_unmarked()
        raise KeyboardInterrupt

    x.fill_(3)
    use._launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        graph.replay()
    use._launch = launch
    assert world.read(a) == [3] * N
    x.fill_(4)
    graph.replay()
    assert world.read(a) == [4] * N


@needs_native_core
@every_schedule
def test_a_repeated_replay_calls_few_functions(world: World) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    graph = world.captured_copy(x, a)
    graph.replay()
    # the launch, the current stream of the stand-in, the use, its mark and the use of the array
    assert count_calls(graph.replay) <= (5 if native.core is not None else 6)
