"""The kernels over rows, at widths, row counts and offsets of every kind, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat import Array, Gpu
from preheat.kernels.ops import Ops
from tests.kernels import sanitized
from tests.kernels.conftest import DTYPES, Exact, Operand, agree, exact, same_bits, tensors_agree
from tests.kernels.test_rms_norm import gradients, rms_norm
from tests.kernels.test_softmax import softmax

Random = Callable[..., Operand]
EPS = 0.01
#: Types, rows, widths and the elements in front of an operand. Together they take every way to access
#: rows: single elements, whole chunks, chunks element by element, shifted pieces, and staged segments.
CASES = [
    ("float32", 7, 1, 1),
    ("float32", 7, 40, 3),
    ("float32", 7, 129, 0),
    ("float32", 258, 1000, 1),
    ("float32", 1, 33001, 3),
    ("float16", 7, 128, 3),
    ("float16", 7, 1001, 1),
    ("float16", 67, 1001, 0),
    ("bfloat16", 66, 1000, 3),
    ("bfloat16", 2, 4097, 1),
    ("bfloat16", 1, 50257, 0),
]
WIDTHS = (
    *range(1, 41), 127, 128, 129, 1000, 1001, 1002, 1003, 4095, 4096, 4097,
    32000, 50257, 128256, 151936, 200000,
)  # fmt: skip
ELEMENTS = 1 << 26  # of an operand on the GPU, at most


class Call(NamedTuple):
    """The results of one call, the expected values, and the magnitude of their terms."""

    found: tuple[Array, ...]
    wanted: tuple[Exact, ...]
    terms: tuple[Exact, ...]


def placed(gpu: Gpu, array: Array, offset: int) -> Array:
    """Return a copy of an array with `before` elements in front of it, and some after it."""
    room = gpu.zeros(array.size + offset + 3, array.dtype)
    return room[offset : offset + array.size].reshape(array.shape).write(array.numpy())


def every_call(gpu: Gpu, ops: Ops, random: Random, case: tuple[str, int, int, int]) -> list[Call]:
    dtype, rows, width, offset = case
    x, gy, gamma = (random(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    put = [placed(gpu, each.array, offset) for each in (x, gy, gamma)]
    y = placed(gpu, x.array, (offset + 1) % 4)
    ops.softmax(put[0], out=y)
    p = exact(y)
    dot, most = (np.sum(part, -1, keepdims=True) for part in (gy.exact * p, np.abs(gy.exact * p)))
    wanted = gradients(gy.exact, x.exact, gamma.exact, EPS)
    exact_y = softmax(x.exact)
    normed = rms_norm(x.exact, gamma.exact, EPS)
    backward = Call(
        ops.rms_norm_backward(put[1], put[0], put[2], eps=EPS),
        (wanted.x, wanted.gamma),
        (wanted.x_terms, wanted.gamma_terms),
    )
    return [
        Call((y,), (exact_y,), (exact_y,)),
        Call(
            (ops.softmax_backward(put[1], y),),
            (p * (gy.exact - dot),),
            (p * (np.abs(gy.exact) + most),),
        ),
        Call((ops.rms_norm(put[0], put[2], eps=EPS),), (normed,), (np.abs(normed),)),
        backward,
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}-{}x{}+{}".format(*case))
def test_all_of_them_agree_with_float64(
    device: Gpu, ops: Ops, random: Random, case: tuple[str, int, int, int]
) -> None:
    for call in every_call(device, ops, random, case):
        for found, wanted, terms in zip(*call, strict=True):
            agree(found, wanted, terms)


@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [("float32", 258, 1000), ("bfloat16", 66, 1000), ("bfloat16", 1, 50256)],
)
def test_where_operands_begin_changes_no_bit(
    device: Gpu, ops: Ops, random: Random, dtype: str, rows: int, width: int
) -> None:
    x, gy, gamma = (
        random(*each, dtype=dtype).array for each in ((rows, width), (rows, width), (width,))
    )

    def results(at: int, out: int) -> list[Array]:
        a, b, c = (placed(device, each, at) for each in (x, gy, gamma))
        y = ops.softmax(a, out=placed(device, x, out))
        backward = ops.rms_norm_backward(b, a, c, eps=EPS, out=(placed(device, x, out), None))
        return [y, ops.softmax_backward(b, y), ops.rms_norm(a, c, eps=EPS), *backward]

    aligned = results(0, 0)
    for at, out in ((1, 0), (0, 3), (3, 2)):
        assert all(map(same_bits, results(at, out), aligned)), (at, out)


@pytest.mark.parametrize(
    ("dtype", "width"), [("bfloat16", 1001), ("float32", 1000), ("bfloat16", 50257)]
)
def test_a_result_may_take_the_place_of_an_operand_that_is_not_aligned(
    device: Gpu, ops: Ops, random: Random, dtype: str, width: int
) -> None:
    x, gy, gamma = (random(*each, dtype=dtype).array for each in ((70, width), (70, width), (width,)))
    if width > 4096:
        x, gy = x[:1], gy[:1]
    a, b = (placed(device, each, 1) for each in (x, gy))
    wanted = [ops.softmax(a), ops.softmax_backward(b, a), ops.rms_norm(a, gamma, eps=EPS)]
    assert same_bits(ops.softmax(a, out=placed(device, x, 1)), wanted[0])
    calls: tuple[Callable[[Array, Array], Array], ...] = (
        lambda v, _: ops.softmax(v, out=v),
        lambda v, g: ops.softmax_backward(g, v, out=g),
        lambda v, _: ops.rms_norm(v, gamma, eps=EPS, out=v),
    )
    for call, result in zip(calls, wanted, strict=True):
        assert same_bits(call(placed(device, x, 1), placed(device, gy, 1)), result)


@pytest.mark.parametrize("width", [1001, 50257])
def test_twenty_runs_give_the_same_bits(ops: Ops, random: Random, width: int) -> None:
    x, gy, gamma = (
        random(*each, dtype="bfloat16").array for each in ((1, width), (1, width), (width,))
    )

    def run() -> list[Array]:
        y = ops.softmax(x)
        backward = ops.rms_norm_backward(gy, x, gamma, eps=EPS)
        return [y, ops.softmax_backward(gy, y), ops.rms_norm(x, gamma, eps=EPS), *backward]

    first = run()
    for _ in range(19):
        assert all(map(same_bits, run(), first))


def test_the_program_for_compute_sanitizer_runs(device: Gpu) -> None:
    assert sanitized.rows(device, sanitized.ROWS[2:3], ["float32"]) == 1


# For hardware alone


def sampled(number: int) -> list[tuple[str, int, int, int]]:
    every = [
        (dtype, rows, width, offset)
        for dtype, rows, width, offset in itertools.product(
            DTYPES, (1, 7, 512, 8192), WIDTHS, (0, 1, 3)
        )
        if rows * width <= ELEMENTS
    ]
    chosen = np.random.default_rng().choice(len(every), number, replace=False)
    return [every[index] for index in chosen]


@pytest.mark.gpu
def test_cases_of_the_whole_sweep_agree_with_float64(torch: Any, on_gpu: Ops) -> None:
    """Others every time; a failure names the case."""
    for case in sampled(150):
        dtype, rows, width, offset = case

        def operand(*shape: int, dtype: str = dtype, offset: int = offset) -> Any:
            size = int(np.prod(shape))
            values = torch.randn(size + offset, device="cuda").to(getattr(torch, dtype))
            return values[offset:].view(shape)

        x, gy, gamma = operand(rows, width), operand(rows, width), operand(width)
        y, gx, normed = (torch.empty_like(x) for _ in range(3))
        g_gamma = torch.empty_like(gamma)
        on_gpu.softmax(x, out=y)
        on_gpu.rms_norm(x, gamma, eps=EPS, out=normed)
        v = x.double()
        g = gy.double()
        c = gamma.double()
        mean = v.square().mean(-1, keepdim=True) + EPS
        try:
            tensors_agree(y, torch.softmax(v, -1))
            tensors_agree(normed, v * mean.rsqrt() * c)
            on_gpu.softmax_backward(gy, y, out=gx)
            p = y.double()
            dot = (g * p).sum(-1, keepdim=True)
            most = (g * p).abs().sum(-1, keepdim=True)
            tensors_agree(gx, p * (g - dot), p * (g.abs() + most))
            on_gpu.rms_norm_backward(gy, x, gamma, eps=EPS, out=(gx, g_gamma))
            terms = v * g * c
            pull = terms.mean(-1, keepdim=True)
            size = terms.abs().mean(-1, keepdim=True)
            r = mean.sqrt()
            tensors_agree(
                gx, (c * g - v / mean * pull) / r, ((c * g).abs() + v.abs() / mean * size) / r
            )
            tensors_agree(g_gamma, (g * v / r).sum(0), (g * v / r).abs().sum(0))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
