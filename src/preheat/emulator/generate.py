"""Compile a PTX function: every reachable basic block becomes a Python function with successors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from preheat.emulator import sanitize as checks
from preheat.emulator.control_flow import (
    BasicBlock,
    basic_blocks,
    defs,
    is_barrier,
    is_cluster_barrier,
    is_matrix_instruction,
    synchronizes_warp,
    uses,
)
from preheat.emulator.decode import Immediate, Op, Register, decode
from preheat.emulator.emit import EMITTERS, NAMESPACE, call_operands, emit
from preheat.emulator.errors import unsupported
from preheat.emulator.memory import align_up
from preheat.emulator.special_registers import SPECIAL
from preheat.emulator.table import instruction, mnemonics
from preheat.emulator.writer import DType, RegisterSlots, Writer, register_type
from preheat.errors import UnsupportedInstructionError
from preheat.model import ptx

__all__ = ["CompiledBlock", "CompiledFunction", "Generator", "generate"]

#: The compiled function of a block takes a group, its registers and the wave.
BlockFunction = Callable[[Any, list[Any], Any], Any]

_ALL_LANES = Immediate("0xffffffff")
_NO_CALL: tuple[None, tuple[str, ...], tuple[str, ...]] = None, (), ()
_TERMINATORS = {
    "bra": "branch",
    "brx": "branch_table",
    "call": "call",
    "ret": "ret",
    "exit": "exit",
    "trap": "trap",
}


@dataclass
class CompiledBlock:
    """A compiled basic block and its successors. A site is the index of an operation in `ops`."""

    index: int
    terminator: str  # How the block ends: a key of `_TERMINATORS` in `wave`.
    successors: tuple[int, ...]
    first_site: int  # The site of its first operation.
    site: int  # The site of its last operation.
    live_in: frozenset[int]  # The slots of registers, here and below.
    live_out: frozenset[int]
    defs: frozenset[int]
    run: BlockFunction = field(init=False)
    mask: BlockFunction | None = None  # Returns the mask of the threads that it waits for.
    callee: str | None = None
    arguments: tuple[str, ...] = ()  # The variables that hold the arguments of a call.
    returns: tuple[str, ...] = ()  # The variables that get the results of a call.
    only_exits: bool = False  # The block does nothing but return or end the thread.


@dataclass
class CompiledFunction:
    """A compiled function. Registers, special registers and symbols have slot numbers."""

    name: str
    blocks: dict[int, CompiledBlock]  # The reachable blocks by index.
    ops: list[Op]  # The operations by site.
    zeros: list[Any]  # The zero of each slot's type.
    special_slots: list[tuple[int, str]]  # The slot and name of each special register.
    symbol_slots: list[tuple[int, str]]  # The slot and name of each symbol whose address is used.
    local_offsets: dict[str, int]  # Offsets of variables, parameters and results in local memory.
    local_sizes: dict[str, int]  # Sizes of the same variables.
    frame_bytes: int  # The size of its local memory.
    local_align: int
    parameters: dict[str, int]  # The offsets of a kernel's parameters in the parameter buffer.
    arguments: list[tuple[int, int]]  # The offset and size of each argument in local memory.
    returns: list[tuple[int, int]]  # The offset and size of each result in local memory.
    callees: frozenset[str]
    has_indirect_calls: bool
    variables: dict[str, ptx.Variable]
    takes_parameter_address: bool


class Generator:
    """Generates the code of one PTX function."""

    def __init__(
        self,
        function: ptx.Function,
        rejected: list[ptx.Statement] | None = None,
        *,
        sanitize: bool = False,
    ) -> None:
        self.function = function
        self.sanitize = sanitize
        self.is_entry = function.kind == "entry"
        self.body = decode(function, rejected)
        self.blocks = basic_blocks(self.body)
        self.registers = RegisterSlots()
        self.ops = [op for block in self.blocks for op in block.ops]
        self._site_of = {id(op): site for site, op in enumerate(self.ops)}
        self.globals: dict[str, Any] = {}
        self._constants: dict[Any, str] = {}
        self.callees: set[str] = set()
        self.has_indirect_calls = False
        variables = self._local_variables()
        self.local_offsets, self.frame_bytes = _layout(variables)
        self.local_sizes = {variable.name: variable.size for variable in variables}
        self.local_align = max([16, *(variable.align for variable in variables)])
        self.parameters = {p.name: p.offset for p in function.params} if self.is_entry else {}
        self.parameter_bytes = max((p.offset + p.size for p in function.params), default=0)
        self._choose_types()

    def _local_variables(self) -> list[ptx.Variable | ptx.Param]:
        """Return the variables in the function's local memory."""
        variables: list[ptx.Variable | ptx.Param] = [
            variable
            for variable in self.body.variables.values()
            if variable.space in ("local", "param")
        ]
        if not self.is_entry:
            variables += [*self.function.params, *self.function.returns]
        return variables

    def _choose_types(self) -> None:
        """Store each register as the type that most instructions use it as."""
        votes: dict[str, Counter[DType]] = {}
        for block in self.blocks:
            for op in block.ops:
                for register in (*defs(op), *uses(op)):
                    self.registers.add(register.name, register_type(register.kind))
                found = None if op.mnemonic in ("mov", "selp") else instruction(op.opcode)
                if found is None:
                    continue
                types = (*found.results[:1], *found.sources)
                for operand, dtype in zip(op.operands, types, strict=False):
                    if not isinstance(operand, Register):
                        continue
                    if register_type(operand.kind).itemsize == dtype.itemsize:
                        votes.setdefault(operand.name, Counter())[dtype] += 1
        for name, counts in votes.items():
            self.registers.types[self.registers.slots[name]] = counts.most_common(1)[0][0]

    def constant(self, value: Any) -> str:
        """Return the name of a value in the globals of generated functions."""
        key = (type(value), value.tobytes() if isinstance(value, np.generic) else value)
        if key not in self._constants:
            self._constants[key] = f"c{len(self._constants)}"
            self.globals[self._constants[key]] = value
        return self._constants[key]

    def site(self, op: Op) -> int:
        """Return the number of an operation, by which an error finds its line."""
        return self._site_of[id(op)]

    def is_last_read(self, block: BasicBlock, slot: int) -> bool:
        """Return whether the old value of a register is unused once this block has read it."""
        name = self.registers.names[slot]
        if name.startswith("&") or name in SPECIAL:
            return False
        return name not in block.live_out or name in block.defs

    def unsupported(self, op: Op, what: str | None = None) -> UnsupportedInstructionError:
        """Return the error for an operation that the emulator does not support."""
        other_variants = op.mnemonic in EMITTERS or op.mnemonic in mnemonics()
        return unsupported(self.function.name, op, what, other_variants=other_variants)

    def compiled(self) -> CompiledFunction:
        """Return the compiled function."""
        self.globals.update(NAMESPACE)
        if self.sanitize:
            self.globals.update(checks.NAMESPACE)
        reachable = [block for block in self.blocks if block.reachable]
        # All sources are written first, because writing them assigns slots to registers.
        sources = [dict(self._sources(block)) for block in reachable]
        offsets = self.local_offsets
        return CompiledFunction(
            name=self.function.name,
            blocks={
                block.index: self._compiled_block(block, source)
                for block, source in zip(reachable, sources, strict=True)
            },
            ops=self.ops,
            zeros=[dtype.type(0) for dtype in self.registers.types],
            special_slots=self.registers.special_slots,
            symbol_slots=self.registers.symbol_slots,
            local_offsets=offsets,
            local_sizes=self.local_sizes,
            frame_bytes=self.frame_bytes,
            local_align=self.local_align,
            parameters=self.parameters,
            arguments=[(offsets[p.name], p.size) for p in self.function.params if not self.is_entry],
            returns=[(offsets[p.name], p.size) for p in self.function.returns],
            callees=frozenset(self.callees),
            has_indirect_calls=self.has_indirect_calls,
            variables=self.body.variables,
            takes_parameter_address=any(
                name in self.parameters for _, name in self.registers.symbol_slots
            ),
        )

    def _sources(self, block: BasicBlock) -> Iterator[tuple[str, str]]:
        """Yield the source of a block's functions: `run` and, if it synchronizes a warp, `mask`."""
        yield "run", Writer(self, block).function_source("run", emit)
        first = block.ops[0]
        if synchronizes_warp(first):
            mask = _ALL_LANES if is_matrix_instruction(first) else first.operands[-1]
            first_op = BasicBlock(block.index, block.ops[:1], live_out=set(self.registers.slots))
            yield "mask", Writer(self, first_op).operand_source("mask", mask)

    def _compiled_block(self, block: BasicBlock, sources: dict[str, str]) -> CompiledBlock:
        slots = self.registers.slots
        end = block.terminator
        kind = "next"
        if end is not None and (end.mnemonic != "bra" or end.guard):
            kind = "barrier" if is_barrier(end) else _TERMINATORS.get(end.mnemonic, "warp_barrier")
            kind = "cluster_barrier" if is_cluster_barrier(end) else kind
        calls = end is not None and end.mnemonic == "call"
        callee, arguments, returns = (
            call_operands(Writer(self, block), block.ops[-1]) if calls else _NO_CALL
        )
        compiled = CompiledBlock(
            index=block.index,
            terminator=kind,
            successors=block.successors,
            first_site=self.site(block.ops[0]),
            site=self.site(block.ops[-1]),
            live_in=frozenset(slots[name] for name in block.live_in),
            live_out=frozenset(slots[name] for name in block.live_out),
            defs=frozenset(slots[name] for name in block.defs),
            callee=callee,
            arguments=arguments,
            returns=returns,
            only_exits=kind in ("ret", "exit") and len(block.ops) == 1,
        )
        for name, source in sources.items():
            setattr(compiled, name, _compile_lazily(compiled, name, source, self.globals))
        return compiled


def _compile_lazily(
    block: CompiledBlock, name: str, source: str, namespace: dict[str, Any]
) -> BlockFunction:
    """Return a function that compiles `source` at its first call: many blocks never run."""

    def first(group: Any, registers: list[Any], wave: Any) -> Any:
        found: dict[str, BlockFunction] = {}
        exec(compile(source, f"<block {block.index}>", "exec"), namespace, found)
        setattr(block, name, found[name])
        return found[name](group, registers, wave)

    return first


def _layout(variables: list[ptx.Variable | ptx.Param]) -> tuple[dict[str, int], int]:
    """Return the offset of each variable, and the total size."""
    offsets = {}
    top = 0
    for variable in variables:
        offsets[variable.name] = align_up(top, variable.align)
        top = offsets[variable.name] + variable.size
    return offsets, align_up(top, 16)


def generate(function: ptx.Function, *, sanitize: bool = False) -> CompiledFunction:
    """Compile a function, or raise `UnsupportedInstructionError`."""
    return Generator(function, sanitize=sanitize).compiled()
