"""Build instructions of the table from their functions and the modifiers of the opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from preheat.devices.emulator import (
    approximate,
    compare,
    convert,
    floating,
    integer,
    small_floats,
    video,
)
from preheat.devices.emulator.form import (
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
from preheat.devices.emulator.integer import Array, Run

Build = Callable[[Modifiers], Instruction]


def _name(m: Modifiers) -> str:
    """Return the name of the type that an opcode ends with. `.relu` may follow it."""
    return [text for text in m.values() if text not in ("|", "relu")][-1]


def _kind(m: Modifiers) -> np.dtype[Any]:
    return TYPES[_name(m)]


def _element(name: str) -> np.dtype[Any]:
    """Return the element type of a packed type, or the type itself."""
    return TYPES[name.removesuffix("x2")]


def _without(m: Modifiers, name: str) -> Modifiers:
    return {key: text for key, text in m.items() if key != name}


def _alike(m: Modifiers, run: Run, count: int) -> Instruction:
    """Operands and result have the type of the opcode. For a packed type, `run` gets either half."""
    name, kind = _name(m), _kind(m)
    if name.endswith("x2"):
        run = integer.by_halves(run, _element(name))
    return Instruction((kind,), (kind,) * count, run)


def integers(run: Run, count: int) -> Build:
    """Build rows whose operands and result all have the type of the last modifier."""
    return lambda m: _alike(m, run, count)


def wide(run: Run, count: int) -> Build:
    """Build rows with two factors of the opcode's type and a result that is twice as wide."""

    def build(m: Modifiers) -> Instruction:
        kind, double = _kind(m), integer.WIDER[_kind(m)]
        return Instruction((double,), (kind, kind, double)[:count], run)

    return build


def fixed(run: Run, result: np.dtype[Any], *sources: np.dtype[Any]) -> Build:
    """Build rows with operands and result of the given types."""
    return lambda _: Instruction((result,), sources, run)


def counted(run: Run) -> Build:
    """Build rows with one operand of the opcode's type, and a count of 32 bits as the result."""
    return lambda m: Instruction((U32,), (_kind(m),), run)


def leading(run: Run, count: int, *others: np.dtype[Any]) -> Build:
    """Build rows with `count` operands of the opcode's type, then `others`."""
    return lambda m: Instruction((_kind(m),), (_kind(m),) * count + others, run)


def shift(plain: Run, careful: Run) -> Build:
    """Build shifts, with the plain function for types in which NumPy handles large amounts."""

    # NumPy clamps amounts as PTX does, if they have a type that does not widen the result.
    def build(m: Modifiers) -> Instruction:
        kind = _kind(m)
        return Instruction((kind,), (kind, U32), plain if kind in (U32, U64, S64) else careful)

    return build


def moded(name: str, make: Callable[[str], Run], *sources: np.dtype[Any]) -> Build:
    """Build a function that depends on the modifier `name`. The result has the first operand's type."""
    return lambda m: Instruction((sources[0],), sources, make(m[name]))


def _dot_sources(m: Modifiers) -> tuple[np.dtype[Any], ...]:
    total = U32 if m["word"] == m["wordb"] == "u32" else S32
    return TYPES[m["word"]], TYPES[m["wordb"]], total


def simd(operation: str, size: int) -> Build:
    """Build `operation` on each half or byte of words. `.add` sums the results, `.sat` clamps them."""

    def build(m: Modifiers) -> Instruction:
        result, a, b = (_part(m[name], size) for name in ("word", "wordb", "wordc"))
        second = m.get("second", "")
        clamp = result if second == "sat" else ""
        run = video.packed(video.OPERATIONS[operation], a, b, clamp, add=second == "add")
        return Instruction((U32,), (U32, U32, U32), run)

    return build


def simd_set(size: int) -> Build:
    """Build a comparison of each half or byte of words: 1 where it holds."""

    def build(m: Modifiers) -> Instruction:
        holds = compare.INTEGERS[m["cmp"]]
        a, b = _part(m["word"], size), _part(m["wordb"], size)
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


def _finish(run: Run, m: Modifiers) -> Run:
    """Return `run` with `.ftz`, `.sat` and `.relu` as in the opcode."""
    if "ftz" in m:
        run = floating.flushed(run)
    if "sat" in m:
        run = floating.then(run, floating.saturate)
    if "relu" in m:
        run = floating.then(run, floating.relu)
    return run


def floats(run: Run, count: int) -> Build:
    """Build `run`, a function of any floating-point type, on the opcode's type."""

    def build(m: Modifiers) -> Instruction:
        finished = _finish(run, m)
        if _name(m).startswith("bf16"):
            finished = small_floats.bfloat16(finished)
        elif _name(m).startswith("f16"):
            finished = floating.then(finished, small_floats.canonical)
        return _alike(m, finished, count)

    return build


ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "rcp": 1, "sqrt": 1}


