"""Helpers for the tests of products: their forms, their reference, and memory for results."""

from __future__ import annotations

import numpy as np

from preheat import Array, Gpu
from preheat.kernels import gemm
from preheat.kernels.op import Op
from tests.kernels.conftest import ROUNDING, Exact

Dims = dict[str, int]

# Each product by the axes of its operands and its result, which also is the reference.
FORMS = {
    "gemm": ("mk", "kn", "mn"),
    "gemm_backward_a": ("mn", "kn", "mk"),
    "gemm_backward_b": ("mk", "mn", "kn"),
}
EDGE = 3  # Elements around a result that no kernel may write.


def op_of(name: str, dims: Dims, dtype: str = "float32", tile: int | None = None) -> Op:
    made: Op = getattr(gemm, name)(**dims, dtype=dtype, tile=tile)
    return made


def shape_of(axes: str, dims: Dims) -> tuple[int, ...]:
    return tuple(dims[axis] for axis in axes)


def product_agrees(
    name: str, found: Exact, a: Exact, b: Exact, dtype: str, old: Exact | None = None
) -> None:
    """Check a product against float64, within the stated bound and the rounding of its storage."""
    left, right, result = FORMS[name]
    (summed,) = set(left) - set(result)
    spec = f"{left},{right}->{result}"
    length = a.shape[left.index(summed)]
    wanted = np.einsum(spec, a, b, optimize=True)
    most = np.einsum(spec, np.abs(a), np.abs(b), optimize=True)
    if old is not None:
        wanted, most, length = wanted + old, most + np.abs(old), length + 1
    tiny = 2.0**-25 if dtype == "float16" else 0  # Half the distance of subnormal numbers.
    bound = gemm.error_bound(length, dtype) * most + 1.01 * ROUNDING[dtype] * np.abs(wanted) + tiny
    assert found.shape == wanted.shape
    assert (np.abs(found - wanted) <= bound).all()


def framed(gpu: Gpu, shape: tuple[int, ...], dtype: str, shift: int = 0) -> tuple[Array, Array]:
    """Return memory for a result that holds NaN, and the same with the elements around it."""
    size = int(np.prod(shape))
    whole = gpu.array(np.full(size + 2 * EDGE + 1 + shift, np.nan, "float16"), "float16")
    if dtype != "float16":
        whole = gpu.empty(whole.size, dtype).fill(np.nan)
    offset = (EDGE + 1 + shift) * whole.dtype.size
    return Array(whole.buffer, whole.dtype, shape, offset), whole
