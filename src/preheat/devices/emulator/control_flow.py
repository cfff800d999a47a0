"""The control flow of a function: basic blocks, their successors, and live registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from preheat.devices.emulator import carry
from preheat.devices.emulator.decode import (
    Address,
    Body,
    Compound,
    Negated,
    Op,
    Operand,
    Pair,
    Register,
    Selected,
    Symbol,
    Vector,
)
from preheat.toolchain import ptx

__all__ = [
    "Block",
    "blocks_of",
    "defined",
    "is_around",
    "is_barrier",
    "is_cluster_barrier",
    "is_of_matrices",
    "is_rendezvous",
    "is_warp_barrier",
    "used",
]

#: Instructions whose first operand is not a result.
WITHOUT_RESULT = frozenset(
    "st red bra brx call ret exit trap membar fence prefetch prefetchu cp nanosleep pmevent "
    "griddepcontrol".split()
)
_ENDS = frozenset("bra brx call ret exit trap".split())
_PAST = "@past "  # No label in a PTX text begins like this.
_RENDEZVOUS = frozenset("shfl vote match redux elect".split())
_MATRICES = frozenset("mma ldmatrix stmatrix movmatrix".split())


@dataclass
class Block:
    """A basic block. Its last operation may be a control-flow instruction.

    `targets` are block indices: for a branch the taken one and the fall-through, for other blocks that
    continue the next one.
    """

    index: int
    ops: list[Op]
    targets: tuple[int, ...] = ()
    live_in: set[str] = field(default_factory=set)
    live_out: set[str] = field(default_factory=set)
    defines: set[str] = field(default_factory=set)
    reachable: bool = False

    @property
    def end(self) -> Op | None:
        """The control-flow operation that ends the block, or None."""
        return self.ops[-1] if self.ops and _ends_block(self.ops[-1]) else None


def is_around(op: Op) -> bool:
    """Whether this branch stands for the guard of another operation."""
    return op.mnemonic == "bra" and _label(op).startswith(_PAST)


def is_rendezvous(op: Op) -> bool:
    """Whether threads of a warp wait for one another at this instruction."""
    named = op.mnemonic in _RENDEZVOUS and "sync" in op.modifiers
    return named or is_warp_barrier(op) or is_of_matrices(op)


def is_of_matrices(op: Op) -> bool:
    """Whether this is a matrix instruction, at which all threads of a warp wait."""
    return op.mnemonic in _MATRICES


def is_warp_barrier(op: Op) -> bool:
    """Whether this instruction is only a barrier of the warp."""
    return op.mnemonic in ("bar", "barrier") and "warp" in op.modifiers


def is_barrier(op: Op) -> bool:
    """Whether threads of a block wait for one another at this instruction."""
    return op.mnemonic in ("bar", "barrier") and not {"warp", "cluster"} & set(op.modifiers)


def is_cluster_barrier(op: Op) -> bool:
    """Whether threads of a cluster arrive or wait at this instruction."""
    return op.mnemonic == "barrier" and "cluster" in op.modifiers


def blocks_of(body: Body) -> list[Block]:
    """Return the basic blocks of a function in the order of its text, with liveness."""
    ops, labels = _without_guards(body)
    starts = sorted(
        {0, *labels.values()}
        | {at + 1 for at, op in enumerate(ops) if _ends_block(op)}
        | {at for at, op in enumerate(ops) if is_rendezvous(op)}
    )
    starts = _without_repeats(starts, ops, set(labels.values()))
    starts = [at for at in starts if at < len(ops)]
    number = {at: index for index, at in enumerate(starts)}
    number[len(ops)] = len(starts)
    ends = [*starts, len(ops)][1:]
    blocks = [
        Block(index, ops[start:end])
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    blocks.append(Block(len(blocks), [Op(body.ops[-1].line if body.ops else 0, "ret", "ret", ())]))
    place = {label: number[at] for label, at in labels.items()}
    for block in blocks:
        block.targets = tuple(_targets(block, place, body))
    _mark_reachable(blocks)
    _find_live(blocks)
    return blocks


def _without_repeats(starts: list[int], ops: list[Op], labelled: set[int]) -> list[int]:
    """Return the starts of blocks, except where all threads of a warp are known to be together.

    That is the case at a matrix instruction if the previous block began with one.
    """
    kept: list[int] = []
    for at in starts:
        together = kept and is_of_matrices(ops[kept[-1]]) and not _ends_block(ops[at - 1])
        if not (together and at not in labelled and at < len(ops) and is_of_matrices(ops[at])):
            kept.append(at)
    return kept


def _ends_block(op: Op) -> bool:
    barrier = is_barrier(op) or is_warp_barrier(op) or is_cluster_barrier(op)
    return op.mnemonic in _ENDS or barrier


def _without_guards(body: Body) -> tuple[list[Op], dict[str, int]]:
    """Replace guarded instructions by branches around them, so that only branches have a guard."""
    ops: list[Op] = []
    moved: list[int] = []
    labels: dict[str, int] = {}
    for op in body.ops:
        moved.append(len(ops))
        if op.guard is None or op.mnemonic == "bra":
            ops.append(op)
            continue
        register, negated = op.guard
        label = f"{_PAST}{len(moved)}"
        around = Op(op.line, op.text, "bra", (Symbol(label),), (register, not negated))
        ops += [around, op._replace(guard=None)]
        labels[label] = len(ops)
    moved.append(len(ops))
    labels.update({label: moved[at] for label, at in body.labels.items()})
    return ops, labels


def _targets(block: Block, place: dict[str, int], body: Body) -> Iterator[int]:
    op = block.end
    following = block.index + 1
    if op is None or op.mnemonic not in ("bra", "brx", "ret", "exit", "trap"):
        yield following
        return
    names: tuple[str, ...] = ()
    if op.mnemonic in ("bra", "brx"):
        label = _label(op)
        names = (label,) if op.mnemonic == "bra" else body.tables.get(label, (label,))
    for name in names:
        if name not in place:
            raise ptx.SyntaxFault(f"there is no label {name.partition('@')[0]}", op.line)
        yield place[name]
    if op.mnemonic == "bra" and op.guard:
        yield following


def _label(op: Op) -> str:
    """Return the label or the table of labels that a branch names last."""
    last = op.operands[-1] if op.operands else None
    return last.name if isinstance(last, Symbol) else "?"


def _mark_reachable(blocks: list[Block]) -> None:
    waiting = [0]
    while waiting:
        block = blocks[waiting.pop()]
        if not block.reachable:
            block.reachable = True
            waiting += block.targets


def _find_live(blocks: list[Block]) -> None:
    """Compute liveness by names, backwards until nothing changes."""
    gen = []
    for block in blocks:
        reads: set[str] = set()
        writes: set[str] = set()
        for op in block.ops:
            reads |= {r.name for r in used(op)} - writes
            writes |= {r.name for r in defined(op)}
        gen.append(reads)
        block.defines = writes
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            block.live_out = set().union(*(blocks[target].live_in for target in block.targets))
            before = len(block.live_in)
            block.live_in = gen[block.index] | (block.live_out - block.defines)
            changed |= len(block.live_in) != before


def defined(op: Op) -> Iterator[Register]:
    """Yield the registers that an operation writes."""
    if (
        op.operands
        and not isinstance(op.operands[0], Address | Compound)
        and op.mnemonic not in WITHOUT_RESULT
        and (op.mnemonic not in ("bar", "barrier") or "red" in op.modifiers)
    ):
        yield from _registers(op.operands[0])
    if "cc" in op.modifiers:
        yield carry.FLAG


def used(op: Op) -> Iterator[Register]:
    """Yield the registers that an operation reads."""
    if op.guard:
        yield op.guard[0]
    results = {r.name for r in defined(op)} - {carry.FLAG.name} if op.operands else set()
    for operand in op.operands[bool(results) :]:
        yield from _registers(operand)
    if op.mnemonic in ("addc", "subc", "madc"):
        yield carry.FLAG


def _registers(operand: Operand | None) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated | Selected):
        yield operand.register
    elif isinstance(operand, Address):
        yield from _registers(operand.base)
    elif isinstance(operand, Vector | Compound | Pair):
        for item in operand.items:
            yield from _registers(item)
