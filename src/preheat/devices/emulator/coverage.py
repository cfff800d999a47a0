"""Which instructions of a PTX text the emulator can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from preheat.devices.emulator import builtin
from preheat.devices.emulator.decode import Op, Symbol, Vector
from preheat.devices.emulator.emit import emit
from preheat.devices.emulator.flow import is_around
from preheat.devices.emulator.generate import Generator
from preheat.devices.emulator.writer import Writer
from preheat.errors import UnsupportedInstructionError
from preheat.toolchain import ptx

__all__ = ["Form", "coverage"]


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """An instruction without its operands; a call of a function from elsewhere has that one's name."""

    opcode: str
    count: int
    supported: bool
    line: int  # of the first


def coverage(module: ptx.Module) -> list[Form]:
    """Every form of instruction in a module, in alphabetical order; `SyntaxFault` for what is none."""
    bodies = {function.name: function for function in module.functions if function.body is not None}
    counts: Counter[tuple[str, bool]] = Counter()
    lines: dict[tuple[str, bool], int] = {}
    for function in bodies.values():
        for op, supported in _operations(function):
            callee = _callee(op, bodies)
            form = op.opcode if callee is None else f"{op.opcode} {callee}"
            key = form, supported and (callee is None or callee in builtin.FUNCTIONS)
            counts[key] += 1
            lines[key] = min(lines.get(key, op.line), op.line)
    return sorted(Form(form, n, known, lines[form, known]) for (form, known), n in counts.items())


def _operations(function: ptx.Function) -> Iterator[tuple[Op, bool]]:
    """Each operation of a function, reachable or not, and whether it can run."""
    generator = Generator(function)
    for block in generator.blocks[:-1]:
        writer = Writer(generator, block)
        for op in block.ops:
            if is_around(op):
                continue
            try:
                emit(writer, op)
                yield op, True
            except UnsupportedInstructionError:
                yield op, False


def _callee(op: Op, bodies: Container[str]) -> str | None:
    """The function from elsewhere that an operation calls, if it does."""
    if op.mnemonic != "call":
        return None
    named = next((operand for operand in op.operands if not isinstance(operand, Vector)), None)
    return named.name if isinstance(named, Symbol) and named.name not in bodies else None
