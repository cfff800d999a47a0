"""Compile a PTX function: every reachable basic block becomes a Python function with successors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from preheat.devices.emulator import sanitize as checks
from preheat.devices.emulator.control_flow import (
    Block,
    blocks_of,
    defined,
    is_barrier,
    is_cluster_barrier,
    is_of_matrices,
    is_rendezvous,
    used,
)
from preheat.devices.emulator.decode import Number, Op, Register, decode
from preheat.devices.emulator.emit import EMITTERS, NAMESPACE, called, emit
from preheat.devices.emulator.special_registers import SPECIAL
from preheat.devices.emulator.table import instruction, mnemonics
from preheat.devices.emulator.unsupported import unsupported
from preheat.devices.emulator.writer import DType, Registers, Writer, register_type
from preheat.errors import UnsupportedInstructionError
from preheat.toolchain import ptx

__all__ = ["Code", "Generator", "Step", "generate"]

Generated = Callable[[Any, list[Any], Any], Any]

_ALL_LANES = Number("0xffffffff")
_NOBODY: tuple[None, tuple[str, ...], tuple[str, ...]] = None, (), ()
_KINDS = {"bra": "branch", "brx": "table", "call": "call", "ret": "ret", "exit": "exit", "trap": "trap"}


@dataclass
class Step:
    """A compiled basic block and its successors."""

    index: int
    kind: str
    targets: tuple[int, ...]
    first: int  # The site of its first operation.
    site: int  # The site of its last operation.
    live_in: frozenset[int]
    live_out: frozenset[int]
    writes: frozenset[int]
    run: Generated = field(init=False)
    mask: Generated | None = None  # Returns the mask of the threads that it waits for.
    callee: str | None = None
    arguments: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    leaves: bool = False  # Whether the block only ends the thread or returns.


@dataclass
class Code:
    """A compiled function. Registers, special registers and symbols have slot numbers."""

    name: str
    steps: dict[int, Step]  # By the index of the block.
    sites: list[Op]
    zeros: list[Any]
    special: list[tuple[int, str]]
    symbols: list[tuple[int, str]]
    offsets: dict[str, int]  # Offsets of variables, parameters and results in local memory.
    sizes: dict[str, int]  # Sizes of the same.
    frame_bytes: int
    align: int  # Of its local memory.
    parameters: dict[str, int]  # Of a kernel, in its parameter buffer.
    arguments: list[tuple[int, int]]  # Offset and size.
    returns: list[tuple[int, int]]
    callees: frozenset[str]
    indirect: bool  # Whether it calls through pointers.
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
        self.blocks = blocks_of(self.body)
        self.registers = Registers()
        self.sites = [op for block in self.blocks for op in block.ops]
        self._site_of = {id(op): site for site, op in enumerate(self.sites)}
        self.globals: dict[str, Any] = {}
        self._constants: dict[Any, str] = {}
        self.callees: set[str] = set()
        self.indirect = False
        kept = self._locals()
        self.offsets, self.frame_bytes = _laid_out(kept)
        self.sizes = {variable.name: variable.size for variable in kept}
        self.align = max([16, *(variable.align for variable in kept)])
        self.parameters = {p.name: p.offset for p in function.params} if self.is_entry else {}
        self.parameter_bytes = max((p.offset + p.size for p in function.params), default=0)
        self._choose_types()

    def _locals(self) -> list[ptx.Variable | ptx.Param]:
        """Return the variables in the function's local memory."""
        kept: list[ptx.Variable | ptx.Param] = [
            variable
            for variable in self.body.variables.values()
            if variable.space in ("local", "param")
        ]
        if not self.is_entry:
            kept += [*self.function.params, *self.function.returns]
        return kept

    def _choose_types(self) -> None:
        """Store each register as the type that most instructions use it as."""
        votes: dict[str, Counter[DType]] = {}
        for block in self.blocks:
            for op in block.ops:
                for register in (*defined(op), *used(op)):
                    self.registers.add(register.name, register_type(register.kind))
                row = None if op.mnemonic in ("mov", "selp") else instruction(op.opcode)
                if row is None:
                    continue
                types = (*row.results[:1], *row.sources)
                for operand, dtype in zip(op.operands, types, strict=False):
                    if isinstance(operand, Register) and _fits(operand, dtype):
                        votes.setdefault(operand.name, Counter())[dtype] += 1
        for name, counted in votes.items():
            self.registers.kept[self.registers.number[name]] = counted.most_common(1)[0][0]

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

    def drops(self, block: Block, slot: int) -> bool:
        """Return whether the old value of a register is unused once this block has read it."""
        name = self.registers.names[slot]
        if name.startswith("&") or name in SPECIAL:
            return False
        return name not in block.live_out or name in block.defines

    def unsupported(self, op: Op, what: str | None = None) -> UnsupportedInstructionError:
        """Return the error for an operation that the emulator does not support."""
        other_forms = op.mnemonic in EMITTERS or op.mnemonic in mnemonics()
        return unsupported(self.function.name, op, what, other_forms=other_forms)

    def code(self) -> Code:
        """Return the compiled function."""
        self.globals.update(NAMESPACE)
        if self.sanitize:
            self.globals.update(checks.NAMESPACE)
        reachable = [block for block in self.blocks if block.reachable]
        # The texts come before all steps, because writing them assigns slots to registers.
        texts = {block.index: dict(self._texts(block)) for block in reachable}
        steps = {block.index: self._step(block, texts[block.index]) for block in reachable}
        offsets = self.offsets
        return Code(
            name=self.function.name,
            steps=steps,
            sites=self.sites,
            zeros=[dtype.type(0) for dtype in self.registers.kept],
            special=self.registers.special,
            symbols=self.registers.symbols,
            offsets=offsets,
            sizes=self.sizes,
            frame_bytes=self.frame_bytes,
            align=self.align,
            parameters=self.parameters,
            arguments=[(offsets[p.name], p.size) for p in self.function.params if not self.is_entry],
            returns=[(offsets[p.name], p.size) for p in self.function.returns],
            callees=frozenset(self.callees),
            indirect=self.indirect,
            variables=self.body.variables,
            takes_parameter_address=any(name in self.parameters for _, name in self.registers.symbols),
        )

    def _texts(self, block: Block) -> Iterator[tuple[str, str]]:
        """Yield the text of a block's functions: `run` and, at a rendezvous, `mask`."""
        yield "run", Writer(self, block).function("run", emit)
        first = block.ops[0]
        if is_rendezvous(first):
            mask = _ALL_LANES if is_of_matrices(first) else first.operands[-1]
            asks = Writer(self, Block(block.index, block.ops[:1], live_out=set(self.registers.number)))
            yield "mask", asks.operand_function("mask", mask)

    def _step(self, block: Block, texts: dict[str, str]) -> Step:
        number, end = self.registers.number, block.end
        kind = "next"
        if end is not None and (end.mnemonic != "bra" or end.guard):
            kind = "barrier" if is_barrier(end) else _KINDS.get(end.mnemonic, "meet")
            kind = "cluster" if is_cluster_barrier(end) else kind
        calls = end is not None and end.mnemonic == "call"
        callee, arguments, returns = called(Writer(self, block), block.ops[-1]) if calls else _NOBODY
        step = Step(
            index=block.index,
            kind=kind,
            targets=block.targets,
            first=self.site(block.ops[0]),
            site=self.site(block.ops[-1]),
            live_in=frozenset(number[name] for name in block.live_in),
            live_out=frozenset(number[name] for name in block.live_out),
            writes=frozenset(number[name] for name in block.defines),
            callee=callee,
            arguments=arguments,
            returns=returns,
            leaves=kind in ("ret", "exit") and len(block.ops) == 1,
        )
        for name, text in texts.items():
            setattr(step, name, _compiled_when_called(step, name, text, self.globals))
        return step


def _compiled_when_called(step: Step, name: str, text: str, names: dict[str, Any]) -> Generated:
    """Return a function that compiles `text` at its first call: many blocks never run."""

    def first(group: Any, registers: list[Any], wave: Any) -> Any:
        found: dict[str, Generated] = {}
        exec(compile(text, f"<block {step.index}>", "exec"), names, found)
        setattr(step, name, found[name])
        return found[name](group, registers, wave)

    return first


def _laid_out(variables: list[ptx.Variable | ptx.Param]) -> tuple[dict[str, int], int]:
    """Return the offset of each variable, and the total size."""
    offsets, top = {}, 0
    for variable in variables:
        offsets[variable.name] = -(-top // variable.align) * variable.align
        top = offsets[variable.name] + variable.size
    return offsets, -(-top // 16) * 16


def _fits(register: Register, dtype: DType) -> bool:
    return register_type(register.kind).itemsize == dtype.itemsize


def generate(function: ptx.Function, *, sanitize: bool = False) -> Code:
    """Compile a function, or raise `UnsupportedInstructionError`."""
    return Generator(function, sanitize=sanitize).code()
