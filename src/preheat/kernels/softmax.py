"""Softmax over rows, forward and backward: `gx = y (gy - sum_j gy_j y_j)`."""

from __future__ import annotations

from pathlib import Path

from preheat.kernels.op import Op, remembered
from preheat.kernels.rows import FLOATS, Spread, once, row_op

__all__ = ["softmax", "softmax_backward"]

_SOURCE = Path(__file__).with_name("softmax.cu")


@remembered
def softmax(rows: int, width: int, dtype: object) -> Op:
    """Arguments: x, y, rows, width."""
    return row_op(_SOURCE, "softmax", rows, width, dtype, once(dtype))


@remembered
def softmax_backward(rows: int, width: int, dtype: object) -> Op:
    """Arguments: gy, y, gx, rows, width."""
    spreads = [each for each in FLOATS if each != Spread(512, 32)]  # which has no room for both
    return row_op(_SOURCE, "softmax_backward", rows, width, dtype, spreads, operands=2)
