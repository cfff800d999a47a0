"""Streams and events: ordered work, memory that is freed after its uses, reused streams."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.errors import ContextLostError, InputError
from preheat.gpu import Gpu
from tests.devices.support import SaxpyCase, saxpy_case
from tests.faulty import FaultyGpu


class Foreign:
    """A stream of another library with the `__cuda_stream__` protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class Older:
    """A stream with its handle in an attribute, as torch and CuPy had it before the protocol."""

    def __init__(self, name: str, handle: int) -> None:
        setattr(self, name, handle)


def run_in(made: SaxpyCase, stream: object) -> None:
    made.saxpy.launch(2.0, made.x, made.y, made.n, grid=5, block=64, stream=stream)


def test_launches_in_any_stream_are_right(setup: SaxpyCase) -> None:
    with setup.gpu.stream() as first, setup.gpu.stream(priority=-1) as second:
        for times in range(1, 9):
            stream = first if times % 2 else second
            stream.wait((second if times % 2 else first).record())
            run_in(setup, stream)
            setup.check(times)


def test_streams_of_other_libraries_are_taken_by_every_protocol(setup: SaxpyCase) -> None:
    own = setup.gpu.stream()
    assert own.__cuda_stream__() == (0, own.handle)
    others: list[Any] = [
        Foreign(own.handle),
        Older("cuda_stream", own.handle),
        Older("ptr", own.handle),
    ]
    for times, stream in enumerate([own, *others], start=1):
        run_in(setup, stream)
        setup.check(times)
        setup.gpu.synchronize()
    attribute = Older("__cuda_stream__", 0)
    attribute.__cuda_stream__ = (0, own.handle)  # type: ignore[attr-defined]
    run_in(setup, attribute)
    setup.check(5)
    for wrong in (object(), "stream", 0, Older("handle", own.handle)):
        with pytest.raises(InputError, match="is not a stream"):
            run_in(setup, wrong)


def test_arrays_can_be_allocated_in_a_stream_of_their_own(setup: SaxpyCase) -> None:
    stream = setup.gpu.stream()
    x = setup.gpu.array(setup.xs, stream=stream)
    zeros = setup.gpu.zeros(setup.n, stream=stream)
    assert x.buffer.home is stream.raw
    for times in range(1, 5):
        setup.saxpy.launch(2.0, x, setup.y, setup.n, grid=5, block=64, stream=stream)
        setup.check(times)
    for times in range(1, 6):  # The home of the memory is another stream.
        setup.saxpy[5, 64](1.0, x, zeros, setup.n)
        np.testing.assert_allclose(zeros.numpy(), times * setup.xs, rtol=1e-5)


def test_events_measure_and_order(setup: SaxpyCase) -> None:
    start = setup.gpu.record(timing=True)
    setup.launch(3)
    stop = setup.gpu.record(timing=True)
    stop.synchronize()
    assert start.done()
    assert stop.done()
    assert 0 < stop.elapsed(start) < 10
    assert start.elapsed(start) == 0
    stream = setup.gpu.stream()
    stream.wait(stop)
    stream.synchronize()
    assert stream.done()
    later = stream.record()
    later.synchronize()
    assert later.done()
    for first, last in ((start, later), (later, start)):
        with pytest.raises(InputError, match="the event has no time") as caught:
            last.elapsed(first)
        assert caught.value.hint == "record it with timing=True"


def test_a_closed_stream_is_refused(device: Gpu) -> None:
    stream = device.stream()
    assert repr(stream) == f"<Stream {stream.raw.id} on {device.name}>"
    stream.close()
    stream.close()  # A second call does nothing.
    assert repr(stream) == f"<Stream closed on {device.name}>"
    for operation in (
        stream.synchronize, stream.record, stream.done, stream.__cuda_stream__,
        lambda: stream.wait(device.record()), lambda: device.empty(3, stream=stream),
        lambda: stream.handle,
    ):  # fmt: skip
        with pytest.raises(InputError, match="this stream is closed"):
            operation()


def test_what_belongs_to_a_lost_context_is_refused(
    open_device: Callable[..., Gpu],
) -> None:
    gone, here = open_device("emulator:3"), open_device("emulator:4")
    stream = gone.stream()
    event = gone.record(timing=True)
    late = here.record(timing=True)
    gone.reset()
    for operation in (
        stream.synchronize, stream.record, event.done, event.synchronize,
        lambda: event.elapsed(late), lambda: late.elapsed(event), lambda: here.stream().wait(event),
    ):  # fmt: skip
        with pytest.raises(ContextLostError, match="emulator:3: it was reset"):
            operation()
    stream.close()  # This does nothing.


