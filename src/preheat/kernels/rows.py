"""How kernels assign the elements of rows to threads. `common.cuh` is the device side of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from preheat.kernels.op import Op, cpp_of, dimension
from preheat.model.dtypes import DType, dtype_of

__all__ = [
    "MAX_WIDTH",
    "MULTIPROCESSORS",
    "RowLayout",
    "choose_layout",
    "chunk_size",
    "one_operand_layouts",
    "row_dimensions",
    "row_op",
    "slow_reason",
    "two_operand_layouts",
]

MULTIPROCESSORS = 132  # Of a large GPU. Launches of many rows have work for all of them.
MAX_WIDTH = 2**30  # Elements of a row: kernels count them in ints, up to a little beyond the end.

_ODD = "rows are not a whole number of 16 bytes, so that most of them do not begin at a multiple of 16"
_OVERFLOW = "rows do not fit into shared memory, so that the rest of them is read twice"
_BLOCK = 128  # Threads of a block that processes several rows.


class RowLayout(NamedTuple):
    """A row held in the registers of at most `lanes` threads, `elements` in each.

    A thread accesses its elements in chunks of 16 bytes, or one by one if `scalars`.
    """

    lanes: int
    elements: int
    scalars: bool = False

    @property
    def rows_per_block(self) -> int:
        """The number of rows that a block processes."""
        return _BLOCK // self.lanes if self.lanes <= 32 else 1

    def threads(self, width: int, dtype: DType) -> int:
        """The threads of a block. A block with one row has only the warps that have a part of it."""
        if self.lanes <= 32:
            return _BLOCK
        return max(2, -(-width // (32 * self.chunks(dtype) * self.chunk(dtype)))) * 32

    def chunk(self, dtype: DType) -> int:
        """The number of elements in a chunk."""
        return 1 if self.scalars else chunk_size(dtype)

    def chunks(self, dtype: DType) -> int:
        """The number of chunks of a thread. In registers, elements are floats whatever their type."""
        return -(-self.elements // self.chunk(dtype))

    def entry(self, name: str, dtype: DType, cpp: str) -> str:
        """The name expression of the kernel `name` for this layout."""
        return f"{name}<{cpp}, {self.lanes}, {self.chunks(dtype)}, {str(self.scalars).lower()}>"

    def max_width(self, dtype: DType) -> int:
        """The number of elements of the widest row that fits."""
        return self.lanes * self.chunks(dtype) * self.chunk(dtype)


# For rows that are not a whole number of chunks.
_SCALARS = (
    RowLayout(1, 4, True), RowLayout(4, 2, True), RowLayout(16, 2, True), RowLayout(32, 4, True),
    RowLayout(32, 8, True), RowLayout(32, 16, True),
)  # fmt: skip
# For wider such rows: always for floats, for 16-bit types if the rows are few.
_WIDE_SCALARS = RowLayout(1024, 8, True)
_FEW_ROWS = 64
_LARGE = RowLayout(1024, 32)  # Not for few rows of floats: there a cluster is faster.
# Narrow layouts first. A thread holds more 16-bit elements than floats, because a register holds two.
_FLOATS = (
    RowLayout(8, 4), RowLayout(32, 4), RowLayout(32, 8), RowLayout(32, 16), RowLayout(32, 32),
    RowLayout(512, 16), *_SCALARS, _WIDE_SCALARS,
)  # fmt: skip
_16_BIT = (
    RowLayout(8, 8), RowLayout(16, 8), RowLayout(32, 8), RowLayout(32, 16), RowLayout(32, 32),
    RowLayout(512, 32), _LARGE, *_SCALARS,
)  # fmt: skip
# Additional layouts for narrow rows of kernels with little arithmetic.
_NARROW = RowLayout(8, 2, True), RowLayout(32, 2, True)
_NARROW_FLOATS = RowLayout(4, 4), RowLayout(16, 4), *_NARROW
_NARROW_16_BIT = RowLayout(4, 8), *_NARROW


def one_operand_layouts(dtype: object) -> tuple[RowLayout, ...]:
    """The layouts of kernels that hold one operand in registers, narrow ones first."""
    if dtype_of(dtype).size == 2:
        return _in_order(*_16_BIT, *_NARROW_16_BIT)
    return _in_order(*_FLOATS, *_NARROW_FLOATS, RowLayout(512, 32), _LARGE)


def two_operand_layouts(dtype: object) -> tuple[RowLayout, ...]:
    """The layouts of kernels that hold two operands in registers, narrow ones first."""
    return _16_BIT if dtype_of(dtype).size == 2 else _in_order(*_FLOATS, RowLayout(1024, 16))


def _in_order(*layouts: RowLayout) -> tuple[RowLayout, ...]:
    return tuple(sorted(layouts, key=lambda each: each.lanes * each.elements))


def chunk_size(dtype: DType) -> int:
    """The number of elements in a chunk of 16 bytes, which a thread loads or stores at a time."""
    return 16 // dtype.size


def row_dimensions(rows: int, width: int) -> tuple[int, int]:
    """Return `rows` and `width` as ints, or raise an `InputError` that names the wrong one."""
    return dimension("rows", rows), dimension("width", width, MAX_WIDTH)


def row_op(
    source: Path,
    name: str,
    rows: int,
    width: int,
    dtype: object,
    layouts: Iterable[RowLayout],
    *,
    operands: int = 1,
) -> Op:
    """Return a launch of the kernel `name` in which a group of threads processes each row.

    Where no layout fits, it is a launch of `name_wide`, which holds `operands` rows in the shared
    memory of a cluster.
    """
    rows, width = row_dimensions(rows, width)
    element, cpp = cpp_of(dtype)
    dims = (("rows", rows), ("width", width))
    layout = choose_layout(rows, width, element, layouts)
    reason = slow_reason(width, element)
    if layout is None:
        op = Op(name, dims, source, f"{name}_wide<{cpp}>", (rows,), (), slow_reason=reason)
        return _wide(op, element, operands)
    grid = (-(-rows // layout.rows_per_block),)
    block = (layout.threads(width, element),)
    return Op(name, dims, source, layout.entry(name, element, cpp), grid, block, slow_reason=reason)


def slow_reason(width: int, dtype: DType) -> str:
    """Return why rows of `width` elements take longer than others, or an empty string."""
    return "" if width % chunk_size(dtype) == 0 else _ODD


_WIDE_THREADS = 512  # The most threads of a block that processes a wide row.
_SHARED = 108 << 10  # Bytes of shared memory of a block, so that a large GPU's SM holds two blocks.
_SEGMENT = 16 << 10  # Bytes of a row that are worth a separate block.
_CLUSTER = 8  # The blocks of a cluster that every device with clusters supports.
_LINE = 64  # Elements, as in common.cuh.


def _wide(op: Op, element: DType, operands: int) -> Op:
    """Return `op` with a cluster for each row, and a segment in the shared memory of each block."""
    (_, rows), (_, width) = op.dims
    nbytes = operands * width * element.size
    blocks = 1
    while blocks < _CLUSTER and (
        nbytes > blocks * _SHARED or (rows * blocks < MULTIPROCESSORS and nbytes > blocks * _SEGMENT)
    ):
        blocks *= 2
    pieces = -(-width // (blocks * _LINE)) * _LINE // chunk_size(element) + 1
    return op._replace(
        grid=(rows * blocks,),
        block=(min(_WIDE_THREADS, -(-pieces // 32) * 32),),
        shared=operands * pieces * 16,
        cluster=blocks,
        overflow_reason=_OVERFLOW,
    )


def choose_layout(
    rows: int, width: int, dtype: DType, layouts: Iterable[RowLayout]
) -> RowLayout | None:
    """Return the first of `layouts`, narrow ones first, that fits rows of `width` elements.

    Rows that are not a whole number of chunks use a layout of scalars if one fits.
    """
    if rows <= _FEW_ROWS:
        layouts = *(each for each in layouts if each != _LARGE or dtype.size == 2), _WIDE_SCALARS
    fitting = [each for each in layouts if width <= each.max_width(dtype)]
    odd = width % chunk_size(dtype) != 0
    return next((each for each in fitting if each.scalars == odd), next(iter(fitting), None))
