"""Write a basic block as a Python function over arrays.

Inside the function, registers are local variables. The type that each holds (`float32`, `uint32`) is
known, so reading a register as it was written costs nothing. Live registers are written back at the
end; the others are deleted after their last use, because recently freed memory is still in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.devices.emulator.control_flow import Block, used
from preheat.devices.emulator.decode import (
    Address,
    Negated,
    Number,
    Op,
    Operand,
    Register,
    Special,
    Symbol,
)
from preheat.devices.emulator.special_registers import DYNAMIC, SPECIAL
from preheat.devices.emulator.variant import TYPES
from preheat.errors import UnsupportedInstructionError
from preheat.toolchain import ptx

if TYPE_CHECKING:
    from preheat.devices.emulator.generate import Generator

__all__ = ["BOOL", "I64", "U32", "U64", "DType", "Registers", "Writer", "register_type"]

DType = np.dtype[Any]
_I32 = np.dtype(np.int32)  # Addresses of 32 bits wrap around: a negative one is an offset backwards.
BOOL, U32, U64, I64 = (np.dtype(t) for t in (np.bool_, np.uint32, np.uint64, np.int64))


class Registers:
    """Slot numbers for the registers of a function, and the type of each between blocks."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.names: list[str] = []
        self.kept: list[DType] = []
        self.special: list[tuple[int, str]] = []
        self.symbols: list[tuple[int, str]] = []

    def add(self, name: str, dtype: DType) -> int:
        """Return the slot of a register, adding one if needed."""
        if name not in self.number:
            self.number[name] = len(self.kept)
            self.names.append(name)
            self.kept.append(dtype)
        return self.number[name]

    def add_special(self, name: str) -> int:
        """Return the slot of a special register."""
        if name not in self.number:
            self.special.append((self.add(name, SPECIAL[name]), name))
        return self.number[name]

    def add_symbol(self, name: str) -> int:
        """Return the slot that holds the address of a variable."""
        key = f"&{name}"
        if key not in self.number:
            self.symbols.append((self.add(key, U64), name))
        return self.number[key]


