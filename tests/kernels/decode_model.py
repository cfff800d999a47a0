"""A small decoder on a device, its reference in float64, and a kernel that reports a decode state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import preheat
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.kernels.decode import DecodeKernel, DecodeState

Floats = np.ndarray[Any, np.dtype[np.float64]]


Ints = list[int]


WORDS, HEADS, DIM, ROWS = 37, 2, 4, 52


WIDTH = HEADS * DIM


STEP = """\
const int WORDS = 37, HEADS = 2, DIM = 4, ROWS = 52, WIDTH = HEADS * DIM;

__device__ void embed_one(const float* words, const float* places, float* x, int b, int token, int at) {
    int e = threadIdx.x;
    x[b * WIDTH + e] = words[token * WIDTH + e] + places[at * WIDTH + e];
}
__device__ float project(const float* x, const float* weight, int e) {
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i] * weight[i * WIDTH + e];
    return sum;
}
__device__ void append_one(
    const float* x, const float* weights, float* q, float* k, float* v, int b, int at) {
    int e = threadIdx.x, row = (b * ROWS + at) * WIDTH + e;
    q[b * WIDTH + e] = project(x + b * WIDTH, weights, e);
    k[row] = project(x + b * WIDTH, weights + WIDTH * WIDTH, e);
    v[row] = project(x + b * WIDTH, weights + 2 * WIDTH * WIDTH, e);
}
__device__ void attend_one(
    const float* q, const float* k, const float* v, float* out, int b, int length) {
    __shared__ float score[ROWS];
    int head = blockIdx.x * DIM;
    q += b * WIDTH + head, k += b * ROWS * WIDTH + head, v += b * ROWS * WIDTH + head;
    for (int row = threadIdx.x; row < length; row += blockDim.x) {
        float dot = 0;
        for (int d = 0; d < DIM; d++) dot += q[d] * k[row * WIDTH + d];
        score[row] = dot * 0.5f;
    }
    __syncthreads();
    if (threadIdx.x >= DIM) return;
    float most = score[0], sum = 0, mean = 0;
    for (int row = 1; row < length; row++) most = fmaxf(most, score[row]);
    for (int row = 0; row < length; row++) {
        float weight = expf(score[row] - most);
        sum += weight;
        mean += weight * v[row * WIDTH + threadIdx.x];
    }
    out[b * WIDTH + head + threadIdx.x] = mean / sum;
}

