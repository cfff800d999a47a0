"""The layers of neural networks, forward and backward."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from tests.corpus.case import (
    Array,
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
    writes,
)

#: Sums and maxima over a block of at most 1024 threads, as every kernel of a row needs them.
BLOCK = """
__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
    for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}
__device__ float block_sum(float v, float* scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    v = warp_sum(v);
    __syncthreads();  // scratch may still be read
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? scratch[lane] : 0.0f);
}
"""


def softmax(x: Array) -> Array:
    """Return the softmax of each row."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


@kernel(
    BLOCK
    + """
extern "C" __global__ void softmax_forward(const float* x, float* y, int width) {
    __shared__ float scratch[32];
    __shared__ float highest;
    const float* row = x + (size_t)blockIdx.x * width;
    float m = __int_as_float(0xff800000);
    for (int c = threadIdx.x; c < width; c += blockDim.x) m = fmaxf(m, row[c]);
    m = warp_max(m);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = m;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; w++) m = fmaxf(m, scratch[w]);
        highest = m;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum += expf(row[c] - highest);
    sum = block_sum(sum, scratch);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        y[(size_t)blockIdx.x * width + c] = expf(row[c] - highest) / sum;
}
""",
    sizes=(1, 33, 500),
    rtol=2e-6,
    atol=1e-7,
)
def softmax_forward(rng: Generator, n: int) -> Launch:
    x = 5 * normal(rng, 3, n)
    return Launch(3, 128, (x, writes(softmax(wide(x)), "float32"), n))


@kernel(
    BLOCK
    + """
extern "C" __global__ void softmax_backward(const float* __restrict__ y, const float* __restrict__ dy,
                                            float* __restrict__ dx, int width) {
    __shared__ float scratch[32];
    size_t at = (size_t)blockIdx.x * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum += y[at + c] * dy[at + c];
    sum = block_sum(sum, scratch);
    for (int c = threadIdx.x; c < width; c += blockDim.x) dx[at + c] = y[at + c] * (dy[at + c] - sum);
}
""",
    sizes=(1, 33, 500),
    rtol=1e-5,
    atol=1e-7,
)
def softmax_backward(rng: Generator, n: int) -> Launch:
    y = softmax(wide(normal(rng, 3, n))).astype(np.float32)
    dy = normal(rng, 3, n)
    dx = wide(y) * (dy - (wide(y) * dy).sum(-1, keepdims=True))
    return Launch(3, 64, (y, dy, writes(dx, "float32"), n))


@kernel(
    """
    extern "C" __global__ void online_softmax_by_warp(const float* x, float* y, int rows, int width) {
        int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
        if (row >= rows) return;
        x += row * width;
        y += row * width;
        float m = -3.402823466e38f, sum = 0.0f;
        for (int c = lane; c < width; c += 32) {
            float higher = fmaxf(m, x[c]);
            sum = sum * __expf(m - higher) + __expf(x[c] - higher);
            m = higher;
        }
        for (int d = 16; d; d /= 2) {
            float om = __shfl_xor_sync(0xffffffffu, m, d), os = __shfl_xor_sync(0xffffffffu, sum, d);
            float higher = fmaxf(m, om);
            sum = sum * __expf(m - higher) + os * __expf(om - higher);
            m = higher;
        }
        for (int c = lane; c < width; c += 32) y[c] = __fdividef(__expf(x[c] - m), sum);
    }
    """,
    sizes=(1, 33, 200),
    rtol=1e-5,
    atol=1e-7,
)
def online_softmax_by_warp(rng: Generator, n: int) -> Launch:
    x = normal(rng, 5, n)
    return Launch(3, 64, (x, writes(softmax(wide(x)), "float32"), 5, n))


