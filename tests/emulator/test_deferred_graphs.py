"""Graphs and stream handles of deferred devices."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from preheat.devices import base
from preheat.emulator.device import EmulatorDevice
from preheat.errors import DriverError
from tests.emulator.deferred import (
    SIZE,
    Bump,
    Owned,
    contents,
    deferred,
    ready,
    word,
)


def captured(device: base.Device, address: int) -> tuple[base.Graph, base.Stream]:
    """Three kernels that add 1, 10 and 100."""
    stream = device.stream()
    bump = Bump(device, stream)
    stream.begin_capture("thread_local")
    for number in (1, 10, 100):
        bump(address, number)
    return stream.end_capture(), stream


@pytest.mark.parametrize("seed", range(30))
def test_a_replay_is_one_piece_of_work_in_its_stream(seed: int) -> None:
    device = deferred(seed)
    address, target = ready(device, 0), ready(device, 0)
    graph, _ = captured(device, address)
    executable = graph.instantiate()
    stream = device.stream()
    other = device.stream()
    device.fill(address, b"\x00", SIZE, stream)
    replay = executable.prepare(stream)
    assert replay() == replay() == (0,)
    device.copy(target, address, SIZE, other)  # unordered: between two replays, never inside one
    graph.close()
    executable.close()
    assert replay() == (400,)
    Bump(device, stream)(address, 1000)
    assert word(device, address, stream) == 1222
    assert word(device, target, other) in (0, 111, 222, 1222)


def test_replays_are_late_and_can_be_waited_for() -> None:
    seen = set()
    for seed in range(40):
        device = deferred(seed)
        address = ready(device, 0)
        graph, stream = captured(device, address)
        assert graph.instantiate().prepare(stream)() == (0,)
        seen.add(word(device, address, other := device.stream()))
        other.wait(stream.record())
        assert word(device, address, other) == 111
    assert seen == {0, 111}


@pytest.mark.parametrize("schedule", [None, 0])
def test_a_capture_keeps_owners_until_graph_and_executables_are_gone(schedule: int | None) -> None:
    device = EmulatorDevice(schedule=schedule)
    stream = device.stream()
    address = device.allocate(SIZE, device.stream())
    owner = Owned()
    gone = weakref.ref(owner)
    stream.begin_capture("thread_local")
    stream.retain(owner)
    del owner
    device.fill(address, b"\x01", SIZE, stream)
    graph = stream.end_capture()
    executables = [graph.instantiate(), graph.instantiate()]
    graph.close()
    executables[0].close()
    assert gone() is not None
    executables[1].close()
    assert gone() is None


def test_a_queued_replay_keeps_owners() -> None:
    kept = 0
    for seed in range(10):
        device = deferred(seed)
        stream = device.stream()
        address = ready(device, 0)
        owner = Owned()
        gone = weakref.ref(owner)
        stream.begin_capture("thread_local")
        stream.retain(owner)
        device.fill(address, b"\x01", SIZE, stream)
        del owner
        graph = stream.end_capture()
        executable = graph.instantiate()
        executable.prepare(stream)()
        del graph, executable
        gc.collect()
        kept += gone() is not None
        stream.synchronize()
        assert gone() is None
    assert kept > 0


def test_owners_go_with_a_capture_that_comes_to_nothing() -> None:
    device = EmulatorDevice()
    stream = device.stream()
    owner = Owned()
    gone = weakref.ref(owner)
    stream.begin_capture("thread_local")
    stream.retain(owner)
    del owner
    with pytest.raises(DriverError):
        stream.synchronize()
    with pytest.raises(DriverError, match="901"):
        stream.retain(Owned())
    with pytest.raises(DriverError, match="901"):
        stream.end_capture()
    gc.collect()
    assert gone() is None
    with pytest.raises(DriverError, match="401"):
        stream.retain(Owned())


def test_captured_and_queued_work_never_wait_for_one_another() -> None:
    device = deferred(0)
    stream, other = device.stream(), device.stream()
    before = other.record()
    stream.begin_capture("relaxed")
    inside = stream.record()
    stream.wait(inside)
    stream.end_capture()
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        other.wait(inside)
    stream.begin_capture("relaxed")
    with pytest.raises(DriverError, match="905"):
        stream.wait(before)


@pytest.fixture(params=[None, 1], ids=["immediate", "deferred"])
def device(request: pytest.FixtureRequest) -> EmulatorDevice:
    return EmulatorDevice(schedule=request.param)


def test_a_destroyed_streams_handle_is_used_again_with_another_id(device: EmulatorDevice) -> None:
    first, second = device.stream(), device.stream()
    assert first.id != second.id
    assert first.handle != second.handle
    first.close()
    first.close()
    third, fourth = device.stream(), device.stream()
    assert third.handle == first.handle
    assert fourth.handle not in (first.handle, second.handle)
    assert len({first.id, second.id, third.id, fourth.id, EmulatorDevice().stream().id}) == 5
    first.close()  # does nothing to the stream that has its handle now
    assert device.adopt(first.handle).id == third.id


def test_an_adopted_stream_is_the_stream_itself(device: EmulatorDevice) -> None:
    stream = device.stream()
    adopted = device.adopt(stream.handle)
    assert (adopted.handle, adopted.id) == (stream.handle, stream.id)
    stream.begin_capture("thread_local")
    assert device.adopt(stream.handle).capture_status() == adopted.capture_status() == "active"
    adopted.end_capture().close()
    adopted.close()
    assert device.adopt(stream.handle).id == stream.id


def test_there_are_default_streams_and_no_others(device: EmulatorDevice) -> None:
    assert device.adopt(0).id == device.adopt(1).id
    ids = [device.adopt(2).id, device.adopt(2).id]
    thread = threading.Thread(target=lambda: ids.append(device.adopt(2).id))
    thread.start()
    thread.join()
    assert ids[0] == ids[1] != ids[2]
    assert device.adopt(0).id not in ids
    gone = device.stream()
    gone.close()
    for handle in (gone.handle, 1 << 60, -1):
        with pytest.raises(DriverError, match="INVALID_HANDLE") as caught:
            device.adopt(handle)
        assert caught.value.code == 400


@pytest.mark.parametrize("seed", range(10))
def test_adopted_streams_share_their_queue(seed: int) -> None:
    device = deferred(seed)
    address = ready(device, 0)
    stream = device.stream()
    for number in range(1, 6):
        device.fill(address, bytes([number]), SIZE, device.adopt(stream.handle))
    assert contents(device, address, stream) == b"\x05" * SIZE
    default = ready(device, 0)
    device.fill(default, b"\x01", SIZE, device.adopt(0))
    device.fill(default, b"\x02", SIZE, device.adopt(1))
    assert contents(device, default, device.adopt(0)) == b"\x02" * SIZE


@pytest.mark.parametrize("seed", range(10))
def test_a_destroyed_stream_does_what_it_has_and_takes_no_more(seed: int) -> None:
    device = deferred(seed)
    address = ready(device, 0)
    stream = device.stream()
    device.fill(address, b"\x01", SIZE, stream)
    event = stream.record()
    stream.close()
    with pytest.raises(DriverError, match="400"):
        device.fill(address, b"\x02", SIZE, stream)
    again = device.stream()
    assert again.handle == stream.handle
    again.wait(event)
    assert contents(device, address, again) == b"\x01" * SIZE


def test_the_capture_of_a_destroyed_stream_is_over(device: EmulatorDevice) -> None:
    stream = device.stream()
    stream.begin_capture("global")
    stream.close()
    device.synchronize()
    assert device.stream().capture_status() == "none"
