"""A layered layout: boxes in rows, edges that point down, and long graphs wrapped into columns.

1. The row of a box is the longest path that leads to it.
2. An edge over several rows gets a lane, which is a narrow place, in each row between.
3. The places of a row are ordered by the mean position of their neighbours (barycenter).
4. Rows are stacked; where the picture would become too long, the next row begins a new column.
5. Each place moves to the mean of its neighbours, as far as the order and the gaps permit.

An edge into the next column runs below its column, up between the two, and down from above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

__all__ = ["Box", "Layout", "Point", "arrange"]

Point = tuple[float, float]

_LANE = 14.0  # the width of a lane
_GAP_X = 26.0  # between boxes of one row
_GAP_Y = 30.0  # between rows
_TRACK = 8.0  # between edges that run beside each other from column to column
_GUTTER = 30.0  # between columns, beside the tracks
_FEWEST_ROWS = 12  # in a column, where there are several
_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, by its upper left corner and its size. `column` counts from the left."""

    x: float
    y: float
    width: float
    height: float
    column: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Places for boxes and edges, in the order in which these were given.

    An edge is a line through points, from the lower side of one box to the upper side of another.
    """

    boxes: tuple[Box, ...]
    edges: tuple[tuple[Point, ...], ...]
    width: float
    height: float


@dataclass(eq=False, slots=True)
class _Place:
    """A box or a lane in one row. A lane has no height of its own, and passes the whole row."""

    row: int
    width: float
    height: float
    before: list[_Place] = field(default_factory=list)
    after: list[_Place] = field(default_factory=list)
    rank: float = 0.0  # the position in its row
    x: float = 0.0  # of the centre
    y: float = 0.0  # of the upper side
    row_end: float = 0.0  # where the gap below the row begins
    column: int = 0


def arrange(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], max_width: float
) -> Layout:
    """Place boxes of these sizes so that no two overlap and no edge crosses a box.

    Args:
        sizes: Width and height of each box.
        edges: Pairs of positions in `sizes`. Each leads from a box to a later one.
        max_width: Columns are added up to this width. A row that is wider is not divided.

    Raises:
        ValueError: An edge does not lead to a later box.

    Example:
        >>> chain = arrange([(100, 40)] * 3, [(0, 1), (1, 2)], max_width=1000)
        >>> [box.y for box in chain.boxes]
        [0.0, 70.0, 140.0]
    """
    boxes = [_Place(row, *size) for row, size in zip(_rows(len(sizes), edges), sizes, strict=True)]
    chains = [_chain(boxes[source], boxes[target]) for source, target in edges]
    rows = _ordered_rows(boxes, chains)
    columns = _Columns(rows, max_width)
    columns.place()
    return Layout(
        boxes=tuple(Box(p.x - p.width / 2, p.y, p.width, p.height, p.column) for p in boxes),
        edges=tuple(map(columns.points, chains)),
        width=columns.width,
        height=columns.height,
    )


def _rows(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the row of each box: the length of the longest path that leads to it."""
    rows = [0] * count
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        if not source < target:
            raise ValueError(f"an edge leads from box {source} to box {target}, which is not later")
        rows[target] = max(rows[target], rows[source] + 1)
    return rows


def _chain(source: _Place, target: _Place) -> list[_Place]:
    """Return the places of an edge: its two boxes, and a lane in each row between."""
    lanes = [_Place(row, _LANE, 0.0) for row in range(source.row + 1, target.row)]
    chain = [source, *lanes, target]
    for upper, lower in pairwise(chain):
        upper.after.append(lower)
        lower.before.append(upper)
    return chain


def _ordered_rows(boxes: Sequence[_Place], chains: Iterable[Sequence[_Place]]) -> list[list[_Place]]:
    """Return the places of each row, from left to right."""
    rows: list[list[_Place]] = [[] for _ in range(1 + max((box.row for box in boxes), default=-1))]
    for place in (*boxes, *(lane for chain in chains for lane in chain[1:-1])):
        rows[place.row].append(place)
    for row in rows:
        _rank(row)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for row in rows if downwards else reversed(rows):
            row.sort(key=lambda place: _barycenter(place, downwards=downwards))
            _rank(row)
    return rows


def _rank(row: Sequence[_Place]) -> None:
    for at, place in enumerate(row):
        place.rank = (at + 0.5) / len(row)


def _barycenter(place: _Place, *, downwards: bool) -> float:
    neighbours = place.before if downwards else place.after
    return fmean(each.rank for each in neighbours) if neighbours else place.rank


# Columns and coordinates


def _distance(left: _Place, right: _Place) -> float:
    """Return how far the centres of neighbours in a row are apart at least."""
    return (left.width + right.width) / 2 + _GAP_X


def _row_width(row: Sequence[_Place]) -> float:
    return sum(place.width for place in row) + _GAP_X * (len(row) - 1)


