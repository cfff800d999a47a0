"""Kernels that read a decode state: on the device or by value, and blocks that choose the device."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from preheat.devices.array import Array
from preheat.errors import (
    CaptureError,
    GraphError,
    InputError,
)
from preheat.gpu import Gpu
from preheat.kernels.decode import DecodeState
from tests.graph.support import line_here
from tests.kernels.decode_model import Reference, model, tell, weights
from tests.threads import run_in_thread


def test_a_kernel_reads_the_state_on_the_device_by_default(device: Gpu) -> None:
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
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
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
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
    made = model(device, [5], [0])
    exact = Reference(weights(1), [5], [0])
    with device.capture() as graph, made.state.on_device():
        made.step(device_state=False)
    for _ in range(4):
        graph.replay()
        np.testing.assert_allclose(made.out.numpy(), exact.step(), rtol=2e-4, atol=2e-5)


def test_blocks_nest_and_each_holds_for_its_own_state(device: Gpu) -> None:
    kernel = tell(device)
    out = device.zeros(3, "int32")
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


def test_a_block_that_raises_ends_anyway(device: Gpu) -> None:
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
    with pytest.raises(ZeroDivisionError), state.on_device():
        raise ZeroDivisionError
    for launch in (kernel[1, 1], partial(kernel.launch, grid=1, block=1)):
        with pytest.raises(InputError, match="tell was launched without a decode state") as refused:
            launch(out)
        assert refused.value.hint == "pass state=state, or launch inside `with state.on_device():`"


def test_a_block_holds_for_its_own_thread(device: Gpu) -> None:
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
    state.set(7, 3)
    with state.on_device():
        with pytest.raises(InputError, match="without a decode state"):
            run_apart(lambda: kernel[1, 1](out))
        run_apart(lambda: kernel[1, 1](out, state=state, device_state=False))
        assert out.numpy().tolist() == [-7, -3, -4]


def test_a_block_holds_for_its_own_task(device: Gpu) -> None:
    states = [DecodeState(device) for _ in range(2)]
    kernel = tell(device)
    outs = [device.zeros(3, "int32") for _ in states]

    async def step(state: DecodeState, out: Array) -> None:
        with state.on_device():
            await asyncio.sleep(0)  # The other task opens its block during this await.
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
    state = DecodeState(device, 2)
    out = device.zeros(6, "int32")
    state.set([7, 8], [3, 9])
    state.advance()
    tell(device)[1, 2](out, state=state)
    assert out.numpy().tolist() == [7, 4, 5, 8, 10, 11]


def test_by_value_is_for_one_sequence(device: Gpu) -> None:
    state = DecodeState(device, 2)
    kernel = tell(device)
    out = device.zeros(6, "int32")
    with pytest.raises(
        InputError, match="of one sequence can be passed by value, not one of 2"
    ) as refused:
        kernel[1, 1](out, state=state, device_state=False)
    assert "device_state=True" in str(refused.value.hint)


def test_by_value_inside_a_capture_is_refused_where_it_stands(device: Gpu) -> None:
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
    graph = device.capture().begin()
    where = line_here(2)
    with pytest.raises(CaptureError, match="would be fixed in the graph") as refused:
        kernel[1, 1](out, state=state, device_state=False)
    assert refused.value.where == where
    kernel[1, 1](out, state=state)
    with pytest.raises(CaptureError, match=f"{where}: the capture failed: a decode state"):
        graph.end()


def test_by_value_is_refused_once_the_device_advanced_the_state(device: Gpu) -> None:
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
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
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
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
    if dropped:  # The position is unknown from here on.
        del graph
        gc.collect()
        with pytest.raises(GraphError, match="a graph that advances it was replayed"):
            kernel[1, 1](out, state=state, device_state=False)


def test_replays_that_only_read_the_state_do_not_affect_passing_by_value(device: Gpu) -> None:
    state = DecodeState(device)
    kernel = tell(device)
    out = device.zeros(3, "int32")
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


def test_a_value_that_is_no_device_or_no_state_is_refused(device: Gpu) -> None:
    nothing: Any = None
    with pytest.raises(InputError, match="None is not a device"):
        DecodeState(nothing)
    kernel = tell(device)
    out = device.zeros(3, "int32")
    wrong = 5
    for device_state in (True, False):
        how: dict[str, Any] = {"state": wrong, "device_state": device_state}
        with pytest.raises(InputError, match="state=5 is not a DecodeState"):
            kernel[1, 1](out, **how)
        with pytest.raises(InputError, match="state=5 is not a DecodeState"):
            kernel.launch(out, grid=1, block=1, **how)
