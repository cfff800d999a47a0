"""Compares the figures of a page with the results of benchmarks.

A comment below a paragraph, list or table names the source of each of its figures:

    A launch takes 4.0 µs, and 5.0 µs with cuda.core.

    <!-- bench_launch: Host cost of one launch > a launch
    4.0 µs = preheat, kernel[grid, block](…)
    5.0 µs = cuda.core, scalars made at each call
    -->

The first line has the name of a results file, the beginning of the title of one of its tables, and a
column. Each of the other lines has a figure as the page prints it, and the row where it was measured;
a row with the same name as another one is named by its first two cells. Columns may also follow the
row. If a table has several columns of one name, name a column to its left as well: `torch > rate`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RESULTS", "Passage", "Quantity", "Source", "agrees", "passages", "quantities", "tables"]

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

_DECIMAL = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
#: What a unit measures, and its size.
_UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), ("time", 1e-9)),
    **dict.fromkeys(("µs", "microsecond", "microseconds"), ("time", 1e-6)),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), ("time", 1e-3)),
    **dict.fromkeys(("s", "second", "seconds"), ("time", 1.0)),
    **dict.fromkeys(("minute", "minutes"), ("time", 60.0)),
    **dict.fromkeys(("hour", "hours"), ("time", 3600.0)),
    **{f"{prefix}B/s": ("bandwidth", size) for prefix, size in (_DECIMAL | _BINARY).items()},
    **{f"{prefix}FLOP/s": ("rate", size) for prefix, size in _DECIMAL.items()},
    **{f"{prefix}B": ("size", size) for prefix, size in _DECIMAL.items()},
    "%": ("ratio", 0.01),
    **dict.fromkeys(("x", "times"), ("ratio", 1.0)),
    "compiles": ("count", 1.0),
}
_WORDS = {
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
    "twenty": "20",
    "thirty": "30",
    "fifty": "50",
}
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_UNIT = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_BEFORE, _AFTER = r"(?<![\w.,-])", r"(?![\w³])"
# `16 x 16` is a shape. Several numbers can share a unit: `104 / 103 %`, `288 to 345 µs`.
_SHOWN = re.compile(
    rf"{_BEFORE}((?:{_NUMBER})(?:(?: / |,? and |, | or | to )(?:{_NUMBER}))*)"
    rf"[ -]?({_UNIT}){_AFTER}(?! \d)"
)
_TIME = r"(?:milli|micro|nano)seconds?"
_NAMED = re.compile(rf"\b({'|'.join(_WORDS)}) ({_TIME}|seconds?|minutes?|hours?|times)\b", re.I)
_ABOUT = re.compile(
    rf"\b(a {_TIME}|(?:hundred|few|several|some|half a|tens of) (?:{_TIME}|seconds?|minutes?))\b", re.I
)
_MEASURED = re.compile(rf"([+-]?(?:{_NUMBER}))(?: ?({_UNIT}){_AFTER})?")
_COMMENT = re.compile(r"^ *<!-- (bench_\w+): (.*?)\n(.*?)-->$", re.M | re.S)
_PASSAGE = re.compile(r"(?:^.*\S.*\n?)+", re.M)
_HIDDEN = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->|`[^`\n]+`|\]\([^)\s]+\)", re.M | re.S)


class Quantity(NamedTuple):
    """A number with a unit, as a page prints it."""

    number: str
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}".strip()


class Source(NamedTuple):
    """Where a figure was measured."""

    line: int
    figure: Quantity
    results: str
    title: str
    row: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        path = " > ".join((self.title, self.row, *self.columns))
        return f"line {self.line}: {self.figure} = {self.results}: {path}"

    def cell(self) -> Quantity:
        """Return what was measured: the first number of a cell, or the middle one of several runs."""
        table = _table(self.results, self.title)
        rows = [row for row in table["rows"] if self.row in (row[0], f"{row[0]}, {row[1]}")]
        assert len(rows) == 1, f"{self}: {len(rows)} rows have this name"
        at = 0  # A column is looked for to the right of the one that was named before it.
        for column in self.columns:
            assert column in table["head"][at:], f"{self}: no column {column!r}"
            at = table["head"].index(column, at)
        return _measured(str(rows[0][at]), table["head"][at])


@dataclass(frozen=True)
class Passage:
    """A paragraph, list or table of a page, and the sources of its figures."""

    page: Path
    line: int
    text: str
    sources: tuple[Source, ...]


@cache
def tables(results: str) -> dict[str, Any]:
    """Return the content of a results file."""
    content: dict[str, Any] = json.loads((RESULTS / f"{results}.json").read_text())
    return content


def _table(results: str, title: str) -> dict[str, Any]:
    found = {name: table for name, table in tables(results)["tables"].items() if name.startswith(title)}
    assert len(found) == 1, f"{results}: {len(found)} tables begin with {title!r}"
    (table,) = found.values()
    assert isinstance(table, dict)
    return table


def _measured(cell: str, head: str) -> Quantity:
    if re.fullmatch(r"[\d.]+(?: +[\d.]+)+", cell):
        runs = sorted(cell.split(), key=float)
        return Quantity(runs[len(runs) // 2], _unit_of(head))
    found = _MEASURED.search(cell)
    assert found is not None, f"no number in {cell!r}"
    return Quantity(found[1], found[2] or _unit_of(head))


def _unit_of(head: str) -> str:
    """Return the unit that the head of a column names, or ''."""
    words = re.findall(rf"{_BEFORE}({_UNIT}){_AFTER}", head)
    return str(words[-1]) if words else ""


def agrees(shown: Quantity, measured: Quantity) -> bool:
    """Return True if the measured number, rounded as the shown one, is the shown one."""
    kind, size = _UNITS.get(shown.unit, ("", 1.0))
    other, other_size = _UNITS.get(measured.unit, (kind, _UNITS["s"][1] if kind == "time" else 1.0))
    places = len(shown.number.partition(".")[2])
    value = float(measured.number.replace(",", "")) * other_size / size
    return kind == other and abs(value - float(shown.number.replace(",", ""))) <= 0.501 * 10**-places


def quantities(text: str) -> Iterator[Quantity]:
    """Yield the quantities of a passage that may have been measured.

    Sizes in powers of two are limits and operands, and need no source.
    """
    for numbers, unit in _SHOWN.findall(text):
        for number in re.findall(_NUMBER, numbers):
            yield Quantity(number, unit)
    for word, unit in _NAMED.findall(text):
        yield Quantity(_WORDS[word.lower()], unit)
    for words in _ABOUT.findall(text):
        yield Quantity(*words.lower().rsplit(" ", 1))
    yield from _in_columns(text)


def _in_columns(text: str) -> Iterator[Quantity]:
    """Yield the bare numbers of a table in columns whose head names a unit."""
    lines = [line.strip() for line in text.splitlines() if line.lstrip().startswith("|")]
    rows = [line.strip("|").split("|") for line in lines]
    for at, head in enumerate(rows[0] if rows else ()):
        unit = _unit_of(head)
        for row in rows[2:]:
            if unit and re.fullmatch(_NUMBER, row[at].strip()):
                yield Quantity(row[at].strip(), unit)


def passages(page: Path) -> Iterator[Passage]:
    """Yield the passages of a page, without code and links, in their order."""
    text = page.read_text()
    comments = list(_COMMENT.finditer(text))
    plain = _HIDDEN.sub(lambda hidden: re.sub(r"[^\n]", " ", hidden[0]), text)
    found = list(_PASSAGE.finditer(plain))
    ends = [*(passage.start() for passage in found[1:]), len(text)]
    for passage, end in zip(found, ends, strict=True):
        below = (comment for comment in comments if passage.start() <= comment.start() < end)
        sources = (source for comment in below for source in _sources(text, comment))
        yield Passage(page, _line(text, passage.start()), passage[0], tuple(sources))


def _sources(text: str, comment: re.Match[str]) -> Iterator[Source]:
    """Yield what the lines of a comment name."""
    results, place, lines = comment.groups()
    title, *columns = place.split(" > ")
    for line, content in enumerate(lines.strip().splitlines(), _line(text, comment.start()) + 1):
        shown, equal, path = content.strip().partition(" = ")
        assert equal, f"line {line}: not `figure = row`: {content}"
        figure = re.fullmatch(rf"({_NUMBER})(?: (.+))?", shown)
        assert figure is not None, f"line {line}: no figure: {shown}"
        row, *more = path.split(" > ")
        assert columns or more, f"line {line}: no column: {content}"
        quantity = Quantity(figure[1], figure[2] or "")
        yield Source(line, quantity, results, title, row, (*columns, *more))


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
