"""Decode states: one captured step serves every position, and a loop of replays writes nothing."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import preheat
from preheat.build.builder import Builder
from preheat.errors import (
    CaptureError,
    ContextLostError,
    GraphError,
    InputError,
    LaunchError,
    StaleBufferError,
    StaleGraphError,
)
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.kernels import decode
from preheat.kernels.decode import DecodeKernel, DecodeState
from preheat.program import Program
from preheat.runtime.array import Array
from tests.faulty import Flaky
from tests.graph.support import here
from tests.processes import finish, start
from tests.runtime.support import library
from tests.threads import run_in_thread

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
        self.given, self.k, self.v = given, given.k.copy(), given.v.copy()
        self.tokens, self.positions = list(tokens), list(positions)

    def step(self) -> Floats:
        """What attention gives for each sequence, which then goes on with the best word."""
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
    """The same on a device; `state` says where it stands."""

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
        """Embed, append to the caches, attend, pick the next word and, if asked to, go on to it."""
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
        """A graph of one step."""
        with self.gpu.capture() as graph:
            self.step()
        return graph

    def bits(self) -> bytes:
        """Everything the step makes."""
        made = (self.out, self.scores, self.next, self.k, self.v)
        return b"".join(each.numpy().tobytes() for each in made)


def model(gpu: Gpu, tokens: Ints, positions: Ints, limit: int | None = ROWS) -> Model:
    """A model whose sequences begin at these tokens and positions."""
    state = preheat.DecodeState(gpu, len(tokens), limit=limit)
    state.set(tokens, positions)
    return Model(gpu, weights(len(tokens)), state)


STARTS = [([5], [0]), ([9, 2, 30], [0, 5, 11])]


# One capture for every step


@pytest.mark.parametrize(("tokens", "positions"), STARTS, ids=["batch 1", "batch 3"])
def test_one_capture_serves_every_step_without_a_host_write(
    flaky: Flaky, tokens: Ints, positions: Ints
) -> None:
    made = model(flaky.gpu, tokens, positions)
    exact = Reference(weights(len(tokens)), tokens, positions)
    graph, words = made.captured(), set[int]()
    for _ in range(40):
        with flaky.asked() as asked:
            graph.replay()
        assert not {"copy_in", "fill", "set", "launch"} & set(asked)
        np.testing.assert_allclose(made.out.numpy(), exact.step(), rtol=2e-4, atol=2e-5)
        now = made.state.read()
        assert [*now.token] == exact.tokens
        assert [*now.position] == exact.positions
        assert [*now.length] == [at + 1 for at in exact.positions]
        words |= {*now.token}
    assert len(words) > 5  # it did not get stuck at one word
    np.testing.assert_allclose(made.k.numpy(), exact.k, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "positions"), STARTS, ids=["batch 1", "batch 3"])
def test_replaying_is_bit_identical_to_running_the_kernels(
    device: Gpu, tokens: Ints, positions: Ints
) -> None:
    replayed, eager = (model(device, tokens, positions) for _ in range(2))
    graph = replayed.captured()
    for _ in range(12):
        graph.replay()
        eager.step()
        assert replayed.bits() == eager.bits()
        assert replayed.state.read() == eager.state.read()


def test_by_value_gives_the_same_as_on_the_device(device: Gpu) -> None:
    on_device, by_value = (model(device, [5], [3]) for _ in range(2))
    token = 5
    for at in range(3, 15):
        by_value.state.set(token, at)
        by_value.step(device_state=False, advance=False)
        on_device.step()
        assert by_value.bits() == on_device.bits()
        token = int(by_value.next.numpy()[0])


def test_two_states_do_not_disturb_one_another(device: Gpu) -> None:
    starts = [([5], [0]), ([7], [4])]
    models = [model(device, *start) for start in starts]
    exact = [Reference(weights(1), *start) for start in starts]
    graphs = [each.captured() for each in models]
    for turn in (0, 1, 1, 0, 1, 0, 0):
        graphs[turn].replay()
        np.testing.assert_allclose(models[turn].out.numpy(), exact[turn].step(), rtol=2e-4, atol=2e-5)
    for mine, other in zip(models, exact, strict=True):
        assert [*mine.state.read().token] == other.tokens
        assert [*mine.state.read().position] == other.positions


def test_two_devices_have_states_of_their_own(open_device: Callable[..., Gpu]) -> None:
    first, second = (DecodeState(open_device(f"emulator:{n}")) for n in range(2))
    first.set(3, 4)
    second.set(5, 6)
    first.advance()
    assert first.read() == ((3,), (5,), (6,), (0,))
    assert second.read() == ((5,), (6,), (7,), (0,))


def test_a_state_is_set_between_replays_and_the_graph_goes_on_from_there(device: Gpu) -> None:
    made = model(device, [5], [0])
    graph = made.captured()
    for _ in range(3):
        graph.replay()
    made.state.set(11, 1)
    exact = Reference(weights(1), [5], [0])
    for _ in range(3):
        exact.step()
    exact.tokens, exact.positions = [11], [1]
    graph.replay()
    np.testing.assert_allclose(made.out.numpy(), exact.step(), rtol=2e-4, atol=2e-5)


# The state


@pytest.mark.parametrize("batch", [1, 3, 131])
def test_setting_is_one_copy_and_reads_back(flaky: Flaky, batch: int) -> None:
    random = np.random.default_rng(batch)
    tokens, positions = random.integers(0, 2**31 - 1, (2, batch))
    state = DecodeState(flaky.gpu, batch)
    with flaky.asked("copy_in", "copy", "fill", "launch", "set") as asked:
        state.set(tokens, positions)
    assert asked == {"copy_in": 1}
    expected = (tokens, positions, positions + 1, np.zeros(batch, int))
    assert state.read() == tuple(tuple(row.tolist()) for row in expected)


@pytest.mark.parametrize("batch", [1, 3, 131])
def test_advancing_is_one_launch(flaky: Flaky, batch: int) -> None:
    state, at = DecodeState(flaky.gpu, batch), np.arange(batch)
    state.set(at + 7, at)
    sampled = flaky.gpu.array((at * 13 + 1).astype(np.int32))
    with flaky.asked() as asked:
        state.advance()
    assert asked == {"function.prepare": 1, "launch": 1}
    assert np.array_equal(state.read()[:3], [at + 7, at + 1, at + 2])
    state.advance(sampled)
    assert np.array_equal(state.read()[:3], [at * 13 + 1, at + 2, at + 3])


def test_a_new_state_is_at_the_beginning(device: Gpu) -> None:
    assert DecodeState(device, 2).read() == ((0, 0), (0, 0), (1, 1), (0, 0))


def test_addresses_stay_the_same(device: Gpu) -> None:
    state = DecodeState(device, 3)
    rows = (state.token, state.position, state.length)
    before = [row.address for row in rows]
    state.set([1, 2, 3], [4, 5, 6])
    state.advance()
    assert [row.address for row in (state.token, state.position, state.length)] == before
    assert [row.numpy().tolist() for row in rows] == [[1, 2, 3], [5, 6, 7], [6, 7, 8]]
    assert all(row.dtype.name == "int32" and row.shape == (3,) for row in rows)


def test_one_sequence_is_set_by_integers_or_sequences(device: Gpu) -> None:
    state = DecodeState(device)
    for token, position in ((3, 4), ([3], [4]), (np.int64(3), np.array([4]))):
        state.set(0, 0)
        state.set(token, position)
        assert state.read() == ((3,), (4,), (5,), (0,))


def test_a_sequence_at_its_limit_stays_there_and_read_tells(device: Gpu) -> None:
    state, sampled = DecodeState(device, 2, limit=7), device.array([50, 60], "int32")
    state.set([5, 6], [6, 4])
    with device.capture() as graph:
        state.advance(sampled)
    for _ in range(4):
        graph.replay()
    assert state.read() == ((5, 60), (6, 6), (7, 7), (4, 2))
    state.set([5, 6], [0, 1])
    assert state.read().overrun == (0, 0)


def test_replays_beyond_the_limit_do_the_last_step_again(device: Gpu) -> None:
    made = model(device, [5], [2], limit=6)
    untouched = made.k.numpy()[:, 6:].copy()
    graph = made.captured()
    for _ in range(4):
        graph.replay()
    last = made.bits()
    assert made.state.read()[1:] == ((5,), (6,), (1,))
    for _ in range(3):
        graph.replay()
    assert made.bits() == last
    np.testing.assert_array_equal(made.k.numpy()[:, 6:], untouched)
    assert made.state.read().overrun == (4,)


def test_without_a_limit_the_position_does_not_overflow(device: Gpu) -> None:
    state = DecodeState(device)
    state.set(1, 2**31 - 2)
    state.advance()
    assert state.read() == ((1,), (2**31 - 2,), (2**31 - 1,), (1,))


@pytest.mark.parametrize(
    ("token", "position", "why"),
    [
        ([1], [1, 2, 3], "1 values of token for 3 sequences"),
        ([1, 2, 3], 7, "1 values of position for 3 sequences"),
        ([1, 2, 3], [0, -1, 0], "position -1 is outside 0 to 9"),
        ([1, 2, 3], [0, 10, 0], "position 10 is outside 0 to 9"),
        ([1, 2**31, 3], [0, 0, 0], "token 2147483648 is outside"),
        ([1, 2.5, 3], [0, 0, 0], "not one integer for each sequence"),
        (np.array(3), [0, 0, 0], "not one integer for each sequence"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    device: Gpu, token: Any, position: Any, why: str
) -> None:
    state = DecodeState(device, 3, limit=10)
    state.set([4, 5, 6], [1, 2, 3])
    with pytest.raises(InputError, match=why):
        state.set(token, position)
    assert state.read() == ((4, 5, 6), (1, 2, 3), (2, 3, 4), (0, 0, 0))


@pytest.mark.parametrize("given", [{"batch": 0}, {"batch": 1.5}, {"limit": 0}, {"limit": 2**31}])
def test_a_state_of_nothing_is_refused(device: Gpu, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        DecodeState(device, **given)


def test_sampled_tokens_are_one_int32_for_each_sequence(device: Gpu) -> None:
    state = DecodeState(device, 3)
    with pytest.raises(
        InputError, match=r"sampled of shape \(4,\) is not one token for each of 3 sequences"
    ):
        state.advance(device.zeros(4, "int32"))
    with pytest.raises(InputError, match="sampled tokens must be int32, not int64") as refused:
        state.advance(device.zeros(3, "int64"))
    assert refused.value.hint == "cast them to int32"
    with pytest.raises(LaunchError, match="cannot take list"):
        state.advance([1, 2, 3])
    assert state.read().position == (0, 0, 0)


@pytest.mark.gpu
def test_tokens_that_torch_sampled_are_taken_as_they_are(open_device: Callable[..., Gpu]) -> None:
    torch, state = library("torch"), DecodeState(open_device("cuda"), 3)
    for step in range(4):
        sampled = torch.arange(3, dtype=torch.int32, device="cuda") + step
        state.advance(sampled)
    assert state.read() == ((3, 4, 5), (4, 4, 4), (5, 5, 5), (0, 0, 0))


def test_setting_inside_a_capture_is_refused(device: Gpu) -> None:
    state = DecodeState(device)
    with pytest.raises(CaptureError, match="copying from the host"), device.capture():
        state.set(1, 1)


def test_advancing_in_a_stream_is_seen_by_everything_after_it(device: Gpu) -> None:
    state, side = DecodeState(device), device.stream()
    for _ in range(3):
        state.advance(stream=side)
    assert state.token.buffer.uses.writer is side.raw
    assert state.read().position == (3,)


def test_closing_a_state_makes_its_graphs_stale(device: Gpu) -> None:
    state = DecodeState(device)
    with device.capture() as graph:
        state.advance()
    state.close()
    with pytest.raises(StaleGraphError, match="advance"):
        graph.replay()
    with pytest.raises(StaleBufferError):
        state.read()


def test_after_a_reset_a_state_is_gone(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    state = DecodeState(gpu)
    gpu.reset()
    with pytest.raises(StaleBufferError, match="reset"):
        state.set(1, 1)
    with pytest.raises(ContextLostError, match="reset"):
        state.advance()


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


def test_a_kernel_reads_the_state_on_the_device_unless_told_otherwise(device: Gpu) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    state.set(7, 3)
    for _ in range(4):  # the quick way too
        kernel[1, 1](out, state=state)
        assert out.numpy().tolist() == [7, 3, 4]
        kernel[1, 1](out, state=state, device_state=False)
        assert out.numpy().tolist() == [-7, -3, -4]
        kernel.launch(out, state=state, device_state=True, grid=1, block=1)
        assert out.numpy().tolist() == [7, 3, 4]
        kernel.launch(out, state=state, device_state=False, grid=1, block=1, stream=device.stream())
        assert out.numpy().tolist() == [-7, -3, -4]
    assert "tell_by_value" in repr(kernel)


# A block of launches on the device


def test_inside_the_block_every_launch_reads_the_state_on_the_device(device: Gpu) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    state.set(7, 3)
    with state.on_device() as same:
        assert same is state
        for how in ({}, {"state": state}, {"state": state, "device_state": False}):
            out.fill(0)
            kernel[1, 1](out, **how)
            assert out.numpy().tolist() == [7, 3, 4]
            out.fill(0)
            kernel.launch(out, grid=1, block=1, **how)
            assert out.numpy().tolist() == [7, 3, 4]
    kernel[1, 1](out, state=state, device_state=False)
    assert out.numpy().tolist() == [-7, -3, -4]


def test_a_step_that_runs_by_value_is_captured_inside_the_block(device: Gpu) -> None:
    made, exact = model(device, [5], [0]), Reference(weights(1), [5], [0])
    with device.capture() as graph, made.state.on_device():
        made.step(device_state=False)
    for _ in range(4):
        graph.replay()
        np.testing.assert_allclose(made.out.numpy(), exact.step(), rtol=2e-4, atol=2e-5)


def test_blocks_nest_and_each_holds_for_its_own_state(device: Gpu) -> None:
    kernel, out = tell(device), device.zeros(3, "int32")
    states = [DecodeState(device) for _ in range(3)]
    for at, state in enumerate(states):
        state.set(10 * at + 1, at)
    outer, inner, other = states

    def seen(**how: Any) -> int:
        kernel[1, 1](out, **how)
        return int(out.numpy()[0])

    by_value: dict[str, Any] = {"device_state": False}
    with outer.on_device():
        assert seen() == 1
        with inner.on_device():
            assert [seen(), seen(state=outer, **by_value), seen(state=inner, **by_value)] == [11, 1, 11]
            with outer.on_device():
                assert seen() == 1
            assert [seen(), seen(state=outer, **by_value)] == [11, 1]
            assert seen(state=other, **by_value) == -21  # of another state, as it says
        assert [seen(), seen(state=inner, **by_value)] == [1, -11]


def test_a_block_that_raises_ends_all_the_same(device: Gpu) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    with pytest.raises(ZeroDivisionError), state.on_device():
        raise ZeroDivisionError
    for launch in (kernel[1, 1], partial(kernel.launch, grid=1, block=1)):
        with pytest.raises(InputError, match="tell was launched without a decode state") as refused:
            launch(out)
        assert refused.value.hint == "pass state=state, or launch inside `with state.on_device():`"


def test_a_block_holds_for_its_own_thread(device: Gpu) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    state.set(7, 3)
    with state.on_device():
        with pytest.raises(InputError, match="without a decode state"):
            run_apart(lambda: kernel[1, 1](out))
        run_apart(lambda: kernel[1, 1](out, state=state, device_state=False))
        assert out.numpy().tolist() == [-7, -3, -4]


def test_a_block_holds_for_its_own_task(device: Gpu) -> None:
    states, kernel = [DecodeState(device) for _ in range(2)], tell(device)
    outs = [device.zeros(3, "int32") for _ in states]

    async def step(state: DecodeState, out: Array) -> None:
        with state.on_device():
            await asyncio.sleep(0)  # the other task opens its block meanwhile
            kernel[1, 1](out)

    async def both() -> None:
        await asyncio.gather(*map(step, states, outs))

    for at, state in enumerate(states):
        state.set(at + 1, 3)
    asyncio.run(both())
    assert [int(out.numpy()[0]) for out in outs] == [1, 2]


def run_apart(do: Callable[[], None]) -> None:
    """Run it in another thread, with nothing inherited from this one."""
    run_in_thread(lambda: contextvars.Context().run(do))


def test_on_the_device_a_kernel_sees_every_sequence(device: Gpu) -> None:
    state, out = DecodeState(device, 2), device.zeros(6, "int32")
    state.set([7, 8], [3, 9])
    state.advance()
    tell(device)[1, 2](out, state=state)
    assert out.numpy().tolist() == [7, 4, 5, 8, 10, 11]


def test_by_value_is_for_one_sequence(device: Gpu) -> None:
    state, kernel, out = DecodeState(device, 2), tell(device), device.zeros(6, "int32")
    with pytest.raises(
        InputError, match="of one sequence can be passed by value, not one of 2"
    ) as refused:
        kernel[1, 1](out, state=state, device_state=False)
    assert "device_state=True" in str(refused.value.hint)


def test_by_value_inside_a_capture_is_refused_where_it_stands(device: Gpu) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    graph = device.capture().begin()
    where = here(2)
    with pytest.raises(CaptureError, match="would be fixed in the graph") as refused:
        kernel[1, 1](out, state=state, device_state=False)
    assert refused.value.where == where
    kernel[1, 1](out, state=state)
    with pytest.raises(CaptureError, match=f"{where}: the capture failed: a decode state"):
        graph.end()


def test_by_value_is_refused_once_the_device_advanced_the_state(device: Gpu) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    state.advance()
    with pytest.raises(GraphError, match="it was advanced on the device"):
        kernel[1, 1](out, state=state, device_state=False)
    state.set(5, 6)
    kernel[1, 1](out, state=state, device_state=False)
    assert out.numpy().tolist() == [-5, -6, -7]


@pytest.mark.parametrize("dropped", [False, True])
def test_by_value_is_refused_once_a_graph_advanced_the_state_until_it_is_set(
    device: Gpu, dropped: bool
) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    with device.capture() as graph:
        state.advance()
    with pytest.raises(GraphError, match="a graph that advances it was replayed"):
        kernel[1, 1](out, state=state, device_state=False)
    for _ in range(2):
        state.set(5, 6)
        kernel[1, 1](out, state=state, device_state=False)
        assert out.numpy().tolist() == [-5, -6, -7]
        graph.replay()
        with pytest.raises(GraphError, match="a graph that advances it was replayed") as refused:
            kernel[1, 1](out, state=state, device_state=False)
        assert "state.set(token, position)" in str(refused.value.hint)
        kernel[1, 1](out, state=state)
        assert out.numpy().tolist() == [5, 7, 8]
    if dropped:  # and what it did cannot be asked any more
        del graph
        gc.collect()
        with pytest.raises(GraphError, match="a graph that advances it was replayed"):
            kernel[1, 1](out, state=state, device_state=False)


def test_replays_that_only_read_the_state_leave_by_value_alone(device: Gpu) -> None:
    state, kernel, out = DecodeState(device), tell(device), device.zeros(3, "int32")
    with device.capture() as graph:
        kernel[1, 1](out, state=state)
    state.set(5, 6)
    graph.replay()
    assert out.numpy().tolist() == [5, 6, 7]
    assert state.by_value() == (5, 6, 7)


def test_a_capture_that_was_given_up_does_not_keep_the_host_from_knowing(device: Gpu) -> None:
    state = DecodeState(device)

    def body() -> None:
        state.advance()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), device.capture():
        body()
    state.set(5, 6)
    assert state.by_value() == (5, 6, 7)


def test_tokens_that_do_not_fit_end_the_capture_even_when_that_is_swallowed(device: Gpu) -> None:
    state = DecodeState(device, 3)
    graph = device.capture().begin()
    with pytest.raises(InputError):
        state.advance(state.token[:2])
    state.advance()
    with pytest.raises(CaptureError, match="the capture failed: sampled of shape"):
        graph.end()


def test_what_is_no_device_or_no_state_is_refused(device: Gpu) -> None:
    nothing: Any = None
    with pytest.raises(InputError, match="None is not a device"):
        DecodeState(nothing)
    kernel, out, wrong = tell(device), device.zeros(3, "int32"), 5
    for device_state in (True, False):
        how: dict[str, Any] = {"state": wrong, "device_state": device_state}
        with pytest.raises(InputError, match="state=5 is not a DecodeState"):
            kernel[1, 1](out, **how)
        with pytest.raises(InputError, match="state=5 is not a DecodeState"):
            kernel.launch(out, grid=1, block=1, **how)


def test_sequences_are_counted_in_64_bits(shared_builder: Builder) -> None:
    artifact = shared_builder.build(Program.from_file(decode._SOURCE), "sm_90")
    text = artifact.ptx.decode()
    body = text[text.index(".entry advance(") :]
    assert re.search(r"(mul|mad)\.wide\.u32", body)
    compared = re.findall(r"setp\.\w+\.(\w+)", body)
    assert compared[0] == "s64"  # the number of the sequence with the batch


MANY = """
import numpy as np
import preheat
from preheat.kernels import decode

gpu = preheat.device()
advance = gpu.kernel(decode._SOURCE, "advance")
state = gpu.array(np.arange(12, dtype=np.int32).reshape(4, 3))
advance.launch(state, None, 100, 3, grid=2**22 + 1, block=1024)  # more threads than an int can count
print(state.numpy().tolist())
batch = 2**31 - 1
if gpu.memory().free > 40 << 30:
    state = gpu.zeros((4, batch), "int32")
    for _ in range(2):
        advance.launch(state, None, 2, batch, grid=-(-batch // 128), block=128)
    print([[int(state[row, at].numpy()) for at in (0, 2**30, batch - 1)] for row in range(4)])
"""


@pytest.mark.gpu
def test_the_largest_batch_advances_whole() -> None:
    few, *many = finish(start(MANY)).splitlines()
    assert few == "[[0, 1, 2], [4, 5, 6], [7, 8, 9], [9, 10, 11]]"
    if not many:
        pytest.skip("the largest batch takes 40 GiB")
    assert many == ["[[0, 0, 0], [2, 2, 2], [2, 2, 2], [0, 0, 0]]"]
