"""Pictures of graphs as text in the language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from preheat.graph.pictures import svg
from preheat.graph.pictures.picture import Change, Item, Link, Picture

__all__ = ["as_dot"]

_COLOUR = {Change.ADDED: "#1a7f37", Change.REMOVED: "#cf222e", Change.CHANGED: "#9a6700"}
_FOREIGN = "#8250df"


def as_dot(picture: Picture) -> str:
    """Return a picture as a Graphviz graph. Its nodes are called n0, n1 and so on."""
    return "\n".join(("digraph {", *(f"  {line}" for line in _statements(picture)), "}", ""))


def _statements(picture: Picture) -> Iterator[str]:
    yield f"graph [label={_quoted([picture.title])}, labelloc=t, fontname=monospace];"
    yield "node [shape=box, style=rounded, fontname=monospace, fontsize=11];"
    for at, item in enumerate(picture.items):
        yield f"n{at} [{', '.join(_attributes(item))}];"
    for link in picture.links:
        yield f"n{link.source} -> n{link.target}{_link_attributes(link)};"


def _attributes(item: Item) -> Iterator[str]:
    yield f"label={_quoted([f'{item.label} {item.title}', *item.rows])}"
    yield f"tooltip={_quoted(item.details)}"
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


def _quoted(lines: Iterable[str]) -> str:
    """Return lines, aligned to the left, as a string that Graphviz shows as it is.

    Graphviz interprets backslashes and, as in HTML, ampersands.
    """
    return '"' + "".join(f"{_escaped(line)}\\l" for line in lines) + '"'


def _escaped(line: str) -> str:
    return svg.one_line(line).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
