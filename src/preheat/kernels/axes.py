"""Axes change places, as heads and positions do around attention; and gradients that meet are added."""

from __future__ import annotations

from pathlib import Path

from preheat.errors import InputError
from preheat.kernels.op import BLOCKS, Op, cpp_of, dimension, remembered
from preheat.kernels.rows import WIDEST, chunk_of

__all__ = ["LINES", "add", "swap_axes"]

#: The most rows times columns: kernels count them in ints, up to a block beyond the end.
LINES = 2**31 - 1024

_SOURCE = Path(__file__).with_name("axes.cu")
_BLOCK = 256  # as in axes.cu


@remembered
def swap_axes(rows: int, columns: int, width: int, dtype: object) -> Op:
    """y[columns, rows, width] = scale x[rows, columns, width].

    Arguments: x, y, scale, rows, columns, width, add.
    """
    dims = {"rows": dimension("rows", rows), "columns": dimension("columns", columns)}
    dims["width"] = dimension("width", width, WIDEST)
    return _op("swap_axes", dims, dims["rows"] * dims["columns"], dtype)


@remembered
def add(rows: int, width: int, dtype: object) -> Op:
    """y[rows, width] += x[rows, width]: a swap with one column. Arguments: as there."""
    dims = {"rows": dimension("rows", rows), "width": dimension("width", width, WIDEST)}
    return _op("add", dims, dims["rows"], dtype)


def _op(name: str, dims: dict[str, int], lines: int, dtype: object) -> Op:
    element, cpp = cpp_of(dtype)
    blocks = -(-lines * -(-dims["width"] // chunk_of(element)) // _BLOCK)
    if lines > LINES or blocks > BLOCKS:
        sizes = " by ".join(f"{each} {size}" for each, size in dims.items())
        raise InputError(f"{sizes} is more than one launch can move")
    entry = f"swap_axes<{cpp}>"
    return Op(name, tuple(dims.items()), _SOURCE, entry, (blocks,), (_BLOCK,))
