"""Helpers for the tests of deferred streams: devices by seed, and work to queue on them."""

from __future__ import annotations

import ctypes

from preheat.devices import base
from preheat.emulator.device import EmulatorDevice
from tests.emulator.support import artifact, entry

SEEDS = range(200)


SIZE = 64


BUMP = entry(
    ".param .u64 p, .param .u32 v",
    """
    ld.param.u64 %d1, [p]; ld.param.u32 %r2, [v];
    ld.global.u32 %r1, [%d1]; add.u32 %r1, %r1, %r2; st.global.u32 [%d1], %r1; ret;""",
)


def deferred(seed: int) -> EmulatorDevice:
    return EmulatorDevice(schedule=seed)


def contents(device: base.Device, address: int, stream: base.Stream, size: int = SIZE) -> bytes:
    out = bytearray(size)
    device.copy_out(memoryview(out), address, stream)
    return bytes(out)


def filled(device: base.Device, value: int, stream: base.Stream, size: int = SIZE) -> int:
    address = device.allocate(size, stream)
    device.fill(address, bytes([value]), size, stream)
    return address


def ready(device: base.Device, value: int) -> int:
    """Memory that holds `value` before anything else is submitted."""
    stream = device.stream()
    address = filled(device, value, stream)
    stream.synchronize()
    return address


class Bump:
    """A kernel that adds a number to a word of device memory."""

    def __init__(self, device: base.Device, stream: base.Stream) -> None:
        function = device.load(artifact(BUMP)).function("k")
        self._submit = function.prepare(base.Geometry((1, 1, 1), (1, 1, 1)), stream)

    def __call__(self, address: int, number: int = 1) -> None:
        given = ctypes.c_uint64(address), ctypes.c_uint32(number)
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in given))
        assert self._submit(ctypes.addressof(pointers), 0) == (0,)
        given[0].value = given[1].value = 0  # which the launch has read already


def word(device: base.Device, address: int, stream: base.Stream) -> int:
    return int.from_bytes(contents(device, address, stream, 4), "little")


class Owned:
    """Something that can be seen to go."""
