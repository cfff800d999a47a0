"""Output of the command line: data on stdout, messages on stderr, readable sizes."""

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
from preheat.messages import count

__all__ = [
    "columns",
    "count",
    "duration",
    "print_error",
    "print_json",
    "print_message",
    "progress",
    "size",
]

_EVERY = 10.0  # seconds between two lines without a terminal


def print_json(value: Any) -> None:
    """Print a value to stdout as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_message(text: str) -> None:
    """Print a message to stderr."""
    click.echo(text, err=True)


def print_error(text: str, hint: str | None = None) -> None:
    """Print an error to stderr and, after a blank line, its hint."""
    color = False if environ().get("NO_COLOR") else None  # None: only on a terminal
    click.echo(f"{click.style('error', fg='red', bold=True)}: {text}", err=True, color=color)
    if hint:
        click.echo(f"\n{click.style('hint', fg='cyan', bold=True)}: {hint}", err=True, color=color)


def size(number: float) -> str:
    """Format a number of bytes: `1.2 MiB`."""
    if abs(number) < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        number /= 1024
        if abs(number) < 1024 or unit == "TiB":
            break
    return f"{number:.1f} {unit}"


def duration(seconds: float) -> str:
    """Format a duration: `35 ms`, `1.8 s`, `4 min`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def columns(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Yield rows with aligned cells. Columns in `right` are aligned to the right."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column), default=0) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


class Progress(Protocol):
    """Receives the progress of some work."""

    def step(self, doing: str, advance: int = 1, work: float | None = None) -> None: ...


class _LineProgress:
    """Progress without a terminal, such as in the build of an image: a line from time to time."""

    def __init__(self, title: str, total: int, every: float) -> None:
        self._title = title
        self._total = total
        self._every = every
        self._count = 0
        self._due = time.monotonic() + every

    def step(self, doing: str, advance: int = 1, work: float | None = None) -> None:
        del work
        self._count += advance
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            print_message(f"{self._title}: {self._count:,} of {self._total:,}, {doing}")


@contextmanager
def progress(
    title: str, total: int, *, work: float | None = None, show: bool | None = None
) -> Iterator[Progress]:
    """Show a progress bar on stderr, or a line every ten seconds where there is no terminal.

    Where steps take unequal time, `work` is the sum of their work in any unit, and each step reports
    its part. The remaining time then follows the work and not the count.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield _LineProgress(title, total, _EVERY if show is None else math.inf)
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

        class _BarProgress:
            count = 0

            def step(self, doing: str, advance: int = 1, work: float | None = None) -> None:
                self.count += advance
                done = advance if work is None else work
                bar.update(task, advance=done, doing=doing, count=self.count)

        yield _BarProgress()
