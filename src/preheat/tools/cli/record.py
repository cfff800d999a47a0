"""`preheat record`: run a command and record the kernels it needs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from preheat.ahead.manifest import ForeignProgram, Manifest, ManifestProgram, Unrecorded
from preheat.ahead.recorder import merge_into, read_existing, spool_directory
from preheat.audit.library import LIBRARY
from preheat.audit.nested import outer_audit
from preheat.audit.session import audit_session
from preheat.errors import InputError
from preheat.model.config import environ
from preheat.model.program import Program
from preheat.model.setting_values import split_pin
from preheat.tools.cli.arguments import require_file, require_writable
from preheat.tools.cli.child import CannotRunError, run_command
from preheat.tools.cli.output import count, print_error, print_json, print_message, print_unrecorded

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat record -- python serve.py --port 8000
  preheat record -o decode.toml --fresh -- torchrun --nproc-per-node 8 decode.py
  preheat record -o all.toml --merge a.toml --merge b.toml
  PREHEAT_RECORD=kernels.toml python serve.py        (the same, if serve.py imports preheat)

\b
This command also records programs that do not import preheat. The variable PREHEAT_RECORD alone does
nothing for such a program. To record kernels of other libraries, it also needs PREHEAT_ADAPTERS=auto.

\b
The command keeps its input and output (with --json, its output goes to stderr). Its child processes are
recorded as well. The recording of a killed process is merged by the next recording, or by 'preheat
record' without a command. The exit status is that of the command. It is 127 if there is no such
command, and 1 if the command succeeded but the manifest cannot be read or written.

\b
This command also looks for compilers that no adapter covers, such as nvcc and g++ below ninja. It lists
them with the lines that led to them, here and in the manifest. They do not change the exit status.
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
        unrecorded: tuple[Unrecorded, ...] | None = ()
        with _recording_to(target, fresh) as place:
            if words:
                env = {**environ(), "PREHEAT_RECORD": str(place)}
                status, unrecorded = _run(words, env, output=_STDERR if as_json else None)
            recording = merge_into(place)
            if unrecorded:
                merge_into(place, Manifest(unrecorded=unrecorded))
            if fresh and (made := read_existing(place)) != before:
                added.append(made)
            if added:
                merge_into(target, *added, fresh=fresh)
        after = before if fresh and not added else read_existing(target)
        summary = _Summary.of(before, after, everything=not words)
        if not words:
            unrecorded = after.unrecorded
    except InputError as error:
        print_error(str(error), error.hint)
        return status or 1
    except CannotRunError as error:
        print_error(str(error), error.hint)
        return error.status
    if as_json:
        fields = {"manifest": str(output), "exit_status": status, **summary.json()}
        rows = None if unrecorded is None else [vars(item) for item in unrecorded]
        print_json({**fields, "unrecorded": rows, "still_recording": recording})
    else:
        _report(summary, output, status, unrecorded)
    if recording and fresh:
        print_message(f"processes still running: {recording}; their programs are not in {output}")
    elif recording:
        print_message(f"processes still recording: {recording}; they add to {output} when they end")
    return status


def _run(
    words: Sequence[str], env: dict[str, str], *, output: int | None
) -> tuple[int, tuple[Unrecorded, ...] | None]:
    """Run the command in an audit. Return its exit status and what it compiled without a recording.

    The latter is None without an audit library.
    """
    if not LIBRARY.is_file():
        return run_command(words, env, output=output), None
    nested = outer_audit(env) is not None and "PREHEAT_AUDIT_CUPTI" in env
    with audit_session(env, cupti=nested) as session:
        status = run_command(words, session.env, output=output)
        return status, session.unrecorded()


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


# Reporting


@dataclass(frozen=True)
class _Summary:
    """What a run added to a manifest: the programs, and which of them are new."""

    programs: tuple[ManifestProgram, ...]
    new: frozenset[Program]
    foreign: tuple[ForeignProgram, ...]
    manifest: Manifest

    @classmethod
    def of(cls, before: Manifest, after: Manifest, *, everything: bool) -> _Summary:
        """Return the difference of two manifests, or with `everything` all programs of the second."""
        before_requests = {item.identity: item.requests for item in before.programs}
        rows = [
            item
            for item in after.programs
            if everything or item.requests > before_requests.get(item.identity, -1)
        ]
        new = frozenset(item.program for item in rows if item.identity not in before_requests)
        foreign_requests = {item.identity: item.requests for item in before.foreign}
        foreign = (
            item
            for item in after.foreign
            if everything or item.requests > foreign_requests.get(item.identity, -1)
        )
        return cls(tuple(rows), new, tuple(foreign), after)

    def __str__(self) -> str:
        graphs = self.manifest.graphs
        text = f"{count(len(self.programs), 'program')} ({len(self.new):,} new)"
        for kind in sorted({item.kind for item in self.foreign}):
            number = sum(item.kind == kind for item in self.foreign)
            text += f", {count(number, 'request')} of {kind}"
        if graphs:
            keys = sum(len(graph.keys) for graph in graphs)
            text += f", {count(len(graphs), 'graph')} with {count(keys, 'key')}"
        listed = [item.archs for item in self.programs] + [item.archs for item in self.foreign]
        archs = sorted({arch for each in listed for arch in each})
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
                    "requests": item.requests,
                    "callers": item.callers,
                }
                for item in self.programs
            ],
            "foreign": [
                {
                    "kind": item.kind,
                    "name": item.name,
                    "can_be_baked": not item.kept,
                    "arch": [str(arch) for arch in item.archs],
                    "coverage": item.coverage,
                    "seconds": item.seconds,
                    "requests": item.requests,
                    "callers": item.callers,
                }
                for item in self.foreign
            ],
            "graphs": [{"name": name, "keys": keys} for name, keys in self.manifest.graphs],
        }


def _report(
    summary: _Summary, output: Path, status: int, unrecorded: Sequence[Unrecorded] | None
) -> None:
    if summary.programs or summary.foreign:
        print_message(f"recorded {summary} → {output}")
        for path in summary.manifest.recorded:
            name = split_pin(path)[0].name
            print_message(f"what a bake cannot make again is in {name}: copy it with the manifest")
    elif status:
        print_message(f"nothing was recorded: the command ended with exit status {status}")
    else:
        print_message("nothing was recorded" + ("" if unrecorded else f"\n\nhint: {_NOTHING}"))
    if unrecorded is None:
        print_message("compilers that no adapter covers were not looked for: there is no audit library")
    else:
        print_unrecorded(unrecorded)
