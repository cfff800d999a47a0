"""Build the instructions of `table`: types and function, from the modifiers of the opcode.

A `Build` is a function from the modifiers of an opcode to its instruction. Some functions here are a
`Build`. The others return a `Build` for a given function or type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from preheat.emulator import approximate, compare, convert, floating, integer, small_floats, video
from preheat.emulator.integer import Array, ArrayFunction
from preheat.emulator.variant import (
    BOOL,
    F16,
    F32,
    S32,
    S64,
    TYPES,
    U16,
    U32,
    U64,
    Instruction,
    Modifiers,
)

Build = Callable[[Modifiers], Instruction]


def _type_name(m: Modifiers) -> str:
    """Return the name of the type that an opcode ends with. `.relu` may follow it."""
    return [text for text in m.values() if text not in ("|", "relu")][-1]


def _type(m: Modifiers) -> np.dtype[Any]:
    return TYPES[_type_name(m)]


def _element(name: str) -> np.dtype[Any]:
    """Return the element type of a packed type, or the type itself."""
    return TYPES[name.removesuffix("x2")]


def _without(m: Modifiers, name: str) -> Modifiers:
    return {key: text for key, text in m.items() if key != name}


def _same_type(m: Modifiers, run: ArrayFunction, count: int) -> Instruction:
    """Return an instruction whose operands and result have the type of the opcode.

    For a packed type, `run` computes each half.
    """
    name = _type_name(m)
    kind = _type(m)
    if name.endswith("x2"):
        run = integer.by_halves(run, _element(name))
    return Instruction((kind,), (kind,) * count, run)


def same_type(run: ArrayFunction, count: int) -> Build:
    """Build variants whose operands and result all have the type of the last modifier."""
    return lambda m: _same_type(m, run, count)


def widening(run: ArrayFunction, count: int) -> Build:
    """Build variants with two factors of the opcode's type and a result that is twice as wide."""

    def build(m: Modifiers) -> Instruction:
        kind = _type(m)
        double = integer.WIDER[kind]
        return Instruction((double,), (kind, kind, double)[:count], run)

    return build


def fixed_types(run: ArrayFunction, result: np.dtype[Any], *sources: np.dtype[Any]) -> Build:
    """Build variants with operands and result of the given types."""
    return lambda _: Instruction((result,), sources, run)


def to_u32(run: ArrayFunction) -> Build:
    """Build variants with one operand of the opcode's type, and a count of 32 bits as the result."""
    return lambda m: Instruction((U32,), (_type(m),), run)


def leading_operands(run: ArrayFunction, count: int, *others: np.dtype[Any]) -> Build:
    """Build variants with `count` operands of the opcode's type, then `others`."""
    return lambda m: Instruction((_type(m),), (_type(m),) * count + others, run)


def shift(plain: ArrayFunction, careful: ArrayFunction) -> Build:
    """Build shifts, with the plain function for types in which NumPy handles large amounts."""

    # NumPy clamps amounts as PTX does, if they have a type that does not widen the result.
    def build(m: Modifiers) -> Instruction:
        kind = _type(m)
        return Instruction((kind,), (kind, U32), plain if kind in (U32, U64, S64) else careful)

    return build


def by_modifier(name: str, make: Callable[[str], ArrayFunction], *sources: np.dtype[Any]) -> Build:
    """Build variants whose function depends on the modifier `name`; the result has the first type."""
    return lambda m: Instruction((sources[0],), sources, make(m[name]))


def _dot_sources(m: Modifiers) -> tuple[np.dtype[Any], ...]:
    total = U32 if m["atype"] == m["btype"] == "u32" else S32
    return TYPES[m["atype"]], TYPES[m["btype"]], total


def simd(operation: str, size: int) -> Build:
    """Build `operation` on each half or byte of words. `.add` sums the results, `.sat` clamps them."""

    def build(m: Modifiers) -> Instruction:
        result, a, b = (_part(m[name], size) for name in ("dtype", "atype", "btype"))
        clamp = result if m.get("op2") == "sat" else ""
        run = video.packed(video.OPERATIONS[operation], a, b, clamp, add=m.get("op2") == "add")
        return Instruction((U32,), (U32, U32, U32), run)

    return build


def simd_set(size: int) -> Build:
    """Build a comparison of each half or byte of words: 1 where it holds."""

    def build(m: Modifiers) -> Instruction:
        holds = compare.INTEGERS[m["cmp"]]
        a, b = (_part(m[name], size) for name in ("atype", "btype"))
        run = video.packed(lambda x, y: holds(x, y).astype(np.int32), a, b, add="add" in m)
        return Instruction((U32,), (U32, U32, U32), run)

    return build