@kernel(
    BLOCK
    + """
extern "C" __global__ void layer_norm_forward(const float* x, const float* gamma, const float* beta,
                                              float* y, float* mean, float* rstd, int width,
                                              float eps) {
    __shared__ float scratch[32];
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) sum += x[c];
    float m = block_sum(sum, scratch) / width;
    float square = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) square += (x[c] - m) * (x[c] - m);
    float r = rsqrtf(block_sum(square, scratch) / width + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x) y[c] = (x[c] - m) * r * gamma[c] + beta[c];
    if (threadIdx.x == 0) { mean[blockIdx.x] = m; rstd[blockIdx.x] = r; }
}
""",
    sizes=(2, 33, 500),
    rtol=2e-6,
    atol=2e-6,
)
def layer_norm_forward(rng: Generator, n: int) -> Launch:
    x, gamma, beta = normal(rng, 3, n), normal(rng, n), normal(rng, n)
    v = wide(x)
    mean = v.mean(-1)
    rstd = 1 / np.sqrt(v.var(-1) + 0.01)
    y = (v - mean[:, None]) * rstd[:, None] * gamma + beta
    results = (writes(out, "float32") for out in (y, mean, rstd))
    return Launch(3, 96, (x, gamma, beta, *results, n, 0.01))


@kernel(
    BLOCK
    + """
extern "C" __global__ void layer_norm_backward(const float* x, const float* gamma, const float* dy,
                                               float* dx, float* dgamma, float* dbeta, int width,
                                               float eps) {
    __shared__ float scratch[32];
    x += blockIdx.x * width; dy += blockIdx.x * width; dx += blockIdx.x * width;
    float s = 0.0f, q = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) { s += x[c]; q += x[c] * x[c]; }
    float mean = block_sum(s, scratch) / width;
    float rstd = rsqrtf(fmaxf(block_sum(q, scratch) / width - mean * mean, 0.0f) + eps);
    float a = 0.0f, b = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float normed = (x[c] - mean) * rstd, g = dy[c] * gamma[c];
        a += g;
        b += g * normed;
        atomicAdd(&dgamma[c], dy[c] * normed);
        atomicAdd(&dbeta[c], dy[c]);
    }
    a = block_sum(a, scratch) / width;
    b = block_sum(b, scratch) / width;
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        dx[c] = rstd * (dy[c] * gamma[c] - a - (x[c] - mean) * rstd * b);
}
""",
    sizes=(2, 33, 200),
    rtol=1e-5,
    atol=1e-5,
)
def layer_norm_backward(rng: Generator, n: int) -> Launch:
    x, gamma, dy = normal(rng, 3, n), normal(rng, n), normal(rng, 3, n)
    v = wide(x)
    rstd = 1 / np.sqrt(v.var(-1, keepdims=True) + 0.01)
    normed = (v - v.mean(-1, keepdims=True)) * rstd
    g = wide(dy) * gamma
    dx = rstd * (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True))
    ones = np.ones(n, np.float32)
    sums = updates(ones, 1 + (wide(dy) * normed).sum(0)), updates(ones, 1 + wide(dy).sum(0))
    return Launch(3, 64, (x, gamma, dy, writes(dx, "float32"), *sums, n, 0.01))


@kernel(
    "#include <cuda_bf16.h>\n"
    + BLOCK
    + """
extern "C" __global__ void rms_norm_bf16(const __nv_bfloat16* x, const float* weight, __nv_bfloat16* y,
                                         int width, float eps) {
    __shared__ float scratch[32];
    size_t at = (size_t)blockIdx.x * width;
    float square = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float v = __bfloat162float(x[at + c]);
        square += v * v;
    }
    float scale = rsqrtf(block_sum(square, scratch) / width + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        y[at + c] = __float2bfloat16(__bfloat162float(x[at + c]) * scale * weight[c]);
}
""",
    sizes=(1, 33, 500),
    rtol=4e-3,
    atol=1e-6,
)
def rms_norm_bf16(rng: Generator, n: int) -> Launch:
    x = brain(normal(rng, 3, n))
    weight = normal(rng, n)
    v = unbrain(x.bits)
    y = v / np.sqrt((v * v).mean(-1, keepdims=True) + 0.001) * weight
    return Launch(3, 64, (x, weight, writes(y, "bfloat16"), n, 0.001))


