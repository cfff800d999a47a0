"""Every row of the instruction table, against Python's integers and fractions."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.emulator.table import VARIANTS, Instruction, Variant, instruction
from preheat.emulator.variant import TYPES
from tests.emulator import oracle
from tests.emulator.instruction_oracles import (
    NOT_NUMPY,
    ORACLES,
    Modifiers,
    Oracle,
    last,
    oracle_of,
    types,
)
from tests.emulator.oracle import FORMATS, Number


@pytest.fixture(autouse=True)
def _as_the_machine_runs_them() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


# The types of an opcode's operands, of which NumPy knows the sizes alone.


def source_types(made: Instruction, m: Modifiers) -> list[str]:
    return [_type(kind, types(m)[-1:]) for kind in made.sources]


def result_types(made: Instruction, m: Modifiers) -> list[str]:
    return [_type(kind, types(m)) for kind in made.results]


def _type(kind: np.dtype[Any], names: list[str]) -> str:
    for name in names:
        if (TYPES[name] == kind) if name in TYPES else (NOT_NUMPY[name] == kind.itemsize):
            return name
    if kind == np.bool_:
        return "pred"
    return f"{'s' if kind.kind == 'i' else kind.kind}{8 * kind.itemsize}"


# Operands: what goes wrong first, then anything.


@functools.cache
def edges(name: str) -> list[int]:
    """Bits worth trying: zeros, ones, limits, and subnormal and undefined numbers of either sign."""
    if name == "pred":
        return [0, 1]
    if name.endswith("x2"):
        part = name.removesuffix("x2")
        found = edges(part)
        return [
            low | high << oracle.width(part)
            for low, high in zip(found, found[3:] + found[:3], strict=True)
        ]
    top = 1 << oracle.width(name) - 1
    if name not in FORMATS:
        small = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255]
        return [*small, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2]
    form = FORMATS[name]
    one = oracle.bits_of(1.0, name)
    tiny, most = oracle.bits_of(form.tiny, name), oracle.bits_of(float(form.largest), name)
    sizes = [0, 1, 2, tiny - 1, tiny, tiny + 1, tiny + 2, one - 2, one - 1, one, one + 1, one + 2, most]
    limits = [2.0**n + h for n in (7, 8, 15, 16, 31, 32, 63, 64, 126) for h in (0.0, -0.5)]
    sizes += [
        oracle.bits_of(oracle.round_to(Fraction(x), form, "rz"), name)
        for x in (0.5, 1.5, 2.5, 3.0, *limits)
    ]
    specials = [most + 1, top - 1] if name != "e4m3" else [most + 1]
    return [size | side for size in sizes + specials for side in (0, top)]


def operands(names: list[str], count: int, rng: np.random.Generator) -> list[list[int]]:
    """`count` values for each operand: edges, bits at random, and numbers near enough to interact."""
    return [[_operand(name, rng) for _ in range(count)] for name in names]


def _operand(name: str, rng: np.random.Generator) -> int:
    kind = rng.integers(0, 4)
    if kind < 2:
        found = edges(name)
        return found[rng.integers(0, len(found))]
    size = 2 * oracle.width(name.removesuffix("x2")) if name.endswith("x2") else oracle.width(name)
    bits = int.from_bytes(rng.bytes(8)) & ((1 << size) - 1)
    return bits if kind == 2 else _near(name, bits, rng)


def _near(name: str, bits: int, rng: np.random.Generator) -> int:
    if name not in FORMATS:
        return bits & 0x3F if name != "pred" else bits
    moderate = Fraction(float(rng.standard_normal())) * 2 ** int(rng.integers(0, 12))
    return oracle.bits_of(oracle.round_to(moderate, FORMATS[name], "rn"), name)


def column(bits: list[int], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.array(bits, f"u{kind.itemsize}").view(kind)


def results(made: Instruction, arguments: list[Any]) -> list[np.ndarray[Any, Any]]:
    out = made.run(*arguments)
    return list(out) if len(made.results) > 1 else [out]


EXACT = [variant for variant in VARIANTS if not variant.bound]
APPROXIMATE = [variant for variant in VARIANTS if variant.bound]


@functools.cache
def lanes(variant: Variant) -> int:
    """Values to try for each opcode, fewer where a row has many opcodes."""
    return max(8, 600 // len(list(variant.opcodes())))


def expect(expected: Oracle, m: Modifiers, names: list[str], values: tuple[int, ...]) -> Number:
    """Return what an oracle says of one thread, half by half for packed operands."""
    numbers = [oracle.decode(value, name) for value, name in zip(values, names, strict=True)]
    if not any(name.endswith("x2") for name in names):
        return expected(m, *numbers)
    sides = ([n[i] if isinstance(n, tuple) else n for n in numbers] for i in range(2))
    return tuple(expected(m, *side) for side in sides)


@pytest.mark.parametrize("variant", EXACT, ids=lambda variant: variant.syntax)
def test_every_opcode_of_a_row_agrees_with_its_oracle(variant: Variant) -> None:
    rng = np.random.default_rng(zlib.crc32(variant.syntax.encode()))
    expected = oracle_of(variant)
    for opcode in variant.opcodes():
        made = instruction(opcode)
        m = variant.modifiers(opcode)
        assert made is not None
        assert m is not None
        names = source_types(made, m)
        values = operands(names, lanes(variant), rng)
        arguments: list[Any] = [column(v, k) for v, k in zip(values, made.sources, strict=True)]
        if variant.mnemonic == "lop3":  # its truth table is a constant of the instruction
            values[3] = [values[3][0] & 0xFF] * lanes(variant)
            arguments[3] = np.uint32(values[3][0])
        got = [out.view(f"u{out.dtype.itemsize}") for out in results(made, arguments)]
        for lane, bits_in in enumerate(zip(*values, strict=True)):
            want = expect(expected, m, names, bits_in)
            check(opcode, made, m, bits_in, want, [int(out[lane]) for out in got])


def check(
    opcode: str, made: Instruction, m: Modifiers, bits_in: tuple[int, ...], want: Number, got: list[int]
) -> None:
    names = result_types(made, m)
    if opcode.startswith("set.") and ("word" in m):
        names = ["u16x2"]  # a mask in either half
    wanted = [want] if len(got) == 1 else list(want)
    for expected, bits_out, name in zip(wanted, got, names, strict=True):
        shown = ", ".join(map(hex, bits_in))
        assert oracle.agree(expected, bits_out, name), (
            f"{opcode} {shown}: {bits_out:#x}, not {expected}"
        )


# Approximations: a function of doubles, and how far from it the documentation lets a result be.


def quotient_of_floats(a: float, b: float) -> float:
    return oracle.div(a, b, FORMATS["f64"], "rn")


def approximate_quotient(a: float, b: float) -> float:
    return a * math.copysign(0.0, b) if 2.0**126 < abs(b) < math.inf else quotient_of_floats(a, b)


def inverse(a: float) -> float:
    return quotient_of_floats(1.0, a)


def root(a: float) -> float:
    return oracle.sqrt(a, FORMATS["f64"], "rn")


def logarithm(a: float) -> float:
    return math.nan if a < 0 else math.log2(a) if a else -math.inf


def wave(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda a: math.nan if math.isinf(a) else function(a)


def ulps(count: float) -> Callable[..., float]:
    return lambda exact, *_: count * 2.0 ** (math.frexp(exact)[1] - 24)


def relative(power: float) -> Callable[..., float]:
    return lambda exact, *_: abs(exact) * 2.0**power


def absolute(power: float) -> Callable[..., float]:
    return lambda *_: 2.0**power


def logarithmic(exact: float, a: float) -> float:
    return 2.0**-22 * (1.0 if 0.5 < a < 2 else abs(exact))


def angular(_: float, a: float) -> float:
    return 2.0**-20.5 if abs(a) <= 2 * math.pi else 2.0**-14.7 if abs(a) <= 100 * math.pi else 2.0


def power(a: float) -> float:
    return math.inf if a >= 1024 else 2.0**a


BOUNDS: dict[str, tuple[Callable[..., float], Callable[..., float]]] = {
    "div.approx{.ftz}.f32": (approximate_quotient, ulps(2)),
    "div.full{.ftz}.f32": (quotient_of_floats, ulps(2)),
    "rcp.approx{.ftz}.f32": (inverse, ulps(1)),
    "rcp.approx.ftz.f64": (
        inverse,
        relative(-19),
    ),  # the lower 32 bits of the operand do not count either
    "sqrt.approx{.ftz}.f32": (root, relative(-23)),
    "rsqrt.approx{.ftz}.f32": (lambda a: inverse(root(a)), relative(-22.9)),
    "rsqrt.approx.f64": (lambda a: inverse(root(a)), relative(-50)),
    "rsqrt.approx.ftz.f64": (lambda a: inverse(root(a)), relative(-19)),
    "ex2.approx{.ftz}.f32": (power, relative(-22)),
    "ex2.approx.half": (power, relative(-9.9)),
    "ex2.approx.ftz.bfloat16": (power, relative(-7)),
    "lg2.approx{.ftz}.f32": (logarithm, logarithmic),
    "sin.approx{.ftz}.f32": (wave(math.sin), angular),
    "cos.approx{.ftz}.f32": (wave(math.cos), angular),
    "tanh.approx.f32": (math.tanh, relative(-11)),
    "tanh.approx.half": (math.tanh, absolute(-10.987)),
    "tanh.approx.bfloat16": (math.tanh, absolute(-8)),
}


def close(variant: Variant, m: Modifiers, numbers: list[float], got: float) -> bool:
    """Return True if an approximate result is as near to the exact one as its row promises."""
    function, bound = BOUNDS[variant.syntax]
    kind = FORMATS[last(m).removesuffix("x2")]
    if "ftz" in m:
        numbers = [oracle.flush(a, kind) for a in numbers]
    exact = function(*numbers) if not any(map(math.isnan, numbers)) else math.nan
    if math.isnan(exact) or math.isnan(got):
        return math.isnan(exact) and math.isnan(got)
    if exact == 0 or math.isinf(exact):
        return exact == got and oracle.sign(exact) == oracle.sign(got)
    if abs(got) == math.inf:
        return abs(exact) > kind.largest and oracle.sign(exact) == oracle.sign(got)
    # Subnormal numbers are as coarse as the smallest of them; flushed ones, as the smallest normal one.
    coarse = kind.tiny if "ftz" in m else kind.tiny * 2.0 ** (1 - kind.digits)
    return abs(got - exact) <= max(bound(exact, *numbers), coarse)


@pytest.mark.parametrize("variant", APPROXIMATE, ids=lambda variant: variant.syntax)
def test_an_approximate_result_is_within_the_bound_of_its_row(variant: Variant) -> None:
    rng = np.random.default_rng(zlib.crc32(variant.syntax.encode()))
    for opcode in variant.opcodes():
        made = instruction(opcode)
        m = variant.modifiers(opcode)
        assert made is not None
        assert m is not None
        assert not made.exact
        names = source_types(made, m)
        values = operands(names, 300, rng)
        (out,) = results(made, [column(v, k) for v, k in zip(values, made.sources, strict=True)])
        for bits_in, bits_out in zip(
            zip(*values, strict=True), out.view(f"u{out.dtype.itemsize}"), strict=True
        ):
            numbers = [oracle.decode(v, n) for v, n in zip(bits_in, names, strict=True)]
            found = oracle.decode(int(bits_out), last(m))
            pairs = zip(*numbers, strict=True) if isinstance(found, tuple) else [numbers]
            for side, got in zip(pairs, found if isinstance(found, tuple) else [found], strict=True):
                assert close(variant, m, list(side), got), f"{opcode} {side}: {got}"


@pytest.mark.parametrize(
    ("opcode", "operand", "expected"),
    [
        ("ex2.approx.f32", -math.inf, 0.0),
        ("ex2.approx.f32", -0.0, 1.0),
        ("ex2.approx.ftz.f32", -127.0, 0.0),
        ("ex2.approx.f32", -149.0, 2.0**-149),
        ("lg2.approx.f32", 0.0, -math.inf),
        ("lg2.approx.f32", 2.0**-149, -149.0),
        ("lg2.approx.ftz.f32", 2.0**-149, -math.inf),
        ("lg2.approx.f32", -1.0, math.nan),
        ("rsqrt.approx.f32", -0.0, -math.inf),
        ("rsqrt.approx.f32", math.inf, 0.0),
        ("rcp.approx.ftz.f32", 2.0**127, 0.0),
        ("rcp.approx.f32", -math.inf, -0.0),
        ("sqrt.approx.f32", -0.0, -0.0),
        ("sin.approx.f32", -0.0, -0.0),
        ("sin.approx.f32", math.inf, math.nan),
        ("cos.approx.f32", 0.0, 1.0),
        ("tanh.approx.f32", -math.inf, -1.0),
    ],
)
def test_approximate_functions_have_their_documented_special_values(
    opcode: str, operand: float, expected: float
) -> None:
    made = instruction(opcode)
    assert made is not None
    got = made.run(np.float32(operand))
    assert oracle.agree(expected, int(got.view(np.uint32)), "f32")


# Rounding, searched for counterexamples.

MODES = ["rn", "rz", "rm", "rp"]


def any_bits(name: str) -> st.SearchStrategy[int]:
    """Bits of a number: an edge, anything, or near one so that sums interact."""
    size = oracle.width(name)
    small = st.integers(-40, 40).flatmap(
        lambda e: st.floats(1.0, 2.0, width=32).map(lambda f: math.ldexp(f, e))
    )
    limited = small.map(
        lambda x: oracle.bits_of(oracle.round_to(Fraction(x), FORMATS[name], "rz"), name)
    )
    return st.one_of(st.sampled_from(edges(name)), st.integers(0, 2**size - 1), limited)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("operation", ["add", "mul", "fma", "div", "sqrt", "rcp"])
def test_arithmetic_is_rounded_once_in_every_mode(
    operation: str, name: str, data: st.DataObject
) -> None:
    mode = data.draw(st.sampled_from(MODES))
    made = instruction(f"{operation}.{mode}.{name}")
    assert made is not None
    with np.errstate(all="ignore"):
        values = data.draw(st.tuples(*[any_bits(name)] * len(made.sources)))
        got = made.run(*(column([v], made.sources[0]) for v in values))
    numbers = [oracle.number_of(v, name) for v in values]
    expected = oracle.ARITHMETIC[operation](*numbers, FORMATS[name], mode)
    assert oracle.agree(expected, int(got.view(f"u{got.dtype.itemsize}")[0]), name)


@settings(max_examples=300, deadline=None)
@given(
    a=st.integers(0, 2**52 - 1),
    b=st.integers(0, 2**52 - 1),
    exponents=st.tuples(st.integers(1, 2046), st.integers(1, 2046)),
    shift=st.integers(-120, 120),
    flip=st.booleans(),
)
def test_fused_multiply_add_of_doubles_survives_cancellation_and_the_ends_of_the_range(
    a: int, b: int, exponents: tuple[int, int], shift: int, flip: bool
) -> None:
    x, y = (oracle.number_of(m | e << 52, "f64") for m, e in zip((a, b), exponents, strict=True))
    target = Fraction(x) * Fraction(y) * Fraction(2) ** shift * (-1 if flip else 1)
    z = oracle.round_to(target, FORMATS["f64"], "rz")
    made = instruction("fma.rn.f64")
    assert made is not None
    with np.errstate(all="ignore"):
        got = made.run(np.array([x, 1.5]), np.array([y, 2.0]), np.array([z, 0.25]))
    expected = oracle.fma(x, y, z, FORMATS["f64"], "rn")
    assert oracle.agree(expected, int(got.view(np.uint64)[0]), "f64")
    assert got[1] == 3.25


def test_fused_multiply_add_of_singles_is_not_rounded_twice() -> None:
    # a * b + c lies just above the middle of two singles; in double precision, on it.
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    c = np.float32(2.0**-70)
    made = instruction("fma.rn.f32")
    assert made is not None
    assert made.run(a, b, c) == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == np.float32(1 + 2.0**-11)


@pytest.mark.parametrize(
    ("opcode", "a", "b", "c", "expected"),
    [
        # Just below the middle between c, which is odd, and the next number: by 2**-196 ...
        ("f32", 2.0**-75 * (1 + 2.0**-23), 2.0**-75 * (1 - 2.0**-23), 2.0**-127 + 2.0**-149, None),
        # ... and by 2**-1124, which no double can hold.
        ("f64", 2.0**-500 * (1 + 2.0**-52), 2.0**-520 * (1 - 2.0**-52), 2.0**-967 + 2.0**-1019, None),
        # A product beyond the range, and a sum that is not.
        ("f64", 2.0**1023, 2.0, -(2.0**1023), 2.0**1023),
        ("f64", 2.0**1023, -2.0, math.inf, math.inf),
        ("f64", 2.0**1023, 2.0, -math.inf, -math.inf),
    ],
)
def test_fused_multiply_add_at_the_ends_of_the_range(
    opcode: str, a: float, b: float, c: float, expected: float | None
) -> None:
    made = instruction(f"fma.rn.{opcode}")
    assert made is not None
    kind = made.sources[0].type
    assert made.run(kind(a), kind(b), kind(c)) == (c if expected is None else expected)


def test_lop3_computes_every_truth_table() -> None:
    a, b, c = np.uint32(0xF0F0F0F0), np.uint32(0xCCCCCCCC), np.uint32(0xAAAAAAAA)
    made = instruction("lop3.b32")
    assert made is not None
    for table in range(256):
        assert made.run(a, b, c, np.uint32(table)) == table * 0x01010101


# What was measured on an H200 and no document says.


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("div.s32", (7, 0), 0xFFFFFFFF),
        ("rem.s32", (7, 0), 0xFFFFFFFF),
        ("rem.u64", (7, 0), 0xFFFFFFFFFFFFFFFF),
        ("bfe.u64", (0x11, 0x8000, 5), 0),
        ("bfe.u32", (0x11, 0x8000, 5), 0x11),
        ("mul.ftz.f32", (0x3F7FFFFF, 0x00800000), 0x00000000),
        ("mul.ftz.f32", (0x3F7FFFFE, 0x00800001), 0x00800000),
        ("cvt.rp.ftz.f16.f32", (0x00000001,), 0x0001),
        ("cvt.rzi.s32.f32", (0x7FC00000,), 0),
        ("cvt.rzi.s32.f64", (0x7FF8000000000000,), 0x80000000),
        ("cvt.rzi.u64.f32", (0x7FC00000,), 0x8000000000000000),
        ("cvt.rn.tf32.f32", (0x3F801000,), 0x3F800000),
        ("cvt.rn.tf32.f32", (0x3F803000,), 0x3F804000),
        ("sin.approx.f32", (0x4B000000,), 0x3F3504F3),
    ],
)
def test_results_known_from_the_hardware(opcode: str, operands: tuple[int, ...], expected: int) -> None:
    made = instruction(opcode)
    assert made is not None
    got = made.run(*(column([v], k)[0] for v, k in zip(operands, made.sources, strict=True)))
    assert int(got.view(f"u{got.dtype.itemsize}")) == expected


@pytest.mark.parametrize(
    ("angle", "measured"),
    [(0x461C4000, 0xBE9C1FAC), (0x4640E6B6, 0xBF34768D), (0x49742400, 0xBEF15AE7), (0x4E6E6B28, 0)],
)
def test_the_sine_of_a_large_angle_is_as_far_off_as_on_the_hardware(angle: int, measured: int) -> None:
    made = instruction("sin.approx.f32")
    assert made is not None
    got = made.run(column([angle], made.sources[0]))
    assert abs(float(got[0]) - oracle.number_of(measured, "f32")) < 2.0**-21


# The contract with the machine.


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.syntax)
def test_arrays_and_scalars_mix_and_keep_dtype_and_shape(variant: Variant) -> None:
    rng = np.random.default_rng(zlib.crc32(variant.syntax.encode()) + 1)
    opcode = list(variant.opcodes())[int(rng.integers(0, len(list(variant.opcodes()))))]
    made = instruction(opcode)
    m = variant.modifiers(opcode)
    assert made is not None
    assert m is not None
    values = operands(source_types(made, m), 33, rng)
    columns = [column(v, k) for v, k in zip(values, made.sources, strict=True)]
    if variant.mnemonic == "lop3":
        columns[3] = columns[3][:1]
    before = [c.copy() for c in columns]
    lone = results(made, [c[0] for c in columns])
    for size in (1, 33):
        mixed = [c[0] if i else c[:size] for i, c in enumerate(columns)]
        for kind, out, one in zip(made.results, results(made, mixed), lone, strict=True):
            assert out.dtype == kind
            assert out.shape == (size,)
            assert type(one) is kind.type
            assert out[:1].tobytes() == one.tobytes()
    for now, then in zip(columns, before, strict=True):
        assert now.tobytes() == then.tobytes()


def test_an_array_among_scalars_decides_the_shape_wherever_it_stands() -> None:
    made = instruction("fma.rn.f64")
    assert made is not None
    operands = [np.float64(1e300), np.float64(-1e300), np.float64(1e308)]
    for place in range(3):
        mixed = [np.full(31, a) if i == place else a for i, a in enumerate(operands)]
        assert made.run(*mixed).shape == (31,)


@pytest.mark.parametrize("opcode", ["fma.rn.f64", "fma.rm.f32", "fma.rn.bf16"])
def test_long_arrays_give_what_their_pieces_give(opcode: str) -> None:
    made = instruction(opcode)
    assert made is not None
    rng = np.random.default_rng(5)
    name = opcode.rsplit(".", maxsplit=1)[1]
    a, b = (column(v, made.sources[0]) for v in operands([name] * 2, 4099, rng))
    c = column([edges(name)[9]], made.sources[2])[0]
    pieces = [made.run(a[i : i + 1009], b[i : i + 1009], c) for i in range(0, 4099, 1009)]
    assert made.run(a, b, c).tobytes() == np.concatenate(pieces).tobytes()


def test_every_row_has_an_oracle_and_every_oracle_a_row() -> None:
    rows = {variant.syntax for variant in VARIANTS}
    assert set(ORACLES) | set(BOUNDS) <= rows
    assert {variant.syntax for variant in APPROXIMATE} == set(BOUNDS)
    for variant in EXACT:
        assert callable(oracle_of(variant))


def test_no_opcode_belongs_to_two_rows() -> None:
    seen: dict[str, str] = {}
    for variant in VARIANTS:
        for opcode in variant.opcodes():
            assert seen.setdefault(opcode, variant.syntax) == variant.syntax, opcode


@pytest.mark.parametrize(
    "opcode",
    [
        "add",
        "add.",
        "add.s8",
        "add.sat.u32",
        "add.ftz.rn.f32",
        "add.rna.f32",
        "add.cc.u32",
        "addc.u32",
        "mad.lo.cc.u32",
        "mul.s32",
        "fma.f32",
        "fma.rn.sat.f64",
        "div.f32",
        "setp.lo.s32",
        "setp.lt.b32",
        "setp.equ.u32",
        "setp.lt.ftz.f64",
        "setp.lt.f16x2",
        "add.s32|",
        "mov.u8",
        "shr.b8",
        "sin.f32",
        "ex2.approx.f64",
        "cvt.f32.f64",
        "cvt.rn.s32.f32",
        "cvt.s32.f32",
        "cvt.rn.f64.f32",
        "min.xorsign.f32",
        "prmt.b32.f4",
        "ld.global.f32",
        "",
    ],
)
def test_an_opcode_without_a_row_is_refused(opcode: str) -> None:
    assert instruction(opcode) is None


def test_any_modifier_too_many_is_refused() -> None:
    for variant in VARIANTS:
        opcode = next(variant.opcodes())
        head, _, tail = opcode.removesuffix("|").partition(".")
        assert instruction(f"{head}.volatile.{tail}") is None
        assert instruction(f"{opcode}.volatile") is None
