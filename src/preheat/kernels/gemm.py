"""Products of matrices and their gradients: row-major, any dimensions and alignment, summed in fp32.

A sum of `length` products is within `error_bound(length)` of the exact one, relative to the sum of
their magnitudes; then it is rounded to the storage type. A result that is added to what was there has
one addition more. The order of a sum depends on the shape alone: the same operands give the same bits.
"""

from __future__ import annotations

import math
from pathlib import Path

from preheat.errors import InputError
from preheat.kernels.op import BLOCKS, Op, cpp_of, dimension, remembered

__all__ = ["TILES", "error_bound", "gemm", "gemm_backward_a", "gemm_backward_a_nf4", "gemm_backward_b"]

#: Tiles that a block can make of a result, by their width: squares, but 128 by 256. The fastest first.
TILES = (256, 128, 64, 32)

_SOURCE = Path(__file__).with_name("gemm.cu")
_BLOCK = 256  # as in gemm.cu
_BUSY = 128  # blocks that a large GPU needs at least
_MOST = 2**31 - 256  # of a dimension: kernels count in ints, up to a tile beyond the end


def error_bound(length: int) -> float:
    """`length u / (1 - length u)` with `u = 2**-24`: 6e-8 for 1, 2.4e-4 for 4096, none from 2**24."""
    return length / (2**24 - length) if length < 2**24 else math.inf


@remembered
def gemm(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """c[m, n] = a[m, k] b[k, n]. Arguments: a, b, c, m, n, k, add."""
    return _op("gemm", {"m": m, "n": n, "k": k}, ("m", "n"), dtype, tile)


@remembered
def gemm_backward_a(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """ga[m, k] = gc[m, n] b[k, n]^T. Arguments: gc, b, ga, m, n, k, add."""
    return _op("gemm_backward_a", {"m": m, "n": n, "k": k}, ("m", "k"), dtype, tile)


@remembered
def gemm_backward_a_nf4(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """The same with b in NF4. Arguments: gc, codes, scales, ga, m, n, k, add."""
    return _op("gemm_backward_a_nf4", {"m": m, "n": n, "k": k}, ("m", "k"), dtype, tile)


@remembered
def gemm_backward_b(m: int, n: int, k: int, dtype: object, *, tile: int | None = None) -> Op:
    """gb[k, n] = a[m, k]^T gc[m, n]. Arguments: a, gc, gb, m, n, k, add."""
    return _op("gemm_backward_b", {"m": m, "n": n, "k": k}, ("k", "n"), dtype, tile)


def _op(
    name: str, dims: dict[str, int], result: tuple[str, str], dtype: object, tile: int | None
) -> Op:
    sizes = {each: dimension(each, size, _MOST) for each, size in dims.items()}
    rows, columns = (sizes[each] for each in result)
    side = _tile(rows, columns) if tile is None else tile
    if side not in TILES or not isinstance(side, int):
        raise InputError(f"tile {side!r} is none of {', '.join(map(str, TILES))}")
    blocks, kind = _blocks(rows, columns, side), cpp_of(dtype)[1]
    if blocks > BLOCKS:
        high, wide = result
        raise InputError(f"{high} {rows} by {wide} {columns} is a result of more than {BLOCKS} tiles")
    entry = f"{name}<{kind}, {side}>"
    shared = _SHARED["float" if kind == "float" else side]
    return Op(name, tuple(sizes.items()), _SOURCE, entry, (blocks,), (_BLOCK,), shared)


def tiles(dtype):
    return TILES[1:] if cpp_of(dtype)[1] == "float" else TILES

_SHARED = {"float": 36<<10, 256: 96<<10, 128: 64<<10, 64: 64<<10, 32: 64<<10}


def _tile(rows: int, columns: int) -> int:
    """The largest tile that is not mostly beyond the result's edges and leaves no processor idle."""
    for side in TILES[:-1]:
        if 2 * min(rows, columns) > side and _blocks(rows, columns, side) >= _BUSY:
            return side
    return TILES[-1]


def _blocks(rows: int, columns: int, side: int) -> int:
    return -(-rows // min(side, 128)) * -(-columns // side)
