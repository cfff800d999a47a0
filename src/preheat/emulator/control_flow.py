"""The control flow of a function: basic blocks, their successors, and live registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from preheat.emulator import carry
from preheat.emulator.decode import (
    Address,
    CompoundAddress,
    DecodedFunction,
    Negated,
    Op,
    Operand,
    Register,
    ResultPair,
    Symbol,
    Vector,
    VideoOperand,
)
from preheat.model import ptx

__all__ = [
    "BasicBlock",
    "basic_blocks",
    "defs",
    "is_barrier",
    "is_cluster_barrier",
    "is_guard_branch",
    "is_matrix_instruction",
    "is_warp_barrier",
    "synchronizes_warp",
    "uses",
]

#: Instructions whose first operand is not a result.
WITHOUT_RESULT = frozenset(
    "st red bra brx call ret exit trap membar fence prefetch prefetchu cp nanosleep pmevent "
    "griddepcontrol".split()
)
_TERMINATORS = frozenset("bra brx call ret exit trap".split())
_GUARD_LABEL = "@guard "  # No label in a PTX text begins like this.
_WARP_INSTRUCTIONS = frozenset("shfl vote match redux elect".split())
_MATRIX_INSTRUCTIONS = frozenset("mma ldmatrix stmatrix movmatrix".split())


@dataclass
class BasicBlock:
    """A basic block. Its last operation may be a control-flow instruction.

    `successors` are indices of blocks: for a branch the target and the fall-through, for any other
    block that continues the next one.
    """

    index: int
    ops: list[Op]
    successors: tuple[int, ...] = ()
    live_in: set[str] = field(default_factory=set)
    live_out: set[str] = field(default_factory=set)
    defs: set[str] = field(default_factory=set)
    reachable: bool = False

    @property
    def terminator(self) -> Op | None:
        """The control-flow operation that ends the block, or None."""
        return self.ops[-1] if self.ops and _is_terminator(self.ops[-1]) else None


def is_guard_branch(op: Op) -> bool:
    """Return whether this branch implements the guard predicate of the next operation."""
    return op.mnemonic == "bra" and _label(op).startswith(_GUARD_LABEL)


def synchronizes_warp(op: Op) -> bool:
    """Return whether threads of a warp wait for one another at this instruction."""
    named = op.mnemonic in _WARP_INSTRUCTIONS and "sync" in op.modifiers
    return named or is_warp_barrier(op) or is_matrix_instruction(op)


def is_matrix_instruction(op: Op) -> bool:
    """Return whether this is a matrix instruction, at which all threads of a warp wait."""
    return op.mnemonic in _MATRIX_INSTRUCTIONS


def is_warp_barrier(op: Op) -> bool:
    """Return whether this instruction is only a barrier of the warp."""
    return op.mnemonic in ("bar", "barrier") and "warp" in op.modifiers


def is_barrier(op: Op) -> bool:
    """Return whether threads of a block wait for one another at this instruction."""
    return op.mnemonic in ("bar", "barrier") and not {"warp", "cluster"} & set(op.modifiers)


def is_cluster_barrier(op: Op) -> bool:
    """Return whether threads of a cluster arrive or wait at this instruction."""
    return op.mnemonic == "barrier" and "cluster" in op.modifiers


def basic_blocks(body: DecodedFunction) -> list[BasicBlock]:
    """Return the basic blocks of a function in the order of its text, with liveness."""
    ops, labels = _lower_guards(body)
    starts = sorted(
        {0, *labels.values()}
        | {at + 1 for at, op in enumerate(ops) if _is_terminator(op)}
        | {at for at, op in enumerate(ops) if synchronizes_warp(op)}
    )
    starts = _without_repeated_synchronization(starts, ops, set(labels.values()))
    starts = [*(at for at in starts if at < len(ops)), len(ops)]
    blocks = [BasicBlock(i, ops[start:end]) for i, (start, end) in enumerate(pairwise(starts))]
    blocks.append(BasicBlock(len(blocks), [Op(body.ops[-1].line if body.ops else 0, "ret", "ret", ())]))
    index_of = {at: index for index, at in enumerate(starts)}
    block_at_label = {label: index_of[at] for label, at in labels.items()}
    for block in blocks:
        block.successors = tuple(_successors(block, block_at_label, body))
    _mark_reachable(blocks)
    _compute_liveness(blocks)
    return blocks


def _without_repeated_synchronization(
    starts: list[int], ops: list[Op], labelled: set[int]
) -> list[int]:
    """Return the starts of blocks, except where all threads of a warp are known to be together.

    That is the case at a matrix instruction if the previous block began with one.
    """
    result: list[int] = []
    for at in starts:
        together = result and is_matrix_instruction(ops[result[-1]]) and not _is_terminator(ops[at - 1])
        if not (together and at not in labelled and at < len(ops) and is_matrix_instruction(ops[at])):
            result.append(at)
    return result


def _is_terminator(op: Op) -> bool:
    barrier = is_barrier(op) or is_warp_barrier(op) or is_cluster_barrier(op)
    return op.mnemonic in _TERMINATORS or barrier


def _lower_guards(body: DecodedFunction) -> tuple[list[Op], dict[str, int]]:
    """Replace guarded instructions by branches around them, so that only branches have a guard.

    Return the operations, and the index of the operation after each label.
    """
    ops: list[Op] = []
    new_index: list[int] = []
    labels: dict[str, int] = {}
    for op in body.ops:
        new_index.append(len(ops))
        if op.guard is None or op.mnemonic == "bra":
            ops.append(op)
            continue
        register, negated = op.guard
        label = f"{_GUARD_LABEL}{len(new_index)}"
        branch = Op(op.line, op.text, "bra", (Symbol(label),), (register, not negated))
        ops += [branch, op._replace(guard=None)]
        labels[label] = len(ops)
    new_index.append(len(ops))
    labels.update({label: new_index[at] for label, at in body.labels.items()})
    return ops, labels


def _successors(
    block: BasicBlock, block_at_label: dict[str, int], body: DecodedFunction
) -> Iterator[int]:
    op = block.terminator
    following = block.index + 1
    if op is None or op.mnemonic not in ("bra", "brx", "ret", "exit", "trap"):
        yield following
        return
    names: tuple[str, ...] = ()
    if op.mnemonic in ("bra", "brx"):
        label = _label(op)
        names = (label,) if op.mnemonic == "bra" else body.branch_targets.get(label, (label,))
    for name in names:
        if name not in block_at_label:
            raise ptx.SyntaxFault(f"there is no label {name.partition('@')[0]}", op.line)
        yield block_at_label[name]
    if op.mnemonic == "bra" and op.guard:
        yield following


def _label(op: Op) -> str:
    """Return the label or the table of labels that a branch names last."""
    last = op.operands[-1] if op.operands else None
    return last.name if isinstance(last, Symbol) else "?"


def _mark_reachable(blocks: list[BasicBlock]) -> None:
    worklist = [0]
    while worklist:
        block = blocks[worklist.pop()]
        if not block.reachable:
            block.reachable = True
            worklist += block.successors


def _compute_liveness(blocks: list[BasicBlock]) -> None:
    """Compute the live registers of all blocks, backwards until nothing changes."""
    reads_before_writes = []
    for block in blocks:
        reads: set[str] = set()
        writes: set[str] = set()
        for op in block.ops:
            reads |= {r.name for r in uses(op)} - writes
            writes |= {r.name for r in defs(op)}
        reads_before_writes.append(reads)
        block.defs = writes
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            block.live_out = set().union(*(blocks[target].live_in for target in block.successors))
            before = len(block.live_in)
            block.live_in = reads_before_writes[block.index] | (block.live_out - block.defs)
            changed |= len(block.live_in) != before


def defs(op: Op) -> Iterator[Register]:
    """Yield the registers that an operation writes."""
    if (
        op.operands
        and not isinstance(op.operands[0], Address | CompoundAddress)
        and op.mnemonic not in WITHOUT_RESULT
        and (op.mnemonic not in ("bar", "barrier") or "red" in op.modifiers)
    ):
        yield from _registers(op.operands[0])
    if "cc" in op.modifiers:
        yield carry.FLAG


def uses(op: Op) -> Iterator[Register]:
    """Yield the registers that an operation reads."""
    if op.guard:
        yield op.guard[0]
    results = {r.name for r in defs(op)} - {carry.FLAG.name} if op.operands else set()
    for operand in op.operands[bool(results) :]:
        yield from _registers(operand)
    if op.mnemonic in ("addc", "subc", "madc"):
        yield carry.FLAG


def _registers(operand: Operand | None) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated | VideoOperand):
        yield operand.register
    elif isinstance(operand, Address):
        yield from _registers(operand.base)
    elif isinstance(operand, Vector | CompoundAddress | ResultPair):
        for item in operand.items:
            yield from _registers(item)
