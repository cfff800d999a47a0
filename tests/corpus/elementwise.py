"""One thread per element: activations, vectors, small types, half precision, functions."""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Generator

from tests.corpus.case import (
    Launch,
    below,
    blocks,
    brain,
    kernel,
    normal,
    unbrain,
    uniform,
    updates,
    wide,
    words,
    writes,
)

erf = np.vectorize(math.erf, otypes=[np.float64])


@kernel(
    """
    extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i] + y[i];
    }
    """,
    sizes=(1, 33, 1000),
    rtol=1e-6,
    atol=1e-6,
)
def saxpy(rng: Generator, n: int) -> Launch:
    x, y = normal(rng, n), normal(rng, n)
    return Launch(blocks(n, 128), 128, (1.75, x, updates(y, 1.75 * wide(x) + y), n))


@kernel(
    """
    extern "C" __global__ void multiply_grid_stride(const double* __restrict__ a,
                                                    const double* __restrict__ b,
                                                    double* __restrict__ out, size_t n) {
        size_t stride = size_t(gridDim.x) * blockDim.x;
        for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) out[i] = a[i] * b[i];
    }
    """,
    sizes=(1, 127, 1009),
    rtol=1e-15,
)
def multiply_grid_stride(rng: Generator, n: int) -> Launch:
    a, b = rng.standard_normal(n), rng.standard_normal(n)
    return Launch(3, 64, (a, b, writes(a * b), n))


@kernel(
    """
    extern "C" __global__ void relu_backward(const float* x, const float* dy, float* dx, float slope,
                                             int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        dx[i] = x[i] > 0.0f ? dy[i] : slope * dy[i];
    }
    """,
    sizes=(1, 31, 1000),
    rtol=1e-6,
)
def relu_backward(rng: Generator, n: int) -> Launch:
    x, dy = normal(rng, n), normal(rng, n)
    dx = np.where(x > 0, 1.0, float(np.float32(0.01))) * dy
    return Launch(blocks(n, 96), 96, (x, dy, writes(dx, "float32"), 0.01, n))


@kernel(
    """
    __device__ __forceinline__ float phi(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }

    extern "C" __global__ void gelu_backward(const float* x, const float* dy, float* dx, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) {
            float v = x[i];
            float density = 0.39894228f * expf(-0.5f * v * v);
            dx[i] = dy[i] * (phi(v) + v * density);
        }
    }
    """,
    sizes=(1, 33, 769),
    rtol=2e-6,
    atol=2e-6,
)
def gelu_backward(rng: Generator, n: int) -> Launch:
    x = 2 * normal(rng, n)
    dy = normal(rng, n)
    v = wide(x)
    slope = 0.5 * (1 + erf(v / math.sqrt(2))) + v * np.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)
    return Launch(blocks(n, 256), 256, (x, dy, writes(dy * slope, "float32"), n))


@kernel(
    """
    extern "C" __global__ void gelu_tanh(const float* __restrict__ x, float* __restrict__ y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float v = x[i];
        float inner = 0.7978845608f * (v + 0.044715f * v * v * v);
        y[i] = 0.5f * v * (1.0f + tanhf(inner));
    }
    """,
    sizes=(1, 33, 1000),
    rtol=2e-6,
    atol=1e-6,
)
def gelu_tanh(rng: Generator, n: int) -> Launch:
    x = 2 * normal(rng, n)
    v = wide(x)
    y = 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    return Launch(blocks(n, 128), 128, (x, writes(y, "float32"), n))


@kernel(
    """
    extern "C" __global__ void silu_with_gradient(const float* x, float* y, float* dydx, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float v = x[i], s = 1.0f / (1.0f + expf(-v));
        y[i] = v * s;
        dydx[i] = s * (1.0f + v * (1.0f - s));
    }
    """,
    sizes=(1, 127, 1000),
    rtol=1e-6,
    atol=1e-6,
)
def silu_with_gradient(rng: Generator, n: int) -> Launch:
    x = 4 * normal(rng, n)
    v = wide(x)
    s = 1 / (1 + np.exp(-v))
    y, slope = writes(v * s, "float32"), writes(s * (1 + v * (1 - s)), "float32")
    return Launch(blocks(n, 128), 128, (x, y, slope, n))