def rounded(operation: str) -> Build:
    """Build arithmetic that is rounded once, in the mode of the opcode."""

    def build(m: Modifiers) -> Instruction:
        make = floating.flushed_arithmetic if "ftz" in m else floating.arithmetic
        if _name(m).startswith("bf16"):
            run = floating.TO_ODD[operation]
        else:
            run = make(operation, _element(_name(m)), m.get("rnd", "rn"))
        return floats(run, ARITY[operation])(_without(m, "ftz"))

    return build


def mixed(operation: str) -> Build:
    """Build arithmetic of singles whose operands but the last are float16 or bfloat16."""

    def build(m: Modifiers) -> Instruction:
        short = TYPES[m["short"]]
        count = ARITY[operation] - 1
        run = _finish(floating.arithmetic(operation, F32, m.get("rnd", "rn")), m)
        widen = small_floats.from_bfloat16 if m["short"] == "bf16" else small_floats.from_half
        return Instruction(
            (F32,), (short,) * count + (F32,), lambda *a: run(*map(widen, a[:-1]), a[-1])
        )

    return build


def extreme(operation: str) -> Build:
    """Build min and max of floats."""

    def build(m: Modifiers) -> Instruction:
        run = floating.extreme(operation, nan="NaN" in m)
        return floats(floating.xor_sign(run) if "xorsign" in m else run, 2)(m)

    return build


def approximated(run: Run) -> Build:
    """Build an approximate function of one operand."""

    def build(m: Modifiers) -> Instruction:
        return floats(approximate.cut_to_bfloat16(run) if _name(m).startswith("bf16") else run, 1)(m)

    return build


def testp(m: Modifiers) -> Instruction:
    """Build a test of a property of a float."""
    return Instruction((BOOL,), (_kind(m),), compare.PROPERTIES[m["property"]])


# Comparisons.


def _test(table: dict[str, Run], m: Modifiers) -> Run:
    """Return the comparison that an opcode names first."""
    test = table[next(iter(m.values()))]
    if "ftz" in m:
        test = floating.of(test, floating.flush)
    return floating.of(test, small_floats.from_bfloat16) if _name(m).startswith("bf16") else test


def setp(table: dict[str, Run]) -> Build:
    """Build a predicate, or two, the second from the negation. `.bool` combines a third operand."""

    def build(m: Modifiers) -> Instruction:
        test = _test(table, m)
        kind = _kind(m)
        results = (BOOL,) * (1 + ("both" in m))
        if "bool" in m:
            make = compare.joined_with_negation if "both" in m else compare.joined
            return Instruction(results, (kind, kind, BOOL), make(test, compare.JOIN[m["bool"]]))
        return Instruction(results, (kind, kind), compare.with_negation(test) if "both" in m else test)

    return build


def setp_halves(m: Modifiers) -> Instruction:
    """Build a predicate from the lower and one from the upper half. `.bool` adds an operand."""
    both = integer.each_half(_test(compare.FLOATS, m), _element(_name(m)))
    if "bool" not in m:
        return Instruction((BOOL, BOOL), (U32, U32), both)
    return Instruction(
        (BOOL, BOOL), (U32, U32, BOOL), compare.each_joined(both, compare.JOIN[m["bool"]])
    )


def set_number(mark: str, table: dict[str, Run]) -> Build:
    """Build a comparison whose result is a number: all ones, or 1.0, for true."""

    def build(m: Modifiers) -> Instruction:
        test, to, kind = _test(table, m), m[mark], _kind(m)
        if "bool" in m:
            test = compare.joined(test, compare.JOIN[m["bool"]])
        sources = (kind, kind) + (BOOL,) * ("bool" in m)
        return Instruction((TYPES[to],), sources, compare.marked(test, _truth(to)))

    return build


def _truth(name: str) -> Array:
    kind = TYPES[name]
    if name == "bf16":
        return kind.type(0x3F80)
    return kind.type(1.0) if kind.kind == "f" else ~kind.type(0)


def set_halves(mark: str) -> Build:
    """Build a comparison of either half, whose result is a number of type `mark` in that half."""

    def build(m: Modifiers) -> Instruction:
        tests = setp_halves(m)
        return Instruction((U32,), tests.sources, compare.marked_halves(tests.run, _truth(mark)))

    return build


def slct(m: Modifiers) -> Instruction:
    """Build a selection by the sign of the last operand."""
    kind = TYPES[m["any"]]
    run = compare.select_by_flushed_sign if "ftz" in m else compare.select_by_sign
    return Instruction((kind,), (kind, kind, _kind(m)), run)


# Conversions.


def _convert(of: np.dtype[Any], to: np.dtype[Any], run: Run, m: Modifiers) -> Instruction:
    """Build a conversion. `.ftz` applies only to its single-precision sides."""
    if "ftz" in m and of == F32:
        run = floating.of(run, floating.flush)
    if "ftz" in m and to == F32:
        run = floating.then(run, floating.flush)
    return Instruction((to,), (of,), _finish(run, _without(m, "ftz")))


def int_to_int(m: Modifiers) -> Instruction:
    """Build cvt between integers."""
    to = TYPES[m["to"]]
    return Instruction((to,), (TYPES[m["from"]],), convert.integer_to_integer(to, saturate="sat" in m))


