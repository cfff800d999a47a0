"""Find the CUDA source lines of an instruction, by the `.loc` directives of PTX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from preheat.errors import SourceLine
from preheat.model import ptx
from preheat.model.program import HEADER_DIRECTORY, SOURCE_DIRECTORY
from preheat.process.files import read_whole
from preheat.process.lazy import lazy

__all__ = ["Lines", "has_lines", "lines_with_files"]

_LINED = re.compile(rb"^\s*\.loc\s+\d", re.M)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"((?:[^"\\\n]|\\.)*)"', re.M)
_LOC = re.compile(r"\.loc (?P<at>\d+ (?P<line>\d+) \d+)(?:.* inlined_at (?P<outer>\d+ \d+ \d+))?")
_DIRECTORY = re.compile(
    rf"^(?:{re.escape(SOURCE_DIRECTORY)}/|{re.escape(HEADER_DIRECTORY)}/(?:@\w+/)?)"
)

Chain = tuple[str, ...]  # "file line column" of an instruction, then of each inlined call around it.


def has_lines(code: bytes) -> bool:
    """Return whether a PTX text has line information."""
    return _LINED.search(code) is not None


def lines_with_files(code: bytes) -> Lines | None:
    """Return the line information of a PTX text, with its readable source files."""
    if not has_lines(code):
        return None
    text = code.decode()
    sources = {}
    for _, name in _FILE.findall(text):
        with suppress(OSError, UnicodeDecodeError):  # Sources of NVRTC need not be files.
            sources[name] = read_whole(Path(name)).decode()
    return Lines(text, sources)


class Lines:
    """The line information of a PTX text. `sources` maps its file names to their texts."""

    def __init__(self, text: str, sources: Mapping[str, str]) -> None:
        self._files = dict(_FILE.findall(text))
        self._sources = sources
        self._module = ptx.parse(text)

    def of(self, function: ptx.Function, line: int) -> tuple[SourceLine, ...]:
        """Return the source line of the instruction on a line of `function`, then of inlined calls.

        `function` may be from the same code without line information. The result is empty if the code
        differs, and if the compiler gave no line.
        """
        mine = [statement for statement in function.statements if statement.is_instruction]
        rows = self._instructions.get(function.name, [])
        if [text for text, _ in rows] != [statement.text for statement in mine]:
            return ()
        chains = (chain for (_, chain), own in zip(rows, mine, strict=True) if own.line == line)
        return tuple(map(self._shown, next(chains, ())))

    @lazy
    def _instructions(self) -> dict[str, list[tuple[str, Chain]]]:
        return {function.name: list(_locate(function)) for function in self._module.functions}

    def _shown(self, place: str) -> SourceLine:
        file, line, _ = place.split()
        name = self._files.get(file, "?")
        text = self._sources.get(name, "").splitlines()[int(line) - 1 : int(line)]
        return SourceLine(_DIRECTORY.sub("", name), int(line), text[0].strip() if text else None)


def _locate(function: ptx.Function) -> Iterator[tuple[str, Chain]]:
    """Yield the instructions of a function, each with the location of the last `.loc` before it."""
    chain: Chain = ()
    known: dict[str, Chain] = {}  # A call has a `.loc` before the instructions inlined from it.
    for statement in function.statements:
        if loc := _LOC.match(statement.text):
            outer = known.get(loc["outer"], (loc["outer"],)) if loc["outer"] else ()
            known[loc["at"]] = here = (loc["at"], *outer)
            if loc["line"] != "0":  # Code of line 0 comes from the compiler itself.
                chain = here
        elif statement.is_instruction:
            yield statement.text, chain
