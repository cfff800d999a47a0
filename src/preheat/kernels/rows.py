"""How kernels spread rows over threads; `common.cuh` is their side of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from preheat.dtypes import DType, dtype_of
from preheat.kernels.op import Op, cpp_of, dimension

__all__ = [
    "PROCESSORS",
    "WIDEST",
    "Spread",
    "chunk_of",
    "once",
    "row_op",
    "sizes",
    "slower",
    "spread",
    "twice",
]

PROCESSORS = 132  # of a large GPU: all of them shall have rows
WIDEST = 2**30  # elements of a row: kernels count them in ints, and a little beyond the end

_ODD = "rows are not a whole number of 16 bytes, so that most of them do not begin at a multiple of 16"
_TWICE = "shared memory has no room for rows this wide, so that the rest of them is read twice"
_BLOCK = 128  # threads of a block that several rows share


class Spread(NamedTuple):
    """A row in the registers of at most `lanes` threads, each with its `elements`.

    They come in chunks of 16 bytes or, with `singles`, one by one.
    """

    lanes: int
    elements: int
    singles: bool = False

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return _BLOCK // self.lanes if self.lanes <= 32 else 1

    def threads(self, width: int, dtype: DType) -> int:
        """Threads of a block: whole warps. A row that is alone has no more than have a part of it."""
        if self.lanes <= 32:
            return _BLOCK
        return max(2, -(-width // (32 * self.chunks(dtype) * self.chunk(dtype)))) * 32

    def chunk(self, dtype: DType) -> int:
        """Elements of a chunk."""
        return 1 if self.singles else chunk_of(dtype)

    def chunks(self, dtype: DType) -> int:
        """Chunks of a thread: no fewer registers hold them once they are floats, whatever the type."""
        return -(-self.elements // self.chunk(dtype))

    def entry(self, name: str, dtype: DType, cpp: str) -> str:
        """The name expression of the kernel `name` for such rows."""
        return f"{name}<{cpp}, {self.lanes}, {self.chunks(dtype)}, {str(self.singles).lower()}>"

    def holds(self, dtype: DType) -> int:
        """Elements of the widest row that fits."""
        return self.lanes * self.chunks(dtype) * self.chunk(dtype)


# For rows that are no whole number of chunks.
_SINGLES = (
    Spread(1, 4, True), Spread(4, 2, True), Spread(16, 2, True), Spread(32, 4, True),
    Spread(32, 8, True), Spread(32, 16, True),
)  # fmt: skip
_ONE_BY_ONE = Spread(1024, 8, True)  # the same for wider rows of floats and, if they are few, of halves
_FEW = 64  # rows
_LARGE = Spread(1024, 32)  # not for few rows of floats: a cluster is quicker
# Spreads, narrow ones first. A thread has more halves than floats, since a register holds two of them.
_FLOATS = (
    Spread(8, 4), Spread(32, 4), Spread(32, 8), Spread(32, 16), Spread(32, 32), Spread(512, 16),
    *_SINGLES, _ONE_BY_ONE,
)  # fmt: skip
_HALVES = (
    Spread(8, 8), Spread(16, 8), Spread(32, 8), Spread(32, 16), Spread(32, 32), Spread(512, 32), _LARGE,
    *_SINGLES,
)  # fmt: skip
# More of them, for narrow rows on which there is little to do besides.
_NARROW = Spread(8, 2, True), Spread(32, 2, True)
_NARROW_FLOATS = Spread(4, 4), Spread(16, 4), *_NARROW
_NARROW_HALVES = Spread(4, 8), *_NARROW


def once(dtype: object) -> tuple[Spread, ...]:
    """Spreads for one operand."""
    if dtype_of(dtype).size == 2:
        return _in_order(*_HALVES, *_NARROW_HALVES)
    return _in_order(*_FLOATS, *_NARROW_FLOATS, Spread(512, 32), _LARGE)


def twice(dtype: object) -> tuple[Spread, ...]:
    """Spreads for two operands."""
    return _HALVES if dtype_of(dtype).size == 2 else _in_order(*_FLOATS, Spread(1024, 16))


def _in_order(*spreads: Spread) -> tuple[Spread, ...]:
    return tuple(sorted(spreads, key=lambda each: each.lanes * each.elements))


def chunk_of(dtype: DType) -> int:
    """Elements in 16 bytes, which a thread reads or writes at a time."""
    return 16 // dtype.size


def sizes(rows: int, width: int) -> tuple[int, int]:
    """Rows and their width as kernels can take them; `InputError` names the one that they cannot."""
    return dimension("rows", rows), dimension("width", width, WIDEST)


def row_op(
    source: Path,
    name: str,
    rows: int,
    width: int,
    dtype: object,
    spreads: Iterable[Spread],
    *,
    operands: int = 1,
) -> Op:
    """A launch with a row for every group of threads.

    It is of `name`, or of `name_wide` where no spread holds the row: then the shared memory of a
    cluster holds so many `operands`.
    """
    (rows, width), (element, cpp) = sizes(rows, width), cpp_of(dtype)
    dims = (("rows", rows), ("width", width))
    at, odd = spread(rows, width, element, spreads), slower(width, element)
    if at is None:
        op = Op(name, dims, source, f"{name}_wide<{cpp}>", (rows,), (), slower=odd)
        return _wide(op, element, operands)
    grid, block = (-(-rows // at.rows),), (at.threads(width, element),)
    return Op(name, dims, source, at.entry(name, element, cpp), grid, block, slower=odd)


def slower(width: int, dtype: DType) -> str:
    """Why rows of `width` elements take longer than others, if they do."""
    return "" if width % chunk_of(dtype) == 0 else _ODD


_WIDE = 512  # threads of a block that works on a wide row, at most
_SHARE = 108 << 10  # bytes of shared memory, of which a large GPU's processor has two
_SEGMENT = 16 << 10  # bytes of a row that are worth a block
_CLUSTER = 8  # blocks that a cluster can have on every chip that has clusters
_LINE = 64  # elements; as in common.cuh


def _wide(op: Op, element: DType, operands: int) -> Op:
    """A launch in which a cluster of blocks has a row, and each a segment of it in shared memory."""
    (_, rows), (_, width) = op.dims
    nbytes, blocks = operands * width * element.size, 1
    while blocks < _CLUSTER and (
        nbytes > blocks * _SHARE or (rows * blocks < PROCESSORS and nbytes > blocks * _SEGMENT)
    ):
        blocks *= 2
    pieces = -(-width // (blocks * _LINE)) * _LINE // chunk_of(element) + 1
    threads = min(_WIDE, -(-pieces // 32) * 32)
    shared = operands * pieces * 16
    grid, block = (rows * blocks,), (threads,)
    return op._replace(grid=grid, block=block, shared=shared, cluster=blocks, overflow=_TWICE)


def spread(rows: int, width: int, dtype: DType, spreads: Iterable[Spread]) -> Spread | None:
    """The first of `spreads`, narrow ones first, that holds a row of `width` elements.

    Rows that are no whole number of chunks are for singles, if there are some that hold them.
    """
    if rows <= _FEW:
        spreads = *(each for each in spreads if each != _LARGE or dtype.size == 2), _ONE_BY_ONE
    fits = [each for each in spreads if width <= each.holds(dtype)]
    odd = width % chunk_of(dtype) != 0
    return next((each for each in fits if each.singles == odd), next(iter(fits), None))