def test_streams_without_references_are_used_again(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    first = gpu.stream()
    handle = first.handle
    first.close()
    with faulty.count_calls("stream") as calls:
        urgent = gpu.stream(priority=-1)
        assert urgent.handle != handle
        again = gpu.stream()
        assert again.handle == handle
        del again
        gc.collect()
        assert gpu.stream().handle == handle
    assert calls == {"stream": 1}


# Order between streams: the waits that the device is asked for


def test_a_second_stream_waits_for_the_stream_of_the_allocation_once_per_write(
    faulty: FaultyGpu,
) -> None:
    made = saxpy_case(faulty.gpu)
    stream = faulty.gpu.stream()
    waits: list[int] = []

    def count(act: Callable[[], object]) -> None:
        with faulty.count_calls("stream.wait") as calls:
            act()
        waits.append(calls.get("stream.wait", 0))

    count(lambda: run_in(made, stream))  # One wait serves both operands, which home wrote.
    for _ in range(3):
        count(lambda: run_in(made, stream))  # The stream has the rights, also for fast launches.
    count(lambda: made.x.write(made.xs))  # Home waits for the stream that read the array.
    count(lambda: run_in(made, stream))  # The stream waits for what home wrote.
    count(lambda: run_in(made, stream))
    count(lambda: made.launch())  # Home waits for what the stream wrote into the other array.
    assert waits == [1, 0, 0, 0, 1, 1, 0, 1]
    made.check(7)


def test_writers_in_several_streams_wait_for_one_another_and_a_reader_for_the_last(
    faulty: FaultyGpu,
) -> None:
    made = saxpy_case(faulty.gpu)
    streams = [faulty.gpu.stream() for _ in range(3)]
    for stream in streams:
        with faulty.count_calls("stream.wait") as calls:
            run_in(made, stream)
        assert calls["stream.wait"] >= 1
    with faulty.count_calls("stream.wait") as calls:
        made.y.numpy()  # It is read in the stream that wrote it.
    assert calls == {}
    made.check(3)


def test_a_write_waits_for_every_stream_that_read_the_array(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    outs = [(faulty.gpu.stream(), faulty.gpu.zeros(made.n)) for _ in range(3)]
    for stream, out in outs:
        out.fill(0)
        made.saxpy.launch(1.0, made.x, out, made.n, grid=5, block=64, stream=stream)
    with faulty.count_calls("stream.wait") as calls:
        made.x.fill(0)
    assert calls == {"stream.wait": 3}
    with faulty.count_calls("stream.wait") as calls:
        made.x.fill(1)
    assert calls == {}
    for _, out in outs:
        np.testing.assert_allclose(out.numpy(), made.xs, rtol=1e-6)


def test_two_readers_in_two_streams_do_not_wait_for_one_another(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    (left, right) = [faulty.gpu.stream() for _ in range(2)]
    outs = {stream: faulty.gpu.zeros(made.n, stream=stream) for stream in (left, right)}
    waits: list[int] = []
    for stream in (left, right, left, right, left, right):
        with faulty.count_calls("stream.wait") as calls:
            made.saxpy.launch(1.0, made.x, outs[stream], made.n, grid=5, block=64, stream=stream)
        waits.append(calls.get("stream.wait", 0))
    assert waits == [1, 1, 0, 0, 0, 0]  # Each waits for the write in the home stream, once.
    for out in outs.values():
        np.testing.assert_allclose(out.numpy(), 3 * made.xs, rtol=1e-5)


def test_memory_is_released_after_every_stream_that_used_it(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    streams = [faulty.gpu.stream() for _ in range(2)]
    for stream in streams:
        run_in(made, stream)
    with faulty.count_calls("stream.wait", "free") as calls:
        made.x.close()
    assert calls == {"stream.wait": 2, "free": 1}


def test_a_foreign_stream_is_remembered_by_an_event_after_its_last_use(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    own = faulty.gpu.stream()
    own.close()
    handle = faulty.device.stream().handle  # a stream that preheat does not own
    with faulty.count_calls("stream.record") as calls:
        run_in(made, Foreign(handle))
    # The home stream, the use, and the home stream again, which may still read.
    assert calls["stream.record"] == 3
    with faulty.count_calls("stream.wait", "free") as calls:
        made.x.close()
    assert calls == {"stream.wait": 1, "free": 1}
    with faulty.count_calls("stream.wait") as calls:
        made.check(1)
    assert calls == {}  # The home stream has waited for that mark already.


def test_every_use_in_a_foreign_stream_is_remembered_also_of_warm_launches(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    stream = Foreign(faulty.device.stream().handle)
    for _ in range(6):
        with faulty.count_calls("stream.record") as calls:
            run_in(made, stream)
        assert calls["stream.record"] >= 1
    with faulty.count_calls("stream.wait") as calls:
        made.check(6)
    assert calls == {"stream.wait": 1}


def test_events_of_many_launches_do_not_pile_up(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    stream = Foreign(faulty.device.stream().handle)
    for _ in range(1000):
        made.saxpy.launch(0.0, made.x, made.y, 0, grid=1, block=1, stream=stream)
    assert len(faulty.gpu._context.deferred_cleanups) < 300
