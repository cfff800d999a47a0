"""The sources of programs with line information, stored with the code for debuggers and profilers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.model.artifact import Header
from preheat.model.program import HEADER_DIRECTORY, SOURCE_DIRECTORY, Program
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.model import linked_program
else:
    linked_program = LazyModule("preheat.model.linked_program")  # Most processes link nothing.

__all__ = ["own_texts", "sources_of"]

_OPTIONS = {"-G", "--device-debug", "-lineinfo", "--generate-line-info"}


def sources_of(
    program: Program, headers: Iterable[Header], roots: Mapping[str, str], toolkit: Collection[str]
) -> dict[str, str]:
    """Return the texts that the debug information of `program` refers to, by their names in it.

    The result is empty for a program without debug information. It contains neither headers of the
    toolkit nor headers that have changed since the compile.
    """
    if program.language == "cuda+link":
        return _sources_of_parts(program, headers, roots, toolkit)
    if program.language != "cuda" or _OPTIONS.isdisjoint(program.options):
        return {}
    texts = own_texts(program)
    for header in headers:
        if header.root in roots and header.root not in toolkit:
            text = _text(Path(roots[header.root], header.name), header.digest)
            if text is not None:
                texts[f"{HEADER_DIRECTORY}/@{header.root}/{header.name}"] = text
    return texts


def _sources_of_parts(
    program: Program,
    headers: Iterable[Header],
    roots: Mapping[str, str],
    toolkit: Collection[str],
) -> dict[str, str]:
    """Return the texts of all parts. Their names are those that the parts have on their own."""
    texts: dict[str, str] = {}
    for index, part in _parts(program).items():
        start = f"{index}."
        of_part = [header for header in headers if header.root.startswith(start)]
        own = [header._replace(root=header.root.removeprefix(start)) for header in of_part]
        places = ((root, place) for root, place in roots.items() if root.startswith(start))
        texts |= sources_of(
            part, own, {root.removeprefix(start): place for root, place in places}, toolkit
        )
    return texts


def _parts(program: Program) -> Mapping[int, Program]:
    """Return the CUDA C++ parts of a linked program by their index."""
    return program.sources if isinstance(program, linked_program.LinkedProgram) else {}


def own_texts(program: Program) -> dict[str, str]:
    """Return the texts of a program by their names in debug information."""
    if program.language == "cuda+link":
        parts = map(own_texts, _parts(program).values())
        return {name: text for texts in parts for name, text in texts.items()}
    texts = {f"{SOURCE_DIRECTORY}/{program.label}": program.source}
    return texts | {f"{HEADER_DIRECTORY}/{name}": text for name, text in program.headers}


def _text(path: Path, digest: str) -> str | None:
    """Return the text of a file if its content still has this hash, else None."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        return None
    return content.decode("utf-8", "surrogateescape")
