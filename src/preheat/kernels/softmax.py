"""Softmax over rows, forward and backward: `gx = y (gy - sum_j gy_j y_j)`."""

from __future__ import annotations

from pathlib import Path

from preheat.kernels.op import Op, memoize
from preheat.kernels.rows import one_operand_layouts, row_op, two_operand_layouts

__all__ = ["softmax", "softmax_backward"]

_SOURCE = Path(__file__).with_name("softmax.cu")


@memoize
def softmax(rows: int, width: int, dtype: object) -> Op:
    """Kernel arguments: x, y, rows, width."""
    return row_op(_SOURCE, "softmax", rows, width, dtype, one_operand_layouts(dtype))


@memoize
def softmax_backward(rows: int, width: int, dtype: object) -> Op:
    """Kernel arguments: gy, y, gx, rows, width."""
    layouts = two_operand_layouts(dtype)
    return row_op(_SOURCE, "softmax_backward", rows, width, dtype, layouts, operands=2)
