"""Deferred streams: ordered work has one result, and unordered work shows each possible order."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import preheat
from preheat.devices import base
from preheat.emulator.device import EmulatorDevice
from preheat.emulator.memory import POISON
from preheat.errors import DeviceError, DriverError, EmulatorFault, InputError
from tests.emulator.deferred import (
    SEEDS,
    SIZE,
    Bump,
    Owned,
    contents,
    deferred,
    filled,
    ready,
    word,
)
from tests.faulty import FaultyDevice

# Ordered and unordered work


def race(seed: int, *, ordered: bool) -> int:
    """Return what a reader in one stream sees of a write in another that was submitted before."""
    device = deferred(seed)
    source, target = ready(device, 1), ready(device, 1)
    writer, reader = device.stream(), device.stream()
    device.fill(source, b"\x02", SIZE, writer)
    if ordered:
        reader.wait(writer.record())
    device.copy(target, source, SIZE, reader)
    (seen,) = set(contents(device, target, reader))
    return seen


def test_a_reader_that_does_not_wait_sees_both_values() -> None:
    assert {race(seed, ordered=False) for seed in range(40)} == {1, 2}


def test_a_reader_that_waits_always_sees_the_new_value() -> None:
    assert {race(seed, ordered=True) for seed in SEEDS} == {2}


def overwrite(seed: int, *, ordered: bool) -> int:
    """Return what a reader sees when another stream writes the same memory afterwards."""
    device = deferred(seed)
    source, target = ready(device, 1), ready(device, 0)
    reader, writer = device.stream(), device.stream()
    device.copy(target, source, SIZE, reader)
    if ordered:
        writer.wait(reader.record())
    device.fill(source, b"\x02", SIZE, writer)
    (seen,) = set(contents(device, target, reader))
    return seen


def test_a_writer_that_does_not_wait_for_readers_is_sometimes_early() -> None:
    assert {overwrite(seed, ordered=False) for seed in range(40)} == {1, 2}


def test_a_writer_never_waits_for_readers() -> None:
    assert {overwrite(seed, ordered=True) for seed in SEEDS} == {1}


@pytest.mark.parametrize("seed", range(40))
def test_waits_hold_across_several_streams(seed: int) -> None:
    device = deferred(seed)
    address = ready(device, 0)
    streams = [device.stream() for _ in range(5)]
    for number, stream in enumerate(streams, 1):
        Bump(device, stream)(address, number)
        if number < len(streams):
            streams[number].wait(stream.record())
    assert word(device, address, streams[-1]) == 15
    device.synchronize()
    assert all(stream.done() for stream in streams)


def test_kernels_that_are_not_ordered_lose_updates_to_copies() -> None:
    seen = set()
    for seed in range(40):
        device = deferred(seed)
        address = ready(device, 0)
        other = ready(device, 9)
        aside = device.stream()
        main = device.stream()
        Bump(device, main)(address, 5)
        device.copy(address, other, 4, aside)
        device.synchronize()
        seen.add(word(device, address, main))
    assert seen == {0x09090909, 0x09090909 + 5}


def test_work_is_late() -> None:
    late = 0
    for seed in range(40):
        device = deferred(seed)
        address = ready(device, 1)
        stream = device.stream()
        other = device.stream()
        device.fill(address, b"\x02", SIZE, stream)
        late += contents(device, address, other)[0] == 1
    assert 5 < late < 35


# One seed, one order


def trace(seed: int) -> list[bytes]:
    """Return the result of unordered work in several streams after each step."""
    device = deferred(seed)
    streams = [device.stream() for _ in range(4)]
    memory = [ready(device, number) for number in range(6)]
    seen = []
    pick = np.random.default_rng(5)
    for step in range(120):
        stream, other = (streams[i] for i in pick.choice(4, 2, replace=False))
        a, b = (memory[i] for i in pick.choice(6, 2, replace=False))
        device.copy(a, b, SIZE, stream)
        device.fill(b, bytes([step]), SIZE // 2, other)
        if step % 5 == 0:
            other.wait(stream.record())
        if step % 7 == 0:
            seen.append(bytes([stream.done()]))
        if step % 11 == 0:
            seen.append(contents(device, a, other))
    device.synchronize()
    return seen + [contents(device, address, streams[0]) for address in memory]


def test_a_seed_always_gives_the_same_order_and_another_gives_another() -> None:
    assert trace(3) == trace(3)
    assert len({tuple(trace(seed)) for seed in range(6)}) == 6


# When memory is read


@pytest.mark.parametrize("seed", range(20))
def test_host_bytes_and_parameters_are_read_at_submission(seed: int) -> None:
    device = deferred(seed)
    stream = device.stream()
    address = ready(device, 0)
    data = np.full(SIZE, 7, np.uint8)
    device.copy_in(address, data.data, stream)
    data[:] = 9
    Bump(device, stream)(address + 8, 1)
    values = bytearray(b"\x05\x06\x06")
    set_all = device.setter([(address, 1), (address + 2, 2)], stream)
    assert set_all(values) == (0,)  # type: ignore[arg-type]
    values[0] = 1
    expected = b"\x05\x07\x06\x06" + b"\x07" * 4 + b"\x08" + b"\x07" * (SIZE - 9)
    assert contents(device, address, stream) == expected


def test_nothing_can_be_copied_too() -> None:
    device = deferred(0)
    address = device.allocate(0, device.stream())
    stream = device.stream()
    device.copy_in(address, memoryview(b""), stream)
    device.copy(address, address, 0, stream)
    assert contents(device, address, stream, 0) == b""


def test_lent_memory_is_used_before_it_is_taken_back() -> None:
    for seed in range(10):
        device = deferred(seed)
        host = np.full(SIZE, 3, np.uint8)
        address = ready(device, 0)
        stream = device.stream()
        with device.host_memory.register(host.ctypes.data, SIZE, False):
            device.copy(address, host.ctypes.data, SIZE, stream)
        host[:] = 4
        assert contents(device, address, stream) == b"\x03" * SIZE


# Queries and events


@pytest.mark.parametrize("seed", range(20))
def test_polling_ends(seed: int) -> None:
    device = deferred(seed)
    stream, other = device.stream(), device.stream()
    address = filled(device, 0, stream)
    for value in range(50):
        device.fill(address, bytes([value]), SIZE, stream)
        other.wait(stream.record())
    event = other.record()
    polls = [0, 0]
    while not event.done():
        polls[0] += 1
    while not stream.done():
        polls[1] += 1
    assert polls[0] < 1000
    assert polls[1] == 0
    assert event.done()


def test_an_event_is_done_when_its_work_is() -> None:
    for seed in range(20):
        device = deferred(seed)
        stream = device.stream()
        address = ready(device, 0)
        device.fill(address, b"\x01", SIZE, stream)
        event = stream.record(timing=True)
        device.fill(address, b"\x02", SIZE, stream)
        later = stream.record(timing=True)
        event.synchronize()
        assert event.done()
        assert contents(device, address, device.stream())[0] in (1, 2)
        later.synchronize()
        assert later.elapsed(event) >= 0


def test_the_time_of_an_event_is_known_once_it_happened() -> None:
    for seed in range(20):
        stream = deferred(seed).stream()
        first, second = stream.record(timing=True), stream.record(timing=True)
        if second.position.reached_at is None:  # type: ignore[attr-defined]
            with pytest.raises(DriverError, match="600"):
                second.elapsed(first)
            return
    pytest.fail("no seed leaves events for later")


def rerecorded(seed: int, *, wait_again: bool) -> int:
    device = deferred(seed)
    writer, reader = device.stream(), device.stream()
    source, target = ready(device, 0), ready(device, 0)
    device.fill(source, b"\x01", SIZE, writer)
    event = writer.record()
    reader.wait(event)
    device.fill(source, b"\x02", SIZE, writer)
    assert writer.record(reuse=event) is event
    if wait_again:
        reader.wait(event)
    device.copy(target, source, SIZE, reader)
    (seen,) = set(contents(device, target, reader))
    return seen


def test_a_wait_means_the_record_that_was_the_last_one_then() -> None:
    assert {rerecorded(seed, wait_again=False) for seed in range(60)} == {1, 2}
    assert {rerecorded(seed, wait_again=True) for seed in range(60)} == {2}


@pytest.mark.parametrize("seed", range(10))
def test_an_event_can_be_recorded_again_in_another_stream(seed: int) -> None:
    device = deferred(seed)
    first, second = device.stream(), device.stream()
    address = ready(device, 0)
    event = first.record()
    device.fill(address, b"\x01", SIZE, second)
    second.record(reuse=event).synchronize()
    assert contents(device, address, first) == b"\x01" * SIZE


def test_an_event_of_another_device_is_waited_for_but_not_recorded() -> None:
    one, two = deferred(1), deferred(2)
    stream = one.stream()
    address = ready(one, 0)
    one.fill(address, b"\x01", SIZE, stream)
    event = stream.record()
    two.stream().wait(event)
    assert event.done()
    with pytest.raises(DeviceError, match="another device"):
        two.stream().record(reuse=event)
    EmulatorDevice().stream().wait(stream.record())


# Memory


def test_memory_counts_as_another_devices() -> None:
    assert EmulatorDevice(3, schedule=0).dlpack == (12, 3)
    assert EmulatorDevice(3).dlpack == (1, 0)


def test_fresh_memory_is_poisoned_whether_it_is_used_again_or_not() -> None:
    again = 0
    for seed in range(60):
        device = deferred(seed)
        stream = device.stream()
        old = filled(device, 1, stream)
        device.free(old, stream)
        new = device.allocate(SIZE, stream)
        again += new == old
        assert contents(device, new, stream) == bytes([POISON]) * SIZE
        assert device.memory().total - device.memory().free == SIZE
    assert 15 < again < 45


def test_memory_is_used_again_in_the_same_stream_and_size_only() -> None:
    for seed in range(40):
        device = deferred(seed)
        stream = device.stream()
        old = filled(device, 1, stream)
        device.free(old, stream)
        kept = device.allocate(SIZE, device.stream()), device.allocate(SIZE + 1, stream)
        assert old not in kept


def late_use(seed: int, *, ordered: bool) -> bytes:
    """Return the content of new memory while another stream still writes to the previous allocation."""
    device = deferred(seed)
    home, other = device.stream(), device.stream()
    old = ready(device, 0)
    device.fill(old, b"\x01", SIZE, other)
    if ordered:
        home.wait(other.record())
    device.free(old, home)
    new = device.allocate(SIZE, home)
    device.fill(new, b"\x02", SIZE, home)
    device.synchronize()
    return contents(device, new, home)


def outcome(do: Callable[..., bytes], seed: int, **more: bool) -> bytes | str:
    """Return what `do` returns, or the kind of its fault, at any call."""
    try:
        return do(seed, **more)
    except EmulatorFault as fault:
        return fault.kernel


def test_unordered_use_of_memory_that_is_used_again_shows() -> None:
    seen = {outcome(late_use, seed, ordered=False) for seed in range(100)}
    assert seen == {b"\x01" * SIZE, b"\x02" * SIZE, "fill of freed memory"}
    assert {late_use(seed, ordered=True) for seed in SEEDS} == {b"\x02" * SIZE}


def used_elsewhere(seed: int, *, ordered: bool) -> bytes:
    """Return the result of a use of new memory in another stream."""
    device = deferred(seed)
    home, other = device.stream(), device.stream()
    device.free(filled(device, 0, home), home)
    new = device.allocate(SIZE, home)
    if ordered:
        other.wait(home.record())
    device.fill(new, b"\x02", SIZE, other)
    home.wait(other.record())
    return contents(device, new, home)


def test_new_memory_can_be_used_elsewhere_behind_its_stream_only() -> None:
    seen = {outcome(used_elsewhere, seed, ordered=False) for seed in range(100)}
    assert seen >= {b"\x02" * SIZE, "fill of freed memory"}
    assert {used_elsewhere(seed, ordered=True) for seed in SEEDS} == {b"\x02" * SIZE}


Touch = Callable[[EmulatorDevice, int, base.Stream], object]
TOUCHES: dict[str, Touch] = {
    "fill": lambda d, at, s: d.fill(at, b"\x01", SIZE, s),
    "copy": lambda d, at, s: d.copy(ready(d, 0), at, SIZE, s),
    "copy from the host": lambda d, at, s: d.copy_in(at, memoryview(b"12"), s),
    "copy to the host": lambda d, at, s: contents(d, at, s),
    "set": lambda d, at, s: d.setter([(at, 2)], s)(b"12"),
}


@pytest.mark.parametrize("kind", TOUCHES)
def test_freed_memory_cannot_be_used(kind: str) -> None:
    device = deferred(1)
    address = ready(device, 0)
    stream = device.stream()
    device.free(address, stream)
    with pytest.raises(EmulatorFault, match=f"{kind} of freed memory"):
        _touch(device, TOUCHES[kind], address, stream)


def _touch(device: EmulatorDevice, touch: Touch, address: int, stream: base.Stream) -> None:
    touch(device, address, stream)
    device.synchronize()


def test_freed_memory_cannot_be_used_by_kernels_nor_freed_twice() -> None:
    device = deferred(1)
    address = ready(device, 0)
    stream = device.stream()
    device.free(address, stream)
    with pytest.raises(DeviceError, match="no buffer"):
        device.free(address, stream)
    Bump(device, stream)(address)
    with pytest.raises(EmulatorFault, match="in a freed 64-byte buffer"):
        stream.synchronize()


def test_memory_that_is_nobodys_cannot_be_used() -> None:
    device = deferred(1)
    host = np.zeros(SIZE, np.uint8)
    device.fill(host.ctypes.data, b"\x01", SIZE, device.stream())
    with pytest.raises(EmulatorFault, match="fill of no allocated memory"):
        device.synchronize()
    assert not host.any()


def freed_early(seed: int) -> bytes:
    """Return the result of a free in a stream that does not wait for the allocation."""
    device = deferred(seed)
    home, other = device.stream(), device.stream()
    device.free(filled(device, 0, home), home)
    new = device.allocate(SIZE, home)
    device.free(new, other)
    device.synchronize()
    return b""


def test_free_before_the_memory_is_there_is_a_fault_and_no_crash() -> None:
    seen = {outcome(freed_early, seed) for seed in range(100)}
    assert seen == {b"", "fill of freed memory", "free of freed memory"}


def test_much_freed_memory_is_not_kept_for_ever() -> None:
    device = deferred(0)
    stream = device.stream()
    for size in range(1000, 1600):
        device.free(device.allocate(size, stream), stream)
    big = [device.allocate(40 << 20, stream) for _ in range(3)]
    for address in big:
        device.free(address, stream)
    device.synchronize()
    assert len(device.allocator._quarantine._allocations) == 1
    assert device.memory().free == device.memory().total


# Faults


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_comes_out_where_work_is_forced_and_stays(seed: int) -> None:
    device = deferred(seed)
    reported = list[DeviceError]()
    device.on_loss = reported.append
    stream, other = device.stream(), device.stream()
    good, bad = ready(device, 0), ready(device, 0)
    bump = Bump(device, stream)
    bump(bad + SIZE)
    assert reported == []
    with pytest.raises(EmulatorFault, match="64-byte buffer"):
        stream.synchronize()
    assert len(reported) == 1
    calls: list[Callable[[], object]] = [
        device.synchronize, stream.synchronize, stream.done, stream.record, other.done,
        lambda: device.fill(good, b"\x01", SIZE, other), lambda: bump(good),
        lambda: device.allocate(8, stream), lambda: device.free(good, stream),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EmulatorFault, match="64-byte buffer"):
            call()
    assert len(reported) == 1
    device.reset()
    stream = device.stream()
    assert contents(device, filled(device, 3, stream), stream) == b"\x03" * SIZE


def test_a_fault_ends_the_work_behind_it() -> None:
    device = deferred(4)
    stream = device.stream()
    address = ready(device, 0)
    Bump(device, stream)(address + SIZE)
    device.fill(address, b"\x01", SIZE, stream)
    event = stream.record()
    with pytest.raises(EmulatorFault):
        event.synchronize()
    assert ctypes.string_at(address, SIZE) == b"\x00" * SIZE


def test_a_fault_that_a_submission_meets_comes_out_at_the_next_call() -> None:
    met = 0
    for seed in range(40):
        device = deferred(seed)
        address = ready(device, 0)
        stream = device.stream()
        Bump(device, stream)(address + SIZE)
        try:
            for _ in range(30):
                device.fill(address, b"\x01", SIZE, stream)
        except EmulatorFault:
            met += 1
        else:
            with pytest.raises(EmulatorFault):
                device.synchronize()
    assert met > 20


def test_other_work_is_lost_with_a_fault_too() -> None:
    seen = set()
    for seed in range(40):
        device = deferred(seed)
        address = ready(device, 0)
        stream = device.stream()
        other = device.stream()
        device.fill(address, b"\x01", SIZE, other)
        Bump(device, stream)(address + SIZE)
        with pytest.raises(EmulatorFault):
            device.synchronize()
        seen.add(ctypes.string_at(address, 1))
    assert seen == {b"\x00", b"\x01"}


# Beside it


def test_threads_can_submit_at_once() -> None:
    device = deferred(9)
    errors = list[BaseException]()
    total = ready(device, 0)

    def work(number: int) -> None:
        try:
            stream = device.stream()
            bump = Bump(device, stream)
            for turn in range(60):
                bump(total + 4 * number)
                scratch = filled(device, turn, stream)
                if turn % 7 == 0:
                    assert contents(device, scratch, stream) == bytes([turn]) * SIZE
                device.free(scratch, stream)
                stream.record().done()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    device.synchronize()
    counts = np.frombuffer(contents(device, total, device.stream(), 12), np.uint32)
    assert counts.tolist() == [60] * 3


def test_a_forked_child_has_the_queued_work_too() -> None:
    device = deferred(2)
    address = ready(device, 0)
    stream = device.stream()
    device.fill(address, b"\x01", SIZE, stream)
    child = os.fork()
    if not child:
        device.after_fork()
        os._exit(0 if contents(device, address, stream) == b"\x01" * SIZE else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert contents(device, address, stream) == b"\x01" * SIZE


@pytest.mark.parametrize("schedule", [None, 0])
def test_everything_goes_through_a_device_that_can_fail(schedule: int | None) -> None:
    faulty: Any = FaultyDevice(EmulatorDevice(schedule=schedule))
    stream, other = faulty.stream(), faulty.stream()
    assert isinstance(stream.id, int)
    assert faulty.adopt(stream.handle).id == stream.id != other.id
    event = stream.record()
    assert stream.record(reuse=event) is event
    other.wait(event)
    address = filled(faulty, 1, stream)
    stream.begin_capture("thread_local")
    stream.retain(owner := Owned())
    gone = weakref.ref(owner)
    del owner
    faulty.fill(address, b"\x02", SIZE, stream)
    graph = stream.end_capture()
    executable = graph.instantiate()
    executable.prepare(other)()
    other.synchronize()
    assert gone() is not None
    executable.close()
    graph.close()
    assert gone() is None
    assert faulty.calls["stream.retain"] == 1
    assert contents(faulty, address, other) in (b"\x01" * SIZE, b"\x02" * SIZE)


@pytest.mark.parametrize("seed", [True, "7", 1.5, ()])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(InputError, match="is not a seed"):
        EmulatorDevice(0, schedule=seed)


def test_a_deferred_device_is_opened_by_its_seed() -> None:
    first, other = preheat.device("emulator", schedule=1), preheat.device("emulator", schedule=2)
    with first, other:
        assert preheat.device("emulator", schedule=1) is first is not other
        x = first.zeros(4)
        assert x.__dlpack_device__() == (12, 0)
        assert x.numpy().tolist() == [0.0] * 4
    with pytest.raises(InputError, match="arch, patience and schedule belong to the emulator"):
        preheat.device("cuda", schedule=1)
