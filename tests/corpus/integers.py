"""Integer arithmetic: bits, wide products, division, random numbers, number theory."""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tests.corpus.case import Array, Launch, below, blocks, kernel, updates, words, writes

U32 = 0xFFFFFFFF


def bits_of(values: Array, width: int = 32) -> NDArray[np.int64]:
    """Return the bits of each value, lowest first, along a new last axis."""
    places = np.arange(width, dtype=np.uint64)
    return (values.astype(np.uint64)[..., None] >> places & 1).astype(np.int64)


@kernel(
    """
    extern "C" __global__ void bit_tricks(const unsigned* x, unsigned* reversed, int* zeros, int* first,
                                          int* ones, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        unsigned v = x[i];
        reversed[i] = __brev(v);
        zeros[i] = __clz(v);
        first[i] = __ffs(v);
        ones[i] = __popc(v);
    }
    """,
    sizes=(1, 33, 1000),
)
def bit_tricks(rng: Generator, n: int) -> Launch:
    x = words(rng, n, "uint32") >> rng.integers(0, 32, n, dtype=np.uint32)
    x[rng.integers(0, n)] = 0
    bits = bits_of(x)
    first = np.where(x == 0, 0, bits.argmax(-1) + 1)
    zeros = np.where(x == 0, 32, bits[:, ::-1].argmax(-1))
    reverse = bits @ (1 << np.arange(31, -1, -1))
    results = (
        writes(reverse, "uint32"),
        writes(zeros, "int32"),
        writes(first, "int32"),
        writes(bits.sum(-1), "int32"),
    )
    return Launch(blocks(n, 128), 128, (x, *results, n))


@kernel(
    """
    extern "C" __global__ void bit_tricks_64(const unsigned long long* x, unsigned long long* reversed,
                                             int* counts, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        reversed[i] = __brevll(x[i]);
        counts[i] = __popcll(x[i]) * 10000 + __clzll(x[i]) * 100 + __ffsll(x[i]);
    }
    """,
    sizes=(1, 33, 300),
)
def bit_tricks_64(rng: Generator, n: int) -> Launch:
    x = words(rng, n, "uint64") >> rng.integers(0, 64, n, dtype=np.uint64)
    x |= np.uint64(1) << rng.integers(0, 64, n, dtype=np.uint64)
    bits = bits_of(x, 64)
    reverse = bits[:, ::-1].astype(np.uint64) @ (np.uint64(1) << np.arange(64, dtype=np.uint64))
    counts = bits.sum(-1) * 10000 + bits[:, ::-1].argmax(-1) * 100 + bits.argmax(-1) + 1
    return Launch(blocks(n, 64), 64, (x, writes(reverse), writes(counts, "int32"), n))


@kernel(
    """
    extern "C" __global__ void funnel_shift_and_permute(const unsigned* lo, const unsigned* hi,
                                                        unsigned* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        unsigned a = lo[i], b = hi[i], by = a % 41u;
        out[6 * i + 0] = __funnelshift_l(a, b, by);
        out[6 * i + 1] = __funnelshift_r(a, b, by);
        out[6 * i + 2] = __funnelshift_lc(a, b, by);
        out[6 * i + 3] = __funnelshift_rc(a, b, by);
        out[6 * i + 4] = __byte_perm(a, b, 0x5412);
        out[6 * i + 5] = __byte_perm(a, b, b & 0x7777);
    }
    """,
    sizes=(1, 33, 500),
)
def funnel_shift_and_permute(rng: Generator, n: int) -> Launch:
    a, b = words(rng, n, "uint32"), words(rng, n, "uint32")
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    by = (a % 41).astype(np.uint64)
    wrap = by & np.uint64(31)
    clamp = np.minimum(by, np.uint64(32))
    word = np.uint64(32)

    def permuted(selector: Array) -> Array:
        picks = [(selector >> (4 * k)) & 7 for k in range(4)]
        taken = [((both >> (8 * pick)) & 0xFF) << (8 * k) for k, pick in enumerate(picks)]
        return np.asarray(np.sum(taken, axis=0, dtype=np.uint64))

    rows = (
        ((both << wrap) >> word) & U32,
        (both >> wrap) & U32,
        np.where(clamp == 32, a, ((both << clamp) >> word) & U32),
        (both >> clamp) & U32,
        permuted(np.full(n, 0x5412, np.uint64)),
        permuted(b.astype(np.uint64) & np.uint64(0x7777)),
    )
    return Launch(blocks(n, 64), 64, (a, b, writes(np.stack(rows, 1).astype(np.uint32)), n))


