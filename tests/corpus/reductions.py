"""Reductions: warps, blocks, grids, atomics, votes, cooperative groups."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from tests.corpus.case import Launch, below, blocks, kernel, normal, updates, wide, words, writes


@kernel(
    """
    __device__ float warp_sum(float v) {
        for (int offset = 16; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffffffu, v, offset);
        return v;
    }

    extern "C" __global__ void sum_by_shuffle(const float* x, float* sums, int width) {
        int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        __shared__ float partial[32];
        float sum = 0.0f;
        for (int c = threadIdx.x; c < width; c += blockDim.x) sum += x[row * width + c];
        sum = warp_sum(sum);
        if (lane == 0) partial[warp] = sum;
        __syncthreads();
        if (warp == 0) {
            sum = warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
            if (lane == 0) sums[row] = sum;
        }
    }
    """,
    sizes=(1, 33, 1000),
    rtol=1e-6,
    atol=1e-5,
)
def sum_by_shuffle(rng: Generator, n: int) -> Launch:
    x = normal(rng, 5, n)
    return Launch(5, 128, (x, writes(wide(x).sum(1), "float32"), n))


@kernel(
    """
    extern "C" __global__ void sum_in_shared(const int* x, long long* sums, int n) {
        extern __shared__ long long cache[];
        long long mine = 0;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
            mine += x[i];
        cache[threadIdx.x] = mine;
        __syncthreads();
        for (unsigned half = blockDim.x / 2; half > 0; half >>= 1) {
            if (threadIdx.x < half) cache[threadIdx.x] += cache[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0) sums[blockIdx.x] = cache[0];
    }
    """,
    sizes=(1, 127, 1009),
)
def sum_in_shared(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    owner = np.arange(n) // 64 % 3
    sums = [x[owner == block].sum(dtype=np.int64) for block in range(3)]
    return Launch(3, 64, (x, writes(np.array(sums)), n), shared=64 * 8)


@kernel(
    """
    __device__ unsigned arrived;

    extern "C" __global__ void last_block_finishes(const double* x, volatile double* partial,
                                                   double* out, int n) {
        __shared__ double cache[128];
        __shared__ bool last;
        double mine = 0;
        for (int i = blockIdx.x * 128 + threadIdx.x; i < n; i += gridDim.x * 128) mine += x[i];
        cache[threadIdx.x] = mine;
        __syncthreads();
        for (int half = 64; half; half >>= 1) {
            if (threadIdx.x < half) cache[threadIdx.x] += cache[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            partial[blockIdx.x] = cache[0];
            __threadfence();
            last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && threadIdx.x == 0) {
            double total = 0;
            for (int b = 0; b < gridDim.x; b++) total += partial[b];
            *out = total;
        }
    }
    """,
    sizes=(1, 129, 1009),
    rtol=1e-14,
    atol=1e-14,
)
def last_block_finishes(rng: Generator, n: int) -> Launch:
    x = rng.standard_normal(n)
    grid = blocks(n, 256) + 1
    owner = np.arange(n) // 128 % grid
    partial = np.array([x[owner == block].sum() for block in range(grid)])
    return Launch(grid, 128, (x, writes(partial), writes([x.sum()]), n))


@kernel(
    """
    extern "C" __global__ void block_argmax(const float* x, int width, float* best, int* where) {
        __shared__ float values[THREADS];
        __shared__ int places[THREADS];
        const float* row = x + blockIdx.x * width;
        float value = __int_as_float(0xff800000);  // minus infinity
        int place = width;
        for (int c = threadIdx.x; c < width; c += THREADS)
            if (row[c] > value) { value = row[c]; place = c; }
        values[threadIdx.x] = value;
        places[threadIdx.x] = place;
        __syncthreads();
        for (int half = THREADS / 2; half; half /= 2) {
            if (threadIdx.x < half) {
                float other = values[threadIdx.x + half];
                int there = places[threadIdx.x + half];
                bool tie = other == values[threadIdx.x] && there < places[threadIdx.x];
                if (other > values[threadIdx.x] || tie) {
                    values[threadIdx.x] = other;
                    places[threadIdx.x] = there;
                }
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) { best[blockIdx.x] = values[0]; where[blockIdx.x] = places[0]; }
    }
    """,
    sizes=(1, 33, 1000),
    options=("-DTHREADS=128",),
)
def block_argmax(rng: Generator, n: int) -> Launch:
    x = np.round(normal(rng, 4, n), 1)  # with ties
    return Launch(4, 128, (x, n, writes(x.max(1)), writes(x.argmax(1), "int32")))


@kernel(
    """
    __device__ void atomic_max(float* address, float value) {
        int* bits = (int*)address;
        int seen = *bits;
        while (__int_as_float(seen) < value) {
            int before = atomicCAS(bits, seen, __float_as_int(value));
            if (before == seen) break;
            seen = before;
        }
    }

    extern "C" __global__ void float_max_by_cas(const float* x, const int* group, float* best, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) atomic_max(&best[group[i]], x[i]);
    }
    """,
    sizes=(1, 33, 500),
)
def float_max_by_cas(rng: Generator, n: int) -> Launch:
    x = normal(rng, n)
    group = below(rng, 0, 7, n)
    before = normal(rng, 7) - 2
    best = before.copy()
    np.maximum.at(best, group, x)
    return Launch(blocks(n, 64), 64, (x, group, updates(before, best), n))


@kernel(
    """
    extern "C" __global__ void every_atomic(const int* x, int* counters, unsigned* bits,
                                            unsigned long long* wide, float* real, double* precise,
                                            int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int v = x[i];
        atomicAdd(&counters[0], v);
        atomicSub(&counters[1], v);
        atomicMin(&counters[2], v);
        atomicMax(&counters[3], v);
        atomicAnd(&bits[0], (unsigned)v | 0xff00u);
        atomicOr(&bits[1], 1u << (v & 31));
        atomicXor(&bits[2], (unsigned)v);
        atomicMax(&bits[3], (unsigned)v);
        atomicAdd(&wide[0], (unsigned long long)(long long)v);
        atomicMax(&wide[1], (unsigned long long)(unsigned)v << 8);
        atomicAdd(&real[v & 1], 0.25f * (v & 15));
        atomicAdd(precise, v * 0.5);
    }
    """,
    sizes=(1, 33, 500),
)
def every_atomic(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    u = x.view(np.uint32)
    w = x.astype(np.int64)
    low, high = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    counters = np.array([5, -5, low, high], np.int32)
    total = x.sum(dtype=np.int32)
    after = np.array([5 + int(total), -5 - int(total), x.min(), x.max()]).astype(np.int32)
    bits = np.array([0xFFFFFFFF, 0, 0x1234, 3], np.uint32)
    bits_after = [
        np.bitwise_and.reduce(u | 0xFF00),
        np.bitwise_or.reduce(np.uint32(1) << (u & 31)),
        np.bitwise_xor.reduce(u) ^ 0x1234,
        max(int(u.max()), 3),
    ]
    longs = np.array([1, 2], np.uint64)
    longs_after = np.array([int(w.sum() + 1) % 2**64, max(int(u.max()) << 8, 2)], np.uint64)
    quarters = [(0.25 * (x[(x & 1) == odd] & 15)).sum() + 1.0 for odd in (0, 1)]  # exact in float32
    args = (
        x,
        updates(counters, after),
        updates(bits, np.array(bits_after, np.uint32)),
        updates(longs, longs_after),
        updates(np.ones(2, np.float32), quarters),
        updates(np.array([0.5]), [0.5 + (w * 0.5).sum()]),
        n,
    )
    return Launch(blocks(n, 64), 64, args)


@kernel(
    """
    extern "C" __global__ void ring_tickets(unsigned* head, unsigned* tail, unsigned* taken,
                                            unsigned slots, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        unsigned ticket = atomicInc(head, slots - 1);
        atomicAdd(&taken[ticket], 1u);
        atomicDec(tail, slots - 1);
    }
    """,
    sizes=(1, 33, 500),
)
def ring_tickets(rng: Generator, n: int) -> Launch:
    slots = 11
    start = int(rng.integers(slots))
    tickets = (start + np.arange(n)) % slots
    taken = below(rng, 1, 9, slots).astype(np.uint32)
    args = (
        updates(np.array([start], np.uint32), [(start + n) % slots]),
        updates(np.array([start], np.uint32), [(start - n) % slots]),
        updates(taken, taken + np.bincount(tickets, minlength=slots)),
    )
    return Launch(blocks(n, 64), 64, (*args, slots, n))


@kernel(
    """
    extern "C" __global__ void histogram(const unsigned char* x, unsigned* bins, int n) {
        __shared__ unsigned local[256];
        for (int b = threadIdx.x; b < 256; b += blockDim.x) local[b] = 0;
        __syncthreads();
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
            atomicAdd(&local[x[i]], 1u);
        __syncthreads();
        for (int b = threadIdx.x; b < 256; b += blockDim.x)
            if (local[b]) atomicAdd(&bins[b], local[b]);
    }
    """,
    sizes=(1, 127, 2003),
)
def histogram(rng: Generator, n: int) -> Launch:
    x = (words(rng, n, "uint8") & words(rng, n, "uint8")).astype(np.uint8)
    before = below(rng, 1, 100, 256).astype(np.uint32)
    return Launch(3, 96, (x, updates(before, before + np.bincount(x, minlength=256)), n))


@kernel(
    """
    extern "C" __global__ void butterfly_all_reduce(const double* x, double* sum, int* highest, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        double s = i < n ? x[i] : 0.0;
        int h = i < n ? (int)(x[i] * 1000.0) : -2147483647;
        #pragma unroll
        for (int mask = 16; mask > 0; mask >>= 1) {
            s += __shfl_xor_sync(0xffffffffu, s, mask);
            h = max(h, __shfl_xor_sync(0xffffffffu, h, mask));
        }
        if (i < n) { sum[i] = s; highest[i] = h; }
    }
    """,
    sizes=(1, 33, 500),
    rtol=1e-14,
    atol=1e-14,
)
def butterfly_all_reduce(rng: Generator, n: int) -> Launch:
    x = rng.standard_normal(n)
    warp = np.arange(n) // 32
    sums = np.bincount(warp, x)[warp]
    highest = np.full(warp[-1] + 1, -(2**31), np.int32)
    np.maximum.at(highest, warp, (x * 1000).astype(np.int32))
    return Launch(blocks(n, 64), 64, (x, writes(sums), writes(highest[warp]), n))


@kernel(
    """
    extern "C" __global__ void reduce_sync(const int* x, int* sum, unsigned* low, unsigned* any,
                                           int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x, warp = i / 32;
        int v = i < n ? x[i] : 0;
        int s = __reduce_add_sync(0xffffffffu, v);
        unsigned m = __reduce_min_sync(0xffffffffu, i < n ? (unsigned)v : 0xffffffffu);
        unsigned o = __reduce_or_sync(0xffffffffu, (unsigned)v & 0xf0f0u);
        if (threadIdx.x % 32 == 0 && i < n) { sum[warp] = s; low[warp] = m; any[warp] = o; }
    }
    """,
    sizes=(1, 33, 500),
)
def reduce_sync(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    starts = np.arange(0, n, 32)
    results = (
        writes(np.add.reduceat(x, starts, dtype=np.int32)),
        writes(np.minimum.reduceat(x.view(np.uint32), starts)),
        writes(np.bitwise_or.reduceat(x.view(np.uint32) & 0xF0F0, starts)),
    )
    return Launch(blocks(n, 64), 64, (x, *results, n))


@kernel(
    """
    extern "C" __global__ void votes(const int* x, unsigned* ballots, int* any, int* all, int* matches,
                                     int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        bool valid = i < n;
        unsigned live = __ballot_sync(0xffffffffu, valid);
        if (!valid) return;
        unsigned ballot = __ballot_sync(live, x[i] > 0);
        int some = __any_sync(live, x[i] > 2), every = __all_sync(live, x[i] > -3);
        unsigned same = __match_any_sync(live, x[i]);
        int agreed;
        __match_all_sync(live, x[i] / 4, &agreed);
        if (threadIdx.x % 32 == 0) {
            ballots[i / 32] = ballot;
            any[i / 32] = some;
            all[i / 32] = every;
        }
        matches[i] = __popc(same) + 100 * (agreed != 0);
    }
    """,
    sizes=(1, 33, 500),
)
def votes(rng: Generator, n: int) -> Launch:
    x = below(rng, -3, 4, n)
    warps = [x[start : start + 32] for start in range(0, n, 32)]
    ballots = [int((w > 0) @ (1 << np.arange(len(w)))) for w in warps]
    same = np.concatenate([(w[:, None] == w).sum(1) for w in warps])
    quarters = [np.trunc(w / 4) for w in warps]
    agreed = np.concatenate([np.full(len(q), (q == q[0]).all()) for q in quarters])
    results = (
        writes(np.array(ballots, np.uint32)),
        writes([(w > 2).any() for w in warps], "int32"),
        writes([(w > -3).all() for w in warps], "int32"),
        writes(same + 100 * agreed, "int32"),
    )
    return Launch(blocks(n, 64), 64, (x, *results, n))


@kernel(
    """
    extern "C" __global__ void warp_aggregated_add(const int* x, int* next, int* grouped, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int kind = x[i];
        unsigned peers = __match_any_sync(__activemask(), kind);
        int leader = __ffs(peers) - 1, lane = threadIdx.x & 31, base;
        if (lane == leader) base = atomicAdd(&next[kind], __popc(peers));
        base = __shfl_sync(peers, base, leader);
        grouped[base + __popc(peers & ((1u << lane) - 1))] = kind;
    }
    """,
    sizes=(1, 33, 500),
)
def warp_aggregated_add(rng: Generator, n: int) -> Launch:
    x = below(rng, 0, 5, n)
    ends = np.cumsum(np.bincount(x, minlength=5))
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int32)
    return Launch(blocks(n, 64), 64, (x, updates(starts, ends), writes(np.sort(x)), n))


COOPERATIVE = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

extern "C" __global__ void cooperative_sum(const float* x, float* total, int* largest, int n) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
    __shared__ float sums[8];
    int i = blockIdx.x * block.size() + block.thread_rank();
    float v = i < n ? x[i] : 0.0f;
    float sum = cg::reduce(warp, v, cg::plus<float>());
    int high = cg::reduce(warp, (int)(v * 1000.0f), cg::greater<int>());
    if (warp.thread_rank() == 0) {
        sums[warp.meta_group_rank()] = sum;
        atomicMax(largest, high);
    }
    block.sync();
    if (block.thread_rank() == 0) {
        float all = 0.0f;
        for (int w = 0; w < warp.meta_group_size(); w++) all += sums[w];
        total[blockIdx.x] = all;
    }
}

extern "C" __global__ void cooperative_tiles(const int* x, int* out, int n) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int v = i < n ? x[i] : 0;
    for (int d = tile.size() / 2; d > 0; d /= 2) v += tile.shfl_down(v, d);
    v = tile.shfl(v, 0);
    bool negative = tile.any(v < 0);
    if (i < n) out[i] = negative ? -v : v;
}
"""


@kernel(COOPERATIVE, sizes=(1, 33, 500), rtol=1e-6, atol=1e-06)
def cooperative_sum(rng: Generator, n: int) -> Launch:
    x = normal(rng, n)
    totals = np.add.reduceat(wide(x), np.arange(0, n, 128))
    largest = int((x * np.float32(1000)).astype(np.int32).max())
    args = x, writes(totals, "float32"), updates(np.array([-9999], np.int32), [max(largest, 0)]), n
    return Launch(blocks(n, 128), 128, args)


@kernel(COOPERATIVE, sizes=(1, 33, 200))
def cooperative_tiles(rng: Generator, n: int) -> Launch:
    x = below(rng, -1000, 1000, n)
    sums = np.add.reduceat(x, np.arange(0, n, 8), dtype=np.int32)
    return Launch(blocks(n, 64), 64, (x, writes(np.abs(sums)[np.arange(n) // 8]), n))


@kernel(
    """
    extern "C" __global__ void dot_with_double_atomics(const float* a, const float* b, double* out,
                                                       int n) {
        double sum = 0;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
            sum += (double)a[i] * b[i];
        for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
        if ((threadIdx.x & 31) == 0) atomicAdd(out, sum);
    }
    """,
    sizes=(1, 127, 1009),
    rtol=1e-13,
    atol=1e-13,
)
def dot_with_double_atomics(rng: Generator, n: int) -> Launch:
    a, b = normal(rng, n), normal(rng, n)
    return Launch(3, 64, (a, b, updates(np.array([2.5]), [2.5 + wide(a) @ wide(b)]), n))


@kernel(
    """
    extern "C" __global__ void barrier_votes(const int* x, int* counts, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        bool positive = i < n && x[i] > 0;
        int many = __syncthreads_count(positive);
        int any = __syncthreads_or(i < n && x[i] > 90);
        int all = __syncthreads_and(i >= n || x[i] > -90);
        if (threadIdx.x == 0) counts[blockIdx.x] = many * 4 + (any != 0) * 2 + (all != 0);
    }
    """,
    sizes=(1, 33, 500),
)
def barrier_votes(rng: Generator, n: int) -> Launch:
    x = below(rng, -100, 101, n)
    chunks = [x[start : start + 48] for start in range(0, n, 48)]
    counts = [(c > 0).sum() * 4 + (c > 90).any() * 2 + (c > -90).all() for c in chunks]
    return Launch(blocks(n, 48), 48, (x, writes(np.array(counts), "int32"), n))
