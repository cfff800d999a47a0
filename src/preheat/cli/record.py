"""`preheat record`: run a command and record the kernels it needs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.ahead.recorder import merge_into, read_existing, spool_directory
from preheat.cli.manifests import require_file, require_writable
from preheat.cli.output import count, print_error, print_json, print_message
from preheat.config import environ
from preheat.errors import InputError
from preheat.program import Program

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat record -- python serve.py --port 8000
  preheat record -o decode.toml --fresh -- torchrun --nproc-per-node 8 decode.py
  preheat record -o all.toml --merge a.toml --merge b.toml
  PREHEAT_RECORD=kernels.toml python serve.py        (the same without this command)

\b
The command keeps its input and output (with --json, its output goes to stderr). The exit status is that
of the command; 127 when there is no such command, and 1 when it succeeded but the manifest cannot be
read or written. Its child processes are recorded too. The recording of a killed process is merged by
the next recording, or by 'preheat record' without a command.
"""

_STDERR = 2
_NOTHING = (
    "the command used neither preheat.device() nor preheat.compile(), or it set another PREHEAT_RECORD"
)


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND [ARG]...]")
@click.option(
    "-o",
    "--output",
    default="kernels.toml",
    show_default=True,
    metavar="MANIFEST",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Manifest to add to.",
)
@click.option("--fresh", is_flag=True, help="Replace the manifest instead of adding to it.")
@click.option(
    "--merge",
    "others",
    multiple=True,
    metavar="MANIFEST",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Manifest whose programs and graphs are added; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def command(
    words: tuple[str, ...], output: Path, fresh: bool, others: tuple[Path, ...], as_json: bool
) -> int:
    """Run COMMAND and write the kernels and graphs it needs to a manifest."""
    target = Path(os.path.abspath(output))
    if not words and not others and not spool_directory(target).is_dir():
        nothing = "there is no COMMAND to run, and no earlier recording to merge"
        raise click.UsageError(nothing, click.get_current_context())
    for path in others:
        if not path.exists():
            raise InputError(f"the manifest to merge does not exist: {path}")
    added = [read_existing(path) for path in dict.fromkeys(others)]
    status = 0
    try:
        require_file(output)  # Check before the command runs.
        require_writable(target)
        if fresh:
            _require_replaceable(target)
        before = Manifest() if fresh else read_existing(target)
        with _recording_to(target, fresh) as place:
            if words:
                status = _run(words, place, output=_STDERR if as_json else None)
            recording = merge_into(place)
            if fresh and (made := read_existing(place)) != before:
                added.append(made)
        if added:
            merge_into(target, *added, fresh=fresh)
        after = before if fresh and not added else read_existing(target)
        summary = _Summary.of(before, after, everything=not words)
    except InputError as error:
        print_error(str(error), error.hint)
        return status or 1
    except _CannotRunError as error:
        print_error(str(error), error.hint)
        return error.status
    if as_json:
        fields = {"manifest": str(output), "exit_status": status, **summary.json()}
        print_json({**fields, "still_recording": recording})
    else:
        _report(summary, output, status)
    if recording and fresh:
        print_message(f"processes still running: {recording}; their programs are not in {output}")
    elif recording:
        print_message(f"processes still recording: {recording}; they add to {output} when they end")
    return status


def _require_replaceable(target: Path) -> None:
    """Raise for a file that is not a manifest. A manifest with errors may be replaced."""
    there = target.read_bytes() if target.is_file() else b""
    if there.strip() and not re.search(rb"^\s*version\b", there, re.MULTILINE):
        raise InputError(
            f"{target} is not a manifest, and --fresh does not replace it",
            hint="name another manifest with -o, or remove that file",
        )


@contextmanager
def _recording_to(target: Path, fresh: bool) -> Iterator[Path]:
    """Yield the manifest to record into. With `fresh` it is a temporary one, so the old file stays."""
    if not fresh:
        yield target
        return
    prefix = f".{target.name}-"
    with TemporaryDirectory(dir=target.parent, prefix=prefix, ignore_cleanup_errors=True) as place:
        yield Path(place) / target.name


# Running


class _CannotRunError(Exception):
    """The command cannot be run. `status` is the exit status of a shell in that case."""

    def __init__(self, words: Sequence[str], fault: OSError) -> None:
        self.status = 127 if isinstance(fault, FileNotFoundError) else 126
        self.hint = None
        why = fault.strerror or str(fault)
        if words[0].endswith(".py") and Path(words[0]).is_file():
            why = "it is a Python file, not a command"
            self.hint = f"preheat record -- python {shlex.join(words)}"
        elif "/" not in words[0] and Path(words[0]).is_file():
            self.hint = f"name the directory of a command that is not in PATH: ./{words[0]}"
        super().__init__(f"cannot run {words[0]}: {why}")


def _run(words: Sequence[str], manifest: Path, *, output: int | None) -> int:
    """Run a command with recording, and return its exit status as a shell reports it."""
    env = {**environ(), "PREHEAT_RECORD": str(manifest)}
    with _forward_signals() as forward_to:
        try:
            child = subprocess.Popen(words, env=env, stdout=output)
        except OSError as fault:
            raise _CannotRunError(words, fault) from None
        with child:
            forward_to(child)
            status = child.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _forward_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward signals to the command, and exit when the command exits.

    Signals that arrive before the process of the command is known are forwarded later.
    """
    command: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: object) -> None:
        if command is None:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():
            command.send_signal(number)

    def forward_to(child: subprocess.Popen[bytes]) -> None:
        nonlocal command
        command = child
        for number in early:
            forward(number, None)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return True in the foreground of a terminal, where Ctrl-C also reaches the command itself."""
    try:
        with open(os.ctermid()) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


# Reporting


@dataclass(frozen=True)
class _Summary:
    """What a run added to a manifest: the programs, and which of them are new."""

    programs: tuple[ManifestProgram, ...]
    new: frozenset[Program]
    manifest: Manifest

    @classmethod
    def of(cls, before: Manifest, after: Manifest, *, everything: bool) -> _Summary:
        """Return the difference of two manifests, or with `everything` all programs of the second."""
        asked = {item.identity: item.asked for item in before.programs}
        rows = [
            item for item in after.programs if everything or item.asked > asked.get(item.identity, -1)
        ]
        new = frozenset(item.program for item in rows if item.identity not in asked)
        return cls(tuple(rows), new, after)

    def __str__(self) -> str:
        graphs = self.manifest.graphs
        text = f"{count(len(self.programs), 'program')} ({len(self.new):,} new)"
        if graphs:
            keys = sum(len(graph.keys) for graph in graphs)
            text += f", {count(len(graphs), 'graph')} with {count(keys, 'key')}"
        archs = sorted({arch for item in self.programs for arch in item.archs})
        return text + (f", for {', '.join(map(str, archs))}" if archs else "")

    def json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return {
            "programs": [
                {
                    "label": item.program.label,
                    "file": item.program.path,
                    "include": item.program.include_spellings,
                    "new": item.program in self.new,
                    "arch": [str(arch) for arch in item.archs],
                    "entries": item.entries,
                    "seconds": item.seconds,
                    "asked": item.asked,
                    "by": item.callers,
                }
                for item in self.programs
            ],
            "graphs": [{"name": name, "keys": keys} for name, keys in self.manifest.graphs],
        }


def _report(summary: _Summary, output: Path, status: int) -> None:
    if summary.programs:
        print_message(f"recorded {summary} → {output}")
    elif status:
        print_message(f"nothing was recorded: the command ended with exit status {status}")
    else:
        print_message(f"nothing was recorded\n\nhint: {_NOTHING}")
