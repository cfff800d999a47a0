"""Fills of eight bytes by a kernel: correct at every size, and by the driver without a compiler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import preheat
from preheat.devices.fill import FILL, KernelFill
from preheat.devices.kernel import Kernel
from preheat.devices.session import _load_fill_kernel
from preheat.errors import ToolchainError
from preheat.gpu import Gpu


@pytest.fixture
def emulator(open_device: Callable[..., Gpu]) -> Gpu:
    return open_device("emulator")


def with_kernel(gpu: Gpu, smallest: int = 1) -> list[int]:
    """Let the device fill by a kernel, and return a list that gets the sizes of such fills."""
    filled: list[int] = []
    by_kernel = KernelFill(gpu._context, lambda: gpu.kernel(FILL, "preheat_fill8"), smallest=smallest)

    def fill(address: int, pattern: bytes, count: int, stream: object) -> bool:
        done = by_kernel(address, pattern, count, stream)  # type: ignore[arg-type]
        filled.extend([count] if done else [])
        return done

    gpu._context.kernel_fill = fill
    return filled


@pytest.mark.parametrize("size", [1, 31, 33, 257, 1009, 70_001])
@pytest.mark.parametrize(
    ("dtype", "value"), [("float64", 1.1), ("int64", (7 << 32) + 5), ("complex64", 3.25)]
)
def test_every_element_is_filled_and_nothing_beside_them(
    dtype: str, value: float, size: int, emulator: Gpu
) -> None:
    filled = with_kernel(emulator)
    whole = emulator.zeros(size + 2, dtype)
    whole[1 : size + 1].fill(value)
    expected = np.zeros(size + 2, dtype)
    expected[1:-1] = value
    assert np.array_equal(whole.numpy(), expected)
    assert filled == [size]


def test_patterns_that_the_driver_knows_and_small_arrays_are_left_to_it(emulator: Gpu) -> None:
    filled = with_kernel(emulator, smallest=100)
    for dtype, value, size in (("float64", 0, 500), ("float32", 1.1, 500), ("float64", 1.1, 99)):
        made = emulator.empty(size, dtype).fill(value)
        assert np.array_equal(made.numpy(), np.full(size, value, dtype))
    assert filled == []


def test_a_captured_fill_is_one_node_and_is_replayed(emulator: Gpu) -> None:
    filled = with_kernel(emulator)
    made = emulator.zeros(500, "float64")
    made.fill(2.2)  # This loads the kernel.
    made.fill(0)
    with emulator.capture() as graph:
        made.fill(1.1)
    assert [node.kind for node in graph.nodes] == ["fill"]
    assert not made.numpy().any()
    graph.replay()
    assert np.array_equal(made.numpy(), np.full(500, 1.1))
    assert filled == [500, 500]


def test_a_kernel_that_is_not_loaded_yet_is_not_loaded_inside_a_capture(emulator: Gpu) -> None:
    filled = with_kernel(emulator)
    made = emulator.zeros(500, "float64")
    with emulator.capture() as graph:
        made.fill(1.1)
    graph.replay()
    assert np.array_equal(made.numpy(), np.full(500, 1.1))
    assert filled == []


def test_the_driver_fills_without_a_compiler(emulator: Gpu) -> None:
    tried: list[int] = []

    def load() -> Kernel | None:
        tried.append(1)
        raise ToolchainError("there is no compiler")

    emulator._context.kernel_fill = KernelFill(emulator._context, load, smallest=1)
    for _ in range(3):
        assert emulator.empty(33, "float64").fill(1.1).numpy().tolist() == [1.1] * 33
    assert tried == [1]


def test_a_sealed_process_compiles_no_kernel_for_fills(
    open_device: Callable[..., Gpu], builder: preheat.Builder
) -> None:
    import weakref

    gpu = open_device("emulator", builder=builder)
    with preheat.sealed():
        assert _load_fill_kernel(weakref.ref(gpu._session)) is None
    assert _load_fill_kernel(weakref.ref(gpu._session)) is not None
    with preheat.sealed():
        assert _load_fill_kernel(weakref.ref(gpu._session)) is not None