class Writer:
    """Writes the function of one block."""

    def __init__(self, code: Generator, block: Block) -> None:
        self.code = code
        self.block = block
        self.lines: list[str] = []
        self.names: dict[
            int, dict[DType, str]
        ] = {}  # Local variables that hold each register, by type.
        self.fresh: dict[int, DType] = {}  # The type that a register was last written or first read as.
        self.written: set[int] = set()
        self.places: dict[tuple[str, str], str] = {}
        self.op = block.ops[0]
        self.count = 0

    # Values in and out

    def variable(self) -> str:
        """Return a new local variable."""
        self.count += 1
        return f"v{self.count}"

    def let(self, expression: str) -> str:
        """Return a new local variable that holds `expression`."""
        name = self.variable()
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, value: Any) -> str:
        """Return the name of a value in the function's globals."""
        return self.code.constant(value)

    def site(self) -> int:
        """Return the number of the operation being written."""
        return self.code.site(self.op)

    def held(self, slot: int) -> tuple[str, DType]:
        """Return a local variable with a register's value, and its type."""
        if slot not in self.fresh:
            kept = self.code.registers.kept[slot]
            name = self.let(f"R[{slot}]")
            self.lines.append(f"if {name} is None: {name} = G.fetch({slot})")
            if self.code.drops(self.block, slot):
                self.lines.append(f"R[{slot}] = None")
            self.fresh[slot] = kept
            self.names[slot] = {kept: name}
        dtype = self.fresh[slot]
        return self.names[slot][dtype], dtype

    def slot_of(self, operand: Operand | None) -> int:
        """Return the slot of an operand that is in a register."""
        if isinstance(operand, Register):
            if register_type(operand.kind).kind == "V":
                raise self.unsupported(f"registers of type .{operand.kind}")
            return self.code.registers.add(operand.name, register_type(operand.kind))
        if isinstance(operand, Special):
            if operand.name not in SPECIAL:
                raise self.unsupported(operand.name)
            return self.code.registers.add_special(operand.name)
        if isinstance(operand, Symbol):
            return self.code.registers.add_symbol(operand.name)
        raise self.unsupported()

    def number(self, operand: Number, dtype: DType) -> Any:
        """Return a literal as `dtype`."""
        try:
            return operand.value(dtype)
        except ValueError:
            raise self.unsupported(f"{operand.text} as an integer") from None

    def read(self, operand: Operand | None, dtype: DType) -> str:
        """Return an expression for an operand as `dtype`."""
        if isinstance(operand, Number):
            return self.constant(self.number(operand, dtype))
        if isinstance(operand, Negated):
            return f"~{self.read(operand.register, BOOL)}"
        if isinstance(operand, Special) and operand.name in DYNAMIC:
            return self._clock(operand.name.endswith("_hi"), dtype)
        slot = self.slot_of(operand)
        name, held = self.held(slot)
        if held != dtype:
            name = self.names[slot].get(dtype) or self.let(_as(name, held, dtype, self.constant))
            self.names[slot][dtype] = name
        if isinstance(operand, Symbol) and operand.offset:
            return f"({name} + {self.constant(np.int64(operand.offset).astype(dtype))})"
        return name

    def _clock(self, upper: bool, dtype: DType) -> str:
        """Return as much of the clock as a type holds, from its upper half if `upper`."""
        bits = np.dtype(f"u{dtype.itemsize}")
        mask = (1 << 8 * dtype.itemsize) - 1
        word = f"{self.constant(bits.type)}(W.clock() >> {32 * upper} & {mask})"
        return word if dtype == bits else f"{word}.view({self.constant(dtype)})"

    def read_bits(self, operand: Operand | None, size: int) -> tuple[str, DType]:
        """Return an operand as the type of `size` bytes that it currently has."""
        unsigned = np.dtype(f"u{size}")
        if isinstance(operand, Register):
            _, held = self.held(self.slot_of(operand))
            if held.itemsize == size and held != BOOL:
                return self.read(operand, held), held
        return self.read(operand, unsigned), unsigned

    def write(self, operand: Operand | None, name: str, dtype: DType) -> None:
        """Let a register hold the local variable `name`."""
        if operand is None:
            return
        if not isinstance(operand, Register):
            raise self.unsupported()
        slot = self.slot_of(operand)
        wanted = register_type(operand.kind)
        if dtype.itemsize != wanted.itemsize:
            wide = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{wanted.itemsize}")
            name = self.let(_as(name, dtype, wide, self.constant))
            dtype = wide
        self.fresh[slot] = dtype
        self.names[slot] = {dtype: name}
        self.written.add(slot)
        self.places = {key: place for key, place in self.places.items() if key[0] != f"R{slot}"}

    def write_all(
        self, operands: tuple[Operand | None, ...], types: tuple[DType, ...], call: str
    ) -> None:
        """Write the results of `call`: one value, or as many as there are operands."""
        names = [self.variable() for _ in operands]
        self.lines.append(f"{', '.join(names)} = {call}")
        for operand, name, dtype in zip(operands, names, types, strict=False):
            self.write(operand, name, dtype)

    def result_type(self, operand: Operand | None, plain: DType) -> DType:
        """Return the type that a register has between blocks, if untyped bits may be written to it."""
        if isinstance(operand, Register):
            kept = self.code.registers.kept[self.slot_of(operand)]
            if kept.itemsize == plain.itemsize and plain.kind == "u" and kept != BOOL:
                return kept
        return plain

    def unsupported(self, what: str | None = None) -> UnsupportedInstructionError:
        """Return the error for an operation that the emulator does not support."""
        return self.code.unsupported(self.op, what)

    def needed(self, operand: Operand) -> bool:
        """Return whether a register that the current operation sets is read later."""
        if not isinstance(operand, Register):
            return True
        later = self.block.ops[self.block.ops.index(self.op) + 1 :]
        return operand.name in self.block.live_out or any(operand in used(op) for op in later)

    # Addresses

    def place(self, address: Address, space: str) -> str:
        """Return a local variable with the `Place` of an address without its offset."""
        base = address.base
        slot = self.slot_of(base) if not isinstance(base, Number) else -1
        key = (f"R{slot}" if slot >= 0 else f"#{base}", space)
        if key not in self.places:
            narrow = isinstance(base, Register) and register_type(base.kind).itemsize == 4
            value = self.read(
                base._replace(offset=0) if isinstance(base, Symbol) else base, _I32 if narrow else I64
            )
            find = "place_shared" if space in ("shared", "cluster") else "place"
            generic = space == "generic"
            call = f"place_generic(G, {value})" if generic else f"{find}(G, {value}, {space!r})"
            self.places[key] = self.let(call)
        return self.places[key]

    def address(self, operand: Operand | None, space: str) -> tuple[str, int]:
        """Return the place of an address operand, and the offset from it."""
        if not isinstance(operand, Address):
            raise self.unsupported()
        offset = operand.base.offset if isinstance(operand.base, Symbol) else operand.offset
        return self.place(operand, self.space_of(operand, space)), offset

    def space_of(self, address: Address, named: str) -> str:
        """Return the space of an address. Parameters are in local or in global memory."""
        if named != "param":
            return {"const": "global"}.get(named, named)
        local = isinstance(address.base, Symbol) and address.base.name in self.code.offsets
        return "local" if local or not self.code.is_entry else "global"

    # The function

    def function(self, name: str, emit: Callable[[Writer, Op], str | None]) -> str:
        """Return the text of the block's function. `emit` writes each operation."""
        result = None
        for op in self.block.ops:
            result = emit(self, op)
        for slot in sorted(self.written):
            register = self.code.registers.names[slot]
            if register in self.block.live_out:
                held, dtype = self.held(slot)
                kept = self.code.registers.kept[slot]
                value = held if dtype == kept else _as(held, dtype, kept, self.constant)
                self.lines.append(f"R[{slot}] = {value}")
        return self._text(name, result or "None")

    def operand_function(self, name: str, operand: Operand | None) -> str:
        """Return the text of a function that returns an operand of the block's first operation."""
        self.op = self.block.ops[0]
        return self._text(name, self.read(operand, U32))

    def _text(self, name: str, result: str) -> str:
        body = "\n    ".join(_with_deletes([*self.lines, f"return {result}"]))
        return f"def {name}(G, R, W):\n    {body}\n"


