"""The sources of programs with line information, kept with their code for debuggers and profilers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from preheat.artifact import Header
from preheat.program import Program

__all__ = ["HOME", "LABELS", "own_texts", "sources_of"]

_OPTIONS = {"-G", "--device-debug", "-lineinfo", "--generate-line-info"}

#: What debug information calls the directory of sources, and that of headers. See `worker.py`.
LABELS, HOME = "/preheat", "/proc/self/cwd"


def sources_of(
    program: Program,
    headers: Iterable[Header],
    roots: Mapping[str, str],
    toolkit: Collection[str],
) -> dict[str, str]:
    """The texts that the debug information of `program` refers to, by the names it has for them.

    Empty for a program without debug information. Headers of the toolkit are left out, and so is a
    header that has changed since the compile.
    """
    if program.language != "cuda" or _OPTIONS.isdisjoint(program.options):
        return {}
    texts = own_texts(program)
    for header in headers:
        if header.root in roots and header.root not in toolkit:
            text = _text(Path(roots[header.root], header.name), header.digest)
            if text is not None:
                texts[f"{HOME}/@{header.root}/{header.name}"] = text
    return texts


def own_texts(program: Program) -> dict[str, str]:
    """The texts that a program consists of, by the names that debug information has for them."""
    texts = {f"{LABELS}/{program.label}": program.source}
    return texts | {f"{HOME}/{name}": text for name, text in program.headers}


def _text(path: Path, digest: str) -> str | None:
    """The text of a file whose content still has this hash."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        return None
    return content.decode("utf-8", "surrogateescape")
