"""Expected results of instructions, computed with Python's integers, fractions and bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

Number = Any  # an int, a float, a bool, or a tuple of them for packed types


class Format(NamedTuple):
    """A binary floating-point format: bits of precision, least exponent, greatest value."""

    digits: int
    lowest: int
    largest: Fraction

    @property
    def tiny(self) -> float:
        return 2.0**self.lowest


def _format(digits: int, lowest: int) -> Format:
    return Format(digits, lowest, Fraction(2) ** (2 - lowest) * (1 - Fraction(1, 2**digits)))


FORMATS = {
    "f16": _format(11, -14),
    "bf16": _format(8, -126),
    "tf32": _format(11, -126),
    "f32": _format(24, -126),
    "f64": _format(53, -1022),
    "e5m2": _format(3, -14),
    "e4m3": Format(4, -6, Fraction(448)),
}


def round_to(exact: Fraction, form: Format, mode: str, *, bounded: bool = True) -> float:
    """`exact`, not zero, as the number of `form` that `mode` picks; any exponent if not `bounded`."""
    size = abs(exact)
    side = 1 if exact > 0 else -1
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    if bounded:
        exponent = max(exponent, form.lowest)
    quantum = Fraction(2) ** (exponent - form.digits + 1)
    whole, rest = divmod(size, quantum)
    up = {
        "rz": False,
        "rm": exact < 0,
        "rp": exact > 0,
        "rn": 2 * rest > quantum or (2 * rest == quantum and whole % 2 == 1),
        "rna": 2 * rest >= quantum,
    }[mode]
    rounded = (whole + (up and rest != 0)) * quantum
    if bounded and rounded > form.largest:
        stays = mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        return math.copysign(float(form.largest) if stays else math.inf, side)
    return math.copysign(float(rounded), side)


def _rounded(exact: Fraction, form: Format, mode: str, ftz: bool) -> float:
    if ftz and abs(round_to(exact, form, mode, bounded=False)) < form.tiny:
        return 0.0 if exact > 0 else -0.0
    return round_to(exact, form, mode)


def flush(a: float, form: Format) -> float:
    return math.copysign(0.0, a) if abs(a) < form.tiny else a


def sign(a: float) -> float:
    return math.copysign(1.0, a)


def add(a: float, b: float, form: Format, mode: str, ftz: bool = False) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    return _sum(Fraction(a) + Fraction(b), sign(a) == sign(b), a, form, mode, ftz)


def _sum(exact: Fraction, alike: bool, a: float, form: Format, mode: str, ftz: bool) -> float:
    if exact:
        return _rounded(exact, form, mode, ftz)
    return math.copysign(0.0, a) if alike else (-0.0 if mode == "rm" else 0.0)


def sub(a: float, b: float, form: Format, mode: str, ftz: bool = False) -> float:
    return add(a, -b, form, mode, ftz)


def mul(a: float, b: float, form: Format, mode: str, ftz: bool = False) -> float:
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return _rounded(Fraction(a) * Fraction(b), form, mode, ftz)


def fma(a: float, b: float, c: float, form: Format, mode: str, ftz: bool = False) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return _sum(exact, sign(a) * sign(b) == sign(c), c, form, mode, ftz)


def div(a: float, b: float, form: Format, mode: str, ftz: bool = False) -> float:
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
        return math.nan
    if math.isinf(a) or b == 0:
        return math.inf * sign(a) * sign(b)
    if math.isinf(b) or a == 0:
        return 0.0 * sign(a) * sign(b)
    return _rounded(Fraction(a) / Fraction(b), form, mode, ftz)


def rcp(a: float, form: Format, mode: str, ftz: bool = False) -> float:
    return div(1.0, a, form, mode, ftz)


def sqrt(a: float, form: Format, mode: str, _: bool = False) -> float:
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    # Use more bits than any result has, and one more bit that is set if a remainder is left.
    exact = Fraction(a)
    scale = 2**1300
    whole = math.isqrt(int(exact * scale * scale))
    odd = Fraction(2 * whole + (Fraction(whole, scale) ** 2 != exact), 2 * scale)
    return round_to(odd, form, mode)


ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "fma": fma,
    "mad": fma,
    "div": div,
    "rcp": rcp,
    "sqrt": sqrt,
}


def saturate(a: float) -> float:
    return 0.0 if math.isnan(a) or a <= 0 else min(a, 1.0)


def relu(a: float) -> float:
    return a if math.isnan(a) or a > 0 else 0.0


def least(a: float, b: float, nan: bool) -> float:
    """Return the lesser of two numbers, -0 below +0."""
    if math.isnan(a) or math.isnan(b):
        return math.nan if nan or (math.isnan(a) and math.isnan(b)) else (b if math.isnan(a) else a)
    return min((a, b), key=lambda x: (x, sign(x)))


def compare(name: str, a: Number, b: Number) -> bool:
    unordered = bool(a != a or b != b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name.endswith("u") and unordered:
        return True
    base = name.removesuffix("u") if name not in ("lo", "ls", "hi", "hs") else name
    ways: dict[str, bool] = {
        "eq": a == b,
        "ne": a != b,
        "lt": a < b,
        "le": a <= b,
        "gt": a > b,
        "ge": a >= b,
        "lo": a < b,
        "ls": a <= b,
        "hi": a > b,
        "hs": a >= b,
    }
    return not unordered and ways[base]


def to_integer(a: float, mode: str) -> int:
    """Return a finite number rounded to an integer."""
    exact = Fraction(a)
    if mode == "rni":
        return round(exact)
    return (
        math.trunc(exact) if mode == "rzi" else math.floor(exact) if mode == "rmi" else math.ceil(exact)
    )


# Bits to numbers and back.


def bits_of(a: float, name: str) -> int:
    """Return the bits of a number that the format holds."""
    if name == "bf16":
        return bits_of(a, "f32") >> 16
    if name == "tf32":
        return bits_of(a, "f32")
    if name == "e5m2":
        return bits_of(a, "f16") >> 8
    if name == "e4m3":
        half = bits_of(a / 256, "f16")
        return half >> 8 & 0x80 | half >> 7 & 0x7F
    code, whole = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}[name]
    return int(struct.unpack(whole, struct.pack(code, a))[0])


def number_of(bits: int, name: str) -> float:
    if name == "bf16":
        return number_of(bits << 16, "f32")
    if name == "tf32":
        return number_of(bits, "f32")
    if name == "e5m2":
        return number_of(bits << 8, "f16")
    if name == "e4m3":
        if bits & 0x7F == 0x7F:
            return math.nan
        return number_of((bits & 0x80) << 8 | (bits & 0x7F) << 7, "f16") * 256
    code, whole = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}[name]
    return float(struct.unpack(code, struct.pack(whole, bits))[0])


def width(name: str) -> int:
    """Return the bits of a type that is not packed."""
    if name == "pred":
        return 1
    return 8 if name.startswith("e") else int("".join(filter(str.isdigit, name.removeprefix("t"))))


def decode(bits: int, name: str) -> Number:
    """Return the number, or the lower and the upper number, that `bits` are as the type `name`."""
    if name.endswith("x2"):
        part = name.removesuffix("x2")
        return decode(bits & ((1 << width(part)) - 1), part), decode(bits >> width(part), part)
    if name in FORMATS:
        return number_of(bits, name)
    if name == "pred":
        return bool(bits)
    return bits - (bits >> width(name) - 1 << width(name)) if name.startswith("s") else bits


def agree(expected: Number, bits: int, name: str) -> bool:
    """Return True if `bits` are the number expected of the type `name`; all NaNs are equal."""
    if name.endswith("x2"):
        part = name.removesuffix("x2")
        low, high = bits & ((1 << width(part)) - 1), bits >> width(part)
        return agree(expected[0], low, part) and agree(expected[1], high, part)
    if name not in FORMATS:
        return int(expected) % (1 << width(name)) == bits
    if math.isnan(expected):
        return math.isnan(number_of(bits, name))
    return bits_of(expected, name) == bits
