"""RMSNorm over rows, forward and backward, with `v = mean(x^2) + eps` and `r = sqrt(v)`.

`gx = (gamma gy - (x / v) mean(x gy gamma)) / r`, and the gradient of gamma is the sum of `gy x / r`
over the rows: groups of threads add up rows a fixed step apart, and a second launch adds up those
sums. Groups and order follow from the shape alone, so every run gives the same bits.
"""

from __future__ import annotations

from pathlib import Path

from preheat.dtypes import DType
from preheat.kernels.op import Op, cpp_of, remembered
from preheat.kernels.rows import PROCESSORS, Spread, chunk_of, row_op, sizes, slower, spread, twice

__all__ = ["groups", "rms_norm", "rms_norm_backward", "workspace"]

_SOURCE = Path(__file__).with_name("rms_norm.cu")
_SINGLES = Spread(8, 1, True), Spread(32, 1, True), Spread(32, 4, True), Spread(32, 8, True)
_FLOATS = (
    Spread(8, 4), Spread(32, 4), Spread(32, 8), Spread(512, 8), Spread(1024, 8),
    *_SINGLES, Spread(512, 8, True), Spread(1024, 8, True),
)  # fmt: skip
_HALVES = (
    Spread(8, 8), Spread(32, 8), Spread(32, 16), Spread(512, 8), Spread(576, 8), Spread(1024, 8),
    *_SINGLES,
)  # fmt: skip
_LATENCY = Spread(1024, 1, True)  # for at most _VERY_FEW rows, where only latency counts
_VERY_FEW = 8
_ONE_BLOCK = 32  # rows that one block adds up by itself: a second launch takes longer
_STRIP, _STRIP_THREADS = {2: 4096, 4: 2048}, 256  # by bytes of an element, as in rms_norm.cu
_TWICE = "no registers hold rows this wide, so that they are read twice"
_COLUMNS, _LINES = 4, 128  # as in rms_norm.cu; of four columns each


@remembered
def rms_norm(rows: int, width: int, dtype: object) -> Op:
    """Arguments: x, gamma, y, eps, rows, width."""
    return row_op(_SOURCE, "rms_norm", rows, width, dtype, twice(dtype))


@remembered
def rms_norm_backward(rows: int, width: int, dtype: object) -> tuple[Op, ...]:
    """Launches, of which only `rms_norm_backward` is always there; the arguments of each by its name.

    `rms_norm_strips`: gy, x, gamma, room, rows, width, groups. `rms_norm_backward`: gy, x, gamma, gx,
    room, g_gamma, eps, rows, width, groups. `rms_norm_gamma`: room, g_gamma, groups, width. `room` is a
    workspace of floats.
    """
    (rows, width), (element, cpp) = sizes(rows, width), cpp_of(dtype)
    name, number = "rms_norm_backward", groups(rows, width, dtype)
    dims = (("rows", rows), ("width", width))
    at = _spread(rows, width, element)
    alone = number == 1 if at is None else number <= at.rows
    more = () if alone else (_gamma(number, width, cpp),)
    if at is not None:
        entry, grid = at.entry(name, element, cpp), (-(-number // at.rows),)
        block = (at.threads(width, element),)
        return Op(name, dims, _SOURCE, entry, grid, block, slower=slower(width, element)), *more
    block, strips = (_STRIP_THREADS,), -(-width // _STRIP[element.size])
    grid, why = (strips * rows,), slower(width, element)
    first = Op("rms_norm_strips", dims, _SOURCE, f"rms_norm_strips<{cpp}>", grid, block, slower=why)
    entry = f"{name}_strips<{cpp}>"
    return first, Op(name, dims, _SOURCE, entry, (strips * number,), block, slower=_TWICE), *more


@remembered
def groups(rows: int, width: int, dtype: object) -> int:
    """Among how many groups of threads `rms_norm_backward` shares out the rows."""
    (rows, width), (element, _) = sizes(rows, width), cpp_of(dtype)
    at = _spread(rows, width, element)
    if at is None:
        return min(rows, max(1, 6 * PROCESSORS // -(-width // _STRIP[element.size])))
    if at.lanes <= 32:
        return min(rows, at.rows if rows <= _ONE_BLOCK else PROCESSORS * 512 // at.lanes)
    resident = 512 if element.size == 4 else 1152 if at.lanes == 576 else 1024  # threads of a processor
    return min(rows, PROCESSORS * max(1, resident // at.threads(width, element)))


def workspace(rows: int, width: int, dtype: object) -> int:
    """Floats of a workspace: the sums of columns of each group and, of wide rows, of each strip."""
    (rows, width), (element, _) = sizes(rows, width), cpp_of(dtype)
    strips = 0 if _spread(rows, width, element) else -(-width // _STRIP[element.size])
    return groups(rows, width, dtype) * (-(-width // 8) * 8) + 2 * strips * rows


def _spread(rows: int, width: int, element: DType) -> Spread | None:
    if element.size == 4:
        return spread(rows, width, element, _FLOATS)
    odd = width % chunk_of(element) != 0
    if odd and rows <= _VERY_FEW and _SINGLES[-1].holds(element) < width <= _LATENCY.lanes:
        return _LATENCY
    return spread(rows, width, element, _HALVES)


def _gamma(number: int, width: int, cpp: str) -> Op:
    dims, entry = (("groups", number), ("width", width)), f"rms_norm_gamma<{cpp}>"
    blocks, threads = -(-width // (4 * _COLUMNS)), _COLUMNS * _LINES
    return Op("rms_norm_gamma", dims, _SOURCE, entry, (blocks,), (threads,))
