"""SiLU and SwiGLU, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat import Gpu
from preheat.kernels.ops import Ops
from tests.kernels.conftest import (
    DTYPES,
    Exact,
    Operand,
    agree,
    exact,
    gradient,
    same_bits,
    shifted,
    tensors_agree,
)

SIZES = 1, 31, 33, 127, 1000, 4099
Random = Callable[..., Operand]


def sigmoid(x: Exact) -> Exact:
    return 1 / (1 + np.exp(-x))


def silu(x: Exact) -> Exact:
    return x * sigmoid(x)


def slope(x: Exact) -> Exact:
    """Return the derivative of silu."""
    s = sigmoid(x)
    return s * (1 + x - x * s)


def terms(x: Exact) -> Exact:
    """Return the magnitude of what `slope` adds up."""
    s = sigmoid(x)
    return s * (1 + np.abs(x) * (1 - s))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_agree_with_float64(ops: Ops, random: Random, dtype: str, n: int) -> None:
    x, up = random(n, dtype=dtype), random(n, dtype=dtype)
    agree(ops.silu(x.array), silu(x.exact))
    agree(ops.swiglu(x.array, up.array), silu(x.exact) * up.exact)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_float64(ops: Ops, random: Random, dtype: str, n: int) -> None:
    gy, x, up = (random(n, dtype=dtype) for _ in range(3))
    of_silu, most = gy.exact * slope(x.exact), np.abs(gy.exact) * terms(x.exact)
    agree(ops.silu_backward(gy.array, x.array), of_silu, most)
    g_gate, g_up = ops.swiglu_backward(gy.array, x.array, up.array)
    agree(g_gate, of_silu * up.exact, most * np.abs(up.exact))
    agree(g_up, gy.exact * silu(x.exact))


def test_gradients_are_those_of_the_values(ops: Ops, random: Random) -> None:
    gy, x, up = random(33), random(33), random(33)
    found = ops.silu_backward(gy.array, x.array).numpy()
    assert np.allclose(found, gradient(silu, x.exact, gy.exact), rtol=1e-5, atol=1e-6)
    g_gate, g_up = ops.swiglu_backward(gy.array, x.array, up.array)
    by_gate = gradient(lambda gate: silu(gate) * up.exact, x.exact, gy.exact)
    by_up = gradient(lambda up: silu(x.exact) * up, up.exact, gy.exact)
    assert np.allclose(g_gate.numpy(), by_gate, rtol=1e-5, atol=1e-6)
    assert np.allclose(g_up.numpy(), by_up, rtol=1e-5, atol=1e-6)


def test_far_from_zero_nothing_overflows(device: Gpu, ops: Ops) -> None:
    x, ones = device.array([-200, -90, -30, 30, 90, 200], "float32"), device.array([1] * 6, "float32")
    assert np.allclose(ops.silu(x).numpy(), silu(exact(x)), rtol=1e-5, atol=1e-30)
    assert np.allclose(ops.silu_backward(ones, x).numpy(), slope(exact(x)), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(("dtype", "one"), [("bfloat16", 128), ("float16", 1024)])
def test_ties_are_rounded_to_even(device: Gpu, ops: Ops, dtype: str, one: int) -> None:
    gate = device.array([one + 1.0, one + 3.0, one, np.nan], dtype)
    up = device.array([1.5, 1.5, np.nan, 1.5], dtype)
    found = exact(ops.swiglu(gate, up))  # of so large a gate all is left: the products end in a half
    wanted = [1.5 * one + 2, 1.5 * one + 4, np.nan, np.nan]
    assert np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_changes_no_bit(device: Gpu, ops: Ops, random: Random, dtype: str) -> None:
    operands = [random(4104, dtype=dtype).array for _ in range(3)]
    for op, count in ((ops.silu, 1), (ops.silu_backward, 2), (ops.swiglu, 2)):
        given = operands[:count]
        aligned = op(*given)
        assert same_bits(op(*(shifted(device, each) for each in given)), aligned)
        assert same_bits(op(shifted(device, given[0]), *given[1:]), aligned)
        assert same_bits(op(*given, out=shifted(device, given[0])), aligned)
    both = ops.swiglu_backward(*operands)
    moved = ops.swiglu_backward(*(shifted(device, each) for each in operands))
    assert all(map(same_bits, both, moved))


def test_a_slice_is_read_and_written_and_nothing_beside_it(device: Gpu, ops: Ops) -> None:
    x = np.linspace(-3, 3, 1001, dtype="float32")
    y = device.array(np.full(1001, 7, "float32"))
    ops.silu(device.array(x)[1:-1], out=y[1:-1])
    found = y.numpy()
    assert found[0] == found[-1] == 7
    assert np.allclose(found[1:-1], silu(x[1:-1].astype(np.float64)), rtol=2e-6)


def test_a_result_may_take_the_place_of_an_operand(ops: Ops, random: Random) -> None:
    gy, x, up = (random(1000).array for _ in range(3))
    wanted = ops.silu_backward(gy, x)
    copy = ops.gpu.array(gy)
    assert ops.silu_backward(copy, x, out=copy) is copy
    assert same_bits(copy, wanted)
    g_gate, g_up = ops.swiglu_backward(gy, x, up)
    ops.swiglu_backward(gy, x, up, out=(x, up))
    assert same_bits(x, g_gate)
    assert same_bits(up, g_up)


def test_the_shape_of_an_operand_is_kept(ops: Ops, random: Random) -> None:
    assert ops.silu(random(3, 5, 7).array).shape == (3, 5, 7)


# For hardware alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes_agree_with_float64(torch: Any, on_gpu: Ops, dtype: str) -> None:
    kind = getattr(torch, dtype)
    n = 2**24 + 3
    gy, x, up = (torch.randn(n, device="cuda").to(kind) for _ in range(3))
    y, gx, g_up = (torch.empty_like(x) for _ in range(3))
    dy = gy.double()
    v = x.double()
    s = torch.sigmoid(x.double())
    of_silu, terms = dy * s * (1 + v - v * s), dy.abs() * s * (1 + v.abs() * (1 - s))
    on_gpu.silu(x, out=y)
    tensors_agree(y, v * s)
    on_gpu.silu_backward(gy, x, out=gx)
    tensors_agree(gx, of_silu, terms)
    on_gpu.swiglu_backward(gy, x, up, out=(gx, g_up))
    tensors_agree(gx, of_silu * up.double(), terms * up.double().abs())
    tensors_agree(g_up, dy * v * s)


@pytest.mark.gpu
def test_more_elements_than_an_int_can_count(torch: Any, on_gpu: Ops) -> None:
    x = torch.zeros(2**31 + 5, device="cuda", dtype=torch.float16)
    x[-3:] = torch.tensor([-1.0, 2.0, 3.0])
    wanted = x[-4:].double()
    on_gpu.silu(x, out=x)
    tensors_agree(x[-4:], wanted * torch.sigmoid(wanted))