@kernel(
    BLOCK
    + """
extern "C" __global__ void rms_norm_backward(const float* x, const float* weight, const float* dy,
                                             float* dx, int width, float eps) {
    extern __shared__ float row[];
    __shared__ float scratch[32];
    x += blockIdx.x * width; dy += blockIdx.x * width; dx += blockIdx.x * width;
    float square = 0.0f, dot = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        row[c] = x[c];
        square += row[c] * row[c];
        dot += row[c] * weight[c] * dy[c];
    }
    float r = rsqrtf(block_sum(square, scratch) / width + eps);
    float shift = block_sum(dot, scratch) * r * r / width;
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        dx[c] = r * (weight[c] * dy[c] - row[c] * shift);
}
""",
    sizes=(1, 33, 500),
    rtol=2e-5,
    atol=2e-6,
)
def rms_norm_backward(rng: Generator, n: int) -> Launch:
    x, weight, dy = normal(rng, 3, n), normal(rng, n), normal(rng, 3, n)
    v = wide(x)
    g = wide(dy) * weight
    r = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + 0.001)
    dx = r * g - v * r**3 * (v * g).mean(-1, keepdims=True)
    return Launch(3, 64, (x, weight, dy, writes(dx, "float32"), n, 0.001), shared=4 * n)


@kernel(
    """
    extern "C" __global__ void rotary_embedding(float* x, const int* positions, int heads, int half,
                                                float theta) {
        int token = blockIdx.x, head = blockIdx.y, k = threadIdx.x;
        if (k >= half) return;
        float* pair = x + ((size_t)token * heads + head) * 2 * half;
        float angle = positions[token] * powf(theta, -(float)k / half), s, c;
        sincosf(angle, &s, &c);
        float a = pair[k], b = pair[k + half];
        pair[k] = a * c - b * s;
        pair[k + half] = a * s + b * c;
    }
    """,
    sizes=(1, 7, 32),
    atol=2e-4,
)
def rotary_embedding(rng: Generator, n: int) -> Launch:
    x = normal(rng, 5, 3, 2, n)
    positions = below(rng, 0, 300, 5)
    angle = positions[:, None] * 10000.0 ** (-np.arange(n) / n)
    c = np.cos(angle)[:, None]
    s = np.sin(angle)[:, None]
    a, b = wide(x[:, :, 0]), wide(x[:, :, 1])
    after = np.stack([a * c - b * s, a * s + b * c], axis=2)
    return Launch((5, 3), 32, (updates(x, after), positions, 3, n, 10000.0))


@kernel(
    """
    extern "C" __global__ void embedding_lookup(const long long* ids, const float* table, float* out,
                                                int width, long long vocabulary) {
        long long id = ids[blockIdx.x];
        bool known = id >= 0 && id < vocabulary;
        for (int c = threadIdx.x; c < width; c += blockDim.x)
            out[(size_t)blockIdx.x * width + c] = known ? table[id * width + c] : 0.0f;
    }
    """,
    sizes=(1, 33, 70),
)
def embedding_lookup(rng: Generator, n: int) -> Launch:
    ids = rng.integers(-2, 15, 9)
    table = normal(rng, 13, n)
    known = (ids >= 0) & (ids < 13)
    out = np.where(known[:, None], table[np.clip(ids, 0, 12)], np.float32(0))
    return Launch(9, 32, (ids, table, writes(out), n, 13))


