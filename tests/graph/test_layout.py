"""The layout of pictures: nothing overlaps, edges lead on, and everything is inside."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.graph.pictures.layout import Box, Layout, Point, arrange

Edge = tuple[int, int]
TINY = 1e-6


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[float, float]], list[Edge]]:
    """Return boxes of several heights, and edges that lead to later ones."""
    count = draw(st.integers(1, 32))
    deep = draw(st.booleans())  # All boxes in a chain, which is long enough for columns.
    heights = draw(st.lists(st.sampled_from([25.0, 41.0, 73.0]), min_size=count, max_size=count))
    edges = set()
    for target in range(1, count):
        near = st.integers(max(0, target - 4), target - 1)
        far = st.integers(0, target - 1)
        edges |= {(source, target) for source in draw(st.lists(near | far, max_size=2))}
        edges |= {(target - 1, target)} if deep else set()
    return [(120.0, height) for height in heights], sorted(edges)


def chain(count: int) -> tuple[list[tuple[float, float]], list[Edge]]:
    return [(120.0, 41.0)] * count, list(pairwise(range(count)))


def overlap(one: Box, other: Box) -> bool:
    beside = one.x + one.width <= other.x + TINY or other.x + other.width <= one.x + TINY
    above = one.y + one.height <= other.y + TINY or other.y + other.height <= one.y + TINY
    return not (beside or above)


def crosses(start: Point, end: Point, box: Box) -> bool:
    """Return True if a line enters the inside of a box. Slanted lines count as their bounding box."""
    low, high = sorted((start[1], end[1]))
    left, right = sorted((start[0], end[0]))
    apart = right <= box.x + TINY or left >= box.x + box.width - TINY
    return not apart and low < box.y + box.height - TINY and high > box.y + TINY


def check(layout: Layout, sizes: list[tuple[float, float]], edges: list[Edge]) -> None:
    assert [(box.width, box.height) for box in layout.boxes] == sizes
    for box in layout.boxes:
        assert box.x >= -TINY
        assert box.y >= -TINY
        assert box.x + box.width <= layout.width + TINY
        assert box.y + box.height <= layout.height + TINY
    assert not [pair for pair in combinations(layout.boxes, 2) if overlap(*pair)]
    assert len(layout.edges) == len(edges)
    for (source, target), points in zip(edges, layout.edges, strict=True):
        check_edge(layout, layout.boxes[source], layout.boxes[target], points)


def check_edge(layout: Layout, source: Box, target: Box, points: tuple[Point, ...]) -> None:
    assert points[0] == pytest.approx((source.x + source.width / 2, source.y + source.height))
    assert points[-1] == pytest.approx((target.x + target.width / 2, target.y))
    if source.column == target.column:
        assert source.y + source.height < target.y
        assert all(lower[1] > upper[1] for upper, lower in pairwise(points))
    else:
        assert source.column < target.column
        assert source.x + source.width < target.x
    for x, y in points:
        assert -TINY <= x <= layout.width + TINY
        assert -TINY <= y <= layout.height + TINY
    for start, end in pairwise(points):
        assert not [box for box in layout.boxes if crosses(start, end, box)]


@given(graphs(), st.sampled_from([200.0, 700.0, 5000.0]))
@settings(max_examples=40, deadline=None)
def test_boxes_never_overlap_and_edges_lead_on_around_them(
    graph: tuple[list[tuple[float, float]], list[Edge]], max_width: float
) -> None:
    check(arrange(*graph, max_width), *graph)


@pytest.mark.parametrize("count", [1, 23, 24, 100, 320])
def test_a_long_chain_is_wrapped_into_columns_within_the_width(count: int) -> None:
    sizes, edges = chain(count)
    layout = arrange(sizes, edges, 1000)
    check(layout, sizes, edges)
    columns = max(box.column for box in layout.boxes) + 1
    assert columns == min(6, max(1, count // 12))  # Six columns of 120 and the tracks between fit.
    assert layout.width <= 1000
    assert len({box.x for box in layout.boxes}) == columns  # A chain is straight.


def test_edges_between_columns_run_beside_each_other() -> None:
    """A long edge, and the chain, cross into each column on tracks of their own."""
    sizes, edges = chain(48)
    layout = arrange(sizes, [*edges, (0, 47), (1, 46)], 1000)
    check(layout, sizes, [*edges, (0, 47), (1, 46)])
    lines = [(x0, y0, y1) for edge in layout.edges for (x0, y0), (x1, y1) in pairwise(edge) if x0 == x1]
    up = [x for x, y0, y1 in lines if y1 < y0]
    assert len(up) == len(set(up)) == 9  # three edges into each of three columns


def test_a_fork_is_centred_above_its_branches() -> None:
    layout = arrange([(100, 40)] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)], 1000)
    top, left, right, bottom = layout.boxes
    assert top.x == bottom.x == (left.x + right.x) / 2
    assert left.y == right.y


def test_an_edge_to_an_earlier_box_is_refused() -> None:
    for edge in ((1, 0), (1, 1)):
        with pytest.raises(ValueError, match="which is not later"):
            arrange([(10, 10)] * 2, [edge], 100)


def test_nothing_is_laid_out_as_nothing() -> None:
    assert arrange([], [], 100) == Layout((), (), 0, 0)
