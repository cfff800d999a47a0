"""Runs a page of the documentation from top to bottom, as a reader would.

All blocks of a page share one directory. A block with a title, such as `python title="app.py"`, is a
file, and is written there. A block of Python without a title runs. Its output is the `text` block
that follows it, if there are only a few words between them. A `console` block has commands after `$ `,
with their output. Nothing runs in blocks of other kinds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.shown_output import compare

__all__ = ["KINDS", "Block", "blocks", "run_page"]

_FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```$', re.M | re.S)
_WORDS_BETWEEN = 12  # Longer text between code and a `text` block means that it is not its output.
#: The kinds of blocks: those that run, those that are files, and those that are only shown.
KINDS = {"python", "console", "text", "toml", "cuda", "cpp", "yaml", "dockerfile", "ini"}


class Block(NamedTuple):
    """A fenced block of a page. `output` is what the page shows below a block of Python."""

    page: Path
    line: int
    kind: str
    title: str
    text: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text()
    found = list(_FENCE.finditer(text))
    for number, fence in enumerate(found):
        indent, kind, title, content = fence.groups()
        line = text.count("\n", 0, fence.start()) + 1
        following = found[number + 1] if number + 1 < len(found) else None
        output = None
        if kind == "python" and following is not None and following[2] == "text":
            between = text[fence.end() : following.start()]
            if len(between.split()) < _WORDS_BETWEEN:
                output = _dedent(following[4], following[1])
        yield Block(page, line, kind, title or "", _dedent(content, indent), output)


def _dedent(text: str, indent: str) -> str:
    return re.sub(f"^{indent}", "", text, flags=re.M)


def run_page(page: Path, place: Path, env: Mapping[str, str]) -> int:
    """Run the blocks of a page in the directory `place`, and return how many of them ran."""
    ran = 0
    for block in blocks(page):
        if block.title:
            path = place / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.kind == "python":
            _run_python(block, place, env)
        elif block.kind == "console":
            _run_console(block, place, env)
        else:
            continue
        ran += 1
    return ran


def _run_python(block: Block, place: Path, env: Mapping[str, str]) -> None:
    script = place / f"{block.page.stem}_{block.line}.py"
    script.write_text(block.text)
    done = _run([sys.executable, "-W", "error", script.name], place, env)
    script.unlink()
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    if block.output is not None:
        compare(block.output, done.stdout)


def _run_console(block: Block, place: Path, env: Mapping[str, str]) -> None:
    """Run the commands of a block in one shell, so that `export` and `cd` have an effect."""
    parts = re.split(r"^\$ ", block.text, flags=re.M)[1:]
    commands = [_command(part) for part in parts]
    script = "".join(f'{command}\necho "\n<$?>"\n' for command, _ in commands)
    done = _run(["bash", "-c", script], place, env)
    outputs = re.split(r"\n<(\d+)>\n", done.stdout)[:-1]
    assert len(outputs) == 2 * len(commands), f"{block}\n{done.stdout}\n{done.stderr}"
    for (command, shown), out, status in zip(commands, outputs[::2], outputs[1::2], strict=True):
        assert status == "0", f"{block}: {command}\n{out}\n{done.stderr}"
        compare(shown, out)


def _command(part: str) -> tuple[str, str]:
    """Split a command from its output. A command goes on after a backslash at the end of a line."""
    command, _, shown = part.partition("\n")
    while command.endswith("\\"):
        more, _, shown = shown.partition("\n")
        command += f"\n{more}"
    return command, shown


def _run(words: list[str], place: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=place, env={**os.environ, **env}, capture_output=True, text=True)
