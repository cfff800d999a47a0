"""Fills with patterns of eight bytes write every element and nothing else, captured or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.gpu import Gpu

SIZES = (1, 31, 33, 131071, 131072 + 5, 1 << 20)
# No value has two equal halves, so one half alone or the wrong order gives other bits.
VALUES: dict[str, Any] = {"float64": 1.1, "int64": 0x0123456789ABCDEF, "complex64": 1.5 - 2.25j}
LARGE = 131072 + 5  # elements; a GPU fills them by a kernel

sizes = pytest.mark.parametrize("count", SIZES)
types = pytest.mark.parametrize("dtype", VALUES)


def whole(dtype: str, count: int) -> np.ndarray[Any, Any]:
    """Return the values of a filled array."""
    return np.full(count, VALUES[dtype], dtype)


@sizes
@types
def test_every_element_is_filled_and_its_neighbours_stay_unchanged(
    dtype: str, count: int, device: Gpu
) -> None:
    framed = device.zeros(count + 2, dtype)
    inside = framed[1 : count + 1]
    inside.fill(VALUES[dtype])
    expected = np.zeros(count + 2, dtype)
    expected[1:-1] = VALUES[dtype]
    assert np.array_equal(framed.numpy(), expected)
    assert np.array_equal(inside.numpy(), whole(dtype, count))


@sizes
@types
@pytest.mark.parametrize("warm", [False, True])
def test_a_captured_fill_is_one_node_and_every_replay_does_it(
    warm: bool, dtype: str, count: int, device: Gpu
) -> None:
    framed = device.zeros(count + 2, dtype)
    inside = framed[1 : count + 1]
    if warm:  # A capture cannot load the kernel for large fills.
        inside.fill(VALUES[dtype])
        framed.fill(0)
    with device.capture() as graph:
        inside.fill(VALUES[dtype])
    assert [(node.kind, node.foreign) for node in graph.nodes] == [("fill", False)]
    assert not framed.numpy().any()
    expected = np.zeros(count + 2, dtype)
    expected[1:-1] = VALUES[dtype]
    for _ in range(2):
        graph.replay()
        assert np.array_equal(framed.numpy(), expected)
        framed.fill(0)


@types
def test_captured_fills_are_distinguished_from_the_launches_between_them(
    dtype: str, device: Gpu
) -> None:
    source = """
        extern "C" __global__ void halve(unsigned long long* x, long long n) {
            long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
            if (i < n) x[i] >>= 32;
        }
    """
    x = device.zeros(LARGE, dtype)
    bits = device.kernel(source, "halve")
    x.fill(VALUES[dtype])
    words = device.zeros(LARGE, "int64")
    with device.capture() as graph:
        x.fill(VALUES[dtype])
        words.fill(VALUES["int64"])
        bits[-(-LARGE // 256), 256](words, LARGE)
        x.fill(VALUES[dtype])
    assert [node.kind for node in graph.nodes] == ["fill", "fill", "kernel", "fill"]
    assert not any(node.foreign for node in graph.nodes)
    for _ in range(2):
        graph.replay()
        assert np.array_equal(x.numpy(), whole(dtype, LARGE))
        assert np.array_equal(words.numpy(), np.full(LARGE, VALUES["int64"] >> 32))
        x.fill(0)


@types
def test_a_fill_comes_after_what_another_stream_does_with_the_array(dtype: str, device: Gpu) -> None:
    side = device.stream()
    source = device.array(whole(dtype, LARGE))
    x, seen = device.zeros(LARGE, dtype, stream=side), device.zeros(LARGE, dtype)
    x.copy_from(source)
    seen.copy_from(x)
    x.fill(0)
    x.fill(VALUES[dtype])
    x[: LARGE // 2].fill(0)
    assert np.array_equal(seen.numpy(), whole(dtype, LARGE))
    expected = whole(dtype, LARGE)
    expected[: LARGE // 2] = 0
    assert np.array_equal(x.numpy(), expected)


@pytest.mark.gpu
@types
def test_a_large_fill_works_in_a_process_that_can_compile_nothing_more(
    dtype: str, open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = open_device("cuda")
    fill: Any = gpu._context.kernel_fill
    monkeypatch.setattr(fill, "_load", lambda: None)
    assert np.array_equal(gpu.empty(LARGE, dtype).fill(VALUES[dtype]).numpy(), whole(dtype, LARGE))
