"""Emit matrix instructions."""

from __future__ import annotations

from preheat.emulator import matrices
from preheat.emulator.decode import Op, Operand, Vector
from preheat.emulator.variant import TYPES
from preheat.emulator.writer import U32, Writer

__all__ = ["emit_load", "emit_product", "emit_store", "emit_transpose"]


def _fragments(w: Writer, operand: Operand | None, count: int) -> tuple[Operand | None, ...]:
    """Return the registers of a matrix. A single one may have no braces."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count or None in items:
        raise w.unsupported()
    return items


def _matrix_modifiers(w: Writer, op: Op) -> tuple[str, int, bool]:
    """Return space, number and transposition of matrices. The order of these modifiers is free."""
    sync, aligned, *words, kind = (*op.modifiers, "", "", "")[: max(len(op.modifiers), 3)]
    counts = [int(word[1:]) for word in words if word in ("x1", "x2", "x4")]
    spaces = [word for word in words if word in ("shared", "shared::cta")]
    known = 2 + len(spaces) + ("trans" in words)
    if (
        (sync, aligned, kind) != ("sync", "aligned", "b16")
        or "m8n8" not in words
        or len(counts) != 1
        or len(spaces) > 1
        or len(words) != known
    ):
        raise w.unsupported()
    return "shared" if spaces else "generic", counts[0], "trans" in words


def emit_load(w: Writer, op: Op) -> None:
    """Emit `ldmatrix`: fragments of one, two or four matrices from shared memory."""
    space, count, transposed = _matrix_modifiers(w, op)
    items = _fragments(w, op.operands[0], count)
    addresses, offset = w.address(op.operands[1], space)
    call = f"load_matrices(G, {addresses}, {offset}, {w.site()}, {count}, {transposed})"
    w.write_results(items, (U32,) * count, call if count > 1 else f"{call}[0]")


def emit_store(w: Writer, op: Op) -> None:
    """Emit `stmatrix`: fragments of one, two or four matrices to shared memory."""
    space, count, transposed = _matrix_modifiers(w, op)
    values = ", ".join(w.read(item, U32) for item in _fragments(w, op.operands[1], count))
    addresses, offset = w.address(op.operands[0], space)
    w.lines.append(f"store_matrices(G, {addresses}, {offset}, {w.site()}, {transposed}, {values})")


def emit_transpose(w: Writer, op: Op) -> None:
    """Emit `movmatrix`: the fragment of the transposed matrix."""
    if op.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise w.unsupported()
    call = f"transpose_matrix(G, {w.site()}, {w.read(op.operands[1], U32)})"
    w.write(op.operands[0], w.assign(call), U32)


def emit_product(w: Writer, op: Op) -> None:
    """Emit `mma.sync`: a product of fragments and a sum."""
    words = op.modifiers
    shape, kind, total = (words[2], words[6], words[5]) if len(words) == 9 else ("", "", "")
    plain = ("sync", "aligned", shape, "row", "col", total, kind, kind, total)
    sums = {"f16": ("f16", "f32"), "bf16": ("f32",)}.get(kind, ())
    if words != plain or shape not in matrices.SHAPES or total not in sums:
        raise w.unsupported()
    variant = matrices.MmaShape(matrices.SHAPES[shape], kind, total)
    first, second, third = variant.registers
    dtype = TYPES["f32"] if total == "f32" else U32
    results, a, b, c = (
        _fragments(w, operand, count)
        for operand, count in zip(op.operands, (third, first, second, third), strict=True)
    )
    values = [*(w.read(item, U32) for item in (*a, *b)), *(w.read(item, dtype) for item in c)]
    call = f"multiply(G, {w.constant(variant)}, {w.site()}, {', '.join(values)})"
    w.write_results(results, (dtype,) * third, call)
