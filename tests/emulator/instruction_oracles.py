"""The expected result of every row of the instruction table, by Python's integers and fractions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction

from preheat.emulator.table import Variant
from preheat.emulator.variant import TYPES
from tests.emulator import oracle
from tests.emulator.oracle import FORMATS, Number

Modifiers = dict[str, str]


Oracle = Callable[..., Number]


OPERATORS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


NOT_NUMPY = {"tf32": 4, "e4m3x2": 2, "e5m2x2": 2}


def types(m: Modifiers) -> list[str]:
    return [text for text in m.values() if text in TYPES or text in NOT_NUMPY]


def clamp(value: int, name: str) -> int:
    bits = oracle.width(name)
    low, high = (
        (-(1 << bits - 1), (1 << bits - 1) - 1) if name.startswith("s") else (0, (1 << bits) - 1)
    )
    return min(max(value, low), high)


def bits(a: int, name: str = "b32") -> list[int]:
    return [a >> i & 1 for i in range(oracle.width(name))]


def unbits(digits: list[int]) -> int:
    return sum(digit << i for i, digit in enumerate(digits))


def last(m: Modifiers) -> str:
    return types(m)[-1]


def wide(m: Modifiers) -> int:
    return oracle.width(last(m))


def low_24(a: int, m: Modifiers) -> int:
    a &= 0xFFFFFF
    return a - (a >> 23 << 24) if last(m) == "s32" else a


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return -1 if b == 0 else a - b * quotient(a, b)


def parts(a: int, size: int, signed: bool) -> list[int]:
    """Return the fields of `size` bits of a word."""
    fields = [a >> i & ((1 << size) - 1) for i in range(0, 32, size)]
    return [field - (field >> size - 1 << size) if signed else field for field in fields]


def dp4a(m: Modifiers, a: int, b: int, c: int) -> int:
    pairs = zip(parts(a, 8, m["atype"] == "s32"), parts(b, 8, m["btype"] == "s32"), strict=True)
    return c + sum(x * y for x, y in pairs)


def dp2a(m: Modifiers, a: int, b: int, c: int) -> int:
    chosen = parts(b, 8, m["btype"] == "s32")[2 * (m["part"] == "hi") :][:2]
    return c + sum(x * y for x, y in zip(parts(a, 16, m["atype"] == "s32"), chosen, strict=True))


VIDEO: dict[str, Callable[[int, int], int]] = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vavrg": lambda a, b: (abs(a + b) + 1) // 2 * (1 if a + b >= 0 else -1),
    "vabsdiff": lambda a, b: abs(a - b),
    "vmin": min,
    "vmax": max,
}


def video(name: str) -> Oracle:
    """Halves or bytes, each computed by itself, then clamped, joined or summed."""
    size = 16 if name.endswith("2") else 8

    def expected(m: Modifiers, a: int, b: int, c: int) -> int:
        kinds = (m["atype"], m["btype"])
        fields = (parts(v, size, k == "s32") for v, k in zip((a, b), kinds, strict=True))
        if "cmp" in m:
            found = [int(oracle.compare(m["cmp"], x, y)) for x, y in zip(*fields, strict=True)]
        else:
            found = [VIDEO[name[:-1]](x, y) for x, y in zip(*fields, strict=True)]
        if m.get("op2") == "sat":
            found = [clamp(value, f"{m['dtype'][0]}{size}") for value in found]
        if "add" in (m.get("op2"), *m):
            return c + sum(found)
        return sum(value % (1 << size) << size * i for i, value in enumerate(found))

    return expected


def mixed(name: str) -> Oracle:
    def expected(m: Modifiers, *arguments: float) -> float:
        result = oracle.ARITHMETIC[name](*arguments, FORMATS["f32"], m.get("rnd", "rn"))
        return finish(m, result)

    return expected


def lop3(_: Modifiers, a: int, b: int, c: int, table: int) -> int:
    rows = zip(bits(a), bits(b), bits(c), strict=True)
    return unbits([table >> (x << 2 | y << 1 | z) & 1 for x, y, z in rows])


def funnel(m: Modifiers, a: int, b: int, c: int) -> int:
    n = c % 32 if m["mode"] == "wrap" else min(c, 32)
    return ((b << 32 | a) << n >> 32) if "l" in m else (b << 32 | a) >> n


def bfe(m: Modifiers, a: int, position: int, length: int) -> int:
    digits = bits(a, last(m))
    top = wide(m) - 1
    position, length = (position, length) if top == 63 else (position & 255, length & 255)
    fill = 0 if last(m).startswith("u") or length == 0 else digits[min(position + length - 1, top)]
    inside = [i < length and position + i <= top for i in range(top + 1)]
    return unbits([digits[position + i] if inside[i] else fill for i in range(top + 1)])


def bfi(m: Modifiers, a: int, b: int, position: int, length: int) -> int:
    source = bits(a, last(m))
    target = bits(b, last(m))
    top = wide(m) - 1
    position, length = (position, length) if top == 63 else (position & 255, length & 255)
    for i in range(min(length, top + 1)):
        if position + i <= top:
            target[position + i] = source[i]
    return unbits(target)


def bfind(m: Modifiers, a: int) -> int:
    highest = (a if a >= 0 else ~a).bit_length() - 1
    return wide(m) - 1 - highest if "shiftamt" in m and highest >= 0 else highest


def prmt(m: Modifiers, a: int, b: int, c: int) -> int:
    source = parts(a, 8, False) + parts(b, 8, False)
    if "permutation" not in m:
        picks = [c >> 4 * i & 15 for i in range(4)]
        chosen = [source[p & 7] if p < 8 else 255 * (source[p & 7] >> 7) for p in picks]
    else:
        c &= 3
        pick: dict[str, Callable[[int], int]] = {
            "f4e": lambda i: c + i,
            "b4e": lambda i: (c - i) % 8,
            "rc8": lambda _: c,
            "ecl": lambda i: max(c, i),
            "ecr": lambda i: min(c, i),
            "rc16": lambda i: 2 * (c & 1) + (i & 1),
        }
        chosen = [source[pick[m["permutation"]](i)] for i in range(4)]
    return sum(byte << 8 * i for i, byte in enumerate(chosen))


def fns(_: Modifiers, mask: int, base: int, offset: int) -> int:
    if base > 31:
        return -1
    ends = {0: base + 1, 1: 32, -1: -1}[(offset > 0) - (offset < 0)]
    found = [place for place in range(base, ends, -1 if offset < 0 else 1) if mask >> place & 1]
    wanted = max(abs(offset), 1) - 1
    return found[wanted] if wanted < len(found) else -1


def bmsk(m: Modifiers, a: int, b: int) -> int:
    first, count = (a, b) if m["mode"] == "clamp" else (a % 32, b % 32)
    return unbits([first <= i < first + count for i in range(32)])


def szext(m: Modifiers, a: int, b: int) -> int:
    count = b % 32 if m["mode"] == "wrap" else min(b, 32)
    if count == 0:
        return 0
    fill = bits(a)[count - 1] if last(m) == "s32" else 0
    return unbits([bits(a)[i] if i < count else fill for i in range(32)])


def first(m: Modifiers) -> str:
    return next(iter(m.values()))


def compared(m: Modifiers, a: Number, b: Number, c: bool = False) -> tuple[bool, bool]:
    """Return the predicate and its complement."""
    if "ftz" in m:
        form = FORMATS[last(m).removesuffix("x2")]
        a, b = oracle.flush(a, form), oracle.flush(b, form)
    true = oracle.compare(first(m), a, b)
    if "bool" not in m:
        return true, not true
    return OPERATORS[m["bool"]](true, c), OPERATORS[m["bool"]](not true, c)


def setp(m: Modifiers, *arguments: Number) -> Number:
    found = compared(m, *arguments)
    return found if "both" in m and not last(m).endswith("x2") else found[0]


def marked(m: Modifiers, *arguments: Number) -> Number:
    to = types(m)[0]
    return compared(m, *arguments)[0] * (1.0 if to.removesuffix("x2") in FORMATS else -1)


def slct(m: Modifiers, a: Number, b: Number, c: Number) -> Number:
    return a if (oracle.flush(c, FORMATS["f32"]) if "ftz" in m else c) >= 0 else b


def arithmetic(m: Modifiers, name: str, *arguments: float) -> float:
    form = FORMATS[last(m).removesuffix("x2")]
    ftz = "ftz" in m
    if ftz:
        arguments = tuple(oracle.flush(a, form) for a in arguments)
    mode = m.get("rnd", "rn")
    result = oracle.ARITHMETIC[name](*arguments, form, mode, ftz)
    return finish(m, result)


def finish(m: Modifiers, result: float) -> float:
    if "sat" in m:
        result = oracle.saturate(result)
    return oracle.relu(result) if "relu" in m else result


def rounded(name: str) -> Oracle:
    return lambda m, *arguments: arithmetic(m, name, *arguments)


def plain(function: Callable[[float], float]) -> Oracle:
    """Return a function of one number that rounds nothing."""

    def expected(m: Modifiers, a: float) -> float:
        return function(oracle.flush(a, FORMATS[last(m).removesuffix("x2")]) if "ftz" in m else a)

    return expected


def extreme(greater: bool) -> Oracle:
    def expected(m: Modifiers, a: float, b: float) -> float:
        if "ftz" in m:
            form = FORMATS[last(m).removesuffix("x2")]
            a, b = oracle.flush(a, form), oracle.flush(b, form)
        product = oracle.sign(a) * oracle.sign(b)
        if "xorsign" in m:
            a, b = abs(a), abs(b)
        found = -oracle.least(-a, -b, "NaN" in m) if greater else oracle.least(a, b, "NaN" in m)
        return math.copysign(found, product) if "xorsign" in m else found

    return expected


def property_of(m: Modifiers, a: float) -> bool:
    subnormal = 0 < abs(a) < FORMATS[last(m)].tiny
    return {
        "finite": math.isfinite(a),
        "infinite": math.isinf(a),
        "number": not math.isnan(a),
        "notanumber": math.isnan(a),
        "normal": math.isfinite(a) and not subnormal,
        "subnormal": subnormal,
    }[m["property"]]


def integer_from(name: str) -> Oracle:
    def expected(m: Modifiers, a: float) -> int:
        to = types(m)[0]
        if math.isnan(a):
            return 1 << oracle.width(to) - 1 if 64 in (oracle.width(to), oracle.width(name)) else 0
        if math.isinf(a):
            return clamp(int(oracle.sign(a)) << 70, to)
        return clamp(
            oracle.to_integer(oracle.flush(a, FORMATS["f32"]) if "ftz" in m else a, m["irnd"]), to
        )

    return expected


def number_from_integer(m: Modifiers, a: int) -> float:
    rounded = oracle.round_to(Fraction(a), FORMATS[types(m)[0]], m["rnd"]) if a else 0.0
    return finish(m, rounded)


def converted(m: Modifiers, a: float) -> float:
    """Return a number in another format, or the same one."""
    names = [name.removesuffix("x2") for name in types(m)]
    to, of = FORMATS[names[0]], FORMATS[names[-1]]
    if "ftz" in m and names[-1] == "f32" and names[0] != "f16":
        a = oracle.flush(a, of)
    if "irnd" in m and math.isfinite(a):
        a = math.copysign(oracle.to_integer(a, m["irnd"]), a) if abs(a) < 2.0**60 else a
    mode = m.get("rnd") or m.get("rnz") or m.get("rdir") or ("rna" if "rna" in m else "rn")
    if math.isfinite(a) and a:
        a = oracle.round_to(Fraction(a), to, mode)
    if "ftz" in m and names[0] == "f32":
        a = oracle.flush(a, to)
    return finish(m, a)


def both_converted(m: Modifiers, upper: float, lower: float) -> tuple[float, float]:
    return converted(m, lower), converted(m, upper)


def to_byte(m: Modifiers, a: float) -> float:
    a = oracle.relu(a) if "relu" in m else a
    form = FORMATS[m["fp8"].removesuffix("x2")]
    if math.isnan(a) or a == 0:
        return a
    if math.isinf(a):
        return math.copysign(float(form.largest), a)
    size = oracle.round_to(Fraction(a), form, "rn", bounded=abs(a) <= form.largest)
    return math.copysign(min(abs(size), float(form.largest)), a)


def both_to_bytes(m: Modifiers, upper: float, lower: float) -> tuple[float, float]:
    return to_byte(m, lower), to_byte(m, upper)


def pack(m: Modifiers, a: int, b: int) -> int:
    return clamp(a, m["int16"]) % 65536 << 16 | clamp(b, m["int16"]) % 65536


def pack_onto(m: Modifiers, a: int, b: int, c: int) -> int:
    return c << 16 | clamp(a, m["int8"]) % 256 << 8 | clamp(b, m["int8"]) % 256


def clamped(m: Modifiers, value: int) -> int:
    return clamp(value, last(m))


ORACLES: dict[str, Oracle] = {
    "mov.any": lambda _, a: a,
    "mov.pred": lambda _, a: a,
    "add.int": lambda _, a, b: a + b,
    "add.int16x2": lambda _, a, b: a + b,
    "add.sat.s32": lambda m, a, b: clamped(m, a + b),
    "sub.int": lambda _, a, b: a - b,
    "sub.sat.s32": lambda m, a, b: clamped(m, a - b),
    "mul.lo.int": lambda _, a, b: a * b,
    "mul.hi.int": lambda m, a, b: a * b >> wide(m),
    "mul.wide.narrow": lambda _, a, b: a * b,
    "mad.lo.int": lambda _, a, b, c: a * b + c,
    "mad.hi.int": lambda m, a, b, c: (a * b >> wide(m)) + c,
    "mad.hi.sat.s32": lambda m, a, b, c: clamped(m, (a * b >> 32) + c),
    "mad.wide.narrow": lambda _, a, b, c: a * b + c,
    "mul24.lo.word": lambda m, a, b: low_24(a, m) * low_24(b, m),
    "mul24.hi.word": lambda m, a, b: low_24(a, m) * low_24(b, m) >> 16,
    "mad24.lo.word": lambda m, a, b, c: low_24(a, m) * low_24(b, m) + c,
    "mad24.hi.word": lambda m, a, b, c: (low_24(a, m) * low_24(b, m) >> 16) + c,
    "mad24.hi.sat.s32": lambda m, a, b, c: clamped(m, (low_24(a, m) * low_24(b, m) >> 16) + c),
    "div.int": lambda _, a, b: quotient(a, b),
    "rem.int": lambda _, a, b: remainder(a, b),
    "abs.sint": lambda _, a: abs(a),
    "neg.sint": lambda _, a: -a,
    "min.int": lambda _, a, b: min(a, b),
    "min.int16x2": lambda _, a, b: min(a, b),
    "min.relu.s32": lambda _, a, b: max(min(a, b), 0),
    "min.relu.s16x2": lambda _, a, b: max(min(a, b), 0),
    "min.s32.relu": lambda _, a, b: max(min(a, b), 0),
    "min.s16x2.relu": lambda _, a, b: max(min(a, b), 0),
    "max.int": lambda _, a, b: max(a, b),
    "max.int16x2": lambda _, a, b: max(a, b),
    "max.relu.s32": lambda _, a, b: max(a, b, 0),
    "max.relu.s16x2": lambda _, a, b: max(a, b, 0),
    "max.s32.relu": lambda _, a, b: max(a, b, 0),
    "max.s16x2.relu": lambda _, a, b: max(a, b, 0),
    "sad.int": lambda _, a, b, c: c + abs(a - b),
    "dp4a.atype.btype": dp4a,
    "dp2a.part.atype.btype": dp2a,
    **{f"{name}{n}.dtype.atype.btype{{.op2}}": video(f"{name}{n}") for name in VIDEO for n in (2, 4)},
    **{f"vset{n}.atype.btype.cmp{{.add}}": video(f"vset{n}") for n in (2, 4)},
    "add{.rnd}{.sat}.f32.f16type": mixed("add"),
    "sub{.rnd}{.sat}.f32.f16type": mixed("sub"),
    "fma.rnd{.sat}.f32.f16type": mixed("fma"),
    "and.logical": lambda _, a, b: a & b,
    "or.logical": lambda _, a, b: a | b,
    "xor.logical": lambda _, a, b: a ^ b,
    "not.logical": lambda _, a: -1 - a,
    "cnot.bits": lambda _, a: a == 0,
    "lop3.b32": lop3,
    "shl.bits": lambda _, a, n: a << min(n, 64),
    "shr.bits": lambda _, a, n: a >> n,
    "shr.int": lambda _, a, n: a >> n,
    "shf.l.mode.b32": funnel,
    "shf.r.mode.b32": funnel,
    "bfe.long": bfe,
    "bfi.untyped": bfi,
    "bfind.long": bfind,
    "bfind.shiftamt.long": bfind,
    "brev.untyped": lambda m, a: unbits(bits(a, last(m))[::-1]),
    "clz.untyped": lambda m, a: wide(m) - a.bit_length(),
    "popc.untyped": lambda _, a: a.bit_count(),
    "prmt.b32": prmt,
    "prmt.b32.permutation": prmt,
    "fns.b32": fns,
    "bmsk.mode.b32": bmsk,
    "szext.mode.u32": szext,
    "szext.mode.s32": szext,
    "setp.cmp{.bool}.sint{|}": setp,
    "setp.ucmp{.bool}.uint{|}": setp,
    "setp.bcmp{.bool}.bits{|}": setp,
    "setp.fcmp{.bool}{.ftz}.f32{|}": setp,
    "setp.fcmp{.bool}.f64{|}": setp,
    "setp.fcmp{.bool}{.ftz}.f16": setp,
    "setp.fcmp{.bool}.bf16": setp,
    "setp.fcmp{.bool}{.ftz}.f16x2|": setp,
    "setp.fcmp{.bool}.bf16x2|": setp,
    "set.cmp{.bool}.settype.sint": marked,
    "set.ucmp{.bool}.settype.uint": marked,
    "set.bcmp{.bool}.settype.bits": marked,
    "set.fcmp{.bool}{.ftz}.settype.f32": marked,
    "set.fcmp{.bool}.settype.f64": marked,
    "set.fcmp{.bool}{.ftz}.settypeh.f16": marked,
    "set.fcmp{.bool}.settypeb.bf16": marked,
    "set.fcmp{.bool}{.ftz}.f16x2.f16x2": marked,
    "set.fcmp{.bool}{.ftz}.word.f16x2": marked,
    "set.fcmp{.bool}.bf16x2.bf16x2": marked,
    "set.fcmp{.bool}.word.bf16x2": marked,
    "selp.any": lambda _, a, b, c: a if c else b,
    "slct.any.s32": slct,
    "slct{.ftz}.any.f32": slct,
    "testp.property.float": property_of,
    "copysign.float": lambda _, a, b: math.copysign(b, a),
    "cvt{.sat}.to.from": lambda m, a: clamp(a, m["to"]) if "sat" in m else a,
    "cvt.irnd{.ftz}{.sat}.to.f32": integer_from("f32"),
    "cvt.irnd{.sat}.to.f64": integer_from("f64"),
    "cvt.irnd{.sat}.to.f16": integer_from("f16"),
    "cvt.irnd.to.bf16": integer_from("bf16"),
    "cvt.rnd{.ftz}{.sat}.f32.from": number_from_integer,
    "cvt.rnd{.sat}.f64.from": number_from_integer,
    "cvt.rnd{.sat}.f16.from": number_from_integer,
    "cvt.rnd.bf16.from": number_from_integer,
    "cvt{.irnd}{.ftz}{.sat}.f32.f32": converted,
    "cvt{.irnd}{.sat}.f64.f64": converted,
    "cvt{.irnd}{.sat}.f16.f16": converted,
    "cvt.irnd.bf16.bf16": converted,
    "cvt.rnd{.ftz}{.sat}.f32.f64": converted,
    "cvt.rnd{.sat}.f16.f64": converted,
    "cvt.rnd{.ftz}{.sat}.f16.f32": converted,
    "cvt{.rnd}.f16.bf16": converted,
    "cvt.rnd.bf16.f64": converted,
    "cvt.rdir.bf16.f32": converted,
    "cvt{.rnd}.bf16.f16": converted,
    "cvt.rnz.relu.f16.f32": converted,
    "cvt.rnz{.relu}.bf16.f32": converted,
    "cvt.rnz{.relu}.f16x2.f32": both_converted,
    "cvt.rnz{.relu}.bf16x2.f32": both_converted,
    "cvt.rnz{.relu}.tf32.f32": converted,
    "cvt.rna.tf32.f32": converted,
    "cvt.rn.satfinite{.relu}.fp8.f32": both_to_bytes,
    "cvt.rn.satfinite{.relu}.fp8.f16x2": to_byte,
    "cvt.rn.satfinite{.relu}.fp8.bf16x2": to_byte,
    "cvt.rn{.relu}.f16x2.fp8": converted,
    "cvt.rn{.relu}.bf16x2.fp8": converted,
    "cvt{.ftz}{.sat}.f64.f32": converted,
    "cvt{.ftz}{.sat}.f32.f16": converted,
    "cvt{.sat}.f64.f16": converted,
    "cvt{.ftz}.f32.bf16": converted,
    "cvt.f64.bf16": converted,
    "cvt.pack.sat.int16.s32": pack,
    "cvt.pack.sat.int8.s32.b32": pack_onto,
}


def oracle_of(variant: Variant) -> Oracle:
    """Return the oracle of a row; floating-point arithmetic shares one for all its types."""
    if variant.syntax in ORACLES:
        return ORACLES[variant.syntax]
    if variant.mnemonic in oracle.ARITHMETIC:
        return rounded(variant.mnemonic)
    return {"abs": plain(abs), "neg": plain(operator.neg), "min": extreme(False), "max": extreme(True)}[
        variant.mnemonic
    ]