@kernel(
    """
    extern "C" __global__ void clamp_to_bytes(const float* x, unsigned char* out, float scale, int zero,
                                              int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = (unsigned char)min(max(__float2int_rn(x[i] * scale) + zero, 0), 255);
    }
    """,
    sizes=(1, 33, 1000),
)
def clamp_to_bytes(rng: Generator, n: int) -> Launch:
    x = normal(rng, n)
    q = np.clip(np.rint(x * np.float32(64.0)).astype(np.int64) + 100, 0, 255)
    return Launch(blocks(n, 128), 128, (x, writes(q, "uint8"), 64.0, 100, n))


@kernel(
    """
    extern "C" __global__ void small_types(const signed char* a, const short* b,
                                           const unsigned short* c, short* sum, signed char* low,
                                           unsigned short* high, bool* less, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        short s = a[i] + b[i];
        sum[i] = s;
        low[i] = (signed char)(b[i] * 3 - c[i]);
        high[i] = (unsigned short)(c[i] / 7u + (a[i] >> 2));
        less[i] = b[i] < a[i];
    }
    """,
    sizes=(1, 31, 1000),
)
def small_types(rng: Generator, n: int) -> Launch:
    a, b, c = words(rng, n, "int8"), words(rng, n, "int16"), words(rng, n, "uint16")
    wa = a.astype(np.int64)
    wb = b.astype(np.int64)
    wc = c.astype(np.int64)
    results = (
        writes((wa + wb).astype(np.int16)),
        writes((wb * 3 - wc).astype(np.int8)),
        writes((wc // 7 + (wa >> 2)).astype(np.uint16)),
        writes(wb < wa),
    )
    return Launch(blocks(n, 128), 128, (a, b, c, *results, n))


@kernel(
    """
    extern "C" __global__ void scale_float4(const float4* __restrict__ x, float4* __restrict__ y,
                                            float by, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n / 4) {
            float4 v = x[i];
            v.x *= by; v.y *= by; v.z *= by; v.w *= by;
            y[i] = v;
        }
        if (i < n % 4) {  // what no vector covers
            int tail = n - 1 - i;
            ((float*)y)[tail] = ((const float*)x)[tail] * by;
        }
    }
    """,
    sizes=(1, 31, 1003),
    rtol=1e-6,
)
def scale_float4(rng: Generator, n: int) -> Launch:
    x = normal(rng, n)
    return Launch(blocks(n // 4 + 3, 64), 64, (x, writes(-1.25 * wide(x), "float32"), -1.25, n))


@kernel(
    """
    extern "C" __global__ void complex_multiply(const double2* a, const double2* b, double2* c, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        double2 p = a[i], q = b[i];
        c[i] = make_double2(p.x * q.x - p.y * q.y, p.x * q.y + p.y * q.x);
    }
    """,
    sizes=(1, 33, 509),
    rtol=1e-14,
    atol=1e-14,
)
def complex_multiply(rng: Generator, n: int) -> Launch:
    a, b = rng.standard_normal((n, 2)), rng.standard_normal((n, 2))
    product = a.view(np.complex128) * b.view(np.complex128)
    return Launch(blocks(n, 64), 64, (a, b, writes(product.view(np.float64)), n))


@kernel(
    """
    extern "C" __global__ void int4_rotate_add(const int4* x, int4* y, int4 bias, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int4 v = x[i];
        y[i] = make_int4(v.y + bias.x, v.z + bias.y, v.w + bias.z, v.x + bias.w);
    }
    """,
    sizes=(1, 31, 500),
)
def int4_rotate_add(rng: Generator, n: int) -> Launch:
    x, bias = words(rng, (n, 4)), words(rng, 4)
    return Launch(blocks(n, 64), 64, (x, writes(np.roll(x, -1, axis=1) + bias), bias.tobytes(), n))


@kernel(
    """
    extern "C" __global__ void rgb_to_grey(const uchar4* pixels, unsigned char* grey, int width,
                                           int height) {
        int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
        if (x >= width || y >= height) return;
        uchar4 p = pixels[y * width + x];
        grey[y * width + x] = (unsigned char)((77 * p.x + 150 * p.y + 29 * p.z) >> 8);
    }
    """,
    sizes=(1, 31, 53),
)
def rgb_to_grey(rng: Generator, n: int) -> Launch:
    width, height = n, n // 2 + 1
    pixels = words(rng, (height, width, 4), "uint8")
    grey = (pixels[..., :3] @ np.array([77, 150, 29])) >> 8
    grid = (blocks(width, 16), blocks(height, 8))
    return Launch(grid, (16, 8), (pixels, writes(grey, "uint8"), width, height))


AXPBY = """
template <typename T, int Unroll>
__global__ void axpby(T a, const T* x, T b, T* y, int n) {
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * Unroll;
    #pragma unroll
    for (int k = 0; k < Unroll; k++)
        if (first + k < n) y[first + k] = a * x[first + k] + b * y[first + k];
}
"""


@kernel(AXPBY, entry="axpby<float, 4>", sizes=(1, 33, 1000), rtol=1e-6, atol=1e-6)
def axpby_float(rng: Generator, n: int) -> Launch:
    x, y = normal(rng, n), normal(rng, n)
    expected = 0.75 * wide(x) - 1.5 * wide(y)
    return Launch(blocks(n, 4 * 64), 64, (0.75, x, -1.5, updates(y, expected), n))


@kernel(AXPBY, entry="axpby<double, 2>", sizes=(1, 127), rtol=1e-14, atol=1e-14)
def axpby_double(rng: Generator, n: int) -> Launch:
    x, y = rng.standard_normal(n), rng.standard_normal(n)
    return Launch(blocks(n, 2 * 64), 64, (0.3, x, 1.7, updates(y, 0.3 * x + 1.7 * y), n))


@kernel(AXPBY, entry="axpby<long long, 1>", sizes=(1, 127))
def axpby_long(rng: Generator, n: int) -> Launch:
    x, y = words(rng, n, "int64"), words(rng, n, "int64")
    return Launch(blocks(n, 64), 64, (-3, x, 7, updates(y, -3 * x + 7 * y), n))


@kernel(
    """
    #include <cuda_fp16.h>

    extern "C" __global__ void half2_fma_relu(const __half2* a, const __half2* b, const __half2* c,
                                              __half2* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        __half2 v = __hfma2(a[i], b[i], c[i]);
        v = __hmax2(v, __float2half2_rn(0.0f));
        out[i] = __hadd2(v, __floats2half2_rn(1.0f, -2.0f));
    }
    """,
    sizes=(1, 33, 500),
    rtol=2e-3,
    atol=2e-3,
)
def half2_fma_relu(rng: Generator, n: int) -> Launch:
    a, b, c = (normal(rng, n, 2).astype(np.float16) for _ in range(3))
    expected = np.maximum(wide(a) * wide(b) + wide(c), 0) + np.array([1.0, -2.0])
    return Launch(blocks(n, 64), 64, (a, b, c, writes(expected, "float16"), n))


@kernel(
    """
    #include <cuda_fp16.h>

    extern "C" __global__ void half_softplus(const half* x, half* y, float* sum, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float v = __half2float(x[i]);
        half scaled = __hmul(x[i], __float2half(0.5f)) - x[i] / __float2half(4.0f);
        y[i] = __float2half_rn(logf(1.0f + expf(v)));
        sum[i] = (float)scaled + (__hgt(x[i], __float2half(0.0f)) ? 1.0f : -1.0f);
    }
    """,
    sizes=(1, 33, 500),
    rtol=1e-3,
    atol=1e-3,
)
def half_softplus(rng: Generator, n: int) -> Launch:
    x = normal(rng, n).astype(np.float16)
    v = wide(x)
    results = writes(np.log1p(np.exp(v)), "float16"), writes(v / 4 + np.sign(v), "float32")
    return Launch(blocks(n, 64), 64, (x, *results, n))


@kernel(
    """
    #include <cuda_bf16.h>

    extern "C" __global__ void bf16_gated(const __nv_bfloat16* gate, const __nv_bfloat16* up,
                                          __nv_bfloat16* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float g = __bfloat162float(gate[i]);
        out[i] = __float2bfloat16(g / (1.0f + __expf(-g)) * __bfloat162float(up[i]));
    }
    """,
    sizes=(1, 33, 1000),
    rtol=4e-3,
    atol=1e-6,
)
def bf16_gated(rng: Generator, n: int) -> Launch:
    gate, up = brain(normal(rng, n)), brain(normal(rng, n))
    g = unbrain(gate.bits)
    out = g / (1 + np.exp(-g)) * unbrain(up.bits)
    return Launch(blocks(n, 128), 128, (gate, up, writes(out, "bfloat16"), n))


@kernel(
    """
    #include <cuda_bf16.h>

    extern "C" __global__ void bf16x2_axpy(const __nv_bfloat162* x, __nv_bfloat162* y, float a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        __nv_bfloat162 scaled = __hmul2(x[i], __float2bfloat162_rn(a));
        y[i] = __hfma2(scaled, __floats2bfloat162_rn(2.0f, 0.5f), __hneg2(x[i]));
    }
    """,
    sizes=(1, 33, 500),
    rtol=1.6e-2,
    atol=1e-2,
)
def bf16x2_axpy(rng: Generator, n: int) -> Launch:
    x = brain(normal(rng, n, 2))
    y = unbrain(x.bits) * (1.5 * np.array([2.0, 0.5]) - 1)
    return Launch(blocks(n, 64), 64, (x, writes(y, "bfloat16"), 1.5, n))


@kernel(
    """
    extern "C" __global__ void fast_intrinsics(const float* x, float* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float v = x[i];
        out[8 * i + 0] = __expf(v);
        out[8 * i + 1] = __logf(v);
        out[8 * i + 2] = __sinf(v);
        out[8 * i + 3] = __cosf(v);
        out[8 * i + 4] = __fdividef(1.0f, v);
        out[8 * i + 5] = rsqrtf(v);
        out[8 * i + 6] = __powf(v, 1.5f);
        out[8 * i + 7] = __frcp_rn(v) + __fsqrt_rn(v) + __saturatef(v);
    }
    """,
    sizes=(1, 33, 300),
    rtol=2e-6,
    atol=2e-6,
)
def fast_intrinsics(rng: Generator, n: int) -> Launch:
    x = uniform(rng, 0.05, 3.0, n)
    v = wide(x)
    last = 1 / v + np.sqrt(v) + np.minimum(v, 1)
    rows = np.exp(v), np.log(v), np.sin(v), np.cos(v), 1 / v, v**-0.5, v**1.5, last
    return Launch(blocks(n, 64), 64, (x, writes(np.stack(rows, axis=1), "float32"), n))


@kernel(
    """
    extern "C" __global__ void accurate_functions(const float* x, float* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float v = x[i], s, c;
        sincosf(v, &s, &c);
        out[8 * i + 0] = s;
        out[8 * i + 1] = c;
        out[8 * i + 2] = expf(v);
        out[8 * i + 3] = logf(fabsf(v));
        out[8 * i + 4] = powf(fabsf(v), 0.7f);
        out[8 * i + 5] = tanhf(v);
        out[8 * i + 6] = erff(v);
        out[8 * i + 7] = atan2f(v, 0.5f) + cbrtf(v) + fmodf(v, 0.75f);
    }
    """,
    sizes=(1, 33, 300),
    rtol=1e-6,
    atol=1e-6,
)
def accurate_functions(rng: Generator, n: int) -> Launch:
    x = 3 * normal(rng, n)
    v = wide(x)
    power = np.abs(v) ** float(np.float32(0.7))
    last = np.arctan2(v, 0.5) + np.cbrt(v) + np.fmod(v, 0.75)
    rows = np.sin(v), np.cos(v), np.exp(v), np.log(np.abs(v)), power, np.tanh(v), erf(v), last
    return Launch(blocks(n, 64), 64, (x, writes(np.stack(rows, axis=1), "float32"), n))


@kernel(
    """
    extern "C" __global__ void sine_of_large_angles(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = sinf(x[i]);  // far out, more bits of pi are needed than a float has
    }
    """,
    sizes=(1, 33, 300),
    atol=1e-6,
)
def sine_of_large_angles(rng: Generator, n: int) -> Launch:
    x = uniform(rng, -1e7, 1e7, n)
    return Launch(blocks(n, 64), 64, (x, writes(np.sin(wide(x)), "float32"), n))


@kernel(
    """
    extern "C" __global__ void double_functions(const double* x, double* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        double v = x[i];
        out[6 * i + 0] = exp(v);
        out[6 * i + 1] = log(fabs(v) + 1.0);
        out[6 * i + 2] = sin(v);
        out[6 * i + 3] = sqrt(fabs(v)) / (1.0 + v * v);
        out[6 * i + 4] = fma(v, v, -floor(v));
        out[6 * i + 5] = erf(v) + tanh(v) * pow(fabs(v), 1.25);
    }
    """,
    sizes=(1, 33, 200),
    rtol=2e-15,
    atol=2e-15,
)
def double_functions(rng: Generator, n: int) -> Launch:
    v = 3 * rng.standard_normal(n)
    rows = (
        np.exp(v),
        np.log(np.abs(v) + 1),
        np.sin(v),
        np.sqrt(np.abs(v)) / (1 + v * v),
        v * v - np.floor(v),
        erf(v) + np.tanh(v) * np.abs(v) ** 1.25,
    )
    return Launch(blocks(n, 64), 64, (v, writes(np.stack(rows, axis=1)), n))


@kernel(
    """
    extern "C" __global__ void fast_math_sigmoid(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = sqrtf(1.0f / (1.0f + expf(-x[i]))) + sinf(x[i]) / x[i];
    }
    """,
    sizes=(1, 33, 1000),
    rtol=1e-5,
    atol=1e-5,
    options=("-use_fast_math",),
)
def fast_math_sigmoid(rng: Generator, n: int) -> Launch:
    x = uniform(rng, 0.1, 3.0, n)
    y = np.sqrt(1 / (1 + np.exp(-wide(x)))) + np.sin(wide(x)) / x
    return Launch(blocks(n, 128), 128, (x, writes(y, "float32"), n))


@kernel(
    """
    __device__ float cdf(float d) { return 0.5f * erfcf(-d * 0.7071067811865475f); }

    extern "C" __global__ void black_scholes(const float* spot, const float* strike, const float* years,
                                             float rate, float volatility, float* call, float* put,
                                             int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float s = spot[i], k = strike[i], t = years[i];
        float root = sqrtf(t);
        float d1 = (logf(s / k) + (rate + 0.5f * volatility * volatility) * t) / (volatility * root);
        float d2 = d1 - volatility * root;
        float discounted = k * expf(-rate * t);
        call[i] = s * cdf(d1) - discounted * cdf(d2);
        put[i] = discounted * cdf(-d2) - s * cdf(-d1);
    }
    """,
    sizes=(1, 33, 1000),
    rtol=1e-5,
    atol=1e-5,
)
def black_scholes(rng: Generator, n: int) -> Launch:
    spot, strike = uniform(rng, 5, 30, n), uniform(rng, 5, 30, n)
    years = uniform(rng, 0.25, 5, n)
    rate, vol = float(np.float32(0.02)), float(np.float32(0.3))
    s, k, t = wide(spot), wide(strike), wide(years)
    d1 = (np.log(s / k) + (rate + vol**2 / 2) * t) / (vol * np.sqrt(t))
    d2 = d1 - vol * np.sqrt(t)
    cdf = [(1 + erf(d / math.sqrt(2))) / 2 for d in (d1, d2)]
    call = s * cdf[0] - k * np.exp(-rate * t) * cdf[1]
    put = k * np.exp(-rate * t) * (1 - cdf[1]) - s * (1 - cdf[0])
    results = writes(call, "float32"), writes(put, "float32")
    return Launch(blocks(n, 128), 128, (spot, strike, years, rate, vol, *results, n))


@kernel(
    """
    struct Window { double scale; int low, high; char keep; short step[3]; };

    extern "C" __global__ void struct_by_value(Window w, const int* x, double* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        bool inside = x[i] >= w.low && x[i] < w.high;
        y[i] = inside == (w.keep == 'k') ? x[i] * w.scale + w.step[i % 3] : -1.0;
    }
    """,
    sizes=(1, 33, 500),
    rtol=1e-14,
)
def struct_by_value(rng: Generator, n: int) -> Launch:
    fields = [("scale", "f8"), ("low", "i4"), ("high", "i4"), ("keep", "S1"), ("step", "i2", 3)]
    step = words(rng, 3, "int16")
    window = np.array((0.37, -50, 70, b"k", step), np.dtype(fields, align=True))
    x = below(rng, -100, 100, n)
    y = np.where((x >= -50) & (x < 70), x * 0.37 + step[np.arange(n) % 3], -1.0)
    return Launch(blocks(n, 128), 128, (window.tobytes(), x, writes(y), n))


@kernel(
    """
    struct Particle { float position[3]; float mass; float velocity[3]; float life; };

    extern "C" __global__ void pointer_to_struct(Particle* particles, float dt, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        Particle p = particles[i];
        if (p.life <= 0.0f) return;
        for (int d = 0; d < 3; d++) p.position[d] += dt * p.velocity[d];
        p.mass *= 0.5f;
        p.life -= dt;
        particles[i] = p;
    }
    """,
    sizes=(1, 31, 300),
    rtol=1e-6,
    atol=1e-6,
)
def pointer_to_struct(rng: Generator, n: int) -> Launch:
    particles = normal(rng, n, 8)
    after = wide(particles)
    alive = particles[:, 7] > 0
    after[alive, :3] += 0.125 * after[alive, 4:7]
    after[alive, 3] *= 0.5
    after[alive, 7] -= 0.125
    return Launch(blocks(n, 64), 64, (updates(particles, after), 0.125, n))
