"""Swap two axes, as attention does with heads and positions, and add one array to another."""

from __future__ import annotations

from pathlib import Path

from preheat.errors import InputError
from preheat.kernels.op import MAX_BLOCKS, Op, cpp_of, dimension, memoize
from preheat.kernels.rows import MAX_WIDTH, chunk_size

__all__ = ["MAX_LINES", "add", "swap_axes"]

#: The most rows times columns: kernels count them in ints, up to a block beyond the end.
MAX_LINES = 2**31 - 1024

_SOURCE = Path(__file__).with_name("axes.cu")
_BLOCK = 256  # Threads, as in axes.cu.


@memoize
def swap_axes(rows: int, columns: int, width: int, dtype: object) -> Op:
    """y[columns, rows, width] = scale x[rows, columns, width].

    Kernel arguments: x, y, scale, rows, columns, width, add.
    """
    dims = {"rows": dimension("rows", rows), "columns": dimension("columns", columns)}
    dims["width"] = dimension("width", width, MAX_WIDTH)
    return _op("swap_axes", dims, dims["rows"] * dims["columns"], dtype)


@memoize
def add(rows: int, width: int, dtype: object) -> Op:
    """y[rows, width] += x[rows, width]: `swap_axes` with one column, and the same kernel arguments."""
    dims = {"rows": dimension("rows", rows), "width": dimension("width", width, MAX_WIDTH)}
    return _op("add", dims, dims["rows"], dtype)


def _op(name: str, dims: dict[str, int], lines: int, dtype: object) -> Op:
    element, cpp = cpp_of(dtype)
    blocks = -(-lines * -(-dims["width"] // chunk_size(element)) // _BLOCK)
    if lines > MAX_LINES or blocks > MAX_BLOCKS:
        sizes = " by ".join(f"{each} {size}" for each, size in dims.items())
        raise InputError(f"{sizes} is more than one launch can move")
    entry = f"swap_axes<{cpp}>"
    return Op(name, tuple(dims.items()), _SOURCE, entry, (blocks,), (_BLOCK,))
