"""Report which instructions of a PTX text the emulator can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from preheat.emulator import builtin
from preheat.emulator.control_flow import is_guard_branch
from preheat.emulator.decode import Op, Symbol, Vector
from preheat.emulator.emit import emit
from preheat.emulator.generate import Generator
from preheat.emulator.writer import Writer
from preheat.errors import UnsupportedInstructionError
from preheat.model import ptx

__all__ = ["OpcodeCoverage", "coverage"]


@dataclass(frozen=True, slots=True, order=True)
class OpcodeCoverage:
    """How often an opcode occurs, and whether the emulator can run it.

    The opcode of a call of an external function includes the name of the function.
    """

    opcode: str
    count: int
    supported: bool
    line: int  # The line of its first occurrence.


def coverage(module: ptx.Module) -> list[OpcodeCoverage]:
    """Return the coverage of every opcode in a module, in alphabetical order."""
    counts: Counter[tuple[str, bool]] = Counter()
    lines: dict[tuple[str, bool], int] = {}
    for function in (function for function in module.functions if function.body is not None):
        for opcode, line, supported in _opcodes(function, module.bodies):
            counts[opcode, supported] += 1
            lines[opcode, supported] = min(lines.get((opcode, supported), line), line)
    return sorted(
        OpcodeCoverage(opcode, count, supported, lines[opcode, supported])
        for (opcode, supported), count in counts.items()
    )


def _opcodes(function: ptx.Function, bodies: Container[str]) -> Iterator[tuple[str, int, bool]]:
    """Yield the opcode and line of each instruction of a function, and whether it can run."""
    rejected: list[ptx.Statement] = []
    try:
        generator = Generator(function, rejected)
    except ptx.SyntaxFault:
        # Nothing in this function can run, for example because a branch has no target.
        rejected = [statement for statement in function.statements if statement.is_instruction]
    else:
        for op, supported in _operations(generator):
            callee = _callee(op, bodies)
            known = callee is None or callee in builtin.FUNCTIONS
            yield op.opcode if callee is None else f"{op.opcode} {callee}", op.line, supported and known
    for statement in rejected:
        yield statement.opcode, statement.line, False


def _operations(generator: Generator) -> Iterator[tuple[Op, bool]]:
    """Yield each operation of a function, reachable or not, and whether it can run."""
    for block in generator.blocks[:-1]:
        writer = Writer(generator, block)
        for op in block.ops:
            if is_guard_branch(op):
                continue
            try:
                emit(writer, op)
                yield op, True
            except UnsupportedInstructionError:
                yield op, False


def _callee(op: Op, bodies: Container[str]) -> str | None:
    """Return the external function that an operation calls, or None."""
    if op.mnemonic != "call":
        return None
    named = next((operand for operand in op.operands if not isinstance(operand, Vector)), None)
    return named.name if isinstance(named, Symbol) and named.name not in bodies else None