@kernel(
    """
    extern "C" __global__ void wide_products(const long long* a, const long long* b, long long* low,
                                             long long* high, unsigned long long* uhigh, int* mixed,
                                             int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        low[i] = a[i] * b[i];
        high[i] = __mul64hi(a[i], b[i]);
        uhigh[i] = __umul64hi(a[i], b[i]);
        mixed[i] = __mulhi((int)a[i], (int)b[i]) ^ (int)__umulhi((unsigned)a[i], (unsigned)b[i])
                 ^ __mul24((int)a[i], (int)b[i]);
    }
    """,
    sizes=(1, 33, 300),
)
def wide_products(rng: Generator, n: int) -> Launch:
    a, b = words(rng, n, "int64"), words(rng, n, "int64")
    pairs = [(int(p), int(q)) for p, q in zip(a, b, strict=True)]

    def signed(value: int, width: int) -> int:
        value &= (1 << width) - 1
        return value - (value >> (width - 1) << width)

    def mixed(p: int, q: int) -> int:
        high = signed(p, 32) * signed(q, 32) >> 32
        return signed(high ^ ((p & U32) * (q & U32) >> 32) ^ signed(p, 24) * signed(q, 24), 32)

    mask = (1 << 64) - 1
    results = (
        writes(a * b),
        writes(np.array([p * q >> 64 for p, q in pairs], np.int64)),
        writes(np.array([(p & mask) * (q & mask) >> 64 for p, q in pairs], np.uint64)),
        writes(np.array([mixed(p, q) for p, q in pairs], np.int32)),
    )
    return Launch(blocks(n, 64), 64, (a, b, *results, n))


