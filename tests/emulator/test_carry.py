"""The carry flag: the value after subtractions, and 128-bit arithmetic that reads it."""

from __future__ import annotations

import numpy as np
import pytest

from preheat.gpu import Gpu

FLAGS = """
typedef unsigned u32;
extern "C" __global__ void flags(const u32* as, const u32* bs, u32* carry, u32* chain) {
    int i = threadIdx.x;
    u32 rest, high, a = as[i], b = bs[i];
    asm("sub.cc.u32 %0, %2, %3; addc.u32 %1, 0, 0;" : "=r"(rest), "=r"(carry[i]) : "r"(a), "r"(b));
    asm("add.cc.u32 %0, %2, %3; subc.u32 %1, %2, %3;" : "=r"(rest), "=r"(high) : "r"(a), "r"(b));
    chain[i] = high;
}
"""
WIDE = """
typedef unsigned long long u64;
typedef unsigned __int128 u128;
__device__ u128 whole(const u64* x) { return ((u128)x[1] << 64) | x[0]; }
extern "C" __global__ void wide(const u64* a, const u64* b, u64* out) {
    int i = threadIdx.x;
    u128 x = whole(a + 2 * i), y = whole(b + 2 * i);
    u128 results[4] = {x / y, x % y, x - y, (u128)((__int128)x / (__int128)y)};
    for (int j = 0; j < 4; j++) {
        out[8 * i + 2 * j] = (u64)results[j];
        out[8 * i + 2 * j + 1] = (u64)(results[j] >> 64);
    }
}
"""
EDGES = (0, 1, 5, 7, 2**31 - 1, 2**31, 2**32 - 1)


def test_the_flag_after_a_subtraction_is_the_carry(device: Gpu) -> None:
    a, b = (np.array(x, "uint32") for x in zip(*((a, b) for a in EDGES for b in EDGES), strict=True))
    carry, chain = (device.zeros(len(a), "uint32") for _ in range(2))
    device.kernel(FLAGS, "flags")[1, len(a)](device.array(a), device.array(b), carry, chain)
    assert carry.numpy().tolist() == (a >= b).astype("uint32").tolist()
    total = a.astype("uint64") + b
    expected = (a.astype("uint64") - b - 1 + (total >> 32)) & 0xFFFFFFFF
    assert chain.numpy().tolist() == expected.tolist()


def signed(value: int) -> int:
    return value - (1 << 128) if value >> 127 else value


@pytest.mark.parametrize("bits", [8, 63, 64, 65, 100, 128])
def test_arithmetic_of_128_bits(device: Gpu, bits: int) -> None:
    rng = np.random.default_rng(bits)
    x = [int.from_bytes(rng.bytes(16), "little") for _ in range(64)]
    y = [max(int.from_bytes(rng.bytes(16), "little") >> (128 - bits), 1) for _ in range(64)]
    out = device.zeros(64 * 8, "uint64")
    words = [np.array([w for v in row for w in (v & (2**64 - 1), v >> 64)], "uint64") for row in (x, y)]
    wide = device.kernel(WIDE, "wide", options=["--device-int128"])
    wide[1, 64](device.array(words[0]), device.array(words[1]), out)
    rows = out.numpy().reshape(64, 4, 2)
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        p, q = signed(a), signed(b)
        quotient = abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
        for got, want in zip(rows[i], (a // b, a % b, a - b, quotient), strict=True):
            assert int(got[0]) | int(got[1]) << 64 == want % (1 << 128)
