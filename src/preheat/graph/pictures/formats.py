"""Pictures of graphs as SVG, and as text in the language of Graphviz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from preheat.graph.pictures import svg
from preheat.graph.pictures.layout import Box, Point, arrange
from preheat.graph.pictures.picture import Change, Item, Link, Picture

__all__ = ["as_dot", "as_svg"]

_CHARACTER = svg.ADVANCE * svg.SIZE  # the width of one
_LINE = 16.0
_PAD = 9.0
_MARGIN = 18.0
_TIP = 7.0  # of an arrow
_MAX_WIDTH = 1160.0  # of the layout, so that a page shows the picture at its size
_LEAST_WIDTH = 432.0  # so that the title of a small graph has room
_MIN_COLUMNS, _MAX_COLUMNS = 18, 32  # of characters in a box
_TITLE = 14.0  # the size of the title
_SWATCH = 20.0  # the space of a colour in the legend

#: By class: declarations for light pages, and for dark ones.
_STYLE: svg.Style = {
    "page": ("fill: #ffffff", "fill: #0d1117"),
    "text": ("fill: #1f2328", "fill: #e6edf3"),
    "name": ("fill: #1f2328; font-weight: bold", "fill: #e6edf3"),
    "quiet": ("fill: #59636e", "fill: #9da7b3"),
    "scalar": ("fill: #0550ae; font-weight: bold", "fill: #79c0ff"),
    "kernel": ("fill: #f6f8fa; stroke: #818b98", "fill: #161b22; stroke: #656c76"),
    "memory": ("fill: #eaf3ff; stroke: #4a8fd8", "fill: #13233a; stroke: #4a8fd8"),
    "foreign": (
        "fill: #f7f0ff; stroke: #8250df; stroke-dasharray: 5 3",
        "fill: #231b36; stroke: #a371f7",
    ),
    "added": (
        "fill: #e3f7e8; stroke: #1a7f37; stroke-width: 2",
        "fill: #10291a; stroke: #3fb950",
    ),
    "removed": (
        "fill: #ffebe9; stroke: #cf222e; stroke-width: 2; stroke-dasharray: 2 3",
        "fill: #33161a; stroke: #f85149",
    ),
    "changed": (
        "fill: #fff4d6; stroke: #9a6700; stroke-width: 2",
        "fill: #2e2410; stroke: #d29922",
    ),
    "edge": ("stroke: #818b98; fill: none", "stroke: #7d8590"),
    "edge-added": ("stroke: #1a7f37; stroke-width: 2; fill: none", "stroke: #3fb950"),
    "edge-removed": (
        "stroke: #cf222e; stroke-width: 2; stroke-dasharray: 2 3; fill: none",
        "stroke: #f85149",
    ),
    "tip": ("fill: #818b98", "fill: #7d8590"),
    "tip-added": ("fill: #1a7f37", "fill: #3fb950"),
    "tip-removed": ("fill: #cf222e", "fill: #f85149"),
}
_CLASS_OF_CHANGE = {Change.ADDED: "added", Change.REMOVED: "removed", Change.CHANGED: "changed"}
_MEANING = {"kernel": "kernel", "memory": "fill or copy", "foreign": "work of another library"}


def as_svg(picture: Picture) -> str:
    """Return a picture as an SVG document."""
    width = _box_width(picture.items)
    sizes = [(width, _box_height(item)) for item in picture.items]
    edges = [(link.source, link.target) for link in picture.links]
    layout = arrange(sizes, edges, _MAX_WIDTH)
    inner = max(layout.width, _LEAST_WIDTH)
    head, top = _head(picture, inner)
    left = _MARGIN + (inner - layout.width) / 2
    content = (*map(_edge, picture.links, layout.edges), *map(_box, picture.items, layout.boxes))
    body = svg.element("g", "\n".join(content), transform=f"translate({_at(left, top)})")
    height = top + layout.height + _MARGIN
    return svg.document(picture.title, inner + 2 * _MARGIN, height, _STYLE, [*head, body])


# Boxes


def _class(item: Item) -> str:
    if item.change is not None:
        return _CLASS_OF_CHANGE[item.change]
    if item.foreign:
        return "foreign"
    return "kernel" if item.kind == "kernel" else "memory"


def _box_width(items: Sequence[Item]) -> float:
    """Return the width of all boxes: what the longest text needs, within limits."""
    longest = _MIN_COLUMNS
    for item in items:
        first = svg.columns(item.title) + 2 + svg.columns(item.label)
        longest = max(longest, first, *map(svg.columns, item.rows))
    return min(longest, _MAX_COLUMNS) * _CHARACTER + 2 * _PAD


def _box_height(item: Item) -> float:
    return _LINE * (1 + len(item.rows)) + _PAD


def _box(item: Item, box: Box) -> str:
    """Return the element of an item at its place."""
    shape = svg.element(
        "rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=5, class_=_class(item)
    )
    return svg.element("g", svg.tooltip(item.details) + shape + "".join(_texts(item, box)))


def _texts(item: Item, box: Box) -> Iterator[str]:
    limit = round((box.width - 2 * _PAD) / _CHARACTER)
    left, y = box.x + _PAD, box.y + _LINE
    right = box.x + box.width - _PAD
    name = svg.fit(item.title, limit - svg.columns(item.label) - 2)
    yield svg.text(name, left, y, svg.SIZE, class_="name")
    yield svg.text(item.label, right, y, svg.SIZE, class_="quiet", text_anchor="end")
    for at, row in enumerate(item.rows, start=1):
        style = "scalar" if item.scalars and at == len(item.rows) else "quiet"
        yield svg.text(svg.fit(row, limit), left, y + at * _LINE, svg.SIZE, class_=style)


# Edges


def _edge(link: Link, points: Sequence[Point]) -> str:
    """Return the path of an edge, and the tip of its arrow."""
    x, y = points[-1]
    line = f"M{_at(*points[0])}{''.join(_pieces(points))}"
    tip = f"M{_at(x, y)}l{_at(-_TIP / 2, -_TIP)}h{svg.number(_TIP)}z"
    suffix = f"-{_CLASS_OF_CHANGE[link.change]}" if link.change is not None else ""
    return "".join(
        svg.element("path", d=d, class_=c + suffix) for d, c in ((line, "edge"), (tip, "tip"))
    )


def _pieces(points: Sequence[Point]) -> Iterator[str]:
    """Yield straight lines, and a curve wherever an edge leaves the vertical."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 == x1 or y0 == y1:
            yield f"L{_at(x1, y1)}"
        else:
            middle = (y0 + y1) / 2
            yield f"C{_at(x0, middle)} {_at(x1, middle)} {_at(x1, y1)}"


