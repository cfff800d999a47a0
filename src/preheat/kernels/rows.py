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
    "WIDE",
    "WIDEST",
    "Spread",
    "chunk_of",
    "once",
    "row_op",
    "sizes",
    "spread",
]

WIDE = 1024  # threads for a row that no spread holds
TWICE = "no registers hold rows this wide: they are read twice"
WIDEST = 2**30  # elements of a row: kernels count them in ints, and a little beyond the end

_BLOCK = 128  # threads of a block that several rows share


class Spread(NamedTuple):
    """A row in the registers of `lanes` threads, each with its `elements`, which come in chunks."""

    lanes: int
    elements: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return _BLOCK // self.lanes if self.lanes <= 32 else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.rows

    def chunks(self, dtype: DType) -> int:
        """Chunks of a thread: no fewer registers hold them once they are floats, whatever the type."""
        return -(-self.elements // chunk_of(dtype))


#: Spreads for floats, narrow ones first.
FLOATS = (
    Spread(8, 4), Spread(32, 4), Spread(32, 8), Spread(32, 16), Spread(32, 32), Spread(128, 16),
    Spread(256, 16), Spread(512, 16), Spread(512, 32),
)  # fmt: skip
# The same for halves: a thread that has more of them spends less on what threads put together.
_HALVES = (
    Spread(8, 8), Spread(32, 8), Spread(32, 16), Spread(32, 32), Spread(64, 32), Spread(128, 32),
    Spread(256, 32), Spread(512, 32),
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
    again: Spread | None = None,
) -> Op:
    """A launch with a row for every group of threads.

    It is of `name`, of `name_again` where the row takes the spread `again`, which holds one of two
    operands, or of `name_wide` where no spread holds it.
    """
    (rows, width), (element, cpp) = sizes(rows, width), cpp_of(dtype)
    at, dims = spread(width, element, spreads), (("rows", rows), ("width", width))
    if at is None:
        return Op(name, dims, source, f"{name}_wide<{cpp}>", (rows,), (WIDE,), slower=TWICE)
    kernel = f"{name}_again" if at == again else name
    entry = f"{kernel}<{cpp}, {at.lanes}, {at.chunks(element)}>"
    return Op(name, dims, source, entry, (-(-rows // at.rows),), (at.threads,))


def spread(width: int, dtype: DType, spreads: Iterable[Spread]) -> Spread | None:
    """The first of `spreads`, narrow ones first, that holds a row of `width` elements."""
    chunks = -(-width // chunk_of(dtype))
    return next((each for each in spreads if each.lanes * each.chunks(dtype) >= chunks), None)
