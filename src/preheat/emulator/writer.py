"""Write a basic block as a Python function over arrays.

Inside the function, registers are local variables. The type of each variable (`float32`, `uint32`) is
known, so reading a register as it was written costs nothing. Live registers are written back at the
end; the others are deleted after their last use, because recently freed memory is still in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator.control_flow import BasicBlock, uses
from preheat.emulator.decode import (
    Address,
    Immediate,
    Negated,
    Op,
    Operand,
    Register,
    SpecialRegister,
    Symbol,
)
from preheat.emulator.special_registers import DYNAMIC, SPECIAL
from preheat.emulator.variant import TYPES
from preheat.errors import UnsupportedInstructionError
from preheat.model import ptx

if TYPE_CHECKING:
    from preheat.emulator.generate import Generator

__all__ = ["BOOL", "I64", "U32", "U64", "DType", "RegisterSlots", "Writer", "register_type"]

DType = np.dtype[Any]
_I32 = np.dtype(np.int32)  # Addresses of 32 bits wrap around: a negative one is an offset backwards.
BOOL, U32, U64, I64 = (np.dtype(t) for t in (np.bool_, np.uint32, np.uint64, np.int64))


class RegisterSlots:
    """Slot numbers for the registers of a function, and the type of each between blocks."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.names: list[str] = []
        self.types: list[DType] = []
        self.special_slots: list[tuple[int, str]] = []
        self.symbol_slots: list[tuple[int, str]] = []

    def add(self, name: str, dtype: DType) -> int:
        """Return the slot of a register, adding one if needed."""
        if name not in self.slots:
            self.slots[name] = len(self.types)
            self.names.append(name)
            self.types.append(dtype)
        return self.slots[name]

    def add_special(self, name: str) -> int:
        """Return the slot of a special register."""
        if name not in self.slots:
            self.special_slots.append((self.add(name, SPECIAL[name]), name))
        return self.slots[name]

    def add_symbol(self, name: str) -> int:
        """Return the slot that holds the address of a variable."""
        key = f"&{name}"
        if key not in self.slots:
            self.symbol_slots.append((self.add(key, U64), name))
        return self.slots[key]


