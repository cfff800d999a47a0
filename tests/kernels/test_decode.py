"""Decode states: one captured step serves every position, and a loop of replays writes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.errors import (
    CaptureError,
    ContextLostError,
    InputError,
    LaunchError,
    StaleBufferError,
    StaleGraphError,
)
from preheat.gpu import Gpu
from preheat.kernels import decode
from preheat.kernels.decode import DecodeState
from preheat.model.program import Program
from tests.devices.support import import_or_skip
from tests.faulty import FaultyGpu
from tests.kernels.decode_model import STARTS, Ints, Reference, model, weights
from tests.processes import expect_success, start_python

# One capture for every step


@pytest.mark.parametrize(("tokens", "positions"), STARTS, ids=["batch 1", "batch 3"])
def test_one_capture_serves_every_step_without_a_host_write(
    faulty: FaultyGpu, tokens: Ints, positions: Ints
) -> None:
    made = model(faulty.gpu, tokens, positions)
    exact = Reference(weights(len(tokens)), tokens, positions)
    graph = made.captured()
    words = set[int]()
    for _ in range(40):
        with faulty.count_calls() as calls:
            graph.replay()
        assert not {"copy_in", "fill", "set", "launch"} & set(calls)
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


def test_a_state_is_set_between_replays_and_the_graph_continues_from_there(device: Gpu) -> None:
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


def test_a_cache_of_graphs_serves_a_loop_that_sets_the_state_before_every_step(device: Gpu) -> None:
    cached, eager = (model(device, [5], [0]) for _ in range(2))
    graphs = device.graphs()
    assert not graphs.replay("step")
    for at, token in enumerate((5, 11, 2, 7, 11, 3)):
        for made in (cached, eager):
            made.state.set(token, at)
        if not graphs.replay("step"):
            graphs.run("step", cached.step)
        eager.step()
        assert cached.bits() == eager.bits()
        assert cached.state.read() == eager.state.read()
    graphs.invalidate("step")
    assert not graphs.replay("step")


# The state


@pytest.mark.parametrize("batch", [1, 3, 131])
def test_setting_is_one_copy_and_reads_back(faulty: FaultyGpu, batch: int) -> None:
    random = np.random.default_rng(batch)
    tokens, positions = random.integers(0, 2**31 - 1, (2, batch))
    state = DecodeState(faulty.gpu, batch)
    with faulty.count_calls("copy_in", "copy", "fill", "launch", "set") as calls:
        state.set(tokens, positions)
    assert calls == {"copy_in": 1}
    expected = (tokens, positions, positions + 1, np.zeros(batch, int))
    assert state.read() == tuple(tuple(row.tolist()) for row in expected)


@pytest.mark.parametrize("batch", [1, 3, 131])
def test_advancing_is_one_launch(faulty: FaultyGpu, batch: int) -> None:
    state = DecodeState(faulty.gpu, batch)
    at = np.arange(batch)
    state.set(at + 7, at)
    sampled = faulty.gpu.array((at * 13 + 1).astype(np.int32))
    with faulty.count_calls() as calls:
        state.advance()
    assert calls == {"function.prepare": 1, "launch": 1}
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


def test_a_sequence_at_its_limit_stays_there_and_read_reports_it(device: Gpu) -> None:
    state = DecodeState(device, 2, limit=7)
    sampled = device.array([50, 60], "int32")
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
        ([1, 2**32 - 1, 3], [0, 0, 0], "token 4294967295 is outside"),
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
    torch = import_or_skip("torch")
    state = DecodeState(open_device("cuda"), 3)
    for step in range(4):
        sampled = torch.arange(3, dtype=torch.int32, device="cuda") + step
        state.advance(sampled)
    assert state.read() == ((3, 4, 5), (4, 4, 4), (5, 5, 5), (0, 0, 0))


def test_setting_inside_a_capture_is_refused(device: Gpu) -> None:
    state = DecodeState(device)
    with pytest.raises(CaptureError, match="copying from the host"), device.capture():
        state.set(1, 1)


def test_advancing_in_a_stream_is_seen_by_everything_after_it(device: Gpu) -> None:
    state = DecodeState(device)
    side = device.stream()
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
    few, *many = expect_success(start_python(MANY)).splitlines()
    assert few == "[[0, 1, 2], [4, 5, 6], [7, 8, 9], [9, 10, 11]]"
    if not many:
        pytest.skip("the largest batch takes 40 GiB")
    assert many == ["[[0, 0, 0], [2, 2, 2], [2, 2, 2], [0, 0, 0]]"]
