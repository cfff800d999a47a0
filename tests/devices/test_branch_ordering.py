"""The order of branches inside a capture, beside libraries that fork streams of their own.

Every test runs over several schedules, and each replay executes the nodes in an order that only their
dependencies restrict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from preheat.devices.libraries import StreamHandle
from preheat.errors import CaptureError
from preheat.graph.graph import Graph
from tests.devices.ordering import N, World, every_consumer, every_schedule, fill, shared
from tests.standin import FakeLibrary

TURNS = 4


@contextmanager
def aside(library: FakeLibrary) -> Iterator[None]:
    """Let a library work in a stream of its own inside a capture: fork, then join."""
    captured = library.current
    with library.stream(library.new_stream()) as side:
        library.order(captured)
        yield
    library.current.wait(side.record())


def chain(world: World, *arrays: Any, stream: object = None) -> None:
    """Copy the first array to the second, that to the third, and so on."""
    for source, target in pairwise(arrays):
        world.copy.launch(source, target, N, grid=1, block=64, stream=stream)


def replayed(graph: Graph, read: Any, values: list[int]) -> None:
    """Replay several times, with another schedule of the nodes each, and compare what is read."""
    for _ in range(TURNS):
        graph.replay()
        assert read() == values


@every_schedule
def test_branches_wait_for_uses_of_memory_in_other_branches(world: World) -> None:
    a, b, c, d = (world.zeros() for _ in range(4))
    first, second = world.gpu.stream(), world.gpu.stream()
    with world.gpu.capture() as graph:
        early = world.gpu.record()
        world.put[1, 64](a, 1, N)
        first.wait(early)
        second.wait(early)
        chain(world, a, b, stream=first)
        world.set(a, 2)  # after the read in the first branch
        chain(world, b, c, stream=second)
        world.set(b, 3, second)
        chain(world, a, d)
        world.set(a, 4, first)
        world.gpu.wait(first)
        world.gpu.wait(second)
    replayed(graph, lambda: [int(x.numpy()[0]) for x in (a, b, c, d)], [4, 3, 1, 2])


@every_schedule
def test_a_second_wait_is_not_taken_for_the_first(world: World) -> None:
    a, b = world.zeros(), world.zeros()
    side = world.gpu.stream()
    with world.gpu.capture() as graph:
        side.wait(world.gpu.record())
        for value in range(1, 5):
            world.set(a, value)
            chain(world, a, b, stream=side)
            world.set(b, value + 10, side)
            chain(world, b, a)
        world.gpu.wait(side)
    replayed(graph, lambda: [int(x.numpy()[0]) for x in (a, b)], [14, 14])


@every_schedule
def test_a_launch_on_tensors_goes_to_the_side_stream_of_their_library(world: World) -> None:
    x, y = (world.torch.full(N, 0) for _ in range(2))
    with world.gpu.capture() as graph:
        with aside(world.torch):
            x.fill_(5)
            world.copy[1, 64](x, y, N)
            x.fill_(6)
        world.copy[1, 64](y, x, N)
    replayed(graph, lambda: x.tolist() + y.tolist(), [5] * 2 * N)


@every_schedule
def test_a_branch_of_preheat_is_ordered_with_the_side_stream_of_a_library(world: World) -> None:
    x, out = world.torch.full(N, 0), world.zeros()
    side = world.gpu.stream()
    with world.gpu.capture() as graph:
        side.wait(world.gpu.record())
        with aside(world.torch):
            x.fill_(5)
            chain(world, x, out, stream=side)
            x.fill_(6)
        world.gpu.wait(side)
    replayed(graph, lambda: [int(out.numpy()[0]), *x.tolist()], [5, *[6] * N])


@every_consumer
@every_schedule
def test_shared_memory_is_ordered_with_the_side_stream_of_its_consumer(
    world: World, consumer: str
) -> None:
    a, out = world.zeros(), world.zeros()
    library: Any = world.torch if consumer == "torch" else world.cupy
    t = shared(world, consumer, a)
    with world.gpu.capture() as graph:
        with aside(library):
            fill(t, 3)
            world.copy[1, 64](a, out, N)  # in the captured stream
            fill(t, 4)
            a.fill(5)
            fill(t, 6)
        world.put[1, 64](a, 7, N)
    replayed(graph, lambda: [int(x.numpy()[0]) for x in (a, out)], [7, 3])


@every_consumer
@every_schedule
def test_a_quick_launch_with_shared_memory_is_ordered_with_its_consumer(
    world: World, consumer: str
) -> None:
    """In a capture, a quick launch waits for no side stream, unless a library may use its memory."""
    a, b, c, out = (world.zeros() for _ in range(4))
    library: Any = world.torch if consumer == "torch" else world.cupy
    t = shared(world, consumer, a)
    for _ in range(4):
        world.copy[1, 64](b, c, N)
    with world.gpu.capture() as graph:
        world.copy[1, 64](b, c, N)  # prepares the launch for the captured stream
        with aside(library):
            fill(t, 3)
            world.copy[1, 64](a, out, N)
            fill(t, 4)
        world.put[1, 64](a, 7, N)
    replayed(graph, lambda: [int(x.numpy()[0]) for x in (a, out)], [7, 3])


@every_consumer
@every_schedule
def test_an_export_inside_a_capture_waits_for_branches(world: World, consumer: str) -> None:
    a = world.zeros()
    library: Any = world.torch if consumer == "torch" else world.cupy
    side = world.gpu.stream()
    seen = library.full(N, 0)
    with world.gpu.capture() as graph:
        side.wait(world.gpu.record())
        with aside(library):
            world.set(a, 3, side)
            t = shared(world, consumer, a)
            (seen.copy_ if consumer == "torch" else seen.copy_from)(t)
            fill(t, 4)
        world.gpu.wait(side)
    replayed(graph, lambda: [int(a.numpy()[0]), *seen.tolist()], [4, *[3] * N])


@every_schedule
def test_a_launch_names_the_side_stream_of_a_library(world: World) -> None:
    a = world.zeros()
    with world.gpu.capture() as graph:
        world.set(a, 1)
        with aside(world.torch):
            world.set(a, 2, StreamHandle(world.torch.current.handle))
        world.set(a, 3)
    assert [node.after for node in graph.nodes] == [(), (0,), (1,)]
    replayed(graph, lambda: int(a.numpy()[0]), 3)  # type: ignore[arg-type]


@every_schedule
def test_a_side_stream_that_a_library_does_not_join_is_an_error(world: World) -> None:
    x = world.torch.full(N, 0)
    graph = world.gpu.capture().begin()
    world.torch.fill(x.data_ptr(), N, 1)
    captured = world.torch.current
    with world.torch.stream(world.torch.new_stream()):
        world.torch.order(captured)
        x.fill_(2)
    with pytest.raises(CaptureError, match="another library forked a stream") as caught:
        graph.end()
    assert "wait_stream" in str(caught.value.hint)
    x.fill_(3)
    assert x.tolist() == [3] * N


@every_schedule
def test_a_stream_that_a_library_does_not_fork_is_not_captured(world: World) -> None:
    x = world.torch.full(N, 0)
    a = world.zeros()
    other = world.torch.new_stream()
    with world.gpu.capture(mode="relaxed") as graph:
        world.set(a, 1)
        with world.torch.stream(other):
            x.fill_(2)
            assert x.tolist() == [2] * N
    assert len(graph) == 1


@every_schedule
def test_pools_and_frames_inside_branches_are_ordered(world: World) -> None:
    """Frames hand the same memory out again, so branches that use them follow one another."""
    pool = world.gpu.pool(1 << 12)
    out = [world.zeros() for _ in range(2)]
    side = world.gpu.stream()
    with world.gpu.capture() as graph:
        side.wait(world.gpu.record())
        with pool.frame():
            scratch = pool.empty(N, "int32")
            world.set(scratch, 1, side)
            chain(world, scratch, out[0], stream=side)
        with pool.frame():
            scratch = pool.empty(N, "int32")
            world.set(scratch, 2)
            chain(world, scratch, out[1])
        world.gpu.wait(side)
    replayed(graph, lambda: [int(x.numpy()[0]) for x in out], [1, 2])
