"""Emit the Python code of each instruction.

Instructions that only compute are in `table`, those that access memory in `emit_memory`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from preheat.emulator import (
    access,
    atomics,
    carry,
    copies,
    emit_memory,
    floating,
    matrices,
    mbarrier,
    surfaces,
    textures,
    video,
    warp,
)
from preheat.emulator.addresses import in_space, resolve, resolve_generic, resolve_shared
from preheat.emulator.barrier import Arrival
from preheat.emulator.decode import (
    Immediate,
    Op,
    Operand,
    Register,
    ResultPair,
    Symbol,
    Vector,
    VideoOperand,
)
from preheat.emulator.emit_async import emit_copy, emit_mbarrier
from preheat.emulator.emit_matrices import emit_load, emit_product, emit_store, emit_transpose
from preheat.emulator.emit_textures import emit_fetch, emit_surface_load, emit_surface_store
from preheat.emulator.table import instruction
from preheat.emulator.variant import TYPES
from preheat.emulator.writer import BOOL, U32, U64, DType, Writer, register_type

__all__ = ["EMITTERS", "NAMESPACE", "call_operands", "emit"]

_CLUSTER_BARRIER = r"barrier\.cluster\.(arrive(\.release|\.relaxed)?|wait(\.acquire)?)(\.aligned)?"


def _pure(w: Writer, op: Op) -> None:
    """Emit an instruction that only computes, as its variant in `table` says."""
    pair = op.operands[0] if op.operands and isinstance(op.operands[0], ResultPair) else None
    found = instruction(f"{op.opcode}|" if pair else op.opcode)
    if found is None or len(op.operands) != 1 + len(found.sources):
        raise w.unsupported()
    sources = [w.read(o, t) for o, t in zip(op.operands[1:], found.sources, strict=True)]
    call = f"{w.constant(found.run)}({', '.join(sources)})"
    w.write_results(pair.items if pair else op.operands[:1], found.results, call)


def _lop3(w: Writer, op: Op) -> None:
    """Emit `lop3`, whose truth table is a constant."""
    if not isinstance(op.operands[-1], Immediate):
        raise w.unsupported("lop3 with its truth table in a register")
    _pure(w, op)


def _video(w: Writer, op: Op) -> None:
    """Emit a SIMD video instruction, whose operands and result may select parts of words."""
    found = instruction(op.opcode)
    if found is None or len(op.operands) != 4:
        raise w.unsupported()
    halves = op.mnemonic.endswith("2")
    target, a, b = op.operands[:3]
    words = [w.read(o.register if isinstance(o, VideoOperand) else o, U32) for o in (a, b)]
    orders = [_selector(w, o, r"h[0-3]{2}" if halves else r"b[0-7]{4}") for o in (a, b)]
    chosen = [
        f"{w.constant(video.select(order))}({', '.join(words)})" if order else word
        for order, word in zip(orders, words, strict=True)
    ]
    mask = _selector(w, target, r"h1?0?" if halves else r"b3?2?1?0?")
    masked = f", {video.mask(mask)}" if mask else ""
    call = f"{w.constant(found.run)}({', '.join(chosen)}, {w.read(op.operands[3], U32)}{masked})"
    register = target.register if isinstance(target, VideoOperand) else target
    w.write_results((register,), found.results, call)


def _selector(w: Writer, operand: Operand | None, pattern: str) -> str:
    """Return the parts that an operand selects, or an empty string."""
    if not isinstance(operand, VideoOperand):
        return ""
    if operand.negative or len(operand.parts) < 2 or not re.fullmatch(pattern, operand.parts):
        raise w.unsupported()
    return operand.parts


# Moves


def _move(w: Writer, op: Op) -> None:
    target, source = op.operands
    if len(op.modifiers) != 1 or op.modifiers[0] not in TYPES:
        raise w.unsupported()
    dtype = TYPES[op.modifiers[0]]
    bits = dtype if dtype == BOOL else np.dtype(f"u{dtype.itemsize}")
    vectors = [side for side in (target, source) if isinstance(side, Vector)]
    if any(len(vector.items) not in (2, 4) or len(vector.items) > bits.itemsize for vector in vectors):
        raise w.unsupported()
    if isinstance(source, Vector):
        part = np.dtype(f"u{dtype.itemsize // len(source.items)}")
        values = ", ".join(w.read(item, part) for item in source.items)
        w.write(target, w.assign(f"pack({w.constant(bits)}, {values})"), bits)
    elif isinstance(target, Vector):
        parts = len(target.items)
        part = np.dtype(f"u{dtype.itemsize // parts}")
        call = f"unpack({w.read(source, bits)}, {w.constant(part)}, {parts})"
        w.write_results(target.items, (part,) * parts, call)
    elif isinstance(source, Register) and dtype != BOOL:
        name, held_type = w.read_bits(source, dtype.itemsize)
        w.write(target, w.assign(name), held_type)
    elif isinstance(source, Immediate) and dtype != BOOL:
        stored_type = w.result_type(target, dtype)
        w.write(target, w.assign(w.constant(w.immediate(source, dtype).view(stored_type))), stored_type)
    else:
        w.write(target, w.assign(w.read(source, bits)), bits)


def pack(dtype: DType, *parts: Any) -> Any:
    """Return one word from narrower ones, the lowest first."""
    bits = dtype.itemsize * 8 // len(parts)
    whole = parts[0].astype(dtype)
    for i, part in enumerate(parts[1:], 1):
        whole = whole | (part.astype(dtype) << dtype.type(i * bits))
    return whole


def unpack(whole: Any, part: DType, parts: int) -> list[Any]:
    """Return the narrower words of a word, the lowest first."""
    bits = part.itemsize * 8
    return [
        (whole >> whole.dtype.type(i * bits)).astype(part) if i else whole.astype(part)
        for i in range(parts)
    ]


# Warps


def _shuffle(w: Writer, op: Op) -> None:
    sync, mode, *kind = (*op.modifiers, "", "")
    if sync != "sync" or mode not in warp.SHUFFLES or kind[0] != "b32":
        raise w.unsupported()
    value, held_type = w.read_bits(op.operands[1], 4)
    lane, clamp = (w.read(operand, U32) for operand in op.operands[2:4])
    if w.generator.sanitize:
        mask = w.read(op.operands[4], U32)
        w.lines.append(f"check_shuffle(G, {mode!r}, {lane}, {clamp}, {mask}, {w.site()})")
    w.write_results(
        _result_pair(op), (held_type, BOOL), f"shuffle(G, {mode!r}, {value}, {lane}, {clamp})"
    )


def _result_pair(op: Op) -> tuple[Operand | None, ...]:
    """Return the result of an instruction and its optional predicate."""
    target = op.operands[0]
    return target.items if isinstance(target, ResultPair) else (target, None)


def _member_mask(w: Writer, operand: Operand | None) -> str:
    """Return the mask of participating threads (`membermask`)."""
    mask = w.read(operand, U32)
    if w.generator.sanitize:
        w.lines.append(f"check_member(G, {mask}, {w.site()})")
    return mask


def _vote(w: Writer, op: Op) -> None:
    sync, mode, *_ = (*op.modifiers, "", "")
    if sync != "sync" or mode not in warp.VOTES:
        raise w.unsupported()
    predicate = w.read(op.operands[1], BOOL)
    mask = _member_mask(w, op.operands[2])
    dtype = U32 if mode == "ballot" else BOOL
    w.write(op.operands[0], w.assign(f"vote(G, {mode!r}, {predicate}, {mask})"), dtype)


def _match(w: Writer, op: Op) -> None:
    mode, sync, kind, *_ = (*op.modifiers, "", "", "")
    if mode not in ("any", "all") or sync != "sync" or kind not in ("b32", "b64"):
        raise w.unsupported()
    value = w.read(op.operands[1], TYPES[kind])
    mask = _member_mask(w, op.operands[2])
    w.write_results(_result_pair(op), (U32, BOOL), f"match(G, {mode!r}, {value}, {mask})")


def _redux(w: Writer, op: Op) -> None:
    sync, verb, kind, *more = (*op.modifiers, "", "", "")
    integer = kind in ("u32", "s32", "b32") and not any(more)
    number = re.fullmatch(r"redux\.sync\.(min|max)(\.abs)?(\.NaN)?\.f32", op.opcode)
    if number:
        kind = "f32"
        combine = floating.extreme(verb, nan="NaN" in op.modifiers)
    elif sync == "sync" and verb in warp.REDUCTIONS and integer:
        combine = warp.REDUCTIONS[verb]
    else:
        raise w.unsupported()
    value = w.read(op.operands[1], TYPES[kind])
    if "abs" in op.modifiers:
        value = w.assign(f"{w.constant(np.abs)}({value})")
    mask = _member_mask(w, op.operands[2])
    w.write(op.operands[0], w.assign(f"reduce(G, {w.constant(combine)}, {value}, {mask})"), TYPES[kind])


def _elect(w: Writer, op: Op) -> None:
    w.write_results(_result_pair(op), (U32, BOOL), f"elect(G, {_member_mask(w, op.operands[1])})")


def _activemask(w: Writer, op: Op) -> None:
    w.write(op.operands[0], w.assign("active(G)"), U32)


# Carries


def _with_carry(w: Writer, op: Op) -> None:
    """Emit `add.cc`, `addc` and similar instructions. Without a carry they only compute."""
    base = op.mnemonic.removesuffix("c")
    reads_flag = op.mnemonic != base
    writes_flag = "cc" in op.modifiers
    if not reads_flag and not writes_flag:
        return _pure(w, op)
    words = [word for word in op.modifiers if word != "cc"]
    kind = words.pop() if words else ""
    function = carry.FUNCTIONS.get((base, *words))
    kinds = ("u32", "u64") if "hi" in words else ("u32", "s32", "u64", "s64")
    if function is None or kind not in kinds or len(op.operands) != (4 if base == "mad" else 3):
        raise w.unsupported()
    dtype = np.dtype(f"u{TYPES[kind].itemsize}")
    sources = [w.read(operand, dtype) for operand in op.operands[1:]]
    before = w.read(carry.FLAG, BOOL) if reads_flag else w.constant(np.bool_(carry.initial(base)))
    results = (op.operands[0], carry.FLAG if writes_flag else None)
    w.write_results(results, (dtype, BOOL), f"{w.constant(function)}({before}, {', '.join(sources)})")
    return None


# Control flow: these functions return the expression that the block returns


def _branch(w: Writer, op: Op) -> str | None:
    if op.guard is None:
        return None
    register, negated = op.guard
    value = w.read(register, BOOL)
    return w.assign(f"~{value}") if negated else value


def _branch_table(w: Writer, op: Op) -> str:
    return w.read(op.operands[0], U32)


def _call(w: Writer, op: Op) -> str | None:
    name, _, _ = call_operands(w, op)
    if name is not None:
        w.generator.callees.add(name)
        return None
    w.generator.has_indirect_calls = True
    return w.read(next(o for o in op.operands if not isinstance(o, Vector)), U64)


def call_operands(w: Writer, op: Op) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """Return the callee of a call, if it is named, and the variables with its arguments and results."""
    w.op = op
    operands = list(op.operands)
    returns = operands.pop(0) if isinstance(operands[0], Vector) else None
    if not operands or isinstance(operands[0], Vector):
        raise w.unsupported()
    callee = operands.pop(0)
    arguments = operands.pop(0) if operands and isinstance(operands[0], Vector) else None
    # The remaining operand is a prototype or a list of targets.
    if not all(isinstance(operand, Symbol) for operand in operands):
        raise w.unsupported()
    name = callee.name if isinstance(callee, Symbol) else None
    return name, _parameter_names(w, arguments), _parameter_names(w, returns)


def _parameter_names(w: Writer, operand: Operand | None) -> tuple[str, ...]:
    """Return the names of the variables with the arguments or the results of a call."""
    items = operand.items if isinstance(operand, Vector) else ()
    names = tuple(item.name for item in items if isinstance(item, Symbol))
    if len(names) != len(items) or not w.generator.local_offsets.keys() >= set(names):
        raise w.unsupported("a call with registers as parameters")
    return names


def _barrier(w: Writer, op: Op) -> str | None:
    words = [word for word in op.modifiers if word not in ("cta", "aligned")]
    if words[:1] == ["cluster"]:
        return _cluster_barrier(w, op)
    if not op.operands:
        raise w.unsupported()
    if words[:1] == ["warp"]:
        return None
    operands = list(op.operands)
    kind = words[0] if words else ""
    result = -1
    predicate = "None"
    reduces = kind == "red" and len(words) == 3 and words[1] in ("popc", "and", "or")
    if reduces and len(operands) > 2:
        kind = words[1]
        target = operands.pop(0)
        dtype = U32 if kind == "popc" else BOOL
        if not isinstance(target, Register) or register_type(target.kind).itemsize != dtype.itemsize:
            raise w.unsupported()
        result = w.slot_of(target)
        predicate = w.read(operands.pop(), BOOL)
    elif kind not in ("sync", "arrive"):
        raise w.unsupported()
    ident = w.read(operands[0], U32)
    count = w.read(operands[1], U32) if len(operands) > 1 else "None"
    aligned = op.mnemonic == "bar" or "aligned" in op.modifiers
    return f"arrival({ident}, {count}, {kind!r}, {predicate}, {result}, {aligned})"


def _cluster_barrier(w: Writer, op: Op) -> str:
    if op.operands or not re.fullmatch(_CLUSTER_BARRIER, op.opcode):
        raise w.unsupported()
    return repr(op.modifiers[1])


def _no_effect(w: Writer, op: Op) -> None:
    """Emit nothing: instructions that only order, wait or hint have no effect here."""


def _create_policy(w: Writer, op: Op) -> None:
    w.write(op.operands[0], w.constant(np.uint64(0)), U64)


EMITTERS: dict[str, Callable[[Writer, Op], str | None]] = {
    "ld": emit_memory.load,
    "ldu": emit_memory.load,
    "st": emit_memory.store,
    "atom": emit_memory.atomic,
    "red": emit_memory.atomic,
    "cp": emit_copy,
    "mbarrier": emit_mbarrier,
    "cvta": emit_memory.convert_address,
    "isspacep": emit_memory.is_space,
    "mapa": emit_memory.map_address,
    "getctarank": emit_memory.rank_of_address,
    "mov": _move,
    "lop3": _lop3,
    **{f"{name}{parts}": _video for name in (*video.OPERATIONS, "vset") for parts in (2, 4)},
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "redux": _redux,
    "elect": _elect,
    "activemask": _activemask,
    "ldmatrix": emit_load,
    "stmatrix": emit_store,
    "movmatrix": emit_transpose,
    "mma": emit_product,
    "tex": emit_fetch,
    "suld": emit_surface_load,
    "sust": emit_surface_store,
    **dict.fromkeys(("add", "addc", "sub", "subc", "mad", "madc"), _with_carry),
    "bra": _branch,
    "brx": _branch_table,
    "call": _call,
    **dict.fromkeys(("bar", "barrier"), _barrier),
    **dict.fromkeys(
        "ret exit trap membar fence nanosleep griddepcontrol pmevent prefetch prefetchu".split(),
        _no_effect,
    ),
    "createpolicy": _create_policy,
}


#: The number of operands of each mnemonic.
_OPERAND_COUNTS = {
    **dict.fromkeys(("ld", "ldu", "st"), (2, 3)),
    **dict.fromkeys(("cvta", "isspacep", "getctarank", "mov", "brx", "elect"), (2,)),
    **dict.fromkeys(("ldmatrix", "stmatrix", "movmatrix"), (2,)),
    "mma": (4,),
    **dict.fromkeys(("vote", "match", "redux", "mapa"), (3,)),
    **dict.fromkeys(("atom", "red"), (2, 3, 4, 5)),
    **dict.fromkeys(("bra", "activemask"), (1,)),
    **dict.fromkeys(("call", "createpolicy"), (1, 2, 3, 4)),
    **dict.fromkeys(("bar", "barrier"), (0, 1, 2, 3, 4)),
    **dict.fromkeys(("shfl", "lop3"), (5,)),
}


def emit(w: Writer, op: Op) -> str | None:
    """Emit one operation. Return the expression that its block returns, if it is control flow."""
    w.op = op
    if op.mnemonic in _OPERAND_COUNTS and len(op.operands) not in _OPERAND_COUNTS[op.mnemonic]:
        raise w.unsupported()
    return EMITTERS.get(op.mnemonic, _pure)(w, op)


#: The globals of generated functions.
NAMESPACE: dict[str, Any] = {
    "arrival": Arrival,
    **{
        function.__name__: function
        for function in (
            *(access.load, access.load_vector, access.store, access.store_vector),
            *(in_space, resolve, resolve_generic, resolve_shared, atomics.atomic),
            *(copies.copy_bulk, copies.copy_each, mbarrier.initialise, pack, unpack),
            *(matrices.load_matrices, matrices.store_matrices, matrices.transpose_matrix),
            *(textures.fetch, surfaces.load_surface, surfaces.store_surface),
            *(matrices.multiply, warp.active, warp.elect, warp.match, warp.reduce),
            *(warp.shuffle, warp.vote),
        )
    },
}
