"""Results have the same bits for every alignment of the operands and in every run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from preheat.devices.array import Array
from preheat.gpu import Gpu
from preheat.kernels.ops import Ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hardware("its products have the size of a GPU"),
]

SHIFTS = (0, 1, 2, 4)  # elements
DTYPES = ("float32", "float16", "bfloat16")
SHAPES = ((1000, 1000, 1000), (64, 64, 8192), (129, 257, 1031))

types = pytest.mark.parametrize("dtype", DTYPES)


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Return random numbers on the host, bfloat16 as raw bits."""
    drawn = np.random.default_rng(math.prod(shape)).standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        return (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return drawn.astype(dtype)


def moved(gpu: Gpu, data: np.ndarray[Any, Any], dtype: str, by: int) -> Array:
    """Return an array of these values, `by` elements after the start of an allocation."""
    memory = gpu.zeros(data.size + 64, dtype)
    return memory[by : by + data.size].reshape(data.shape).write(data)


def bits(gpu: Gpu, op: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: str, by: int) -> bytes:
    """Return the result, which has the last shape, with every operand shifted."""
    *operands, result = (values(shape, dtype) for shape in shapes)
    out = moved(gpu, np.zeros_like(result), dtype, by)
    op(*(moved(gpu, each, dtype, by) for each in operands), out=out)
    return out.numpy().tobytes()


@types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shipped_products_have_the_same_bits_wherever_operands_begin(
    shape: tuple[int, int, int], dtype: str, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("cuda")
    (m, n, k) = shape
    gemm = Ops(gpu, blas=False).gemm
    found = {bits(gpu, gemm, [(m, k), (k, n), (m, n)], dtype, by) for by in SHIFTS}
    assert len(found) == 1


@types
@pytest.mark.parametrize("name", ["silu", "softmax", "rms_norm"])
@pytest.mark.parametrize("width", [33, 1000, 4096])
def test_shipped_kernels_of_rows_have_the_same_bits_wherever_operands_begin(
    width: int, name: str, dtype: str, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("cuda")
    ops = Ops(gpu, blas=False)
    op: Callable[..., Any] = getattr(ops, name)
    shapes: list[tuple[int, ...]] = [(31, width), (31, width)]
    if name == "rms_norm":
        shapes.insert(1, (width,))
        op = partial(ops.rms_norm, eps=1e-5)
    assert len({bits(gpu, op, shapes, dtype, by) for by in SHIFTS}) == 1


@types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by", SHIFTS)
def test_cublas_gives_the_same_bits_twice_for_the_same_operands(
    by: int, shape: tuple[int, int, int], dtype: str, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("cuda")
    (m, n, k) = shape
    ops = Ops(gpu)
    if ops.blas is None:
        pytest.skip("there is no cuBLAS here")
    a, b = (moved(gpu, values(size, dtype), dtype, by) for size in ((m, k), (k, n)))
    outs = [moved(gpu, values((m, n), dtype), dtype, by) for _ in range(2)]
    for out in outs:
        ops.gemm(a, b, out=out)
        ops.gemm(a, b, out=gpu.empty((m, n), dtype))  # Other work in other memory.
    assert outs[0].numpy().tobytes() == outs[1].numpy().tobytes()
