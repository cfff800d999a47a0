"""`preheat debug`: write the sources of cached programs for debuggers and profilers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from preheat.errors import InputError, PreheatError
from preheat.model.artifact import Artifact
from preheat.model.program import HEADER_DIRECTORY, SOURCE_DIRECTORY
from preheat.tools.cli.output import columns, count, print_json, print_line, print_message
from preheat.tools.cli.stored import artifact_at, artifacts

__all__ = ["command"]

_HINT = "compile with line information: preheat compile FILE -X=-lineinfo"


@click.group()
def command() -> None:
    """Write sources for debuggers and profilers.

    \b
    Example:
      preheat debug sources ./sources
    """


@command.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def sources(directory: Path, keys: tuple[str, ...], as_json: bool) -> None:
    """Write the sources of cached programs into DIR.

    The cache keeps the source and headers of programs that are compiled with -lineinfo or -G. KEY is
    the start of the key of an entry, as `preheat cache ls` shows it. Without KEY, the sources of all
    such programs are written. If two files have the same name, the file of the most recently used
    program is written.

    \b
    Examples:
      preheat compile saxpy.cu --arch sm_90 -X=-lineinfo
      preheat debug sources ./sources
      cuda-gdb -ex 'set substitute-path /preheat ./sources/preheat' ...

    In Nsight, add DIR to the folders that are searched for source files.
    """
    directory = directory.absolute()
    written: dict[Path, str] = {}
    rows: list[dict[str, Any]] = []
    for artifact in _chosen(keys):
        texts = dict(_place(directory, artifact.sources))
        skipped = [path for path, text in texts.items() if written.get(path, text) != text]
        kept = [path for path in texts if path not in skipped]
        for path in kept:
            if path not in written:
                _write(path, texts[path])
                written[path] = texts[path]
        rows.append(_row(artifact, kept, skipped))
    places = {
        SOURCE_DIRECTORY: str(directory / SOURCE_DIRECTORY.lstrip("/")),
        HEADER_DIRECTORY: str(directory),
    }
    if as_json:
        print_json({"directory": str(directory), "substitute": places, "programs": rows})
        return
    for line in columns(
        [(row["key"][:12], row["program"], row["arch"], _summary(row)) for row in rows]
    ):
        print_line(line)
    print_message(f"Wrote {count(len(written), 'file')} to {directory}; for cuda-gdb:")
    for name, place in places.items():
        print_message(f"  set substitute-path {name} {place}")


def _chosen(keys: tuple[str, ...]) -> Iterator[Artifact]:
    """Yield the artifacts whose sources are written, most recently used first."""
    if keys:
        for key in keys:
            artifact = artifact_at(key)
            if not artifact.sources:
                raise InputError(f"{key} ({artifact.label}) has no line information", hint=_HINT)
            yield artifact
        return
    found = [artifact for _, artifact in artifacts("reading") if artifact.sources]
    if not found:
        raise PreheatError("no program in the cache has line information", hint=_HINT)
    yield from found


def _place(directory: Path, texts: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Yield path and text of each source. A header outside its include directory is skipped."""
    for name, text in texts.items():
        relative = name.removeprefix(f"{HEADER_DIRECTORY}/").lstrip("/")
        if not os.path.normpath(relative).startswith(".."):
            yield directory / relative, text


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")


def _row(artifact: Artifact, kept: list[Path], skipped: list[Path]) -> dict[str, Any]:
    return {
        "key": artifact.digest,
        "program": artifact.label,
        "arch": str(artifact.arch),
        "files": [str(path) for path in kept],
        "skipped": [str(path) for path in skipped],
    }


def _summary(row: Mapping[str, Any]) -> str:
    files = count(len(row["files"]), "file")
    skipped = len(row["skipped"])
    return f"{files}, {skipped} skipped: another program has files of that name" if skipped else files
