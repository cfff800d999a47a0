"""How the command line speaks: data on stdout, talk on stderr, sizes a person can read."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import click

from preheat.config import environ

__all__ = ["columns", "complain", "count", "data", "duration", "emit_json", "progress", "say", "size"]

_EVERY = 10.0  # seconds between two lines where no bar is shown


def data(text: str) -> None:
    """A line of output that may be piped."""
    click.echo(text)


def emit_json(value: Any) -> None:
    """The output as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def say(text: str) -> None:
    """A line for the person at the terminal."""
    click.echo(text, err=True)


def complain(text: str, hint: str | None = None) -> None:
    """An error and, after a blank line, what to do about it."""
    color = False if environ().get("NO_COLOR") else None  # None: only on a terminal
    click.echo(f"{click.style('error', fg='red', bold=True)}: {text}", err=True, color=color)
    if hint:
        click.echo(f"\n{click.style('hint', fg='cyan', bold=True)}: {hint}", err=True, color=color)


def size(number: float) -> str:
    """`1.2 MiB`."""
    if abs(number) < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        number /= 1024
        if abs(number) < 1024 or unit == "TiB":
            break
    return f"{number:.1f} {unit}"


def duration(seconds: float) -> str:
    """`35 ms`, `1.8 s`, `4 min`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def count(number: int, noun: str) -> str:
    """`1 entry`, `2 entries`, `3 files`."""
    plural = noun[:-1] + "ies" if noun.endswith(("ry", "ty")) else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def columns(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Rows with their cells lined up; those in `right` to the right."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column), default=0) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


class Progress(Protocol):
    """Something that can be told how far the work is."""

    def step(self, doing: str, advance: int = 1, work: float | None = None) -> None: ...


class _Log:
    """Progress where nobody watches a bar, such as the build of an image: a line now and then."""

    def __init__(self, title: str, total: int, every: float) -> None:
        self._title, self._total, self._every = title, total, every
        self._count, self._due = 0, time.monotonic() + every

    def step(self, doing: str, advance: int = 1, work: float | None = None) -> None:
        del work
        self._count += advance
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            say(f"{self._title}: {self._count:,} of {self._total:,}, {doing}")


@contextmanager
def progress(
    title: str, total: int, *, work: float | None = None, show: bool | None = None
) -> Iterator[Progress]:
    """A bar on stderr with count and time left; a line every ten seconds where there is no terminal.

    Where steps take unequal time, `work` is what all of them come to in any unit, and each says its
    part: the time left follows that and not the count.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield _Log(title, total, _EVERY if show is None else math.inf)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    one_line = Column(no_wrap=True, overflow="ellipsis")
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}/{task.fields[steps]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}", markup=False, table_column=one_line),
        console=Console(stderr=True, force_terminal=True),
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=work or total, doing="", count=0, steps=total)

        class _Shown:
            count = 0

            def step(self, doing: str, advance: int = 1, work: float | None = None) -> None:
                self.count += advance
                done = advance if work is None else work
                bar.update(task, advance=done, doing=doing, count=self.count)

        yield _Shown()