def _part(word: str, size: int) -> str:
    """Return the NumPy type of a part of a word."""
    return f"{TYPES[word].kind}{size}"


def dp4a(m: Modifiers) -> Instruction:
    """Build four products of bytes."""
    a, b, c = _dot_sources(m)
    return Instruction((c,), (a, b, c), integer.dot_bytes(a.kind, b.kind))


def dp2a(m: Modifiers) -> Instruction:
    """Build two products of 16 by 8 bits."""
    a, b, c = _dot_sources(m)
    return Instruction((c,), (a, b, c), integer.dot_halves(a.kind, b.kind, upper=m["part"] == "hi"))


# Floating point.


def _finish(run: ArrayFunction, m: Modifiers) -> ArrayFunction:
    """Return `run` with `.ftz`, `.sat` and `.relu` as in the opcode."""
    if "ftz" in m:
        run = floating.flushed(run)
    if "sat" in m:
        run = floating.map_result(run, floating.saturate)
    if "relu" in m:
        run = floating.map_result(run, floating.relu)
    return run


def floats(run: ArrayFunction, count: int) -> Build:
    """Build `run`, a function of any floating-point type, on the opcode's type."""

    def build(m: Modifiers) -> Instruction:
        finished = _finish(run, m)
        if _type_name(m).startswith("bf16"):
            finished = small_floats.bfloat16(finished)
        elif _type_name(m).startswith("f16"):
            finished = floating.map_result(finished, small_floats.canonical)
        return _same_type(m, finished, count)

    return build


ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "rcp": 1, "sqrt": 1}


def rounded(operation: str) -> Build:
    """Build arithmetic that is rounded once, in the mode of the opcode."""

    def build(m: Modifiers) -> Instruction:
        make = floating.flushed_arithmetic if "ftz" in m else floating.arithmetic
        if _type_name(m).startswith("bf16"):
            run = floating.TO_ODD[operation]
        else:
            run = make(operation, _element(_type_name(m)), m.get("rnd", "rn"))
        return floats(run, ARITY[operation])(_without(m, "ftz"))

    return build


def mixed_precision(operation: str) -> Build:
    """Build arithmetic of singles whose operands but the last are float16 or bfloat16."""

    def build(m: Modifiers) -> Instruction:
        narrow = TYPES[m["f16type"]]
        count = ARITY[operation] - 1
        run = _finish(floating.arithmetic(operation, F32, m.get("rnd", "rn")), m)
        widen = (
            small_floats.from_bfloat16 if m["f16type"] == "bf16" else convert.float_to_float(F32, "rn")
        )
        return Instruction(
            (F32,), (narrow,) * count + (F32,), lambda *a: run(*map(widen, a[:-1]), a[-1])
        )

    return build


def min_max(operation: str) -> Build:
    """Build min and max of floats."""

    def build(m: Modifiers) -> Instruction:
        run = floating.extreme(operation, nan="NaN" in m)
        return floats(floating.xor_sign(run) if "xorsign" in m else run, 2)(m)

    return build


def approximation(run: ArrayFunction) -> Build:
    """Build an approximate function of one operand."""

    def build(m: Modifiers) -> Instruction:
        return floats(approximate.cut_to_bfloat16(run) if _type_name(m).startswith("bf16") else run, 1)(
            m
        )

    return build


def testp(m: Modifiers) -> Instruction:
    """Build a test of a property of a float."""
    return Instruction((BOOL,), (_type(m),), compare.PROPERTIES[m["property"]])


# Comparisons.


def _comparison(table: dict[str, ArrayFunction], m: Modifiers) -> ArrayFunction:
    """Return the comparison that an opcode names first."""
    test = table[next(iter(m.values()))]
    if "ftz" in m:
        test = floating.map_operands(test, floating.flush)
    return (
        floating.map_operands(test, small_floats.from_bfloat16)
        if _type_name(m).startswith("bf16")
        else test
    )


def setp(table: dict[str, ArrayFunction]) -> Build:
    """Build a predicate, or two, the second from the negation. `.bool` combines a third operand."""

    def build(m: Modifiers) -> Instruction:
        test = _comparison(table, m)
        if "both" in m:
            test = compare.with_negation(test)
        kind = _type(m)
        results = (BOOL,) * (1 + ("both" in m))
        if "bool" in m:
            join = compare.both_joined if "both" in m else compare.joined
            return Instruction(results, (kind, kind, BOOL), join(test, compare.BOOLEAN[m["bool"]]))
        return Instruction(results, (kind, kind), test)

    return build


