"""A progress bar on a terminal, or a line every few seconds without a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from preheat.process.locks import no_fork
from preheat.process.messages import printable

__all__ = ["DelayedProgress", "Progress", "progress"]

_EVERY = 10.0  # seconds between two lines without a terminal
_DELAY = 2.0  # seconds before a delayed bar appears


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
            message = f"{self._title}: {self._count:,} of {self._total:,}, {printable(doing)}"
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()


@contextmanager
def progress(
    title: str, total: int, *, work: float | None = None, show: bool | None = None
) -> Iterator[Progress]:
    """Show a progress bar on stderr, or a line every ten seconds if there is no terminal.

    If steps take unequal time, `work` is the sum of their work in any unit, and each step reports its
    part. The remaining time is then computed from the work instead of the count.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield _LineProgress(title, total, _EVERY if show is None else math.inf)
        return
    with no_fork:
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
                bar.update(task, advance=done, doing=printable(doing), count=self.count)

        yield _BarProgress()


class DelayedProgress:
    """A progress bar that appears on a terminal once the work has taken two seconds.

    Without a terminal, nothing is written. It is used in a `with` statement. `tick` must be called
    regularly, also while no step ends.
    """

    def __init__(self, title: str, total: int, *, work: float) -> None:
        self._title = title
        self._total = total
        self._work = work
        self._bar: Progress | None = None
        self._closing = ExitStack()
        self._due = (
            time.monotonic() + _DELAY if sys.stderr is not None and sys.stderr.isatty() else math.inf
        )
        self._doing = ""
        self._count = 0
        self._done = 0.0

    @property
    def can_appear(self) -> bool:
        """Whether there is a terminal, on which the bar may appear."""
        return self._due < math.inf

    def __enter__(self) -> DelayedProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def step(self, doing: str, advance: int, work: float) -> None:
        """Report what is being done, and how many steps and how much work has ended."""
        self._doing = doing
        self._count += advance
        self._done += work
        if self._bar is not None:
            self._bar.step(doing, advance, work)

    def tick(self) -> None:
        """Show the bar if it is time."""
        if self._bar is None and time.monotonic() >= self._due:
            bar = progress(self._title, self._total, work=self._work, show=True)
            self._bar = self._closing.enter_context(bar)
            self._bar.step(self._doing, self._count, self._done)