@kernel(
    """
    extern "C" __global__ void embedding_backward(const int* ids, const float* dy, float* dtable,
                                                  int width, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n * width) atomicAdd(&dtable[ids[i / width] * width + i % width], dy[i]);
    }
    """,
    sizes=(1, 7, 31),
    rtol=1e-6,
    atol=1e-6,
)
def embedding_backward(rng: Generator, n: int) -> Launch:
    ids = below(rng, 0, 6, 20)
    dy = normal(rng, 20, n)
    before = normal(rng, 6, n)
    after = wide(before)
    np.add.at(after, ids, dy)
    return Launch(blocks(20 * n, 64), 64, (ids, dy, updates(before, after), n, 20))


@kernel(
    BLOCK
    + """
extern "C" __global__ void cross_entropy(const float* logits, const int* target, float* loss,
                                         float* dlogits, int classes) {
    __shared__ float scratch[32];
    const float* row = logits + blockIdx.x * classes;
    float m = __int_as_float(0xff800000), sum = 0.0f;
    for (int c = 0; c < classes; c++) m = fmaxf(m, row[c]);
    for (int c = threadIdx.x; c < classes; c += blockDim.x) sum += expf(row[c] - m);
    float log_sum = m + logf(block_sum(sum, scratch));
    int hit = target[blockIdx.x];
    for (int c = threadIdx.x; c < classes; c += blockDim.x)
        dlogits[blockIdx.x * classes + c] = expf(row[c] - log_sum) - (c == hit ? 1.0f : 0.0f);
    if (threadIdx.x == 0) loss[blockIdx.x] = log_sum - row[hit];
}
""",
    sizes=(1, 33, 200),
    rtol=1e-5,
    atol=2e-6,
)
def cross_entropy(rng: Generator, n: int) -> Launch:
    logits = 3 * normal(rng, 4, n)
    target = below(rng, 0, n, 4)
    p = softmax(wide(logits))
    rows = np.arange(4)
    loss = -np.log(p[rows, target])
    p[rows, target] -= 1
    return Launch(4, 64, (logits, target, writes(loss, "float32"), writes(p, "float32"), n))


@kernel(
    """
    struct Adam { float rate, beta1, beta2, eps, decay; int step; };

    extern "C" __global__ void adam_step(float* p, const float* g, float* m, float* v, Adam o, int n) {
        float correct1 = 1.0f - powf(o.beta1, (float)o.step);
        float correct2 = 1.0f - powf(o.beta2, (float)o.step);
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
            m[i] = o.beta1 * m[i] + (1.0f - o.beta1) * g[i];
            v[i] = o.beta2 * v[i] + (1.0f - o.beta2) * g[i] * g[i];
            float update = m[i] / correct1 / (sqrtf(v[i] / correct2) + o.eps);
            p[i] -= o.rate * (update + o.decay * p[i]);
        }
    }
    """,
    sizes=(1, 33, 500),
    rtol=1e-6,
    atol=2e-7,
)
def adam_step(rng: Generator, n: int) -> Launch:
    p = normal(rng, n)
    g = normal(rng, n)
    m = normal(rng, n)
    v = uniform(rng, 0.1, 1, n)
    settings = np.array([0.01, 0.9, 0.999, 1e-8, 0.1], np.float32)
    rate, beta1, beta2, eps, decay = map(float, settings)
    step = 17
    m2 = beta1 * wide(m) + (1 - beta1) * g
    v2 = beta2 * wide(v) + (1 - beta2) * wide(g) ** 2
    move = m2 / (1 - beta1**step) / (np.sqrt(v2 / (1 - beta2**step)) + eps)
    p2 = p - rate * (move + decay * wide(p))
    by_value = settings.tobytes() + np.int32(step).tobytes()
    return Launch(3, 64, (updates(p, p2), g, updates(m, m2), updates(v, v2), by_value, n))


