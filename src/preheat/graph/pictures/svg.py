"""SVG text: elements, text that fits its place, and colours for light and dark pages.

Characters have a fixed width, and every text states its length, so a viewer with another font scales
the text instead of letting it overlap.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape, quoteattr

__all__ = [
    "ADVANCE",
    "SIZE",
    "Style",
    "columns",
    "document",
    "element",
    "fit",
    "number",
    "one_line",
    "text",
    "text_width",
    "tooltip",
]

#: The width of a character, as a share of the font size.
ADVANCE = 0.6
#: The usual size of the font.
SIZE = 12.0
_FONT = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace'
#: What XML 1.0 cannot contain, and what would break a line.
_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BREAKS = re.compile(r"[\t\n\r\x85\u2028\u2029]+")

#: Declarations for light and for dark pages, by the class of an element.
Style = Mapping[str, tuple[str, str]]


def _clean(value: str) -> str:
    return _FORBIDDEN.sub("\ufffd", value)


def number(value: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{round(value, 1):g}" if abs(value) < 100_000 else f"{value:.0f}"


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """Return an element. `content` is XML already; attributes are escaped, `class_` means `class`.

    Example:
        >>> element("rect", x=1.25, class_="box")
        '<rect x="1.2" class="box"/>'
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}={_attribute(value)}"
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def _attribute(value: object) -> str:
    return quoteattr(_clean(number(value) if isinstance(value, int | float) else str(value)))


def tooltip(lines: Iterable[str]) -> str:
    """Return the `title` element with these lines, which browsers show as a tooltip."""
    return element("title", escape(_clean("\n".join(lines))))


# Text


def one_line(value: str) -> str:
    """Return a text without line breaks, tabs and what XML cannot contain."""
    return _BREAKS.sub(" ", _clean(value))


def columns(value: str) -> int:
    """Return how many characters of fixed width a text takes."""
    return sum(_columns_of(character) for character in value)


def _columns_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(value: str, limit: int) -> str:
    """Return a text of one line with at most `limit` columns; the middle of a longer one is left out.

    Example:
        >>> fit("a_kernel_with_a_long_name", 11)
        'a_ker…_name'
    """
    line = one_line(value)
    if columns(line) <= limit:
        return line
    tail = _head(line[::-1], (limit - 1) // 2)[::-1]
    return f"{_head(line, limit - 1 - columns(tail))}…{tail}"


def _head(value: str, limit: int) -> str:
    """Return the longest beginning of `value` with at most `limit` columns."""
    taken = 0
    for at, character in enumerate(value):
        taken += _columns_of(character)
        if taken > limit:
            return value[:at]
    return value


def text_width(value: str, size: float) -> float:
    """Return the width of a text of one line in a font of `size`."""
    return columns(value) * ADVANCE * size


def text(value: str, x: float, y: float, size: float, **attributes: object) -> str:
    """Return a text of one line whose baseline begins at (x, y), or is anchored there."""
    if not value:
        return ""
    return element(
        "text",
        escape(_clean(value)),
        x=x,
        y=y,
        font_size=None if size == SIZE else size,
        textLength=text_width(value, size),
        lengthAdjust="spacingAndGlyphs",
        **attributes,
    )


# Documents


def document(title: str, width: float, height: float, style: Style, content: Iterable[str]) -> str:
    """Return a whole SVG document. The rules of `style` apply only in it.

    The picture has its own background, because a page may be dark although its reader's system
    is not.
    """
    page = element("rect", width=width, height=height, class_="page")
    body = "\n".join((tooltip([title]), _style(style), page, *content))
    return element(
        "svg",
        f"\n{body}\n",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        class_="preheat",
        role="img",
        style="max-width: 100%; height: auto",
    )


def _style(style: Style) -> str:
    """Return the style sheet.

    Its rules do not affect the rest of a page that has the picture inline.
    """
    light = [f".preheat .{name} {{ {rules} }}" for name, (rules, _) in style.items()]
    dark = [f".preheat .{name} {{ {rules} }}" for name, (_, rules) in style.items() if rules]
    rules = [f".preheat text {{ font: {SIZE:g}px {_FONT}; white-space: pre }}", *light]
    scheme = ["@media (prefers-color-scheme: dark) {", *dark, "}"]
    return element("style", escape("\n" + "\n".join((*rules, *scheme)) + "\n"))
