"""Merge the PTX of several parts into one text, as a linker merges their machine code.

Symbols with linkage are shared by name. Other symbols belong to their part, and get another name where
a second part has one of the same name. Only one of several weak definitions, such as those of templates
and inline functions, stays. A declaration of what another part defines becomes a forward declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.lexer import blank_comments

__all__ = ["PtxPart", "definitions", "merge"]

_DIRECTIVE = re.compile(r"(?<!\S)\.(?:version|target|address_size)\b[^\n]*")
_SECTION = re.compile(r"(?<!\S)\.section\b[^{;]*\{[^}]*\}")
_FILE = re.compile(r"(?<!\S)\.file\s+(?P<number>\d+)[^\n]*")
_LOC = re.compile(r"(?<!\S)(\.loc\s+)(\d+)([^\n,]*)(?:,\s*function_name[^\n,]*)?")
_INLINED = re.compile(r"(?<=\binlined_at )(\d+)")
_IDENTIFIER = re.compile(r"(?<![\w$%.])[A-Za-z_$][\w$]*")
_SHARED = frozenset({".visible", ".weak", ".common"})  # Linkage that other parts can refer to.


@dataclass(frozen=True)
class PtxPart:
    """The PTX of one part: the label of the part and the text."""

    label: str
    text: str
    module: ptx.Module

    @classmethod
    def of(cls, label: str, text: str) -> PtxPart:
        """Parse the PTX of a part; `SyntaxFault` if it is not valid."""
        return cls(label, text, ptx.parse(text))


class _Symbol(NamedTuple):
    """A definition: its linkage, without a dot; empty if it belongs to its part."""

    name: str
    linkage: str


def definitions(part: PtxPart) -> Iterator[_Symbol]:
    """Yield what a part defines: functions, kernels and variables."""
    for function in part.module.functions:
        if function.body is not None:
            shared = "visible" if function.kind == "entry" else ""  # A kernel needs no linkage.
            yield _Symbol(function.name, _linkage(function.linkage) or shared)
    for variable in part.module.variables.values():
        if ".extern" not in variable.linkage:
            yield _Symbol(variable.name, _linkage(variable.linkage))


def _linkage(words: Sequence[str]) -> str:
    return next((word.removeprefix(".") for word in words if word in _SHARED), "")


def merge(parts: Sequence[PtxPart]) -> str:
    """Return the PTX of all parts as one text. No symbol may have two definitions that are not weak."""
    if len(parts) == 1:
        return parts[0].text
    owners = _owners(parts)
    merger = _Merger(owners)
    for index, part in enumerate(parts):
        merger.add(index, part, _private_names(parts, index))
    modules = [part.module for part in parts]
    version = max(module.version for module in modules)
    target = max((module.target for module in modules), key=lambda target: Arch.parse(target[0]))
    head = f".version {version[0]}.{version[1]}\n.target {', '.join(target)}\n.address_size 64\n"
    return "\n".join([head, *merger.declarations.values(), *merger.variables, *merger.functions, ""])


def _owners(parts: Sequence[PtxPart]) -> dict[str, tuple[int, str]]:
    """Return the part whose definition of a shared symbol stays, and its linkage, by name."""
    owners: dict[str, tuple[int, str]] = {}
    for index, part in enumerate(parts):
        for name, linkage in definitions(part):
            known = owners.get(name, (index, ""))[1]
            if linkage and (not known or (linkage == "visible" and known != "visible")):
                owners[name] = index, linkage
    return owners


def _private_names(parts: Sequence[PtxPart], index: int) -> dict[str, str]:
    """Return the new names of symbols of one part that another part uses for something else."""
    others = set()
    for number, part in enumerate(parts):
        if number != index:
            others |= {function.name for function in part.module.functions} | {*part.module.variables}
    mine = [name for name, linkage in definitions(parts[index]) if not linkage and name in others]
    return {name: f"{name}$part{index}" for name in mine}


class _Merger:
    """Collects the pieces of the merged text, each kind in the order of the parts."""

    def __init__(self, owners: Mapping[str, tuple[int, str]]) -> None:
        self._owners = owners
        self._files = 0
        self.declarations: dict[str, str] = {}  # Of functions, by name.
        self.variables: list[str] = []
        self.functions: list[str] = []
        self._shared_arrays: set[str] = set()

    def add(self, index: int, part: PtxPart, renamed: Mapping[str, str]) -> None:
        """Add the pieces of one part, with new names for some of its symbols."""
        adjust = _Adjuster(renamed, self._files)
        text = part.text
        at = 0
        for function in part.module.functions:
            self._add_outside(index, adjust, text[at : function.start])
            piece = adjust(text[function.start : function.end])
            if function.body is None:
                self._declare(function, piece)
            elif self._stays(index, function):
                self.functions.append(piece)
            at = function.end
        self._add_outside(index, adjust, text[at:])
        self._files = adjust.files

    def _stays(self, index: int, definition: ptx.Function | ptx.Variable) -> bool:
        """Return whether a definition of a part stays: it is private, or this part owns the symbol."""
        private = not _linkage(definition.linkage)
        return private or self._owners.get(definition.name, (index, ""))[0] == index

    def _declare(self, function: ptx.Function, piece: str) -> None:
        """Add a declaration. One of a function that a part defines becomes a forward declaration."""
        owner = self._owners.get(function.name)
        if owner is not None and ".extern" in function.linkage:
            piece = piece.replace(".extern", f".{owner[1]}", 1)
        self.declarations.setdefault(function.name, piece)

    def _add_outside(self, index: int, adjust: _Adjuster, text: str) -> None:
        """Add the variables and directives between functions."""
        for piece in _pieces(text):
            kept = self._kept(index, piece)
            if kept:
                self.variables.append(adjust(kept))

    def _kept(self, index: int, piece: str) -> str | None:
        """Return a statement, or None if the definition of another part replaces it."""
        for variable in ptx.declared_variables(blank_comments(piece)):
            extern = ".extern" in variable.linkage
            if extern and variable.space == "shared":
                known = variable.name in self._shared_arrays
                self._shared_arrays.add(variable.name)
                return None if known else piece
            defined = variable.name in self._owners
            if (extern and defined) or not (extern or self._stays(index, variable)):
                return None
        return piece


class _Adjuster:
    """Changes the text of one part: names that others use, and the numbers of its source files."""

    def __init__(self, renamed: Mapping[str, str], files: int) -> None:
        self._renamed = renamed
        self._offset = files
        self.files = files  # The highest number of a file so far.

    def __call__(self, piece: str) -> str:
        piece = _FILE.sub(self._file, piece)
        piece = _LOC.sub(lambda found: f"{found[1]}{int(found[2]) + self._offset}{found[3]}", piece)
        piece = _INLINED.sub(lambda found: str(int(found[1]) + self._offset), piece)
        if self._renamed:
            piece = _IDENTIFIER.sub(lambda found: self._renamed.get(found[0], found[0]), piece)
        return piece.strip()

    def _file(self, found: re.Match[str]) -> str:
        number = int(found["number"]) + self._offset
        self.files = max(self.files, number)
        start, end = (at - found.start() for at in found.span("number"))
        return f"{found[0][:start]}{number}{found[0][end:]}"


def _pieces(text: str) -> Iterator[str]:
    """Yield the statements between functions, without the directives that a merged text has once."""
    clean = blank_comments(text)
    for pattern in (_SECTION, _DIRECTIVE):
        clean = pattern.sub(lambda match: " " * len(match[0]), clean)
    for match in re.finditer(r"\s*(?:\.file\b[^\n]*|[^;]+;)", clean):
        if match[0].strip():
            yield text[match.start() : match.end()] if ".file" in match[0] else match[0]
