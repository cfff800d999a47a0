"""The source lines of an artifact, for messages about faults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.build.builder import Builder
from preheat.errors import PreheatError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.config import SealMode
from preheat.model.program import Program
from preheat.process.locks import no_fork
from preheat.toolchain.sources import own_texts

if TYPE_CHECKING:
    from preheat.model.lines import Lines

__all__ = ["source_lines"]

_LINES = "-lineinfo"


def source_lines(builder: Builder, program: Program | None, artifact: Artifact) -> Lines | None:
    """Return the source lines of `artifact`, which was made from `program`; None if they are unknown.

    Code without line information is built once more with it, unless the process is sealed. That
    artifact has its own key, and it is not recorded, because no manifest should list it.
    """
    with no_fork:
        from preheat.model.lines import Lines, has_lines  # needed only after a fault

    try:
        lined = artifact if has_lines(artifact.ptx) else _lined(builder, program, artifact.arch)
        if lined is None:
            return None
        own = {} if program is None else own_texts(program)  # Bundles contain no sources.
        return Lines(lined.ptx.decode(), {**lined.sources, **own})
    except (PreheatError, ValueError):  # The fault is reported without its source line.
        return None


def _lined(builder: Builder, program: Program | None, arch: Arch) -> Artifact | None:
    """Return the artifact of `program` with line information."""
    if program is None or "cuda" not in program.language:
        return None
    program = _with_lines(program)
    if builder.sealed is SealMode.OFF:
        return builder.build(program, arch, record=False)
    return builder.lookup(program, arch, exact=True, record=False).artifact


def _with_lines(program: Program) -> Program:
    """Return a program that is compiled to the same code with line information."""
    with no_fork:
        from preheat.model.linked_program import LinkedProgram

    if not isinstance(program, LinkedProgram):
        return replace(program, options=(*program.options, _LINES))
    parts = [
        _with_lines(part) if isinstance(part, Program) and part.language == "cuda" else part
        for part in program.parts
    ]
    options = (*program.options, _LINES) if program.lto else program.options
    return replace(program, parts=tuple(parts), options=options)
