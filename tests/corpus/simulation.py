"""Simulation and signals: bodies, transforms, random walks."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from tests.corpus.case import Array, Launch, below, blocks, kernel, normal, uniform, wide, words, writes


@kernel(
    """
    __device__ float3 pull(float4 on, float4 by, float3 sum) {
        float dx = by.x - on.x, dy = by.y - on.y, dz = by.z - on.z;
        float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + 0.01f);
        float s = by.w * inverse * inverse * inverse;
        return make_float3(sum.x + dx * s, sum.y + dy * s, sum.z + dz * s);
    }

    extern "C" __global__ void n_body(const float4* bodies, float3* forces, int n) {
        extern __shared__ float4 tile[];
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        float4 me = bodies[min(i, n - 1)];
        float3 sum = make_float3(0.0f, 0.0f, 0.0f);
        for (int base = 0; base < n; base += blockDim.x) {
            int j = base + threadIdx.x;
            tile[threadIdx.x] = j < n ? bodies[j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            __syncthreads();
            #pragma unroll 4
            for (int k = 0; k < blockDim.x; k++) sum = pull(me, tile[k], sum);
            __syncthreads();
        }
        if (i < n) forces[i] = sum;
    }
    """,
    sizes=(1, 33, 70),
    rtol=1e-5,
    atol=1e-5,
)
def n_body(rng: Generator, n: int) -> Launch:
    bodies = normal(rng, n, 4)
    bodies[:, 3] = np.abs(bodies[:, 3])
    v = wide(bodies)
    d = v[None, :, :3] - v[:, None, :3]
    forces = (d * (v[:, 3] / ((d * d).sum(-1) + 0.01) ** 1.5)[..., None]).sum(1)
    return Launch(blocks(n, 32), 32, (bodies, writes(forces, "float32"), n), shared=32 * 16)


@kernel(
    """
    extern "C" __global__ void fft_radix2(const float2* in, float2* out, int n, int bits) {
        extern __shared__ float2 s[];
        in += blockIdx.x * n;
        out += blockIdx.x * n;
        for (int i = threadIdx.x; i < n; i += blockDim.x) s[__brev(i) >> (32 - bits)] = in[i];
        __syncthreads();
        for (int size = 2; size <= n; size *= 2) {
            for (int k = threadIdx.x; k < n / 2; k += blockDim.x) {
                int at = k % (size / 2), low = k / (size / 2) * size + at, high = low + size / 2;
                float sine, cosine;
                sincospif(-2.0f * at / size, &sine, &cosine);
                float2 a = s[low], b = s[high];
                float2 turned = make_float2(b.x * cosine - b.y * sine, b.x * sine + b.y * cosine);
                s[low] = make_float2(a.x + turned.x, a.y + turned.y);
                s[high] = make_float2(a.x - turned.x, a.y - turned.y);
            }
            __syncthreads();
        }
        for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = s[i];
    }
    """,
    sizes=(2, 64, 256),
    atol=1e-4,
)
def fft_radix2(rng: Generator, n: int) -> Launch:
    x = normal(rng, 3, n, 2)
    spectrum = np.fft.fft(wide(x).view(np.complex128)[..., 0])
    out = np.stack([spectrum.real, spectrum.imag], -1)
    return Launch(3, 48, (x, writes(out, "float32"), n, n.bit_length() - 1), shared=8 * n)


@kernel(
    """
    __device__ unsigned lcg(unsigned& state) { return state = state * 1664525u + 1013904223u; }

    extern "C" __global__ void monte_carlo_hits(const unsigned* seeds, unsigned* hits, int n,
                                                int rounds) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        unsigned state = seeds[i], inside = 0;
        for (int r = 0; r < rounds; r++) {
            unsigned x = lcg(state) >> 16, y = lcg(state) >> 16;
            if (x * x / 2 + y * y / 2 < 0x7fff0000u) inside++;
        }
        hits[i] = inside;
    }
    """,
    sizes=(1, 33, 200),
)
def monte_carlo_hits(rng: Generator, n: int) -> Launch:
    seeds = words(rng, n, "uint32")
    rounds = 20
    state: Array = seeds.astype(np.uint64)
    hits = np.zeros(n, np.uint32)
    for _ in range(rounds):
        x = state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        y = state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        hits += (x >> 16) ** 2 // 2 + (y >> 16) ** 2 // 2 < 0x7FFF0000
    return Launch(blocks(n, 64), 64, (seeds, writes(hits), n, rounds))


@kernel(
    """
    extern "C" __global__ void random_walk(const int* neighbours, const int* start, int* end,
                                           int degree, int steps, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int at = start[i];
        unsigned s = i * 2654435761u + 1u;
        for (int k = 0; k < steps && at >= 0; k++) {
            s ^= s << 13; s ^= s >> 17; s ^= s << 5;
            at = neighbours[at * degree + s % degree];
        }
        end[i] = at;
    }
    """,
    sizes=(1, 33, 200),
)
def random_walk(rng: Generator, n: int) -> Launch:
    neighbours, start = below(rng, -1, 40, 40, 3), below(rng, 0, 40, n)
    at = start.copy()
    s = np.arange(n, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(1)
    for _ in range(12):
        s ^= s << np.uint32(13)
        s ^= s >> np.uint32(17)
        s ^= s << np.uint32(5)
        at = np.where(at >= 0, neighbours[at, s % 3], at)
    return Launch(blocks(n, 64), 64, (neighbours, start, writes(at), 3, 12, n))


@kernel(
    """
    extern "C" __global__ void polynomial_horner_double(const double* coefficients, int degree,
                                                        const double* x, double* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        double sum = coefficients[degree];
        for (int k = degree - 1; k >= 0; k--) sum = sum * x[i] + coefficients[k];
        y[i] = sum;
    }
    """,
    sizes=(1, 33, 300),
    rtol=1e-14,
    atol=1e-14,
)
def polynomial_horner_double(rng: Generator, n: int) -> Launch:
    c = rng.standard_normal(9)
    x = rng.uniform(-1, 1, n)
    return Launch(blocks(n, 64), 64, (c, 8, x, writes(np.polyval(c[::-1], x)), n))


@kernel(
    """
    extern "C" __global__ void ray_sphere(const float3* origins, const float3* directions,
                                          float4 sphere, float* hit, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float3 o = origins[i], d = directions[i];
        float x = o.x - sphere.x, y = o.y - sphere.y, z = o.z - sphere.z;
        float a = d.x * d.x + d.y * d.y + d.z * d.z, b = x * d.x + y * d.y + z * d.z;
        float c = x * x + y * y + z * z - sphere.w * sphere.w;
        float inside = b * b - a * c;
        if (inside < 0.0f) {
            hit[i] = -1.0f;
            return;
        }
        float near = (-b - sqrtf(inside)) / a, far = (-b + sqrtf(inside)) / a;
        hit[i] = near > 0.0f ? near : far > 0.0f ? far : -2.0f;
    }
    """,
    sizes=(1, 33, 300),
    rtol=1e-5,
    atol=1e-5,
)
def ray_sphere(rng: Generator, n: int) -> Launch:
    origin = 3 * normal(rng, n, 3)
    direction = normal(rng, n, 3)
    direction += uniform(rng, -2, 0, n, 1) * origin
    sphere = np.array([0.25, -0.5, 0.125, 1.5], np.float32)
    o = wide(origin) - sphere[:3]
    d = wide(direction)
    a = (d * d).sum(-1)
    b = (o * d).sum(-1)
    c = (o * o).sum(-1) - 1.5**2
    inside = b * b - a * c
    root = np.sqrt(np.abs(inside))
    near, far = (-b - root) / a, (-b + root) / a
    hit = np.where(inside < 0, -1, np.where(near > 0, near, np.where(far > 0, far, -2)))
    return Launch(blocks(n, 64), 64, (origin, direction, sphere.tobytes(), writes(hit, "float32"), n))
