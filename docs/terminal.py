"""Draws the output of a command as the picture of a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from html import unescape
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

__all__ = ["WIDTH", "draw", "lines"]

WIDTH = 118
_FONTS = re.compile(r"\s*@font-face \{.*?\}\n", re.S)
_TEXT = "{http://www.w3.org/2000/svg}text"


def draw(output: str, title: str, styles: Mapping[str, str]) -> str:
    """Return an SVG document. `styles` has patterns, and how their matches stand out.

    A line that is too long ends with an ellipsis. The picture loads no fonts from other servers.
    """
    text = Text(output.strip())
    for pattern, style in styles.items():
        text.highlight_regex(rf"(?m){pattern}", style)
    with open(os.devnull, "w") as nothing:
        console = Console(record=True, width=WIDTH, file=nothing)
        console.print(text, no_wrap=True, overflow="ellipsis")
        return _FONTS.sub("", console.export_svg(title=title, unique_id="terminal"))


def lines(picture: str) -> Iterator[str]:
    """Yield the lines of text in a picture, without those that are empty."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for each in ElementTree.fromstring(picture).iter(_TEXT):
        if "clip-path" in each.attrib:  # The title has none.
            at = (float(each.attrib["x"]), unescape(each.text or "").replace("\xa0", " "))
            rows.setdefault(float(each.attrib["y"]), []).append(at)
    for _, parts in sorted(rows.items()):
        line = "".join(text for _, text in sorted(parts)).rstrip()
        if line:
            yield line
