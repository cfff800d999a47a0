"""Products of matrices and their gradients: row-major, any dimensions and alignment, summed in fp32.

A sum of `length` products is within `error_bound(length, dtype)` of the exact one, relative to the sum
of their magnitudes; then it is rounded to the storage type. A result that is added to what was there
has one addition more. The order of a sum depends on the shape alone: the same operands give the same
bits on the same kind of GPU. Products of float16 and bfloat16 use tensor cores since sm_80.
"""

from __future__ import annotations

import math
from pathlib import Path

from preheat.dtypes import dtype_of
from preheat.errors import InputError
from preheat.kernels.op import BLOCKS, Op, cpp_of, dimension, remembered
from preheat.kernels.rows import slower

__all__ = [
    "TILES",
    "error_bound",
    "gemm",
    "gemm_backward_a",
    "gemm_backward_a_nf4",
    "gemm_backward_b",
    "tiles",
]

#: Tiles that a block can make of a result, by their width: squares, but 128 by 256. The fastest first.
TILES = (256, 128, 64, 32)

_SOURCE = Path(__file__).with_name("gemm.cu")
_BLOCK = 256  # as in gemm.cu
_HIGHEST = 128  # rows of a tile
_SIMT = 36 << 10  # bytes of shared memory for two stages of floats
_MMA = {256: 144 << 10, 128: 64 << 10, 64: 64 << 10, 32: 64 << 10}  # for the stages of 16-bit types
_BUSY = 128  # blocks that a large GPU needs at least
_LONG = 256  # products in a sum
_MOST = 2**31 - 1024  # of a dimension: kernels count in ints, up to some stages beyond the end


def error_bound(length: int, dtype: object = "float32") -> float:
    """`n u / (1 - n u)` with `u = 2**-24` and `n = length`; of 16-bit types `n` is `3 * length`.

    6e-8 for 1, 2.4e-4 for 4096, none from 2**24.

    An addition in fp32 rounds to nearest, with an error of up to `u`. Tensor cores add 8 or 16 exact
    products to a sum at once. They cut off all terms at 24 bits or more below the leading bit of the
    largest one, with an error of up to `2 u` of it for each term, and then the sum. Eight products and
    a sum are nine terms. With the sum's own error that is `2.5 u` for each product.
    """
    terms = length if dtype_of(dtype).name == "float32" else 3 * length
    return terms / (2**24 - terms) if terms < 2**24 else math.inf


def tiles(dtype: object) -> tuple[int, ...]:
    """The tiles that products of a type can have. Only tensor cores gain from the largest one."""
    return TILES[1:] if cpp_of(dtype)[0].name == "float32" else TILES


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
    (element, kind), known = cpp_of(dtype), tiles(dtype)
    (length,) = (size for each, size in sizes.items() if each not in result)
    side = _tile(rows, columns, length, known) if tile is None else tile
    if side not in known or not isinstance(side, int):
        raise InputError(f"tile {side!r} is none of {', '.join(map(str, known))}")
    blocks = _blocks(rows, columns, side)
    if blocks > BLOCKS:
        high, wide = result
        raise InputError(f"{high} {rows} by {wide} {columns} is a result of more than {BLOCKS} tiles")
    shared = _SIMT if kind == "float" else _MMA[side]
    entry = f"{name}<{kind}, {side}>"
    why = slower(sizes["n"], element) or slower(sizes["k"], element)
    return Op(name, tuple(sizes.items()), _SOURCE, entry, (blocks,), (_BLOCK,), shared, slower=why)


def _tile(rows: int, columns: int, length: int, known: tuple[int, ...]) -> int:
    """The largest tile that is not mostly beyond the result's edges and leaves no processor idle.

    A processor holds one block of the largest tile, so nothing hides how a block begins and ends. That
    costs more than it gains where sums are short.
    """
    for side in known[:-1]:
        if side == TILES[0] and length < _LONG:
            continue
        if 2 * min(rows, columns) > side and _blocks(rows, columns, side) >= _BUSY:
            return side
    return known[-1]


def _blocks(rows: int, columns: int, side: int) -> int:
    return -(-rows // min(side, _HIGHEST)) * -(-columns // side)
