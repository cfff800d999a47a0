"""Decode the statements of a function: resolve names in their scopes and parse operands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from preheat.emulator.addresses import to_int64
from preheat.model import ptx
from preheat.model.lexer import split_commas

__all__ = [
    "Address",
    "CompoundAddress",
    "DecodedFunction",
    "Expression",
    "Immediate",
    "Op",
    "Operand",
    "Register",
    "ResultPair",
    "SpecialRegister",
    "Symbol",
    "Vector",
    "VideoOperand",
    "decode",
]


class Register(NamedTuple):
    """A register of the function. Names from inner scopes contain the number of the scope."""

    name: str
    kind: str


class SpecialRegister(NamedTuple):
    """A special register, such as `%tid.x`."""

    name: str


class Immediate(NamedTuple):
    """A literal. Its value depends on the type that it is used as."""

    text: str

    def value(self, dtype: np.dtype[Any]) -> Any:
        """Return the literal as a NumPy scalar. `0f` and `0d` keep their bits in integer types."""
        text = self.text.lower()
        if text.startswith(("0f", "0d")):
            return _reinterpret(int(text[2:], 16), np.dtype("f4" if text[1] == "f" else "f8"), dtype)
        if dtype.kind == "f" and dtype.itemsize > 2:
            decimal = "." in text or ("e" in text and "x" not in text)
            return dtype.type(float(text) if decimal else _integer(text))
        number = _integer(text)
        if dtype.kind == "b":
            return np.bool_(number != 0)
        bits = number & ((1 << 8 * dtype.itemsize) - 1)
        return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]


class Symbol(NamedTuple):
    """A variable or function, and an offset from its beginning."""

    name: str
    offset: int = 0


class Address(NamedTuple):
    """`[base+offset]`."""

    base: Register | Symbol | Immediate
    offset: int


class Vector(NamedTuple):
    """`{a, b}`, the `(a, b)` of a call, or a vector register. An element `_` is None."""

    items: tuple[Operand | None, ...]


class CompoundAddress(NamedTuple):
    """`[a, {x, y}]`: a texture, surface or tensor map, and coordinates in it."""

    items: tuple[Operand | None, ...]


class ResultPair(NamedTuple):
    """`p|q`: two results."""

    items: tuple[Register | Vector | None, ...]


class Negated(NamedTuple):
    """`!p`."""

    register: Register


class VideoOperand(NamedTuple):
    """`%r1.b0` or `-%r1.h1`: the bytes or halves of a register that a video instruction uses."""

    register: Register
    parts: str  # "" for the whole register.
    negative: bool = False


class Expression(NamedTuple):
    """A constant expression such as `4*(2+1)`, or an address with one."""

    text: str


Operand = (
    Register
    | SpecialRegister
    | Immediate
    | Symbol
    | Address
    | Vector
    | CompoundAddress
    | ResultPair
    | Negated
    | VideoOperand
    | Expression
)


class Op(NamedTuple):
    """One instruction. `guard` is its guard predicate and whether that is negated."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand | None, ...]
    guard: tuple[Register, bool] | None = None

    @property
    def mnemonic(self) -> str:
        """The first part of the opcode: `ld` in `ld.global.f32`."""
        return _parts(self.opcode)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The other parts of the opcode: `("global", "f32")` in `ld.global.f32`."""
        return _parts(self.opcode)[1]


@cache
def _parts(opcode: str) -> tuple[str, tuple[str, ...]]:
    mnemonic, *modifiers = opcode.split(".")
    return mnemonic, tuple(modifiers)


@dataclass
class DecodedFunction:
    """A decoded function."""

    ops: list[Op] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # The index of the operation after each label.
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # `.branchtargets`.
    variables: dict[str, ptx.Variable] = field(default_factory=dict)


_Binding = Register | Vector | str


@dataclass
class _Scope:
    number: int
    outer: _Scope | None
    names: dict[str, _Binding] = field(default_factory=dict)  # Registers, variables, labels.
    register_ranges: dict[str, tuple[int, str]] = field(default_factory=dict)  # Such as `%r<5>`.

    def unique(self, name: str) -> str:
        return name if self.number == 0 else f"{name}@{self.number}"

    def register(self, name: str, kind: str) -> Register | Vector:
        """Return the register, or the elements of the vector register, that a name declares."""
        vector, _, element = kind.rpartition(".")
        axes = "xyzw"[: int(vector.removeprefix("v") or 0)]
        items = tuple(Register(self.unique(f"{name}.{axis}"), element) for axis in axes)
        return Vector(items) if items else Register(self.unique(name), kind)

    def find(self, name: str) -> _Binding | None:
        """Return what `name` refers to: a register, or the unique name of a variable or label."""
        scope: _Scope | None = self
        while scope is not None:
            if found := scope.names.get(name):
                return found
            base = name.rstrip("0123456789")
            count, kind = scope.register_ranges.get(base, (0, ""))
            if base != name and int(name[len(base) :]) < count:
                return scope.names.setdefault(name, scope.register(name, kind))
            scope = scope.outer
        return None


_NAME = r"[A-Za-z_$%][\w$]*"
_INTEGER = r"(?:0[xX][\da-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)[uU]?"
_FLOAT = r"0[fF][\da-fA-F]{8}|0[dD][\da-fA-F]{16}|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+"
_NUMBER = re.compile(rf"-?(?:{_INTEGER}|{_FLOAT})")
_OFFSET = rf"\s*(?:\+\s*(?P<plus>-?{_INTEGER})|-\s*(?P<minus>{_INTEGER}))?"
_ADDRESS = re.compile(rf"\[\s*(?P<base>{_NAME}|{_INTEGER}){_OFFSET}\s*\]")
_SYMBOL = re.compile(rf"(?P<base>{_NAME}){_OFFSET}")
_SPECIAL = re.compile(r"%[a-z]\w*(?:\.[xyzw])?")
_SELECTED = re.compile(rf"(?P<sign>-?)\s*(?P<name>{_NAME})(?:\.(?P<parts>[bh]\d{{1,4}}|[xyzwrgba]))?")
_TERM = rf"\(*\s*(?:[-~!]\s*)?(?:{_INTEGER})(?!\w)[\s)]*"
_SUM = rf"{_TERM}(?:(?:<<|>>|&&|\|\||[<>!=]=?|[-+*/%&|^?:])\s*{_TERM})+"
_EXPRESSION = re.compile(rf"{_SUM}|\[\s*{_NAME}\s*[-+]\s*{_SUM}\]")
_LABEL = re.compile(rf"({_NAME})\s*:")
_DIRECTIVE = re.compile(r"\.\w+")
_IGNORED = frozenset((".loc", ".file", ".pragma", ".callprototype", ".calltargets"))


def decode(function: ptx.Function, rejected: list[ptx.Statement] | None = None) -> DecodedFunction:
    """Return the operations of a function.

    A statement with invalid syntax raises `SyntaxFault`, or is skipped and added to `rejected`.
    """
    body = DecodedFunction()
    label = ""
    for scope, statement in list(_statements_with_scopes(function.statements, body, rejected)):
        if named := _LABEL.match(statement.text):
            label = scope.unique(named[1])
            body.labels[label] = len(body.ops)
        elif statement.text.startswith(".branchtargets"):
            targets = split_commas(statement.text.removeprefix(".branchtargets"))
            body.branch_targets[label] = tuple(str(scope.find(target)) for target in targets)
        else:
            try:
                body.ops.append(_operation(statement, scope))
            except ptx.SyntaxFault:
                if rejected is None:
                    raise
                rejected.append(statement)
    return body


def _statements_with_scopes(
    statements: tuple[ptx.Statement, ...], body: DecodedFunction, rejected: list[ptx.Statement] | None
) -> Iterator[tuple[_Scope, ptx.Statement]]:
    """Yield instructions and labels, each with its scope, and process declarations."""
    scope = _Scope(0, None)
    count = 0
    for statement in statements:
        text = statement.text
        if text == "{":
            count += 1
            scope = _Scope(count, scope)
        elif text == "}":
            if scope.outer is None:
                raise ptx.SyntaxFault("a brace closes nothing", statement.line)
            scope = scope.outer
        elif (directive := _DIRECTIVE.match(text)) and directive[0] != ".branchtargets":
            try:
                _declare(directive[0], statement, scope, body)
            except ptx.SyntaxFault:
                if rejected is None:
                    raise
                rejected.append(statement)
        else:
            if label := _LABEL.match(text):
                scope.names[label[1]] = scope.unique(label[1])
            yield scope, statement


def _declare(directive: str, statement: ptx.Statement, scope: _Scope, body: DecodedFunction) -> None:
    if directive == ".reg":
        _declare_registers(statement, scope)
    elif directive not in _IGNORED:
        _declare_variables(statement, scope, body)


def _declare_registers(statement: ptx.Statement, scope: _Scope) -> None:
    for name, count, kind in ptx.declared_registers(statement):
        if count is None:
            scope.names[name] = scope.register(name, kind)
        else:
            scope.register_ranges[name] = (count, kind)


def _declare_variables(statement: ptx.Statement, scope: _Scope, body: DecodedFunction) -> None:
    for variable in ptx.declared_variables(statement.text, statement.line):
        unique = scope.unique(variable.name)
        scope.names[variable.name] = unique
        body.variables[unique] = replace(variable, name=unique)


def _operation(statement: ptx.Statement, scope: _Scope) -> Op:
    guard = None
    instruction = statement.instruction()
    if text := instruction.guard:
        register = scope.find(text.lstrip("!"))
        if not isinstance(register, Register):
            raise ptx.SyntaxFault(f"{text} is no predicate", statement.line)
        guard = (register, text.startswith("!"))
    operands = tuple(_operand(text, scope, statement.line) for text in instruction.operands)
    return Op(statement.line, statement.text, instruction.opcode, operands, guard)


def _operand(text: str, scope: _Scope, line: int) -> Operand | None:
    if text == "_":
        return None
    if _NUMBER.fullmatch(text):
        return Immediate(text)
    if text[:1] not in "%_" and _EXPRESSION.fullmatch(text):
        return Expression(text)
    if "|" in text:
        return ResultPair(tuple(_result(item.strip(), scope, line) for item in text.split("|")))
    if text.startswith(("{", "(")):
        return Vector(_operand_list(text, scope, line))
    if text.startswith("!") and (negated := _register(text[1:].strip(), scope, line)):
        return Negated(negated)
    named = _address(text, scope, line) if text.startswith("[") else _identifier(text, scope)
    if named is None:
        raise ptx.SyntaxFault(f"{text!r} is no operand", line)
    return named


def _operand_list(text: str, scope: _Scope, line: int) -> tuple[Operand | None, ...]:
    """Return the operands between brackets."""
    if text[-1] != {"{": "}", "(": ")", "[": "]"}[text[0]]:
        raise ptx.SyntaxFault(f"{text!r} is no operand", line)
    return tuple(_operand(item, scope, line) for item in split_commas(text[1:-1]))


def _result(text: str, scope: _Scope, line: int) -> Register | Vector | None:
    """Return one of two results. A texture instruction's result is a vector."""
    return (
        Vector(_operand_list(text, scope, line))
        if text.startswith("{")
        else _register(text, scope, line)
    )


