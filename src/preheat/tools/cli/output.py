"""Output of the command line: data on stdout, messages on stderr, readable sizes, and hints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from preheat.model.config import environ
from preheat.process.messages import count, printable

if TYPE_CHECKING:
    from preheat.ahead.manifest import Unrecorded

__all__ = [
    "attempt",
    "columns",
    "count",
    "duration",
    "hint_lines",
    "print_error",
    "print_json",
    "print_line",
    "print_message",
    "print_raw",
    "print_unrecorded",
    "size",
]


def print_json(value: Any) -> None:
    """Print a value to stdout as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_line(text: str = "") -> None:
    """Print a line of data to stdout."""
    click.echo(_safe(text))


def print_raw(data: str | bytes) -> None:
    """Print data for other programs to stdout as it is, without a line break after it."""
    click.echo(data, nl=False)


def print_message(text: str) -> None:
    """Print a message to stderr."""
    click.echo(_safe(text), err=True)


def print_error(text: str, hint: str | None = None) -> None:
    """Print an error to stderr and, after a blank line, its hint."""
    color = False if environ().get("NO_COLOR") else None  # None: only on a terminal
    click.echo(f"{click.style('error', fg='red', bold=True)}: {_safe(text)}", err=True, color=color)
    if hint:
        styled = click.style("hint", fg="cyan", bold=True)
        click.echo(f"\n{styled}: {_safe(hint)}", err=True, color=color)


def _safe(text: str) -> str:
    """Escape control characters, which may come from a file or a server, except in the layout."""
    return printable(text, keep="\n\t")


def attempt(show: Callable[..., None], *values: Any) -> bool:
    """Print by one of the functions above. Return False where that is not possible any more.

    Nobody may read the output, or the disk may be full. What follows on that stream is then dropped, so
    that the exit status does not tell of a failed write.
    """
    try:
        show(*values)
    except OSError:
        for stream in (sys.stdout, sys.stderr):
            _drop_if_broken(stream)
        return False
    return True


def _drop_if_broken(stream: Any) -> None:
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


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


#: The variables that name the directories where a library keeps what it has compiled.
_OWN_CACHES = {"torch": "TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR"}


def hint_lines(used: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield hints about libraries and the compilers that they use: one for each library."""
    compilers: dict[str, set[str]] = {}
    for library, compiler in used:
        compilers.setdefault(library, set()).add(compiler)
    for library, names in compilers.items():
        others = ", ".join(sorted(names - {library}))
        yield ""
        yield f"hint: preheat has no adapter for what {library} compiles{others and f' with {others}'}:"
        yield "  build it ahead of time, or keep the files for the next start"
        if library in _OWN_CACHES:
            yield f"  (variables that name their directories: {_OWN_CACHES[library]})"


def print_unrecorded(items: Sequence[Unrecorded]) -> None:
    """Print what was compiled during a recording and is not recorded, if there is anything."""
    for item in items:
        print_message(f"not recorded: {item}")
    for line in hint_lines((item.library, item.compiler) for item in items if item.compiler):
        print_message(line)
