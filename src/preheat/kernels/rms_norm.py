"""RMSNorm over rows, forward and backward, with `v = mean(x^2) + eps` and `r = sqrt(v)`.

`gx = (gamma gy - (x / v) mean(x gy gamma)) / r`, and the gradient of gamma is the sum of `gy x / r`
over the rows: groups of threads add up rows a fixed step apart, and a second launch adds up those
sums. Groups and order follow from the shape alone, so every run gives the same bits.
"""

from __future__ import annotations

from pathlib import Path

from preheat.dtypes import DType
from preheat.kernels.op import Op, cpp_of, remembered
from preheat.kernels.rows import TWICE, WIDE, Spread, once, row_op, sizes, spread

__all__ = ["PROCESSORS", "groups", "rms_norm", "rms_norm_backward"]

#: Of a large GPU: all of them shall have groups of rows.
PROCESSORS = 132

_SOURCE = Path(__file__).with_name("rms_norm.cu")
_WIDE = Spread(WIDE, 0)
_BACKWARD = (
    Spread(8, 4), Spread(32, 4), Spread(32, 8), Spread(64, 8), Spread(128, 8), Spread(256, 8),
    Spread(512, 8), Spread(1024, 8),
)  # fmt: skip
_THREADS = {2: 1024, 4: 512}  # that each of them has room for, by bytes of an element
_COLUMNS, _LINES = 4, 128  # as in rms_norm.cu; of four columns each


@remembered
def rms_norm(rows: int, width: int, dtype: object) -> Op:
    """Arguments: x, gamma, y, eps, rows, width."""
    return row_op(_SOURCE, "rms_norm", rows, width, dtype, once(dtype))


@remembered
def rms_norm_backward(rows: int, width: int, dtype: object) -> tuple[Op, Op]:
    """Arguments of the first: gy, x, gamma, gx, partial, eps, rows, width, groups.

    Of the second: partial, g_gamma, groups, width. `partial` is a workspace of floats, one row of
    `width` for each group.
    """
    (rows, width), (element, cpp) = sizes(rows, width), cpp_of(dtype)
    at, number = _spread(width, element), groups(rows, width, dtype)
    dims, grid, block = (("rows", rows), ("width", width)), (-(-number // at.rows),), (at.threads,)
    entry, slower = f"rms_norm_backward<{cpp}, {at.lanes}, {at.chunks(element)}>", ""
    if at is _WIDE:
        entry, slower = f"rms_norm_backward_wide<{cpp}>", TWICE
    main = Op("rms_norm_backward", dims, _SOURCE, entry, grid, block, slower=slower)
    return main, _gamma(number, width, cpp)


@remembered
def groups(rows: int, width: int, dtype: object) -> int:
    """Among how many groups of threads `rms_norm_backward` shares out the rows."""
    (rows, width), (element, _) = sizes(rows, width), cpp_of(dtype)
    at = _spread(width, element)
    return min(rows, PROCESSORS * max(1, _THREADS[element.size] // at.lanes))


def _spread(width: int, dtype: DType) -> Spread:
    return spread(width, dtype, _BACKWARD) or _WIDE


def _gamma(number: int, width: int, cpp: str) -> Op:
    dims, entry = (("groups", number), ("width", width)), f"rms_norm_gamma<{cpp}>"
    blocks, threads = -(-width // (4 * _COLUMNS)), _COLUMNS * _LINES
    return Op("rms_norm_gamma", dims, _SOURCE, entry, (blocks,), (threads,))
