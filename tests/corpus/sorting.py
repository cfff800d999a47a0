"""Scans, compaction and sorting inside a block."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from tests.corpus.case import Launch, below, blocks, kernel, normal, updates, words, writes


@kernel(
    """
    extern "C" __global__ void hillis_steele_scan(const int* x, int* out, int n) {
        extern __shared__ int buffer[];  // two of them, in turns
        int *from = buffer, *to = buffer + blockDim.x, t = threadIdx.x;
        from[t] = t < n ? x[t] : 0;
        __syncthreads();
        for (int reach = 1; reach < blockDim.x; reach *= 2) {
            to[t] = t >= reach ? from[t] + from[t - reach] : from[t];
            __syncthreads();
            int* swap = from; from = to; to = swap;
        }
        if (t < n) out[t] = from[t];
    }
    """,
    sizes=(1, 33, 127),
)
def hillis_steele_scan(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    return Launch(1, 128, (x, writes(np.cumsum(x, dtype=np.int32)), n), shared=2 * 128 * 4)


@kernel(
    """
    #define PAD(i) ((i) + ((i) >> 5))  // keeps the tree's strides off one bank

    extern "C" __global__ void blelloch_scan(const float* x, float* out, float* total, int n) {
        __shared__ float tree[PAD(256)];
        int t = threadIdx.x, first = blockIdx.x * 256;
        for (int i = t; i < 256; i += 128) tree[PAD(i)] = first + i < n ? x[first + i] : 0.0f;
        int stride = 1;
        for (int active = 128; active > 0; active >>= 1, stride *= 2) {
            __syncthreads();
            if (t < active) tree[PAD(stride * (2 * t + 2) - 1)] += tree[PAD(stride * (2 * t + 1) - 1)];
        }
        __syncthreads();
        if (t == 0) { total[blockIdx.x] = tree[PAD(255)]; tree[PAD(255)] = 0.0f; }
        for (int active = 1; active <= 128; active *= 2) {
            stride >>= 1;
            __syncthreads();
            if (t < active) {
                int left = PAD(stride * (2 * t + 1) - 1), right = PAD(stride * (2 * t + 2) - 1);
                float value = tree[left];
                tree[left] = tree[right];
                tree[right] += value;
            }
        }
        __syncthreads();
        for (int i = t; i < 256 && first + i < n; i += 128) out[first + i] = tree[PAD(i)];
    }
    """,
    sizes=(1, 255, 600),
    atol=1e-5,
)
def blelloch_scan(rng: Generator, n: int) -> Launch:
    x = normal(rng, n)
    rows = np.pad(x, (0, -n % 256)).reshape(-1, 256).astype(np.float64)
    inclusive = np.cumsum(rows, axis=1)
    out = (inclusive - rows).ravel()[:n]
    results = writes(out, "float32"), writes(inclusive[:, -1], "float32")
    return Launch(blocks(n, 256), 128, (x, *results, n))


@kernel(
    """
    __device__ __forceinline__ int warp_inclusive(int v) {
        for (int d = 1; d < 32; d <<= 1) {
            int other = __shfl_up_sync(0xffffffffu, v, d);
            if ((threadIdx.x & 31) >= d) v += other;
        }
        return v;
    }

    extern "C" __global__ void block_scan_by_shuffle(const int* x, int* out, int n) {
        __shared__ int totals[32];
        int t = threadIdx.x, lane = t & 31, warp = t >> 5;
        int v = t < n ? x[t] : 0, scanned = warp_inclusive(v);
        if (lane == 31) totals[warp] = scanned;
        __syncthreads();
        if (warp == 0) totals[lane] = warp_inclusive(lane < blockDim.x / 32 ? totals[lane] : 0);
        __syncthreads();
        if (t < n) out[t] = scanned - v + (warp ? totals[warp - 1] : 0);
    }
    """,
    sizes=(1, 33, 251),
)
def block_scan_by_shuffle(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    return Launch(1, 256, (x, writes(np.cumsum(x, dtype=np.int32) - x), n))


@kernel(
    """
    extern "C" __global__ void compact_by_ballot(const float* x, float* kept, int* count, int n) {
        __shared__ int base[9];
        int t = threadIdx.x, lane = t & 31, warp = t >> 5;
        bool keep = t < n && x[t] > 0.0f;
        unsigned ballot = __ballot_sync(0xffffffffu, keep);
        if (lane == 0) base[warp + 1] = __popc(ballot);
        __syncthreads();
        if (t == 0) {
            base[0] = 0;
            for (int w = 0; w < 8; w++) base[w + 1] += base[w];
            *count = base[8];
        }
        __syncthreads();
        if (keep) kept[base[warp] + __popc(ballot & ((1u << lane) - 1))] = x[t];
    }
    """,
    sizes=(1, 33, 251),
)
def compact_by_ballot(rng: Generator, n: int) -> Launch:
    x = normal(rng, n)
    x[0] = abs(x[0])  # keep one at least
    kept = x[x > 0]
    return Launch(1, 256, (x, writes(kept), writes(np.array([len(kept)], np.int32)), n))


@kernel(
    """
    extern "C" __global__ void bitonic_sort(const int* x, int* sorted, int n) {
        __shared__ int keys[256];
        int t = threadIdx.x;
        keys[t] = t < n ? x[t] : 0x7fffffff;
        __syncthreads();
        for (int size = 2; size <= 256; size *= 2)
            for (int stride = size / 2; stride > 0; stride /= 2) {
                int other = t ^ stride;
                if (other > t) {
                    bool up = (t & size) == 0;
                    if ((keys[t] > keys[other]) == up) {
                        int swap = keys[t];
                        keys[t] = keys[other];
                        keys[other] = swap;
                    }
                }
                __syncthreads();
            }
        if (t < n) sorted[t] = keys[t];
    }
    """,
    sizes=(1, 33, 251),
)
def bitonic_sort(rng: Generator, n: int) -> Launch:
    x = words(rng, n)
    return Launch(1, 256, (x, writes(np.sort(x)), n))


@kernel(
    """
    extern "C" __global__ void radix_sort(unsigned* keys, int* values, int n) {
        __shared__ unsigned k[128];
        __shared__ int v[128], zeros[128];
        int t = threadIdx.x;
        if (t < n) { k[t] = keys[t]; v[t] = values[t]; }
        for (int bit = 0; bit < 32; bit += 1) {
            bool zero = t < n && !(k[t] >> bit & 1);
            zeros[t] = zero;
            __syncthreads();
            for (int d = 1; d < 128; d *= 2) {
                int before = t >= d ? zeros[t - d] : 0;
                __syncthreads();
                zeros[t] += before;
                __syncthreads();
            }
            unsigned key = t < n ? k[t] : 0;
            int value = t < n ? v[t] : 0, to = zero ? zeros[t] - 1 : zeros[127] + t - zeros[t];
            __syncthreads();
            if (t < n) { k[to] = key; v[to] = value; }
            __syncthreads();
        }
        if (t < n) { keys[t] = k[t]; values[t] = v[t]; }
    }
    """,
    sizes=(1, 33, 127),
)
def radix_sort(rng: Generator, n: int) -> Launch:
    keys = words(rng, n, "uint32") & np.uint32(0xF000000F)  # with ties: the sort is stable
    values = words(rng, n)
    order = np.argsort(keys, kind="stable")
    return Launch(1, 128, (updates(keys, keys[order]), updates(values, values[order]), n))


@kernel(
    """
    extern "C" __global__ void counting_sort(const unsigned char* keys, unsigned char* sorted,
                                             int* starts, int n) {
        __shared__ int offsets[16];
        if (threadIdx.x < 16) offsets[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&offsets[keys[i] & 15], 1);
        __syncthreads();
        if (threadIdx.x == 0)
            for (int d = 0, sum = 0; d < 16; d++) { int c = offsets[d]; offsets[d] = sum; sum += c; }
        __syncthreads();
        if (threadIdx.x < 16) starts[threadIdx.x] = offsets[threadIdx.x];
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            sorted[atomicAdd(&offsets[keys[i] & 15], 1)] = keys[i] & 15;
    }
    """,
    sizes=(1, 127, 500),
)
def counting_sort(rng: Generator, n: int) -> Launch:
    keys = words(rng, n, "uint8")
    digits = np.sort(keys & 15)
    starts = np.searchsorted(digits, np.arange(16))
    return Launch(1, 96, (keys, writes(digits), writes(starts, "int32"), n))


@kernel(
    """
    extern "C" __global__ void odd_even_merge_pairs(float* keys, int* index, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        for (int phase = 0; phase < 2; phase++) {
            int a = 2 * i + phase;
            if (a + 1 < n && keys[a] > keys[a + 1]) {
                float k = keys[a]; keys[a] = keys[a + 1]; keys[a + 1] = k;
                int v = index[a]; index[a] = index[a + 1]; index[a + 1] = v;
            }
            __syncthreads();
        }
    }
    """,
    sizes=(1, 33, 127),
)
def odd_even_merge_pairs(rng: Generator, n: int) -> Launch:
    keys = normal(rng, n)
    index = np.arange(n, dtype=np.int32)
    order = index.copy()
    for phase in (0, 1):
        for a in range(phase, n - 1, 2):
            if keys[order[a]] > keys[order[a + 1]]:
                order[[a, a + 1]] = order[[a + 1, a]]
    return Launch(1, 64, (updates(keys, keys[order]), updates(index, order), n))


@kernel(
    """
    extern "C" __global__ void rank_by_merge_path(const int* a, int na, const int* b, int nb,
                                                  int* merged) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= na + nb) return;
        bool from_a = i < na;
        int key = from_a ? a[i] : b[i - na];
        const int* other = from_a ? b : a;
        int low = 0, high = from_a ? nb : na;
        while (low < high) {
            int mid = (low + high) >> 1;
            if (from_a ? other[mid] < key : other[mid] <= key) low = mid + 1;
            else high = mid;
        }
        merged[low + (from_a ? i : i - na)] = key;
    }
    """,
    sizes=(1, 33, 500),
)
def rank_by_merge_path(rng: Generator, n: int) -> Launch:
    a, b = np.sort(below(rng, 0, n, n)), np.sort(below(rng, 0, n, n // 2 + 1))
    merged = np.sort(np.concatenate([a, b]))
    return Launch(blocks(len(merged), 64), 64, (a, len(a), b, len(b), writes(merged)))
