"""Matrix products and their gradients: row-major, any dimensions and alignment, accumulated in fp32.

A sum of `length` products is within `error_bound(length, dtype)` of the exact sum, relative to the sum
of the magnitudes; then it is rounded to the storage type. Accumulating into a result adds one more
addition. The order of a sum depends on the shape alone: the same operands give the same bits on the
same kind of GPU. Products of float16 and bfloat16 use tensor cores since sm_80.
"""

from __future__ import annotations

import math
from pathlib import Path

from preheat.errors import InputError
from preheat.kernels.op import MAX_BLOCKS, Op, cpp_of, dimension, memoize
from preheat.kernels.rows import slow_reason
from preheat.model.dtypes import dtype_of

__all__ = [
    "TILES",
    "error_bound",
    "gemm",
    "gemm_backward_a",
    "gemm_backward_a_nf4",
    "gemm_backward_b",
    "tiles",
]

#: The widths of the tiles that a block can compute: squares, except 128 by 256. Fastest first.
TILES = (256, 128, 64, 32)

_SOURCE = Path(__file__).with_name("gemm.cu")
_BLOCK = 256  # Threads, as in gemm.cu.
_MAX_TILE_ROWS = 128  # As in gemm.cu.
_SIMT_SHARED = 36 << 10  # Bytes of shared memory for two stages of floats.
_MMA_SHARED = {256: 144 << 10, 128: 64 << 10, 64: 64 << 10, 32: 64 << 10}  # For 16-bit types.
_MIN_BLOCKS = 128  # The fewest blocks that keep a large GPU busy.
_LONG_SUM = 256  # Products in a sum.
_MAX_DIMENSION = 2**31 - 1024  # Kernels count in ints, up to some stages beyond the end.


def error_bound(length: int, dtype: object = "float32") -> float:
    """Return `n u / (1 - n u)` with `u = 2**-24`, and `n = length` or for 16-bit types `3 * length`.

    That is 6e-8 for 1 and 2.4e-4 for 4096; the bound is infinite from `n = 2**24`.

    An addition in fp32 rounds to nearest, with an error of up to `u`. Tensor cores add 8 or 16 exact
    products to a sum at once. They truncate all terms at 24 bits or more below the leading bit of the
    largest one, with an error of up to `2 u` of it for each term, and then truncate the sum. Eight
    products and a sum are nine terms. With the error of the sum that is `2.5 u` for each product.
    """
    terms = length if dtype_of(dtype).name == "float32" else 3 * length
    return terms / (2**24 - terms) if terms < 2**24 else math.inf


def tiles(dtype: object) -> tuple[int, ...]:
    """Return the tile widths for an element type. Only tensor cores gain from the largest one."""
    return TILES[1:] if cpp_of(dtype)[0].name == "float32" else TILES


@memoize
def gemm(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """c[m, n] = a[m, k] b[k, n]. Kernel arguments: a, b, c, m, n, k, add."""
    return _op("gemm", {"m": m, "n": n, "k": k}, ("m", "n"), dtype, tile)


@memoize
def gemm_backward_a(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """ga[m, k] = gc[m, n] b[k, n]^T. Kernel arguments: gc, b, ga, m, n, k, add."""
    return _op("gemm_backward_a", {"m": m, "n": n, "k": k}, ("m", "k"), dtype, tile)


@memoize
def gemm_backward_a_nf4(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """ga[m, k] = gc[m, n] b[k, n]^T with b in NF4.

    Kernel arguments: gc, codes, scales, ga, m, n, k, add.
    """
    return _op("gemm_backward_a_nf4", {"m": m, "n": n, "k": k}, ("m", "k"), dtype, tile)


@memoize
def gemm_backward_b(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """gb[k, n] = a[m, k]^T gc[m, n]. Kernel arguments: a, gc, gb, m, n, k, add."""
    return _op("gemm_backward_b", {"m": m, "n": n, "k": k}, ("k", "n"), dtype, tile)


def _op(
    name: str, dims: dict[str, int], result: tuple[str, str], dtype: object, tile: int | None
) -> Op:
    sizes = {each: dimension(each, size, _MAX_DIMENSION) for each, size in dims.items()}
    rows, columns = (sizes[each] for each in result)
    element, cpp = cpp_of(dtype)
    sizes_of_tiles = tiles(dtype)
    (length,) = (size for each, size in sizes.items() if each not in result)
    side = _tile(rows, columns, length, sizes_of_tiles) if tile is None else tile
    if side not in sizes_of_tiles or not isinstance(side, int):
        raise InputError(f"tile {side!r} is none of {', '.join(map(str, sizes_of_tiles))}")
    blocks = _blocks(rows, columns, side)
    if blocks > MAX_BLOCKS:
        high, wide = result
        raise InputError(
            f"a result with {high} {rows} by {wide} {columns} has more than {MAX_BLOCKS} tiles"
        )
    shared = _SIMT_SHARED if cpp == "float" else _MMA_SHARED[side]
    entry = f"{name}<{cpp}, {side}>"
    reason = slow_reason(sizes["n"], element) or slow_reason(sizes["k"], element)
    dims_of = tuple(sizes.items())
    return Op(name, dims_of, _SOURCE, entry, (blocks,), (_BLOCK,), shared, slow_reason=reason)


def _tile(rows: int, columns: int, length: int, known: tuple[int, ...]) -> int:
    """Return the largest tile that lies mostly inside the result and occupies every multiprocessor.

    A multiprocessor holds only one block of the largest tile, so the start and the end of a block
    overlap with no other work. For short sums that costs more than the tile gains.
    """
    for side in known[:-1]:
        if side == TILES[0] and length < _LONG_SUM:
            continue
        if 2 * min(rows, columns) > side and _blocks(rows, columns, side) >= _MIN_BLOCKS:
            return side
    return known[-1]


def _blocks(rows: int, columns: int, side: int) -> int:
    return -(-rows // min(side, _MAX_TILE_ROWS)) * -(-columns // side)
