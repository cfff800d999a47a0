"""Softmax over rows, forward and backward: `gx = y (gy - sum_j gy_j y_j)`."""

from __future__ import annotations

from pathlib import Path

from preheat.kernels.op import Op, remembered
from preheat.kernels.rows import once, row_op, twice

__all__ = ["softmax", "softmax_backward"]

_SOURCE = Path(__file__).with_name("softmax.cu")


@remembered
def softmax(rows: int, width: int, dtype: object) -> Op:
    """Arguments: x, y, rows, width."""
    return row_op(_SOURCE, "softmax", rows, width, dtype, once(dtype))


@remembered
def softmax_backward(rows: int, width: int, dtype: object) -> Op:
    """Arguments: gy, y, gx, rows, width."""
    return row_op(_SOURCE, "softmax_backward", rows, width, dtype, twice(dtype), operands=2)