def _at(x: float, y: float) -> str:
    return f"{svg.number(x)},{svg.number(y)}"


# The head: title and legend


def _head(picture: Picture, width: float) -> tuple[list[str], float]:
    """Return title and legend for a picture of this width, and where the boxes begin."""
    title = svg.fit(picture.title, int(width / (svg.ADVANCE * _TITLE)))
    drawn = [svg.text(title, _MARGIN, _MARGIN + _TITLE, _TITLE, class_="name")]
    x, y = _MARGIN, _MARGIN + _TITLE + 1.75 * _LINE
    for style, words in _legend(picture):
        space = _SWATCH + svg.text_width(words, svg.SIZE)
        if x > _MARGIN and x + space > _MARGIN + width:
            x, y = _MARGIN, y + 1.25 * _LINE
        drawn.append(_swatch(style, x, y))
        drawn.append(svg.text(words, x + _SWATCH, y, svg.SIZE, class_="quiet"))
        x += space + 2 * _MARGIN
    return drawn, y + 1.5 * _LINE


def _legend(picture: Picture) -> Iterator[tuple[str, str]]:
    """Yield classes and their meaning: those that occur, and all changes if captures are compared."""
    kinds = {_class(item) for item in picture.items}
    yield from ((style, words) for style, words in _MEANING.items() if style in kinds)
    if any(item.scalars for item in picture.items):
        yield "scalar", "scalar that replay() sets"
    if picture.compared:
        changes = Counter(item.change for item in picture.items for _ in range(item.count))
        for change, style in _CLASS_OF_CHANGE.items():
            yield style, f"{change.value} {style}: {changes[change]}"


def _swatch(style: str, x: float, y: float) -> str:
    if style == "scalar":
        return svg.text("=…", x, y, svg.SIZE, class_=style)
    return svg.element("rect", x=x, y=y - 9, width=14, height=10, rx=2, class_=style)


_COLOUR = {Change.ADDED: "#1a7f37", Change.REMOVED: "#cf222e", Change.CHANGED: "#9a6700"}
_FOREIGN = "#8250df"


def as_dot(picture: Picture) -> str:
    """Return a picture as a Graphviz graph. Its nodes are called n0, n1 and so on."""
    return "\n".join(("digraph {", *(f"  {line}" for line in _statements(picture)), "}", ""))


def _statements(picture: Picture) -> Iterator[str]:
    yield f"graph [label={_quote([picture.title])}, labelloc=t, fontname=monospace];"
    yield "node [shape=box, style=rounded, fontname=monospace, fontsize=11];"
    for at, item in enumerate(picture.items):
        yield f"n{at} [{', '.join(_attributes(item))}];"
    for link in picture.links:
        yield f"n{link.source} -> n{link.target}{_link_attributes(link)};"


def _attributes(item: Item) -> Iterator[str]:
    yield f"label={_quote([f'{item.label} {item.title}', *item.rows])}"
    yield f"tooltip={_quote(item.details)}"
    if item.foreign:
        yield 'style="rounded,dashed"'
    if item.change is not None:
        yield f'color="{_COLOUR[item.change]}", penwidth=2'
    elif item.foreign:
        yield f'color="{_FOREIGN}"'


def _link_attributes(link: Link) -> str:
    if link.change is None:
        return ""
    style = ", style=dashed" if link.change is Change.REMOVED else ""
    return f' [color="{_COLOUR[link.change]}"{style}]'


def _quote(lines: Iterable[str]) -> str:
    """Return lines, aligned to the left, as a string that Graphviz shows as it is.

    Graphviz interprets backslashes and, as in HTML, ampersands.
    """
    return '"' + "".join(f"{_escape(line)}\\l" for line in lines) + '"'


def _escape(line: str) -> str:
    return svg.one_line(line).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