def setp_halves(m: Modifiers) -> Instruction:
    """Build a predicate from the lower and one from the upper half. `.bool` adds an operand."""
    both = integer.each_half(_comparison(compare.FLOATS, m), _element(_type_name(m)))
    if "bool" not in m:
        return Instruction((BOOL, BOOL), (U32, U32), both)
    return Instruction(
        (BOOL, BOOL), (U32, U32, BOOL), compare.both_joined(both, compare.BOOLEAN[m["bool"]])
    )


def set_number(result: str, table: dict[str, ArrayFunction]) -> Build:
    """Build a comparison whose result is a number: all ones, or 1.0, for true."""

    def build(m: Modifiers) -> Instruction:
        test = _comparison(table, m)
        kind = _type(m)
        if "bool" in m:
            test = compare.joined(test, compare.BOOLEAN[m["bool"]])
        sources = (kind, kind) + (BOOL,) * ("bool" in m)
        return Instruction(
            (TYPES[m[result]],), sources, compare.as_number(test, _true_value(m[result]))
        )

    return build


def _true_value(name: str) -> Array:
    kind = TYPES[name]
    if name == "bf16":
        return kind.type(0x3F80)
    return kind.type(1.0) if kind.kind == "f" else ~kind.type(0)


def set_halves(result: str) -> Build:
    """Build a comparison of either half, whose result is a number of type `result` in that half."""

    def build(m: Modifiers) -> Instruction:
        tests = setp_halves(m)
        return Instruction((U32,), tests.sources, compare.as_numbers(tests.run, _true_value(result)))

    return build


def slct(m: Modifiers) -> Instruction:
    """Build a selection by the sign of the last operand."""
    kind = TYPES[m["any"]]
    run = compare.select_by_flushed_sign if "ftz" in m else compare.select_by_sign
    return Instruction((kind,), (kind, kind, _type(m)), run)


# Conversions.


def _convert(of: np.dtype[Any], to: np.dtype[Any], run: ArrayFunction, m: Modifiers) -> Instruction:
    """Build a conversion. `.ftz` applies only to its single-precision sides."""
    if "ftz" in m and of == F32:
        run = floating.map_operands(run, floating.flush)
    if "ftz" in m and to == F32:
        run = floating.map_result(run, floating.flush)
    return Instruction((to,), (of,), _finish(run, _without(m, "ftz")))


def int_to_int(m: Modifiers) -> Instruction:
    """Build cvt between integers."""
    to = TYPES[m["to"]]
    return Instruction((to,), (TYPES[m["from"]],), convert.integer_to_integer(to, saturate="sat" in m))


def float_to_int(m: Modifiers) -> Instruction:
    """Build cvt from a float to an integer."""
    of = _type(m)
    to = TYPES[m["to"]]
    # Integers always saturate: `.sat` has no effect.
    return _convert(of, to, convert.float_to_integer(of, to, m["irnd"]), _without(m, "sat"))


def bfloat16_to_int(m: Modifiers) -> Instruction:
    """Build cvt from bfloat16 to an integer."""
    to = TYPES[m["to"]]
    run = convert.float_to_integer(F32, to, m["irnd"])
    return Instruction((to,), (U16,), floating.map_operands(run, small_floats.from_bfloat16))


def int_to_float(to: np.dtype[Any]) -> Build:
    """Build cvt from an integer to a float."""
    return lambda m: _convert(_type(m), to, convert.integer_to_float(to, m["rnd"]), m)


def int_to_bfloat16(m: Modifiers) -> Instruction:
    """Build cvt from an integer to bfloat16."""
    return Instruction((U16,), (_type(m),), convert.integer_to_bfloat16(m["rnd"]))


def float_to_float(of: np.dtype[Any], to: np.dtype[Any]) -> Build:
    """Build cvt between floats."""
    return lambda m: _convert(of, to, convert.float_to_float(to, m.get("rnd", "rn")), m)


def single_to_half(m: Modifiers) -> Instruction:
    """Round a single once. `.ftz` has no effect on operands so far below any result."""
    run = convert.float_to_float(F16, m["rnd"])
    return Instruction(
        (F16,), (F32,), floating.map_result(run, floating.saturate) if "sat" in m else run
    )


