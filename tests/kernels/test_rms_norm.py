"""RMSNorm and its gradients, over rows of any width, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat import Gpu
from preheat.kernels.ops import Ops
from preheat.kernels.rms_norm import groups
from tests.kernels.conftest import (
    DTYPES,
    Exact,
    Operand,
    agree,
    cases,
    exact,
    gradient,
    same_bits,
    shifted,
    tensors_agree,
)

Random = Callable[..., Operand]
SMALL = [(1, 1), (37, 31), (9, 127), (5, 33), (5, 4099), (3, 1000), (5, 300), (2, 9001), (3, 20001)]
# Groups of several rows, of which the last has fewer: in parts of warps, in blocks, and too wide.
SHARED = [(40001, 3), (259, 4104), (129, 8200)]
LARGE = [(40000, 128), (1000, 1024), (8192, 4096), (999, 8192), (65, 65536)]


def rms_norm(x: Exact, gamma: Exact, eps: float) -> Exact:
    return np.asarray(gamma * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps))


class Gradients(NamedTuple):
    """The gradients of a norm, and the magnitudes of what they add up."""

    x: Exact
    x_terms: Exact
    gamma: Exact
    gamma_terms: Exact


def gradients(gy: Exact, x: Exact, gamma: Exact, eps: float) -> Gradients:
    v = np.mean(x * x, -1, keepdims=True) + eps
    dot, most = (np.mean(part, -1, keepdims=True) for part in (x * gy * gamma, np.abs(x * gy * gamma)))
    r = np.sqrt(v)
    columns = gy * x / np.sqrt(v)
    gx, terms = (gamma * gy - x / v * dot) / r, (np.abs(gamma * gy) + np.abs(x) / v * most) / r
    return Gradients(gx, terms, columns.sum(0), np.abs(columns).sum(0))


@pytest.mark.parametrize(
    ("dtype", "rows", "width"), [*cases(SMALL), *(("float32", *shape) for shape in SHARED)]
)
def test_both_ways_agree_with_float64(
    ops: Ops, random: Random, dtype: str, rows: int, width: int
) -> None:
    gy, x = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
    gamma = random(width, dtype=dtype)
    eps = 0.01
    agree(ops.rms_norm(x.array, gamma.array, eps=eps), rms_norm(x.exact, gamma.exact, eps))
    gx, g_gamma = ops.rms_norm_backward(gy.array, x.array, gamma.array, eps=eps)
    wanted = gradients(gy.exact, x.exact, gamma.exact, eps)
    agree(gx, wanted.x, wanted.x_terms)
    agree(g_gamma, wanted.gamma, wanted.gamma_terms)


def test_the_gradients_are_those_of_the_values(ops: Ops, random: Random) -> None:
    gy, x, gamma = random(3, 13), random(3, 13), random(13)
    gx, g_gamma = ops.rms_norm_backward(gy.array, x.array, gamma.array, eps=0.1)
    by_x = gradient(lambda x: rms_norm(x, gamma.exact, 0.1), x.exact, gy.exact)
    by_gamma = gradient(lambda gamma: rms_norm(x.exact, gamma, 0.1), gamma.exact, gy.exact)
    assert np.allclose(gx.numpy(), by_x, rtol=1e-5, atol=1e-6)
    assert np.allclose(g_gamma.numpy(), by_gamma, rtol=1e-5, atol=1e-6)


def test_eps_is_a_parameter(device: Gpu, ops: Ops, random: Random) -> None:
    gy, gamma = random(2, 40), random(40)
    x = device.array(np.full((2, 40), 1e-3, "float32"))
    for eps in (0.0, 1e-6, 1.0):
        agree(ops.rms_norm(x, gamma.array, eps=eps), rms_norm(exact(x), gamma.exact, eps))
        gx, _ = ops.rms_norm_backward(gy.array, x, gamma.array, eps=eps)
        wanted = gradients(gy.exact, exact(x), gamma.exact, eps)
        agree(gx, wanted.x, wanted.x_terms)


def test_a_row_of_zeros_has_a_gradient_thanks_to_eps(device: Gpu, ops: Ops, random: Random) -> None:
    gy = random(2, 31)
    gamma = random(31)
    x = device.zeros((2, 31))
    gx, g_gamma = ops.rms_norm_backward(gy.array, x, gamma.array, eps=0.25)
    agree(gx, 2 * gamma.exact * gy.exact)
    assert not np.any(g_gamma.numpy())


@pytest.mark.parametrize("shape", [(300, 31), (40, 1000)])
def test_twenty_runs_give_the_same_bits(ops: Ops, random: Random, shape: tuple[int, int]) -> None:
    gy, x, gamma = random(*shape).array, random(*shape).array, random(shape[1]).array
    first = ops.rms_norm_backward(gy, x, gamma, eps=1e-6)
    for _ in range(20):
        assert all(map(same_bits, ops.rms_norm_backward(gy, x, gamma, eps=1e-6), first))


@pytest.mark.parametrize("width", [24, 1000, 9000])
def test_alignment_changes_no_bit(device: Gpu, ops: Ops, random: Random, width: int) -> None:
    gy, x, gamma = random(5, width).array, random(5, width).array, random(width).array
    y = ops.rms_norm(x, gamma, eps=1e-6)
    both = ops.rms_norm_backward(gy, x, gamma, eps=1e-6)
    moved = [shifted(device, each) for each in (gy, x, gamma)]
    room = shifted(device, device.empty(ops.rms_norm_workspace(5, width, "float32")).fill(np.nan))
    assert same_bits(ops.rms_norm(moved[1], moved[2], eps=1e-6), y)
    assert all(map(same_bits, ops.rms_norm_backward(*moved, eps=1e-6, workspace=room), both))


@pytest.mark.parametrize("width", [31, 1000, 9000])
def test_gx_may_be_written_over_gy_or_x(ops: Ops, random: Random, width: int) -> None:
    gy, x, gamma = random(5, width).array, random(5, width).array, random(width).array
    wanted = ops.rms_norm_backward(gy, x, gamma, eps=1e-6)
    copies = ops.gpu.array(gy), ops.gpu.array(x)
    over_gy = ops.rms_norm_backward(copies[0], x, gamma, eps=1e-6, out=(copies[0], None))
    over_x = ops.rms_norm_backward(gy, copies[1], gamma, eps=1e-6, out=(copies[1], None))
    assert all(map(same_bits, over_gy, wanted))
    assert all(map(same_bits, over_x, wanted))


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 8192, 100_003])
@pytest.mark.parametrize("width", [1, 128, 4096, 65536])
def test_no_group_is_without_rows(rows: int, width: int) -> None:
    assert 1 <= groups(rows, width, "float32") <= rows


def test_a_larger_workspace_serves_as_well(device: Gpu, ops: Ops, random: Random) -> None:
    gy, x, gamma = random(5, 33).array, random(5, 33).array, random(33).array
    room = device.empty(1000)
    wanted = ops.rms_norm_backward(gy, x, gamma, eps=1e-6)
    assert all(map(same_bits, ops.rms_norm_backward(gy, x, gamma, eps=1e-6, workspace=room), wanted))


# For hardware alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), LARGE)
def test_real_sizes_agree_with_float64(
    torch: Any, on_gpu: Ops, dtype: str, rows: int, width: int
) -> None:
    kind = getattr(torch, dtype)
    eps = 0.01
    gy, x = (torch.randn(rows, width, device="cuda").to(kind) for _ in range(2))
    gamma = torch.randn(width, device="cuda").to(kind)
    y, gx, g_gamma = torch.empty_like(x), torch.empty_like(x), torch.empty_like(gamma)
    on_gpu.rms_norm(x, gamma, eps=eps, out=y)
    on_gpu.rms_norm_backward(gy, x, gamma, eps=eps, out=(gx, g_gamma))
    dy = gy.double()
    a = x.double()
    weight = gamma.double()
    v = (a * a).mean(-1, keepdim=True) + eps
    columns, through = dy * a / v.sqrt(), a * dy * weight
    dot = through.mean(-1, keepdim=True)
    most = through.abs().mean(-1, keepdim=True)
    terms = ((weight * dy).abs() + a.abs() / v * most) / v.sqrt()
    tensors_agree(y, weight * a / v.sqrt())
    tensors_agree(gx, (weight * dy - a / v * dot) / v.sqrt(), terms)
    tensors_agree(g_gamma, columns.sum(0), columns.abs().sum(0))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (1000, 16384)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_at_full_size_give_the_same_bits(
    torch: Any, on_gpu: Ops, dtype: str, shape: tuple[int, int]
) -> None:
    kind = getattr(torch, dtype)
    bits = torch.int32 if dtype == "float32" else torch.int16
    gy, x = (torch.randn(shape, device="cuda").to(kind) for _ in range(2))
    gamma = torch.randn(shape[1], device="cuda").to(kind)
    first, again = ((torch.empty_like(x), torch.empty_like(gamma)) for _ in range(2))
    on_gpu.rms_norm_backward(gy, x, gamma, eps=1e-6, out=first)
    for _ in range(20):
        for each in again:
            each.zero_()
        on_gpu.rms_norm_backward(gy, x, gamma, eps=1e-6, out=again)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one.view(bits), other.view(bits))
