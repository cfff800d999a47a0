"""How kernels spread rows over threads; `common.cuh` is their side of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from preheat.dtypes import DType, dtype_of
from preheat.kernels.op import Op, cpp_of, dimension

__all__ = [
    "FLOATS",
    "TWICE",
    "WIDEST",
    "Spread",
    "chunk_of",
    "once",
    "row_op",
    "sizes",
    "spread",
]

TWICE = "no registers hold rows this wide: what shared memory cannot hold of them is read twice"
WIDEST = 2**30  # elements of a row: kernels count them in ints, and a little beyond the end

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
        """Threads of a block: whole warps and, of a row that is alone, no more than have a part of it."""
        if self.lanes <= 32:
            return _BLOCK
        return max(2, -(-width // (32 * self.chunks(dtype) * self.chunk(dtype)))) * 32

    def chunk(self, dtype: DType) -> int:
        """Elements of a chunk."""
        return 1 if self.singles else chunk_of(dtype)

    def chunks(self, dtype: DType) -> int:
        """Chunks of a thread: no fewer registers hold them once they are floats, whatever the type."""
        return -(-self.elements // self.chunk(dtype))

    def holds(self, width: int, dtype: DType) -> bool:
        """Whether a row fits; rows that are no whole chunks are for singles where those are good."""
        if not self.singles and width % chunk_of(dtype) and (dtype.size == 4 or width <= _SINGLES):
            return False
        return width <= self.lanes * self.chunks(dtype) * self.chunk(dtype)


_SINGLES = 512  # the widest row of halves that is better read one by one
_NARROW = (
    Spread(1, 4, True), Spread(8, 1, True), Spread(16, 1, True), Spread(32, 1, True),
    Spread(32, 2, True), Spread(32, 4, True), Spread(32, 8, True), Spread(32, 16, True),
)  # fmt: skip
#: Spreads for floats, narrow ones first.
FLOATS = (
    Spread(8, 4), Spread(32, 4), Spread(32, 8), Spread(32, 16), Spread(32, 32), Spread(512, 16),
    Spread(512, 32), *_NARROW, Spread(1024, 8, True),
)  # fmt: skip
# The same for halves: a thread that has more of them spends less on what threads put together.
_HALVES = (
    Spread(8, 8), Spread(32, 8), Spread(32, 16), Spread(32, 32), Spread(512, 32), *_NARROW
)  # fmt: skip


def once(dtype: object) -> tuple[Spread, ...]:
    """Spreads for one operand that is read once."""
    return FLOATS if dtype_of(dtype).size == 4 else _HALVES


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

    It is of `name`, or of `name_wide` where no spread holds the row: then shared memory holds what it
    can of so many `operands`.
    """
    (rows, width), (element, cpp) = sizes(rows, width), cpp_of(dtype)
    dims = (("rows", rows), ("width", width))
    at = spread(width, element, spreads)
    if at is None:
        singles = element.size == 4 and width % chunk_of(element) != 0
        chunks, chunk = (8, 1) if singles else (2, chunk_of(element))
        # Two blocks share a processor where shared memory has room for both rows.
        most = 512 if operands * width * element.size <= _ROOM // 2 else 1024
        threads, held = _steps(width, chunk * chunks, most)
        entry = f"{name}_wide<{cpp}, {most}, {chunks}, {str(singles).lower()}>"
        shared = operands * element.size * held
        return Op(name, dims, source, entry, (rows,), (threads,), shared, slower=TWICE)
    entry = f"{name}<{cpp}, {at.lanes}, {at.chunks(element)}, {str(at.singles).lower()}>"
    return Op(name, dims, source, entry, (-(-rows // at.rows),), (at.threads(width, element),))


_ROOM = 220 << 10  # bytes of shared memory of a large GPU's processor


def _steps(width: int, each: int, most: int) -> tuple[int, int]:
    """Threads of a block that goes over a row, `each` at a time, and elements of all steps."""
    steps = -(-width // (each * most))
    warps = -(-width // (each * 32 * steps))
    return 32 * warps, each * 32 * warps * steps


def spread(width: int, dtype: DType, spreads: Iterable[Spread]) -> Spread | None:
    """The first of `spreads`, narrow ones first, that holds a row of `width` elements."""
    return next((each for each in spreads if each.holds(width, dtype)), None)