def register_type(kind: str) -> DType:
    """Return the type of a declared register; a void type if it is too wide."""
    return TYPES[kind] if kind in TYPES else np.dtype(f"V{ptx.SIZES[kind]}")


def _as(name: str, held: DType, wanted: DType, constant: Callable[[Any], str]) -> str:
    """Return an expression for `name` with the bits of `held` as `wanted`."""
    if held.itemsize == wanted.itemsize:
        return f"{name}.view({constant(wanted)})"
    if held.kind == "f":
        name = f"{name}.view({constant(np.dtype(f'u{held.itemsize}'))})"
    if wanted.kind == "f":
        between = constant(np.dtype(f"u{wanted.itemsize}"))
        return f"{name}.astype({between}).view({constant(wanted)})"
    return f"{name}.astype({constant(wanted)})"


def _with_deletes(lines: list[str]) -> list[str]:
    """Return the lines, each followed by a `del` of the local variables that it reads last."""
    last: dict[str, int] = {}
    for at, line in enumerate(lines):
        for name in re.findall(r"\bv\d+\b", line):
            last[name] = at
    ends: dict[int, list[str]] = {}
    for name, at in last.items():
        ends.setdefault(at, []).append(name)
    out = []
    for at, line in enumerate(lines):
        out.append(line)
        if at in ends and at < len(lines) - 1:
            out.append(f"del {', '.join(ends[at])}")
    return out