class Writer:
    """Writes the function of one block."""

    def __init__(self, generator: Generator, block: BasicBlock) -> None:
        self.generator = generator
        self.block = block
        self.lines: list[str] = []
        # The local variables that hold each register, by slot and type.
        self.names: dict[int, dict[DType, str]] = {}
        # The type that each register was last written or first read as.
        self.current_types: dict[int, DType] = {}
        self.written_slots: set[int] = set()
        # The local variables with the addresses of each base, by base and state space.
        self.resolved: dict[tuple[str, str], str] = {}
        self.op = block.ops[0]  # The operation that is being emitted.
        self.count = 0  # Of local variables.

    # Reading and writing registers

    def new_local(self) -> str:
        """Return a new local variable."""
        self.count += 1
        return f"v{self.count}"

    def assign(self, expression: str) -> str:
        """Emit the assignment of `expression` to a new local variable, and return the variable."""
        name = self.new_local()
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, value: Any) -> str:
        """Return the name of a value in the function's globals."""
        return self.generator.constant(value)

    def site(self) -> int:
        """Return the site of the operation that is being emitted: its index among all operations."""
        return self.generator.site(self.op)

    def load_register(self, slot: int) -> tuple[str, DType]:
        """Return a local variable that holds a register, and its type."""
        if slot not in self.current_types:
            stored_type = self.generator.registers.types[slot]
            name = self.assign(f"R[{slot}]")
            self.lines.append(f"if {name} is None: {name} = G.fetch({slot})")
            if self.generator.is_last_read(self.block, slot):
                self.lines.append(f"R[{slot}] = None")
            self.current_types[slot] = stored_type
            self.names[slot] = {stored_type: name}
        dtype = self.current_types[slot]
        return self.names[slot][dtype], dtype

    def slot_of(self, operand: Operand | None) -> int:
        """Return the slot of a register, a special register, or the address of a symbol."""
        if isinstance(operand, Register):
            if register_type(operand.kind).kind == "V":
                raise self.unsupported(f"registers of type .{operand.kind}")
            return self.generator.registers.add(operand.name, register_type(operand.kind))
        if isinstance(operand, SpecialRegister):
            if operand.name not in SPECIAL:
                raise self.unsupported(operand.name)
            return self.generator.registers.add_special(operand.name)
        if isinstance(operand, Symbol):
            return self.generator.registers.add_symbol(operand.name)
        raise self.unsupported()

    def immediate(self, operand: Immediate, dtype: DType) -> Any:
        """Return a literal as `dtype`."""
        try:
            return operand.value(dtype)
        except ValueError:
            raise self.unsupported(f"{operand.text} as an integer") from None

    def read(self, operand: Operand | None, dtype: DType) -> str:
        """Return an expression for an operand as `dtype`."""
        if isinstance(operand, Immediate):
            return self.constant(self.immediate(operand, dtype))
        if isinstance(operand, Negated):
            return f"~{self.read(operand.register, BOOL)}"
        if isinstance(operand, SpecialRegister) and operand.name in DYNAMIC:
            return self._clock(operand.name.endswith("_hi"), dtype)
        slot = self.slot_of(operand)
        name, held_type = self.load_register(slot)
        if held_type != dtype:
            name = self.names[slot].get(dtype) or self.assign(self._convert(name, held_type, dtype))
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
            _, held_type = self.load_register(self.slot_of(operand))
            if held_type.itemsize == size and held_type != BOOL:
                return self.read(operand, held_type), held_type
        return self.read(operand, unsigned), unsigned

    def write(self, operand: Operand | None, name: str, dtype: DType) -> None:
        """Write the local variable `name`, of type `dtype`, to a register. `_` has no register."""
        if operand is None:
            return
        if not isinstance(operand, Register):
            raise self.unsupported()
        slot = self.slot_of(operand)
        wanted = register_type(operand.kind)
        if dtype.itemsize != wanted.itemsize:
            wide = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{wanted.itemsize}")
            name = self.assign(self._convert(name, dtype, wide))
            dtype = wide
        self.current_types[slot] = dtype
        self.names[slot] = {dtype: name}
        self.written_slots.add(slot)
        self.resolved = {key: name for key, name in self.resolved.items() if key[0] != f"R{slot}"}

    def write_results(
        self, operands: tuple[Operand | None, ...], types: tuple[DType, ...], call: str
    ) -> None:
        """Write the results of `call`: one value, or as many as there are operands."""
        names = [self.new_local() for _ in operands]
        self.lines.append(f"{', '.join(names)} = {call}")
        for operand, name, dtype in zip(operands, names, types, strict=False):
            self.write(operand, name, dtype)

    def result_type(self, operand: Operand | None, plain: DType) -> DType:
        """Return the type to load or move untyped bits as: the register's type between blocks."""
        if isinstance(operand, Register):
            stored_type = self.generator.registers.types[self.slot_of(operand)]
            if stored_type.itemsize == plain.itemsize and plain.kind == "u" and stored_type != BOOL:
                return stored_type
        return plain

    def _convert(self, name: str, held_type: DType, wanted: DType) -> str:
        """Return an expression for the bits of `name`, which has the type `held_type`, as `wanted`."""
        constant = self.constant
        if held_type.itemsize == wanted.itemsize:
            return f"{name}.view({constant(wanted)})"
        if held_type.kind == "f":
            name = f"{name}.view({constant(np.dtype(f'u{held_type.itemsize}'))})"
        if wanted.kind == "f":
            between = constant(np.dtype(f"u{wanted.itemsize}"))
            return f"{name}.astype({between}).view({constant(wanted)})"
        return f"{name}.astype({constant(wanted)})"

    def unsupported(self, what: str | None = None) -> UnsupportedInstructionError:
        """Return the error for an operation that the emulator does not support."""
        return self.generator.unsupported(self.op, what)

    def is_read_later(self, operand: Operand) -> bool:
        """Return whether a register that the current operation sets is read later."""
        if not isinstance(operand, Register):
            return True
        later = self.block.ops[self.block.ops.index(self.op) + 1 :]
        return operand.name in self.block.live_out or any(operand in uses(op) for op in later)

    # Addresses

    def resolve(self, address: Address, space: str) -> str:
        """Return a local variable with the `Addresses` of an address without its offset."""
        base = address.base
        slot = self.slot_of(base) if not isinstance(base, Immediate) else -1
        key = (f"R{slot}" if slot >= 0 else f"#{base}", space)
        if key not in self.resolved:
            narrow = isinstance(base, Register) and register_type(base.kind).itemsize == 4
            start = base._replace(offset=0) if isinstance(base, Symbol) else base
            value = self.read(start, _I32 if narrow else I64)
            function = "resolve_shared" if space in ("shared", "cluster") else "resolve"
            call = f"{function}(G, {value}, {space!r})"
            if space == "generic":
                call = f"resolve_generic(G, {value})"
            self.resolved[key] = self.assign(call)
        return self.resolved[key]

    def address(self, operand: Operand | None, space: str) -> tuple[str, int]:
        """Return the addresses of an address operand without its offset, and the offset."""
        if not isinstance(operand, Address):
            raise self.unsupported()
        offset = operand.base.offset if isinstance(operand.base, Symbol) else operand.offset
        return self.resolve(operand, self.space_of(operand, space)), offset

    def space_of(self, address: Address, named: str) -> str:
        """Return the space of an address. Parameters are in local or in global memory."""
        if named != "param":
            return {"const": "global"}.get(named, named)
        local = isinstance(address.base, Symbol) and address.base.name in self.generator.local_offsets
        return "local" if local or not self.generator.is_entry else "global"

    # The function

    def function_source(self, name: str, emit: Callable[[Writer, Op], str | None]) -> str:
        """Return the source of the block's function. `emit` emits each operation."""
        result = None
        for op in self.block.ops:
            result = emit(self, op)
        for slot in sorted(self.written_slots):
            register = self.generator.registers.names[slot]
            if register in self.block.live_out:
                local, dtype = self.load_register(slot)
                stored_type = self.generator.registers.types[slot]
                value = local if dtype == stored_type else self._convert(local, dtype, stored_type)
                self.lines.append(f"R[{slot}] = {value}")
        return self._function_text(name, result or "None")

    def operand_source(self, name: str, operand: Operand | None) -> str:
        """Return the source of a function that returns an operand of the block's first operation."""
        self.op = self.block.ops[0]
        return self._function_text(name, self.read(operand, U32))

    def _function_text(self, name: str, result: str) -> str:
        body = "\n    ".join(_with_deletions([*self.lines, f"return {result}"]))
        return f"def {name}(G, R, W):\n    {body}\n"


def register_type(kind: str) -> DType:
    """Return the type of a declared register; a void type if it is too wide."""
    return TYPES[kind] if kind in TYPES else np.dtype(f"V{ptx.SIZES[kind]}")


def _with_deletions(lines: list[str]) -> list[str]:
    """Return the lines, each followed by a `del` of the local variables that it reads last."""
    last_use: dict[str, int] = {}
    for index, line in enumerate(lines):
        for name in re.findall(r"\bv\d+\b", line):
            last_use[name] = index
    dead_after: dict[int, list[str]] = {}
    for name, index in last_use.items():
        dead_after.setdefault(index, []).append(name)
    result = []
    for index, line in enumerate(lines):
        result.append(line)
        if index in dead_after and index < len(lines) - 1:
            result.append(f"del {', '.join(dead_after[index])}")
    return result
