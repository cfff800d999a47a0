"""Writes docs/reference/cli.md: the help of every command, as `preheat COMMAND --help` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from preheat.tools.cli import _preheat

__all__ = ["PAGE", "reference"]

PAGE = Path(__file__).with_name("reference") / "cli.md"
_WIDTH = 100
_HEAD = """\
# Command line

Every command prints its data to standard output and its messages to standard error. `--json` prints the
data as JSON. This page has the help of every command, with its examples and its exit status.
"""


def reference() -> str:
    """Return the text of the page."""
    return "\n".join((_HEAD, *_sections(_preheat, ("preheat",), None)))


def _sections(
    command: click.Command, path: tuple[str, ...], parent: click.Context | None
) -> Iterator[str]:
    """Yield the section of a command, and those of the commands below it."""
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = click.Context(command, info_name=path[-1], parent=parent, **settings)
    mark = "#" * min(len(path) + 1, 4)
    yield f"{mark} {' '.join(path)}\n\n```text\n{command.get_help(context).rstrip()}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _sections(below, (*path, name), context)


if __name__ == "__main__":
    PAGE.write_text(reference())