class _Columns:
    """Rows in columns, and the coordinates that follow from that."""

    def __init__(self, rows: Sequence[list[_Place]], max_width: float) -> None:
        self._columns = _wrap(rows, max_width)
        # The edges from each column to the next one, from left to right.
        self._crossing = [
            [(place, after) for place in upper[-1] for after in place.after]
            for upper, _ in pairwise(self._columns)
        ]
        self._lefts: list[float] = []
        self.width = 0.0
        self.height = 0.0
        tracks = max(map(len, self._crossing), default=0)
        self._top = tracks * _TRACK + _GAP_Y / 2 if tracks else 0.0  # space for tracks above the rows

    def place(self) -> None:
        """Compute all coordinates and the size of the whole."""
        left = bottom = 0.0
        for number, rows in enumerate(self._columns):
            self._lefts.append(left)
            _align(rows, left)
            bottom = max(bottom, self._stack(rows, number))
            right = max(place.x + place.width / 2 for row in rows for place in row)
            left = right + _GUTTER + self._tracks(number) * _TRACK
            self.width = right
        self._bottom = bottom
        self.height = bottom + self._top

    def _tracks(self, number: int) -> int:
        return len(self._crossing[number]) if number < len(self._crossing) else 0

    def _stack(self, rows: Sequence[Sequence[_Place]], number: int) -> float:
        """Set the heights of the places in a column; return its lower end."""
        y = self._top
        for row in rows:
            height = max(place.height for place in row)
            for place in row:
                place.y = y
                place.row_end = y + height
                place.column = number
            y += height + _GAP_Y
        return y - _GAP_Y

    def points(self, chain: Sequence[_Place]) -> tuple[Point, ...]:
        """Return the points of an edge. It leaves the vertical only in the gaps between rows."""
        points: list[Point] = []
        for upper, lower in pairwise(chain):
            points += [(upper.x, upper.y + upper.height), (upper.x, upper.row_end)]
            if upper.column != lower.column:
                points += self._turns(upper, lower)
            points.append((lower.x, lower.y))
        return tuple(dict.fromkeys(points))

    def _turns(self, upper: _Place, lower: _Place) -> Iterator[Point]:
        """Yield the corners on the way to the next column. Tracks are nested, so that few cross."""
        crossing = self._crossing[upper.column]
        track = len(crossing) - crossing.index((upper, lower))  # The right one is the innermost.
        below = self._bottom + _GAP_Y / 2 - _TRACK + track * _TRACK
        above = self._top - _GAP_Y / 2 - (len(crossing) - track) * _TRACK
        between = self._lefts[lower.column] - _GUTTER / 2 - (len(crossing) - track) * _TRACK
        yield upper.x, below
        yield between, below
        yield between, above
        yield lower.x, above


def _wrap(rows: Sequence[list[_Place]], max_width: float) -> list[Sequence[list[_Place]]]:
    """Divide rows into as many columns of equal length as `max_width` permits."""
    widths = [_row_width(row) for row in rows]
    limit = min(len(rows) // _FEWEST_ROWS, int(max_width / min(widths, default=1)))
    for count in range(limit, 1, -1):
        length = -(-len(rows) // count)
        starts = range(0, len(rows), length)
        tracks = sum(len(each.after) for at in starts[1:] for each in rows[at - 1])
        between = _GUTTER * (len(starts) - 1) + _TRACK * tracks
        if sum(max(widths[at : at + length]) for at in starts) + between <= max_width:
            return [rows[at : at + length] for at in starts]
    return [rows] if rows else []


def _align(rows: Sequence[Sequence[_Place]], left: float) -> None:
    """Set the centres of the places in a column, whose left side is `left`."""
    inside = {id(place) for row in rows for place in row}
    for row in rows:
        _spread(row, [0.0] * len(row))
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for row in rows if downwards else reversed(rows):
            _spread(row, [_preferred_x(place, inside, downwards=downwards) for place in row])
    shift = left - min(place.x - place.width / 2 for row in rows for place in row)
    for row in rows:
        for place in row:
            place.x += shift


def _preferred_x(place: _Place, inside: set[int], *, downwards: bool) -> float:
    """Return the mean x of the neighbours of a place in the same column, or its own x."""
    neighbours = [each for each in (place.before if downwards else place.after) if id(each) in inside]
    return fmean(each.x for each in neighbours) if neighbours else place.x


def _spread(row: Sequence[_Place], preferred: Sequence[float]) -> None:
    """Place a row as close to `preferred` as possible, with the order and the gaps kept.

    This is the least-squares solution: places that would come too close form a group, which moves as
    one, and groups merge until none is too close to the next one.
    """
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + _distance(left, right))
    groups: list[tuple[float, int]] = []  # the mean x of a group, less the offsets, and its size
    for x, offset in zip(preferred, offsets, strict=True):
        mean, size = x - offset, 1
        while groups and groups[-1][0] >= mean:
            other, others = groups.pop()
            mean, size = (mean * size + other * others) / (size + others), size + others
        groups.append((mean, size))
    starts = [mean for mean, size in groups for _ in range(size)]
    for place, start, offset in zip(row, starts, offsets, strict=True):
        place.x = start + offset
