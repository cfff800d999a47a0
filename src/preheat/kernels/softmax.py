"""Softmax over rows, forward and backward: `gx = y (gy - sum_j gy_j y_j)`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from preheat.kernels.op import Op, cpp_of, dimension
from preheat.kernels.rows import TWICE, WIDE, WIDEST, Spread, once, spread

__all__ = ["softmax", "softmax_backward"]

_SOURCE = Path(__file__).with_name("softmax.cu")
_AGAIN = Spread(512, 32)  # holds one operand; the other is read again
_TWO = (
    Spread(8, 4), Spread(32, 4), Spread(32, 8), Spread(32, 16), Spread(32, 32), Spread(128, 16),
    Spread(256, 16), Spread(512, 16), _AGAIN,
)  # fmt: skip


def softmax(rows: int, width: int, dtype: object) -> Op:
    """Arguments: x, y, rows, width."""
    return _op("softmax", rows, width, dtype, once(dtype))


def softmax_backward(rows: int, width: int, dtype: object) -> Op:
    """Arguments: gy, y, gx, rows, width."""
    return _op("softmax_backward", rows, width, dtype, _TWO)


def _op(name: str, rows: int, width: int, dtype: object, spreads: Iterable[Spread]) -> Op:
    rows, width = dimension("rows", rows), dimension("width", width, WIDEST)
    element, cpp = cpp_of(dtype)
    at, dims = spread(width, element, spreads), (("rows", rows), ("width", width))
    if at is None:
        entry = f"{name}_wide<{cpp}>"
        return Op(name, dims, _SOURCE, entry, (rows,), (WIDE,), slower=TWICE)
    kernel = f"{name}_again" if at is _AGAIN else name
    entry = f"{kernel}<{cpp}, {at.lanes}, {at.chunks(element)}>"
    return Op(name, dims, _SOURCE, entry, (-(-rows // at.rows),), (at.threads,))
