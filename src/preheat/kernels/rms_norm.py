"""RMSNorm over rows, forward and backward, with `v = mean(x^2) + eps` and `r = sqrt(v)`.

`gx = (gamma gy - (x / v) mean(x gy gamma)) / r`, and the gradient of gamma is the sum of `gy x / r`
over the rows. Each group of threads adds rows at a fixed distance, and a second launch adds the sums
of all groups. The groups and the order depend on the shape alone, so every run gives the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from preheat.kernels.op import Op, cpp_of, memoize
from preheat.kernels.rows import (
    MULTIPROCESSORS,
    RowLayout,
    choose_layout,
    chunk_size,
    row_dimensions,
    row_op,
    slow_reason,
    two_operand_layouts,
)
from preheat.model.dtypes import DType

__all__ = ["backward_arguments", "groups", "rms_norm", "rms_norm_backward", "workspace"]

_SOURCE = Path(__file__).with_name("rms_norm.cu")
_SCALARS = (
    RowLayout(8, 1, True), RowLayout(32, 1, True), RowLayout(32, 4, True), RowLayout(32, 8, True),
)  # fmt: skip
_FLOATS = (
    RowLayout(8, 4), RowLayout(32, 4), RowLayout(32, 8), RowLayout(512, 8), RowLayout(1024, 8),
    *_SCALARS, RowLayout(512, 8, True), RowLayout(1024, 8, True),
)  # fmt: skip
_16_BIT = (
    RowLayout(8, 8), RowLayout(32, 8), RowLayout(32, 16), RowLayout(512, 8), RowLayout(576, 8),
    RowLayout(1024, 8), *_SCALARS,
)  # fmt: skip
_LATENCY = RowLayout(1024, 1, True)  # For at most _VERY_FEW rows, where only latency counts.
_VERY_FEW = 8
_ONE_BLOCK = 32  # Rows that one block adds alone: a second launch would take longer.
_STRIP = {2: 4096, 4: 2048}  # Elements of a strip by bytes of an element, as in rms_norm.cu.
_STRIP_THREADS = 256  # As in rms_norm.cu.
_READ_TWICE = "rows do not fit into registers, so that they are read twice"
_COLUMNS = 4  # Groups of four columns that a block of rms_norm_gamma adds, as in rms_norm.cu.
_LINES = 128  # Threads that share four columns, as in rms_norm.cu.


@memoize
def rms_norm(rows: int, width: int, dtype: object) -> Op:
    """Kernel arguments: x, gamma, y, eps, rows, width."""
    return row_op(_SOURCE, "rms_norm", rows, width, dtype, two_operand_layouts(dtype))


@memoize
def rms_norm_backward(rows: int, width: int, dtype: object) -> tuple[Op, ...]:
    """Return one to three launches. `rms_norm_backward` is always among them.

    The kernel arguments by the name of the launch, where `workspace` is an array of floats:

    - `rms_norm_strips`: gy, x, gamma, workspace, rows, width, groups
    - `rms_norm_backward`: gy, x, gamma, gx, workspace, g_gamma, eps, rows, width, groups
    - `rms_norm_gamma`: workspace, g_gamma, groups, width
    """
    rows, width = row_dimensions(rows, width)
    element, cpp = cpp_of(dtype)
    name = "rms_norm_backward"
    dims = (("rows", rows), ("width", width))
    number = groups(rows, width, dtype)
    layout = _layout(rows, width, element)
    one_block = number == 1 if layout is None else number <= layout.rows_per_block
    more = () if one_block else (_gamma(number, width, cpp),)
    reason = slow_reason(width, element)
    if layout is not None:
        entry = layout.entry(name, element, cpp)
        grid = (-(-number // layout.rows_per_block),)
        block = (layout.threads(width, element),)
        return Op(name, dims, _SOURCE, entry, grid, block, slow_reason=reason), *more
    strips = -(-width // _STRIP[element.size])
    block = (_STRIP_THREADS,)
    entry = f"rms_norm_strips<{cpp}>"
    first = Op("rms_norm_strips", dims, _SOURCE, entry, (strips * rows,), block, slow_reason=reason)
    entry = f"{name}_strips<{cpp}>"
    grid = (strips * number,)
    return first, Op(name, dims, _SOURCE, entry, grid, block, slow_reason=_READ_TWICE), *more


def backward_arguments(
    name: str,
    gy: Any,
    x: Any,
    gamma: Any,
    gx: Any,
    g_gamma: Any,
    workspace: Any,
    eps: float,
    rows: int,
    width: int,
    groups: int,
) -> tuple[Any, ...]:
    """Return the kernel arguments of the launch `name` of `rms_norm_backward`."""
    if name == "rms_norm_gamma":
        return workspace, g_gamma, groups, width
    if name == "rms_norm_strips":
        return gy, x, gamma, workspace, rows, width, groups
    return gy, x, gamma, gx, workspace, g_gamma, eps, rows, width, groups


@memoize
def groups(rows: int, width: int, dtype: object) -> int:
    """The number of thread groups among which `rms_norm_backward` divides the rows."""
    rows, width = row_dimensions(rows, width)
    element, _ = cpp_of(dtype)
    layout = _layout(rows, width, element)
    if layout is None:
        return min(rows, max(1, 6 * MULTIPROCESSORS // -(-width // _STRIP[element.size])))
    if layout.lanes <= 32:
        one_block = rows <= _ONE_BLOCK
        limit = layout.rows_per_block if one_block else MULTIPROCESSORS * 512 // layout.lanes
        return min(rows, limit)
    threads = 512 if element.size == 4 else 1152 if layout.lanes == 576 else 1024  # Resident on an SM.
    return min(rows, MULTIPROCESSORS * max(1, threads // layout.threads(width, element)))


def workspace(rows: int, width: int, dtype: object) -> int:
    """The floats of a workspace: column sums of each group and, for wide rows, sums of each strip."""
    rows, width = row_dimensions(rows, width)
    element, _ = cpp_of(dtype)
    strips = 0 if _layout(rows, width, element) else -(-width // _STRIP[element.size])
    return groups(rows, width, dtype) * (-(-width // 8) * 8) + 2 * strips * rows


def _layout(rows: int, width: int, element: DType) -> RowLayout | None:
    if element.size == 4:
        return choose_layout(rows, width, element, _FLOATS)
    odd = width % chunk_size(element) != 0
    if odd and rows <= _VERY_FEW and _SCALARS[-1].max_width(element) < width <= _LATENCY.lanes:
        return _LATENCY
    return choose_layout(rows, width, element, _16_BIT)


def _gamma(number: int, width: int, cpp: str) -> Op:
    dims = (("groups", number), ("width", width))
    blocks = -(-width // (4 * _COLUMNS))
    threads = _COLUMNS * _LINES
    return Op("rms_norm_gamma", dims, _SOURCE, f"rms_norm_gamma<{cpp}>", (blocks,), (threads,))