def _address(text: str, scope: _Scope, line: int) -> Address | CompoundAddress | None:
    if "," in text:
        return CompoundAddress(_operand_list(text, scope, line))
    match = _ADDRESS.fullmatch(text)
    base = _operand(match["base"], scope, line) if match else None
    if match and isinstance(base, Symbol):
        return Address(base._replace(offset=_offset(match)), 0)
    if match and isinstance(base, Register | Immediate):
        return Address(base, _offset(match))
    return None


def _identifier(text: str, scope: _Scope) -> Operand | None:
    """Return a register, a special register, or a variable with an offset."""
    found = scope.find(text)
    if isinstance(found, Register | Vector):
        return found
    if text == "WARP_SZ":
        return Immediate("32")
    if (match := _SELECTED.fullmatch(text)) and (parts := _register_part(match, scope)):
        return parts
    if found is None and _SPECIAL.fullmatch(text):
        return SpecialRegister(text)
    if (match := _SYMBOL.fullmatch(text)) is None:
        return None
    inner = scope.find(match["base"])
    return Symbol(inner if isinstance(inner, str) else match["base"], _offset(match))


def _register_part(match: re.Match[str], scope: _Scope) -> Operand | None:
    """Return an element of a vector register, or parts of another register."""
    found = scope.find(match["name"])
    parts = match["parts"] or ""
    axis = max("xyzw".find(parts), "rgba".find(parts)) if parts else -1
    if isinstance(found, Vector) and 0 <= axis < len(found.items) and not match["sign"]:
        return found.items[axis]
    if isinstance(found, Register) and axis < 0:
        return VideoOperand(found, parts, bool(match["sign"]))
    return None


def _offset(match: re.Match[str]) -> int:
    """Return an offset as a signed 64-bit integer."""
    return to_int64(_integer(match["plus"] or "0") - _integer(match["minus"] or "0"))


def _register(text: str, scope: _Scope, line: int) -> Register | None:
    found = None if text == "_" else scope.find(text)
    if text != "_" and not isinstance(found, Register):
        raise ptx.SyntaxFault(f"{text!r} is no register", line)
    return found if isinstance(found, Register) else None


def _integer(text: str) -> int:
    """Return an integer in any base of PTX. A leading zero makes it octal."""
    text = text.rstrip("uU")
    digits = text.lstrip("+-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(text, 8 if octal else 0)


def _reinterpret(bits: int, written: np.dtype[Any], wanted: np.dtype[Any]) -> Any:
    exact = np.array(bits, f"u{written.itemsize}").view(written)
    if wanted.kind != "f":
        exact = exact.view(f"u{written.itemsize}")
    return exact.astype(wanted)[()]
