"""The PTX parser: module directives, variables, functions with their parameter layout, statements.

Function heads are parsed at once. Bodies and variables are parsed on first use, because compilers emit
megabytes of them and a signature needs none.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from preheat.model.lexer import blank_comments, split_commas
from preheat.process.lazy import lazy

__all__ = [
    "Function",
    "Instruction",
    "Module",
    "Param",
    "Statement",
    "SyntaxFault",
    "Variable",
    "declared_registers",
    "declared_variables",
    "parse",
]

#: Types whose values only texture and surface instructions can read.
OPAQUE = ("texref", "samplerref", "surfref")
#: Size in bytes of each type.
SIZES = {f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)} | {
    **dict.fromkeys(("f16", "bf16"), 2),
    **dict.fromkeys(("f32", "f16x2", "bf16x2"), 4),
    **dict.fromkeys(("f64", *OPAQUE), 8),
    "b128": 16,
}

_NAME = r"[A-Za-z_$%][\w$]*"
_VERSION = re.compile(r"(?<!\S)\.version\s+(\d{1,9})\.(\d{1,9})")
_TARGET = re.compile(r"(?<!\S)\.target\s+(\w[\w, \t]*)")
_BRACE = re.compile(r"[{}]")
# No pattern below backtracks much: each quantifier that could share text with another is possessive,
# text between brackets cannot contain an opening bracket, and the length of linkage is limited.
_LINKAGE = r"(?P<linkage>(?:\.(?:visible|extern|weak|common)\s++){0,4}+)"
_INSIDE = r"[^(){};]*+"
_ARGUMENT = rf"\({_INSIDE}(?:\({_INSIDE}\){_INSIDE})?+\)"  # Of an attribute: `(.unified(19, 95))`.
_HEAD = re.compile(
    rf"{_LINKAGE}\.(?P<kind>entry|func)\b"
    rf"(?P<attributes>(?:\s*+\.(?:noreturn|attribute\s*+{_ARGUMENT}))*+)"
    rf"\s*+(?:\((?P<returns>{_INSIDE})\))?+"
    rf"\s*+(?P<name>{_NAME})\s*+(?:\((?P<params>{_INSIDE})\))?+"
)
# A brace at the start of a statement opens or closes a scope; after an opcode it encloses a vector.
_STATEMENT = re.compile(
    r"\s*(?:"
    r"\.(?:loc|file)\b[^\n;]*(?:\n|\Z)"  # Ends with its line.
    rf"|{_NAME}\s*:(?!:)"  # A label.
    r"|[{}]"
    r"|[^;]*;"
    r"|[^;]+\Z)"  # The last statement without a semicolon.
)
_NO_INSTRUCTION = re.compile(rf"[.{{}}]|{_NAME}\s*+:(?!:)")
_GUARD = re.compile(rf"^@\s*+(!?)\s*+({_NAME})\s+")
_OPCODE = re.compile(r"[.\w:]+|\S+")
_PARAM = re.compile(rf"(?<![\w.$%])(?P<name>{_NAME})\s*+(?:\[\s*+(?P<extent>\d{{0,9}})\s*+\])?+\s*+\Z")
_ALIGN = re.compile(r"\.align\s+(\d{1,9})")
_DECLARATION = re.compile(
    rf"(?<![^\s;}}]){_LINKAGE}\.(?P<space>global|const|shared|local|param)"
    rf"(?P<attributes>(?:\s*+\.\w++(?:\s++\d{{1,9}}(?![\w.])|\s*+{_ARGUMENT})?+)++)(?P<rest>[^;]*+)"
)
_ALIAS = re.compile(rf"(?<![^\s;}}])\.alias\s++(?P<name>{_NAME})\s*+,\s*+(?P<target>{_NAME})\s*+;")
_HEAD_END = re.compile(r"\.pragma\b[^;{}]*+;|[;{]")
_EXTENT = r"\[\s*+(\d{0,9})\s*+\]"
_DECLARED = re.compile(
    rf"(?P<name>{_NAME})\s*+(?P<extents>(?:{_EXTENT}\s*+)*+)(?:=\s*+(?P<initial>.*))?+", re.S
)
_REGISTERS = re.compile(r"\.reg\s*+\.(?:(?P<vector>v[24])\s*+\.)?+(?P<kind>\w++)(?P<rest>.*)")
_REGISTER = re.compile(rf"(?P<name>{_NAME})\s*+(?:<\s*+(?P<count>\d{{1,9}})\s*+>)?+")


class SyntaxFault(ValueError):  # noqa: N818  (Callers turn it into a PtxError.)
    """The text is not valid PTX. `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: its name and type in PTX, and its offset in the parameter buffer."""

    name: str
    kind: str  # "f32", "u64", "b8"
    offset: int
    size: int
    align: int
    pointer: bool = False  # Marked `.ptr`. Older PTX declares pointers as plain u64.


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in memory, with its size and initial value.

    `initial` has one text for each initialised element: a number, or an address such as `table` or
    `generic(table)+4`. The rest of the variable is zero.
    """

    name: str
    space: str  # "global", "const", "shared", "local", "param"
    kind: str
    align: int
    size: int  # 0 for an array without extent, whose size the launch decides.
    initial: tuple[str, ...]
    linkage: tuple[str, ...]
    line: int


class Instruction(NamedTuple):
    """The parts of an instruction. `operands` are split at commas outside brackets."""

    guard: str | None  # The guard predicate, such as `%p1` or `!%p1`.
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction, label, directive or brace, without comments and with white space folded."""

    line: int
    text: str

    @property
    def is_instruction(self) -> bool:
        """Whether this is an instruction, as opposed to a label, directive or brace."""
        return _NO_INSTRUCTION.match(self.text) is None

    @property
    def opcode(self) -> str:
        """The opcode, such as `fma.rn.f32` in `@%p1 fma.rn.f32 %f4, %f2, %f1, %f3`."""
        return self.instruction().opcode

    def instruction(self) -> Instruction:
        """Return the parts of the instruction."""
        guard = _GUARD.match(self.text)
        start = guard.end() if guard else 0
        opcode = _OPCODE.match(self.text, start)
        end = opcode.end() if opcode else start
        return Instruction(
            guard=f"{guard[1]}{guard[2]}" if guard else None,
            opcode=self.text[start:end],
            operands=tuple(split_commas(self.text[end:])),
        )


@dataclass(frozen=True)
class Function:
    """A kernel (`entry`) or device function (`func`) of a module."""

    name: str
    kind: str
    linkage: tuple[str, ...]
    params: tuple[Param, ...]
    returns: tuple[Param, ...]
    directives: tuple[str, ...]  # `.maxntid 128, 1, 1`, …
    line: int
    body: str | None  # The text between the braces without comments; None for a declaration.
    body_line: int
    start: int = 0  # Where its head begins in the text of the module.
    end: int = 0  # Where it ends, with its closing brace or semicolon.

    @lazy
    def statements(self) -> tuple[Statement, ...]:
        """The statements of the body."""
        return () if self.body is None else _statements(self.body, self.body_line)


@dataclass(frozen=True)
class Module:
    """A parsed PTX text."""

    version: tuple[int, int]
    target: tuple[str, ...]  # `("sm_90a",)`, possibly with `texmode_unified` or `debug`
    functions: tuple[Function, ...]
    outside: tuple[tuple[int, str], ...] = ()  # Text between functions, each with its first line.

    @lazy
    def variables(self) -> dict[str, Variable]:
        """The variables of the module by name. A definition replaces a declaration."""
        variables: dict[str, Variable] = {}
        for line, text in self.outside:
            for variable in declared_variables(text, line):
                if variable.name not in variables or ".extern" in variables[variable.name].linkage:
                    variables[variable.name] = variable
        return variables

    @lazy
    def bodies(self) -> dict[str, Function]:
        """The functions defined in the module, by name and by the names that `.alias` adds."""
        functions = {f.name: f for f in self.functions if f.body is not None}
        for _, text in self.outside:
            for alias in _ALIAS.finditer(text):
                if alias["target"] in functions:
                    functions[alias["name"]] = functions[alias["target"]]
        return functions

    @lazy
    def entries(self) -> dict[str, Function]:
        """The kernels defined in the module, by name."""
        return {f.name: f for f in self.functions if f.kind == "entry" and f.body is not None}


@lru_cache(maxsize=1)  # The build and then the emulator parse the same text.
def parse(text: str) -> Module:
    """Parse a PTX text, or raise `SyntaxFault`."""
    clean = blank_comments(text)
    version = _VERSION.search(clean)
    target = _TARGET.search(clean)
    if version is None or target is None:
        raise SyntaxFault(f"no .{'target' if version else 'version'} directive", 1)
    outside: list[tuple[int, str]] = []
    functions = tuple(_functions(clean, outside))
    return Module(
        version=(int(version[1]), int(version[2])),
        target=tuple(t.strip() for t in target[1].split(",") if t.strip()),
        functions=functions,
        outside=tuple(outside),
    )


def declared_variables(clean: str, first_line: int = 1) -> Iterator[Variable]:
    """Yield the variables that a text without comments declares, or raise `SyntaxFault`."""
    line = first_line
    counted = 0
    for match in _DECLARATION.finditer(clean):
        line += clean.count("\n", counted, match.start("space"))
        counted = match.start("space")
        words = re.findall(r"\.(\w+)", match["attributes"])
        kind = next((word for word in words if word in SIZES), None)
        if kind is None:
            raise SyntaxFault(f"variable {' '.join(match[0].split())!r} has no known type", line)
        wide = next((int(word[1:]) for word in words if word in ("v2", "v4")), 1)
        stated = _ALIGN.search(match["attributes"])
        align = (int(stated[1]) if stated else 0) or SIZES[kind] * wide
        for row in split_commas(match["rest"]):
            named = _DECLARED.fullmatch(row)
            if named is None:
                raise SyntaxFault(f"{row!r} declares no variable", line)
            extents = [int(n or 0) for n in re.findall(_EXTENT, named["extents"])] + [wide]
            size = SIZES[kind] * math.prod(extents)
            linkage = tuple(match["linkage"].split())
            initial = tuple(_elements((named["initial"] or "").strip(), extents))
            yield Variable(named["name"], match["space"], kind, align, size, initial, linkage, line)


def _elements(initial: str, extents: list[int]) -> Iterator[str]:
    """Yield the initial elements of a variable. Elements that a row omits are 0."""
    nested = initial.startswith("{") and "{" in initial[1:]
    if not nested:  # Most initialisers, including the long ones.
        items = initial.replace("{", " ").replace("}", " ").split(",")
        yield from filter(None, (" ".join(item.split()) for item in items))
        return
    for row in split_commas(initial[1:-1]):
        items = list(_elements(row, extents[1:]))
        yield from items
        if row.startswith("{"):
            yield from ["0"] * (math.prod(extents[1:]) - len(items))


def declared_registers(statement: Statement) -> list[tuple[str, int | None, str]]:
    """Return name, count and type of each register of a `.reg` statement.

    The count is 5 for `%r<5>` and None for `hl`. The type of a vector register is such as `v4.f32`.
    """
    registers = []
    declared = _REGISTERS.fullmatch(statement.text)
    for row in split_commas(declared["rest"]) if declared else ("",):
        named = _REGISTER.fullmatch(row)
        if declared is None or named is None or declared["kind"] not in (*SIZES, "pred"):
            raise SyntaxFault(f"{statement.text!r} declares no register", statement.line)
        kind = ".".join(filter(None, (declared["vector"], declared["kind"])))
        registers.append((named["name"], int(named["count"]) if named["count"] else None, kind))
    return registers


def _statements(clean: str, first_line: int = 1) -> tuple[Statement, ...]:
    """Return the statements of a body without comments. The braces of a scope are statements."""
    statements = []
    line = first_line
    at = 0
    while match := _STATEMENT.match(clean, at):
        piece = match[0]
        if folded := " ".join(piece.rstrip().removesuffix(";").split()):
            lead = len(piece) - len(piece.lstrip())
            statements.append(Statement(line + piece.count("\n", 0, lead), folded))
        line += piece.count("\n")
        at = match.end()
    return tuple(statements)


def _functions(clean: str, outside: list[tuple[int, str]]) -> Iterator[Function]:
    """Yield the functions of a text without comments, and append the text between them to `outside`."""
    at = 0
    breaks = [newline.start() for newline in re.finditer("\n", clean)]
    while match := _HEAD.search(clean, at):
        outside.append((bisect_left(breaks, at) + 1, clean[at : match.start()]))
        end = _head_end(clean, match.end())
        line = bisect_left(breaks, match.start("kind")) + 1
        body = None
        body_start = end
        at = end + 1
        if clean[end : end + 1] == "{":
            close = _matching_brace(clean, end)
            body_start = end + 1
            body = clean[body_start:close]
            at = close + 1
        yield Function(
            name=match["name"],
            kind=match["kind"],
            linkage=tuple(match["linkage"].split()),
            params=_params(match["params"] or "", line),
            returns=_params(match["returns"] or "", line),
            directives=_directives(clean[match.end() : end]),
            line=line,
            body=body,
            body_line=bisect_left(breaks, body_start) + 1,
            start=match.start(),
            end=at,
        )
    outside.append((bisect_left(breaks, at) + 1, clean[at:]))


def _head_end(clean: str, start: int) -> int:
    """Return where a function head ends: at its `{`, or at the `;` of a declaration."""
    for mark in _HEAD_END.finditer(clean, start):
        if not mark[0].startswith(".pragma"):
            return mark.start()
    return len(clean)


def _matching_brace(clean: str, opening: int) -> int:
    depth = 0
    for brace in _BRACE.finditer(clean, opening):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise SyntaxFault("a body is never closed", clean.count("\n", 0, opening) + 1)


def _directives(text: str) -> tuple[str, ...]:
    return tuple([" ".join(directive.split()) for directive in re.findall(r"\.\w+[^.]*", text)])


def _params(text: str, line: int) -> tuple[Param, ...]:
    params = []
    offset = 0
    for row in filter(None, map(str.strip, text.split(","))):
        # `.align` before `.ptr` is the parameter's, after it the pointee's.
        own, pointer, _ = row.partition(".ptr")
        kinds = [word for word in re.findall(r"\.(\w+)", own) if word in SIZES]
        kind = kinds[0] if kinds else None
        named = _PARAM.search(row)
        if kind is None or named is None:
            raise SyntaxFault(f"parameter {row!r} has no known type", line)
        extent = named["extent"]
        stated = _ALIGN.search(own)
        size = SIZES[kind] * (1 if extent is None else int(extent or 0))
        align = (int(stated[1]) if stated else 0) or SIZES[kind]
        offset = -(-offset // align) * align
        params.append(Param(named["name"], kind, offset, size, align, bool(pointer)))
        offset += size
    return tuple(params)