#define STATE const int *token, const int *position, const int *length
#define VALUES int token, int position, int length
extern "C" __global__ void embed(const float* words, const float* places, float* x, STATE) {
    embed_one(words, places, x, blockIdx.x, token[blockIdx.x], position[blockIdx.x]);
}
extern "C" __global__ void embed_by_value(const float* words, const float* places, float* x, VALUES) {
    embed_one(words, places, x, 0, token, position);
}
extern "C" __global__ void append(
    const float* x, const float* weights, float* q, float* k, float* v, STATE) {
    append_one(x, weights, q, k, v, blockIdx.x, position[blockIdx.x]);
}
extern "C" __global__ void append_by_value(
    const float* x, const float* weights, float* q, float* k, float* v, VALUES) {
    append_one(x, weights, q, k, v, 0, position);
}
extern "C" __global__ void attend(const float* q, const float* k, const float* v, float* out, STATE) {
    attend_one(q, k, v, out, blockIdx.y, length[blockIdx.y]);
}
extern "C" __global__ void attend_by_value(
    const float* q, const float* k, const float* v, float* out, VALUES) {
    attend_one(q, k, v, out, 0, length);
}
extern "C" __global__ void score(const float* out, const float* words, float* scores) {
    float sum = 0;
    for (int e = 0; e < WIDTH; e++) sum += out[blockIdx.x * WIDTH + e] * words[threadIdx.x * WIDTH + e];
    scores[blockIdx.x * WORDS + threadIdx.x] = sum;
}
extern "C" __global__ void best(const float* scores, int* next) {
    const float* mine = scores + threadIdx.x * WORDS;
    int found = 0;
    for (int word = 1; word < WORDS; word++) found = mine[word] > mine[found] ? word : found;
    next[threadIdx.x] = found;
}
"""


class Weights(NamedTuple):
    """A tiny model, and caches with something in every row already."""

    words: Floats
    places: Floats
    weights: Floats
    k: Floats
    v: Floats


def weights(batch: int) -> Weights:
    random = np.random.default_rng(batch)

    def some(*shape: int) -> Floats:
        return random.standard_normal(shape).astype(np.float32).astype(np.float64)

    cache = (batch, ROWS, WIDTH)
    return Weights(
        some(WORDS, WIDTH), some(ROWS, WIDTH), some(3, WIDTH, WIDTH), some(*cache), some(*cache)
    )


class Reference:
    """The step in float64."""

    def __init__(self, given: Weights, tokens: Ints, positions: Ints) -> None:
        self.given = given
        self.k = given.k.copy()
        self.v = given.v.copy()
        self.tokens, self.positions = list(tokens), list(positions)

    def step(self) -> Floats:
        """Return the output of attention for each sequence, and advance each to its best word."""
        out = np.stack([self._attend(b) for b in range(len(self.tokens))])
        self.tokens = [int(word) for word in (out @ self.given.words.T).argmax(axis=1)]
        self.positions = [at + 1 for at in self.positions]
        return out

    def _attend(self, b: int) -> Floats:
        at = self.positions[b]
        x = self.given.words[self.tokens[b]] + self.given.places[at]
        q, self.k[b, at], self.v[b, at] = (x @ weight for weight in self.given.weights)
        keys, values = (each[b, : at + 1].reshape(-1, HEADS, DIM) for each in (self.k, self.v))
        scores = np.einsum("hd,rhd->hr", q.reshape(HEADS, DIM), keys) / np.sqrt(DIM)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        mean: Floats = np.einsum("hr,rhd->hd", shares, values).reshape(WIDTH)
        return mean


class Model:
    """The decoder on a device; `state` holds its position."""

    def __init__(self, gpu: Gpu, given: Weights, state: DecodeState) -> None:
        self.gpu, self.state = gpu, state

        def both(name: str) -> DecodeKernel:
            return DecodeKernel(*(gpu.kernel(STEP, f"{name}{kind}") for kind in ("_by_value", "")))

        self.embed, self.append, self.attend = map(both, ("embed", "append", "attend"))
        self.score, self.best = (gpu.kernel(STEP, name) for name in ("score", "best"))
        self.words, self.places, self.weights, self.k, self.v = (
            gpu.array(each.astype(np.float32)) for each in given
        )
        self.x, self.q, self.out = (gpu.zeros((state.batch, WIDTH)) for _ in range(3))
        self.scores, self.next = gpu.zeros((state.batch, WORDS)), gpu.zeros(state.batch, "int32")

    def step(self, *, device_state: bool = True, advance: bool = True) -> None:
        """Embed, append to the caches, attend, choose the next word; with `advance`, move to it."""
        batch = self.state.batch
        how: dict[str, Any] = {"state": self.state, "device_state": device_state}
        self.embed[batch, WIDTH](self.words, self.places, self.x, **how)
        self.append[batch, WIDTH](self.x, self.weights, self.q, self.k, self.v, **how)
        self.attend.launch(self.q, self.k, self.v, self.out, grid=(HEADS, batch), block=32, **how)
        self.score[batch, WORDS](self.out, self.words, self.scores)
        self.best[1, batch](self.scores, self.next)
        if advance:
            self.state.advance(self.next)

    def captured(self) -> Graph:
        """Return a graph of one step."""
        with self.gpu.capture() as graph:
            self.step()
        return graph

    def bits(self) -> bytes:
        """Everything the step makes."""
        made = (self.out, self.scores, self.next, self.k, self.v)
        return b"".join(each.numpy().tobytes() for each in made)


def model(gpu: Gpu, tokens: Ints, positions: Ints, limit: int | None = ROWS) -> Model:
    """Return a model whose sequences begin at these tokens and positions."""
    state = preheat.DecodeState(gpu, len(tokens), limit=limit)
    state.set(tokens, positions)
    return Model(gpu, weights(len(tokens)), state)


STARTS = [([5], [0]), ([9, 2, 30], [0, 5, 11])]


# By value or on the device

TELL = """\
extern "C" __global__ void tell(int* out, const int* token, const int* position, const int* length) {
    int i = threadIdx.x;
    out[3 * i] = token[i], out[3 * i + 1] = position[i], out[3 * i + 2] = length[i];
}
extern "C" __global__ void tell_by_value(int* out, int token, int position, int length) {
    out[0] = -token, out[1] = -position, out[2] = -length;
}
"""


def tell(gpu: Gpu) -> DecodeKernel:
    return DecodeKernel(gpu.kernel(TELL, "tell_by_value"), gpu.kernel(TELL, "tell"))