@kernel(
    """
    extern "C" __global__ void decode_attention(const float* q, const float* keys, const float* values,
                                                float* out, int length, float scale) {
        __shared__ float weights[4], totals[4], mixed[4][32];
        int head = blockIdx.x, warp = threadIdx.y, lane = threadIdx.x;
        float mine = q[head * 32 + lane] * scale, m = -1e30f, sum = 0.0f, mix = 0.0f;
        for (int t = warp; t < length; t += 4) {  // each warp takes every fourth position
            float score = mine * keys[(t * gridDim.x + head) * 32 + lane];
            for (int d = 16; d; d >>= 1) score += __shfl_xor_sync(0xffffffffu, score, d);
            float higher = fmaxf(m, score);
            float shrink = __expf(m - higher), weight = __expf(score - higher);
            sum = sum * shrink + weight;
            mix = mix * shrink + weight * values[(t * gridDim.x + head) * 32 + lane];
            m = higher;
        }
        mixed[warp][lane] = mix;
        if (lane == 0) { weights[warp] = m; totals[warp] = sum; }
        __syncthreads();
        if (warp) return;
        float top = fmaxf(fmaxf(weights[0], weights[1]), fmaxf(weights[2], weights[3]));
        float all = 0.0f, result = 0.0f;
        for (int w = 0; w < 4; w++) {
            float shrink = __expf(weights[w] - top);
            all += totals[w] * shrink;
            result += mixed[w][lane] * shrink;
        }
        out[head * 32 + lane] = result / all;
    }
    """,
    sizes=(1, 33, 70),
    rtol=1e-5,
    atol=2e-6,
)
def decode_attention(rng: Generator, n: int) -> Launch:
    q, keys, values = normal(rng, 3, 32), normal(rng, n, 3, 32), normal(rng, n, 3, 32)
    scores = np.einsum("hd,thd->ht", wide(q), wide(keys)) * 0.125
    out = np.einsum("ht,thd->hd", softmax(scores), wide(values))
    return Launch(3, (32, 4), (q, keys, values, writes(out, "float32"), n, 0.125))


@kernel(
    """
    #include <cuda_fp16.h>

    extern "C" __global__ void swiglu_half(const __half2* gate_up, __half2* out, int half_width) {
        int row = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
        if (c >= half_width) return;
        const __half2* line = gate_up + (size_t)row * 2 * half_width;
        float2 g = __half22float2(line[c]), u = __half22float2(line[c + half_width]);
        g.x = g.x / (1.0f + expf(-g.x)) * u.x;
        g.y = g.y / (1.0f + expf(-g.y)) * u.y;
        out[row * half_width + c] = __float22half2_rn(g);
    }
    """,
    sizes=(1, 33, 100),
    rtol=1e-3,
    atol=1e-5,
)
def swiglu_half(rng: Generator, n: int) -> Launch:
    x = normal(rng, 3, 2, 2 * n).astype(np.float16)
    g, u = wide(x[:, 0]), wide(x[:, 1])
    return Launch((blocks(n, 32), 3), 32, (x, writes(g / (1 + np.exp(-g)) * u, "float16"), n))


@kernel(
    """
    extern "C" __global__ void quantize_rows(const float* x, signed char* q, float* scales, int width) {
        __shared__ unsigned highest;
        if (threadIdx.x == 0) highest = 0;
        __syncthreads();
        const float* row = x + blockIdx.x * width;
        float m = 0.0f;
        for (int c = threadIdx.x; c < width; c += blockDim.x) m = fmaxf(m, fabsf(row[c]));
        atomicMax(&highest, __float_as_uint(m));  // positive floats order as their bits do
        __syncthreads();
        float scale = __uint_as_float(highest) / 127.0f;
        for (int c = threadIdx.x; c < width; c += blockDim.x)
            q[blockIdx.x * width + c] = (signed char)__float2int_rn(row[c] / scale);
        if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    }
    """,
    sizes=(1, 33, 200),
    rtol=1e-6,
)
def quantize_rows(rng: Generator, n: int) -> Launch:
    x = normal(rng, 4, n)
    scales = np.abs(x).max(-1) / np.float32(127)
    q = np.rint(x / scales[:, None]).astype(np.int8)
    return Launch(4, 64, (x, writes(q), writes(scales), n))