@kernel(
    """
    extern "C" __global__ void division(const int* a, const int* b, int* quotient, int* remainder,
                                        unsigned* unsigned_mix, int* by_constants, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int p = a[i], q = b[i];
        quotient[i] = p / q;
        remainder[i] = p % q;
        unsigned_mix[i] = (unsigned)p / (unsigned)q * 3u + (unsigned)p % (unsigned)q;
        by_constants[i] = p / 7 + p % 10 + (p / 8) * 2 + (int)((unsigned)p / 1000u);
    }
    """,
    sizes=(1, 33, 1000),
)
def division(rng: Generator, n: int) -> Launch:
    a = words(rng, n).astype(np.int64)
    b = words(rng, n).astype(np.int64) >> rng.integers(0, 31, n)
    b[b == 0] = -7
    quotient, remainder = truncating(a, b)
    ua, ub = a & U32, b & U32
    constants = truncating(a, 7)[0] + truncating(a, 10)[1] + truncating(a, 8)[0] * 2 + ua // 1000
    results = (
        writes(quotient.astype(np.int32)),
        writes(remainder.astype(np.int32)),
        writes((ua // ub * 3 + ua % ub).astype(np.uint32)),
        writes(constants.astype(np.int32)),
    )
    return Launch(blocks(n, 128), 128, (a.astype(np.int32), b.astype(np.int32), *results, n))


def truncating(a: Array, b: Array | int) -> tuple[Array, Array]:
    """Quotient towards zero and remainder with the sign of `a`, as C has them."""
    quotient = np.abs(a) // np.abs(b) * (np.sign(a) * np.sign(b))
    return quotient, a - quotient * b


@kernel(
    """
    extern "C" __global__ void division_64(const long long* a, const long long* b, long long* quotient,
                                           unsigned long long* remainder, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        quotient[i] = a[i] / b[i];
        remainder[i] = (unsigned long long)a[i] % (unsigned long long)b[i];
    }
    """,
    sizes=(1, 33, 300),
)
def division_64(rng: Generator, n: int) -> Launch:
    a = words(rng, n, "int64")
    b = words(rng, n, "int64") >> rng.integers(0, 62, n)
    b[b == 0] = 11
    remainder = a.astype(np.uint64) % b.astype(np.uint64)
    return Launch(blocks(n, 64), 64, (a, b, writes(truncating(a, b)[0]), writes(remainder), n))


@kernel(
    """
    extern "C" __global__ void dot_int8(const int* a, const int* b, const unsigned* u, int* out,
                                        int rows, int words) {
        int row = blockIdx.x * blockDim.x + threadIdx.x;
        if (row >= rows) return;
        int sum = 0;
        unsigned mixed = 0;
        for (int k = 0; k < words; k++) {
            sum = __dp4a(a[row * words + k], b[k], sum);
            mixed = __dp4a(u[row * words + k], u[k], mixed);
        }
        out[row] = sum - (int)mixed;
    }
    """,
    sizes=(1, 31, 130),
)
def dot_int8(rng: Generator, n: int) -> Launch:
    a, b, u = words(rng, (n, 12), "int8"), words(rng, 12, "int8"), words(rng, (n, 12), "uint8")
    out = a.astype(np.int32) @ b.astype(np.int32) - u.astype(np.int32) @ u[0].astype(np.int32)
    args = a.view(np.int32), b.view(np.int32), u.view(np.uint32), writes(out), n, 3
    return Launch(blocks(n, 64), 64, args)


@kernel(
    """
    extern "C" __global__ void murmur_mix(const unsigned* x, unsigned* y, unsigned seed, int n) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
            unsigned k = x[i] * 0xcc9e2d51u;
            k = (k << 15) | (k >> 17);
            unsigned h = seed ^ (k * 0x1b873593u);
            h = ((h << 13) | (h >> 19)) * 5u + 0xe6546b64u;
            h ^= h >> 16; h *= 0x85ebca6bu;
            h ^= h >> 13; h *= 0xc2b2ae35u;
            y[i] = h ^ (h >> 16);
        }
    }
    """,
    sizes=(1, 33, 1009),
)
def murmur_mix(rng: Generator, n: int) -> Launch:
    x = words(rng, n, "uint32")

    def rotate(v: Array, by: int) -> Array:
        return (v << np.uint32(by)) | (v >> np.uint32(32 - by))

    h = np.uint32(0x9747B28C) ^ (rotate(x * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593))
    h = rotate(h, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return Launch(3, 96, (x, writes(h ^ (h >> np.uint32(16))), 0x9747B28C, n))


@kernel(
    """
    extern "C" __global__ void xorshift_streams(unsigned long long* state, unsigned* out, int n,
                                                int draws) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        unsigned long long s = state[i];
        for (int d = 0; d < draws; d++) {
            s ^= s >> 12;
            s ^= s << 25;
            s ^= s >> 27;
            out[d * n + i] = (unsigned)((s * 0x2545F4914F6CDD1Dull) >> 32);
        }
        state[i] = s;
    }
    """,
    sizes=(1, 33, 257),
)
def xorshift_streams(rng: Generator, n: int) -> Launch:
    draws = 5
    before = words(rng, n, "uint64") | np.uint64(1)
    s = before.copy()
    rows = []
    for _ in range(draws):
        s ^= s >> np.uint64(12)
        s ^= s << np.uint64(25)
        s ^= s >> np.uint64(27)
        rows.append((s * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(32))
    out = writes(np.stack(rows).astype(np.uint32))
    return Launch(blocks(n, 64), 64, (updates(before, s), out, n, draws))


@kernel(
    """
    __device__ uint4 philox(uint4 counter, uint2 key) {
        #pragma unroll
        for (int round = 0; round < 10; round++) {
            unsigned h0 = __umulhi(0xD2511F53u, counter.x), l0 = 0xD2511F53u * counter.x;
            unsigned h1 = __umulhi(0xCD9E8D57u, counter.z), l1 = 0xCD9E8D57u * counter.z;
            counter = make_uint4(h1 ^ counter.y ^ key.x, l1, h0 ^ counter.w ^ key.y, l0);
            key.x += 0x9E3779B9u;
            key.y += 0xBB67AE85u;
        }
        return counter;
    }

    extern "C" __global__ void philox_4x32(unsigned long long seed, uint4* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = philox(make_uint4(i, 0, 7, 0), make_uint2((unsigned)seed, seed >> 32));
    }
    """,
    sizes=(1, 33, 257),
)
def philox_4x32(rng: Generator, n: int) -> Launch:
    seed = int(rng.integers(1 << 62))
    c: list[Array] = [np.arange(n, dtype=np.uint64), *(np.full(n, v, np.uint64) for v in (0, 7, 0))]
    key = [seed & U32, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        h0, h1 = p0 >> np.uint64(32), p1 >> np.uint64(32)
        c = [h1 ^ c[1] ^ np.uint64(key[0]), p1 & U32, h0 ^ c[3] ^ np.uint64(key[1]), p0 & U32]
        key = [(key[0] + 0x9E3779B9) & U32, (key[1] + 0xBB67AE85) & U32]
    return Launch(blocks(n, 64), 64, (seed, writes(np.stack(c, 1).astype(np.uint32)), n))


@kernel(
    """
    __device__ __noinline__ unsigned long long power_mod(unsigned long long base, unsigned exponent,
                                                         unsigned m) {
        unsigned long long result = 1;
        for (base %= m; exponent; exponent >>= 1, base = base * base % m)
            if (exponent & 1) result = result * base % m;
        return result;
    }

    extern "C" __global__ void modular_power(const unsigned* base, const unsigned* exponent, unsigned m,
                                             unsigned* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = (unsigned)power_mod(base[i], exponent[i], m);
    }
    """,
    sizes=(1, 33, 100),
)
def modular_power(rng: Generator, n: int) -> Launch:
    base = words(rng, n, "uint32")
    exponent = rng.integers(0, 5000, n, dtype=np.uint32)
    m = 1_000_003
    out = [pow(int(b), int(e), m) for b, e in zip(base, exponent, strict=True)]
    return Launch(blocks(n, 64), 64, (base, exponent, m, writes(np.array(out, np.uint32)), n))


@kernel(
    """
    __device__ int gcd(int a, int b) {
        while (b) { int t = a % b; a = b; b = t; }
        return a;
    }

    extern "C" __global__ void greatest_common_divisor(const int* a, const int* b, int* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = gcd(a[i], b[i]);
    }
    """,
    sizes=(1, 33, 300),
)
def greatest_common_divisor(rng: Generator, n: int) -> Launch:
    common = below(rng, 1, 50, n)
    a, b = below(rng, 1, 100000, n) * common, below(rng, 1, 100000, n) * common
    out = [math.gcd(int(p), int(q)) for p, q in zip(a, b, strict=True)]
    return Launch(blocks(n, 64), 64, (a, b, writes(np.array(out, np.int32)), n))


@kernel(
    """
    extern "C" __global__ void collatz(const unsigned* start, int* steps, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        unsigned long long v = start[i];
        int count = 0;
        while (v != 1) {
            v = v & 1 ? 3 * v + 1 : v / 2;
            count++;
        }
        steps[i] = count;
    }
    """,
    sizes=(1, 33, 200),
)
def collatz(rng: Generator, n: int) -> Launch:
    start = rng.integers(1, 1000, n, dtype=np.uint32)
    v = start.astype(np.int64)
    steps = np.zeros(n, np.int32)
    while (running := v != 1).any():
        steps += running
        v = np.where(running, np.where(v % 2 == 1, 3 * v + 1, v // 2), v)
    return Launch(blocks(n, 64), 64, (start, writes(steps), n))
