"""Attacks on the emulator's memory: addresses of every size and shape, in every space."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.emulator.addresses import LOCAL_WINDOW, SHARED_WINDOW
from preheat.errors import EmulatorFault
from tests.emulator.support import Machine, entry
from tests.torture.conftest import Campaign

Array = np.ndarray[Any, Any]
WORD, HALF = 1 << 64, 1 << 63
SHARED_BYTES, LOCAL_BYTES = 256, 128
FAR_LOCAL = 4096  # Local addresses from here on are outside all other content of a frame.
DATA = 256  # words that kernels may use, between as many that they must not

#: Numbers near which addresses wrap around, change their sign or their space.
EDGES = [
    *(1 << power for power in (0, 4, 8, 31, 32, 36, 40, 47, 48, 50, 56, 57, 62, 63)),
    *(
        SHARED_WINDOW + SHARED_BYTES,
        LOCAL_WINDOW + LOCAL_BYTES,
        SHARED_WINDOW - (1 << 36),
        (1 << 50) - (1 << 40),
    ),
    *(0x7FFF_FFFF_0000, 0xFFFF_8000_0000_0000),
]
OFFSETS = (0, 8, -8, -1, 1, 4, (1 << 31) - 8, -(1 << 31), (1 << 63) - 1, 1 << 63, (1 << 64) - 4)
STEPS = (0, 4, 8, -4, -8, 1, 1 << 20, 1 << 32, 1 << 57, 1 << 58, -(1 << 60), (1 << 63) - 4)

HEAD = """
.shared .align 16 .b8 sh[256];
.local .align 16 .b8 loc[128];
ld.param.u64 %d1, [at];
mov.u32 %r1, %tid.x;
mul.wide.u32 %d3, %r1, 8;
add.s64 %d4, %d1, %d3;
ld.global.u64 %d5, [%d4];
mov.u32 %r2, 7; mov.b64 %d6, 9; mov.b64 %d7, 11; mov.b16 %h1, 3; mov.b32 %r4, 5; mov.b32 %r5, 6;
mov.u64 %d9, sh; mov.u64 %d10, loc;
st.local.u32 [%d10], %r2; st.shared.u32 [%d9], %r2;
"""


class Access(NamedTuple):
    """An instruction with `{}` in the place of the address, its space and how many bytes it takes."""

    text: str
    space: str
    size: int


def _accesses() -> list[Access]:
    found = []
    for space in ("", ".global", ".shared", ".local", ".const"):
        name = space.removeprefix(".") or "generic"
        for kind, register, size in ((".u8", "%h1", 1), (".u16", "%h1", 2), (".u64", "%d6", 8)):
            found.append(Access(f"ld{space}{kind} {register}, {{}};", name, size))
            found.append(Access(f"st{space}{kind} {{}}, {register};", name, size))
        found.append(Access(f"ld{space}.v4.u32 {{{{%r4, %r5, %r6, %r7}}}}, {{}};", name, 16))
        found.append(Access(f"st{space}.v2.u64 {{}}, {{{{%d6, %d7}}}};", name, 16))
        if space in ("", ".global", ".shared"):
            found.append(Access(f"atom{space}.add.u32 %r4, {{}}, %r2;", name, 4))
            found.append(Access(f"red{space}.add.u32 {{}}, %r2;", name, 4))
            found.append(Access(f"atom{space}.cas.b64 %d6, {{}}, %d6, %d7;", name, 8))
    return [one for one in found if not one.text.startswith("st.const")]


ACCESSES = _accesses()


def _addresses(draw: random.Random, base: int, threads: int) -> list[int]:
    """Return an address for each thread: even steps, near one another, or anything."""
    start = draw.choice([base, base + 4 * (DATA - 1), *EDGES, *(-edge for edge in EDGES)])
    start += draw.choice((0, 0, -1, -4, -8, 4, 8))
    shape = draw.random()
    if shape < 0.4:
        step = draw.choice(STEPS)
        return [(start + step * thread) % WORD for thread in range(threads)]
    if shape < 0.6:
        return [(base + 4 * draw.randrange(-300, 600)) % WORD for _ in range(threads)]
    if shape < 0.8:
        return [draw.choice(EDGES) for _ in range(threads)]
    return [draw.getrandbits(64) for _ in range(threads)]


def _is_inside(space: str, base: int, offset: int, size: int, arrays: list[Array]) -> bool | None:
    """Return True if an access must succeed, and None if that depends on the layout of the frame.

    The base of a generic address decides its space. A sum that needs more than 64 bits is no address.
    """
    if space == "generic" and base >= SHARED_WINDOW:
        space, base = (
            ("shared", base - SHARED_WINDOW) if base < LOCAL_WINDOW else ("local", base - LOCAL_WINDOW)
        )
    address = base + offset
    if address < 0 or address % size:
        return False
    if space == "shared":
        return address + size <= SHARED_BYTES
    if space == "local":
        if LOCAL_BYTES < address + size <= FAR_LOCAL:
            return None
        return address + size <= LOCAL_BYTES
    return any(a.ctypes.data <= address <= a.ctypes.data + a.nbytes - size for a in arrays)


def _expected(access: Access, addresses: list[int], offset: int, arrays: list[Array]) -> bool | None:
    answers = {
        _is_inside(access.space, _signed(address), _signed(offset), access.size, arrays)
        for address in addresses
    }
    return False if False in answers else None if None in answers else True


def _signed(number: int) -> int:
    return (number + HALF) % WORD - HALF


def test_every_address_is_memory_or_a_fault(campaign: Campaign) -> None:
    draw = campaign.random
    faults = 0
    for _ in range(campaign.rounds(quick=150, long=20_000)):
        access, offset = draw.choice(ACCESSES), draw.choice(OFFSETS)
        whole = np.zeros(3 * DATA, np.uint32)
        data = whole[DATA : 2 * DATA]
        addresses = _addresses(draw, data.ctypes.data, draw.choice([1, 2, 32, 33, 64]))
        at = np.array(addresses, np.uint64)
        text = entry(".param .u64 at, .param .u64 data", HEAD + access.text.format(f"[%d5+{offset}]"))
        described = f"{access.text} at {[hex(a) for a in addresses[:3]]}… {offset:+}"
        wanted = _expected(access, addresses, offset, [data, at])
        try:
            Machine(text)(1, len(addresses), at, data)
        except EmulatorFault:
            faults += 1
            assert wanted is not True, f"a fault, though all of it is memory: {described}"
        else:
            assert wanted is not False, f"no fault, though some of it is no memory: {described}"
        assert not whole[:DATA].any(), described
        assert not whole[2 * DATA :].any(), described
    assert faults > 0


@pytest.mark.parametrize("offset", [1 << 31, -8, 1 << 63, (1 << 64) - 8, -(1 << 64) + 16])
def test_a_parameter_that_the_kernel_has_not_is_a_fault(offset: int) -> None:
    text = entry(".param .u64 at, .param .u64 data", f"ld.param.u64 %d1, [at+{offset}];")
    with pytest.raises(EmulatorFault, match="the kernel has 16 bytes of parameters"):
        Machine(text)(1, 1, np.uint64(1), np.uint64(2))