def float_to_int(m: Modifiers) -> Instruction:
    """Build cvt from a float to an integer."""
    of, to = _kind(m), TYPES[m["to"]]
    # Integers always saturate: `.sat` has no effect.
    return _convert(of, to, convert.float_to_integer(of, to, m["integral"]), _without(m, "sat"))


def bfloat16_to_int(m: Modifiers) -> Instruction:
    """Build cvt from bfloat16 to an integer."""
    to = TYPES[m["int"]]
    run = convert.float_to_integer(F32, to, m["integral"])
    return Instruction((to,), (U16,), floating.of(run, small_floats.from_bfloat16))


def int_to_float(to: np.dtype[Any]) -> Build:
    """Build cvt from an integer to a float."""
    return lambda m: _convert(_kind(m), to, convert.integer_to_float(to, m["rnd"]), m)


def int_to_bfloat16(m: Modifiers) -> Instruction:
    """Build cvt from an integer to bfloat16."""
    return Instruction((U16,), (_kind(m),), convert.integer_to_bfloat16(m["rnd"]))


def float_to_float(of: np.dtype[Any], to: np.dtype[Any]) -> Build:
    """Build cvt between floats."""
    return lambda m: _convert(of, to, convert.float_to_float(to, m.get("rnd", "rn")), m)


def single_to_half(m: Modifiers) -> Instruction:
    """Round a single once. `.ftz` has no effect on operands so far below any result."""
    run = convert.float_to_float(F16, m["rnd"])
    return Instruction((F16,), (F32,), floating.then(run, floating.saturate) if "sat" in m else run)


def integral(kind: np.dtype[Any]) -> Build:
    """Round a number to an integer, or leave it as it is."""
    return lambda m: _convert(
        kind, kind, convert.TO_INTEGRAL.get(m.get("integral", ""), np.positive), m
    )


def integral_bfloat16(m: Modifiers) -> Instruction:
    """Build cvt of bfloat16 to a whole number."""
    return Instruction((U16,), (U16,), small_floats.bfloat16(convert.TO_INTEGRAL[m["integral"]]))


def from_bfloat16(to: np.dtype[Any]) -> Build:
    """Build cvt from bfloat16 to another number."""

    def build(m: Modifiers) -> Instruction:
        inner = _convert(F32, to, convert.float_to_float(to, m.get("rnd", "rn")), m)
        return Instruction((to,), (U16,), floating.of(inner.run, small_floats.from_bfloat16))

    return build


def _to_short(to: str, m: Modifiers) -> Run:
    """Return a single as float16 or bfloat16, with `.relu` if given."""
    if to == "f16":
        return floating.then(_finish(convert.float_to_float(F16, m["rnz"]), m), small_floats.canonical)
    before = floating.relu if "relu" in m else np.positive
    return lambda a: small_floats.to_bfloat16(before(a), m["rnz"])


def to_short(to: str) -> Build:
    """Build cvt of one or two floats to 16-bit floats."""
    return lambda m: Instruction((TYPES[to],), (_kind(m),), _to_short(to, m))


def to_shorts(to: str) -> Build:
    """Build cvt of two singles to a packed pair, the first in the upper half."""
    return lambda m: Instruction((U32,), (F32, F32), convert.pair(_to_short(to, m)))


def to_bfloat16(m: Modifiers) -> Instruction:
    """Build cvt of a number of another type to bfloat16."""
    return Instruction(
        (U16,), (_kind(m),), lambda a: small_floats.double_to_bfloat16(a.astype(np.float64), m["rnd"])
    )


def to_tf32(m: Modifiers) -> Instruction:
    """Build cvt to tf32."""
    run = small_floats.single_to_tf32(m.get("rnz", "rna"))
    return Instruction((U32,), (F32,), floating.of(run, floating.relu) if "relu" in m else run)


def _to_byte(m: Modifiers) -> Run:
    run = small_floats.to_byte(m["byte"].removesuffix("x2"))
    return floating.of(run, floating.relu) if "relu" in m else run


def singles_to_bytes(m: Modifiers) -> Instruction:
    """Build cvt of two singles to bytes."""
    return Instruction((U16,), (F32, F32), convert.pair(_to_byte(m)))


def halves_to_bytes(m: Modifiers) -> Instruction:
    """Build cvt of two float16 to bytes."""
    return Instruction((U16,), (U32,), small_floats.halves_to_bytes(_to_byte(m)))


def bytes_to_halves(m: Modifiers) -> Instruction:
    """Build cvt of two bytes to float16."""
    run = _finish(small_floats.from_byte(m["byte"].removesuffix("x2")), m)
    return Instruction((U32,), (U16,), small_floats.bytes_to_halves(run))


def pack(m: Modifiers) -> Instruction:
    """Build the packing of two clamped integers, the first in the upper half."""
    clamp = convert.integer_to_integer(TYPES[m["packed"]], saturate=True)
    return Instruction((U32,), (S32, S32), convert.pair(clamp))


def pack_onto(m: Modifiers) -> Instruction:
    """Build the packing of two integers, clamped to bytes, that are pushed into a word from below."""
    return Instruction((U32,), (S32, S32, U32), convert.push(TYPES[m["octet"]]))