def round_to_integral(kind: np.dtype[Any]) -> Build:
    """Round a number to an integer, or leave it as it is."""
    return lambda m: _convert(kind, kind, convert.TO_INTEGRAL.get(m.get("irnd", ""), np.positive), m)


def round_bfloat16_to_integral(m: Modifiers) -> Instruction:
    """Build cvt of bfloat16 to a whole number."""
    return Instruction((U16,), (U16,), small_floats.bfloat16(convert.TO_INTEGRAL[m["irnd"]]))


def from_bfloat16(to: np.dtype[Any]) -> Build:
    """Build cvt from bfloat16 to another number."""

    def build(m: Modifiers) -> Instruction:
        inner = _convert(F32, to, convert.float_to_float(to, m.get("rnd", "rn")), m)
        return Instruction((to,), (U16,), floating.map_operands(inner.run, small_floats.from_bfloat16))

    return build


def _to_f16type(to: str, m: Modifiers) -> ArrayFunction:
    """Return a single as float16 or bfloat16, with `.relu` if given."""
    if to == "f16":
        return floating.map_result(
            _finish(convert.float_to_float(F16, m["rnz"]), m), small_floats.canonical
        )
    before = floating.relu if "relu" in m else np.positive
    return lambda a: small_floats.to_bfloat16(before(a), m["rnz"])


def single_to_f16type(to: str) -> Build:
    """Build cvt of a single to a 16-bit float."""
    return lambda m: Instruction((TYPES[to],), (_type(m),), _to_f16type(to, m))


def singles_to_packed(to: str) -> Build:
    """Build cvt of two singles to a packed pair, the first in the upper half."""
    return lambda m: Instruction((U32,), (F32, F32), convert.pair(_to_f16type(to, m)))


def to_bfloat16(m: Modifiers) -> Instruction:
    """Build cvt of a number of another type to bfloat16."""
    return Instruction(
        (U16,),
        (_type(m),),
        lambda a: small_floats.double_to_bfloat16(
            a.astype(np.float64), m.get("rnd") or m.get("rdir", "rn")
        ),
    )


def to_tf32(m: Modifiers) -> Instruction:
    """Build cvt to tf32."""
    run = small_floats.single_to_tf32(m.get("rnz", "rna"))
    return Instruction(
        (U32,), (F32,), floating.map_operands(run, floating.relu) if "relu" in m else run
    )


def _to_fp8(m: Modifiers) -> ArrayFunction:
    run = small_floats.to_fp8(m["fp8"].removesuffix("x2"))
    return floating.map_operands(run, floating.relu) if "relu" in m else run


def singles_to_fp8(m: Modifiers) -> Instruction:
    """Build cvt of two singles to bytes."""
    return Instruction((U16,), (F32, F32), convert.pair(_to_fp8(m)))


def halves_to_fp8(m: Modifiers) -> Instruction:
    """Build cvt of two float16 to bytes."""
    return Instruction((U16,), (U32,), integer.by_halves(_to_fp8(m), F16))


def bfloat16_to_fp8(m: Modifiers) -> Instruction:
    """Build cvt of two bfloat16 to bytes."""
    run = floating.map_operands(_to_fp8(m), small_floats.from_bfloat16)
    return Instruction((U16,), (U32,), integer.by_halves(run, U16))


def fp8_to_halves(m: Modifiers) -> Instruction:
    """Build cvt of two bytes to float16."""
    run = _finish(small_floats.from_fp8(m["fp8"].removesuffix("x2")), m)
    return Instruction((U32,), (U16,), integer.by_halves(run, np.dtype(np.uint8)))


def fp8_to_bfloat16(m: Modifiers) -> Instruction:
    """Build cvt of two bytes to bfloat16. Every number of 8 bits is exact in it."""
    run = _finish(small_floats.from_fp8(m["fp8"].removesuffix("x2")), m)
    exact = floating.map_result(run, lambda a: small_floats.single_to_bfloat16(a.astype(np.float32)))
    return Instruction((U32,), (U16,), integer.by_halves(exact, np.dtype(np.uint8)))


def pack(m: Modifiers) -> Instruction:
    """Build the packing of two clamped integers, the first in the upper half."""
    clamp = convert.integer_to_integer(TYPES[m["int16"]], saturate=True)
    return Instruction((U32,), (S32, S32), convert.pair(clamp))


def pack_bytes(m: Modifiers) -> Instruction:
    """Build the packing of two integers, clamped to bytes, that are pushed into a word from below."""
    return Instruction((U32,), (S32, S32, U32), convert.push(TYPES[m["int8"]]))
