"""The instructions that only compute: each row has one function and one test.

An opcode that matches no row is not supported. No modifier is ever ignored.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from preheat.devices.emulator import approximate, build, compare, floating, integer
from preheat.devices.emulator.form import BOOL, F16, F32, F64, S32, U32, Form, Instruction

__all__ = ["FORMS", "Form", "Instruction", "instruction", "mnemonics"]

FORMS: tuple[Form, ...] = (
    Form("mov.any", "a", build.integers(lambda a: a, 1)),
    Form("mov.pred", "a", build.integers(lambda a: a, 1)),
    Form("add.int", "a + b", build.integers(np.add, 2)),
    Form("add.pair", "a + b in either half", build.integers(np.add, 2)),
    Form("add.sat.s32", "a + b, clamped", build.integers(integer.add_saturating, 2)),
    Form("sub.int", "a - b", build.integers(np.subtract, 2)),
    Form("sub.sat.s32", "a - b, clamped", build.integers(integer.subtract_saturating, 2)),
    Form("mul.lo.int", "the lower half of a * b", build.integers(np.multiply, 2)),
    Form("mul.hi.int", "the upper half of a * b", build.integers(integer.multiply_high, 2)),
    Form("mul.wide.narrow", "a * b, twice as wide", build.wide(integer.multiply_wide, 2)),
    Form("mad.lo.int", "the lower half of a * b, plus c", build.integers(integer.multiply_add, 3)),
    Form("mad.hi.int", "the upper half of a * b, plus c", build.integers(integer.multiply_add_high, 3)),
    Form(
        "mad.hi.sat.s32",
        "the upper half of a * b, plus c, clamped",
        build.integers(integer.multiply_add_high_saturating, 3),
    ),
    Form("mad.wide.narrow", "a * b + c, twice as wide", build.wide(integer.multiply_add_wide, 3)),
    Form(
        "mul24.lo.word",
        "bits 0 to 31 of a * b, of 24 bits each",
        build.integers(integer.multiply_24, 2),
    ),
    Form(
        "mul24.hi.word",
        "bits 16 to 47 of a * b, of 24 bits each",
        build.integers(integer.multiply_24_high, 2),
    ),
    Form("mad24.lo.word", "mul24.lo, plus c", build.integers(integer.multiply_24_add, 3)),
    Form("mad24.hi.word", "mul24.hi, plus c", build.integers(integer.multiply_24_add_high, 3)),
    Form(
        "mad24.hi.sat.s32",
        "mul24.hi, plus c, clamped",
        build.integers(integer.multiply_24_add_high_saturating, 3),
    ),
    Form("div.int", "a / b towards zero; all ones for b = 0", build.integers(integer.divide, 2)),
    Form("rem.int", "what a / b leaves, with the sign of a", build.integers(integer.remainder, 2)),
    Form("abs.sint", "the size of a", build.integers(np.abs, 1)),
    Form("neg.sint", "-a", build.integers(np.negative, 1)),
    Form("min.int", "the lesser", build.integers(np.minimum, 2)),
    Form("min.pair", "the lesser in either half", build.integers(np.minimum, 2)),
    Form("min.relu.s32", "the lesser, at least 0", build.integers(integer.minimum_relu, 2)),
    Form("min.s32.relu", "the lesser, at least 0", build.integers(integer.minimum_relu, 2)),
    Form(
        "min.s16x2.relu",
        "the lesser in either half, at least 0",
        build.integers(integer.minimum_relu, 2),
    ),
    Form(
        "min.relu.s16x2",
        "the lesser in either half, at least 0",
        build.integers(integer.minimum_relu, 2),
    ),
    Form("max.int", "the greater", build.integers(np.maximum, 2)),
    Form("max.pair", "the greater in either half", build.integers(np.maximum, 2)),
    Form("max.relu.s32", "the greater, at least 0", build.integers(integer.maximum_relu, 2)),
    Form("max.s32.relu", "the greater, at least 0", build.integers(integer.maximum_relu, 2)),
    Form(
        "max.s16x2.relu",
        "the greater in either half, at least 0",
        build.integers(integer.maximum_relu, 2),
    ),
    Form(
        "max.relu.s16x2",
        "the greater in either half, at least 0",
        build.integers(integer.maximum_relu, 2),
    ),
    Form("sad.int", "c plus the difference of a and b", build.integers(integer.sum_of_differences, 3)),
    Form("dp4a.word.wordb", "c plus four products of bytes", build.dp4a),
    Form("dp2a.part.word.wordb", "c plus two products of 16 by 8 bits", build.dp2a),
    *(
        Form(
            f"{name}{32 // (8 * size)}.word.wordb.wordc{{.second}}",
            f"{meaning} in each part, clamped with .sat, summed with .add",
            build.simd(name, size),
        )
        for name, meaning in (
            ("vadd", "a + b"),
            ("vsub", "a - b"),
            ("vavrg", "the mean of a and b"),
            ("vabsdiff", "the difference of a and b"),
            ("vmin", "the lesser"),
            ("vmax", "the greater"),
        )
        for size in (2, 1)
    ),
    Form("vset2.word.wordb.cmp{.add}", "a against b in either half", build.simd_set(2)),
    Form("vset4.word.wordb.cmp{.add}", "a against b in each byte", build.simd_set(1)),
    Form("and.logical", "a & b", build.integers(np.bitwise_and, 2)),
    Form("or.logical", "a | b", build.integers(np.bitwise_or, 2)),
    Form("xor.logical", "a ^ b", build.integers(np.bitwise_xor, 2)),
    Form("not.logical", "~a", build.integers(np.invert, 1)),
    Form("cnot.bits", "1 where a = 0, else 0", build.integers(integer.is_zero, 1)),
    Form(
        "lop3.b32", "any function of three bits, by its truth table", build.integers(integer.logic_3, 4)
    ),
    Form("shl.bits", "a shifted left", build.shift(np.left_shift, integer.shift_left)),
    Form("shr.bits", "a shifted right", build.shift(np.right_shift, integer.shift_right)),
    Form("shr.int", "a shifted right", build.shift(np.right_shift, integer.shift_right)),
    Form(
        "shf.l.mode.b32",
        "the upper half of b:a shifted left",
        build.moded("mode", integer.funnel_left, U32, U32, U32),
    ),
    Form(
        "shf.r.mode.b32",
        "the lower half of b:a shifted right",
        build.moded("mode", integer.funnel_right, U32, U32, U32),
    ),
    Form("bfe.long", "a field of a", build.leading(integer.extract, 1, U32, U32)),
    Form("bfi.untyped", "b with a field from a", build.leading(integer.insert, 2, U32, U32)),
    Form(
        "bfind.long",
        "where the highest bit is that is not the sign",
        build.counted(integer.highest_bit),
    ),
    Form(
        "bfind.shiftamt.long",
        "how far that bit is from the top",
        build.counted(integer.highest_bit_shift),
    ),
    Form("brev.untyped", "the bits in opposite order", build.integers(integer.reverse, 1)),
    Form("clz.untyped", "leading zeros", build.counted(integer.leading_zeros)),
    Form("popc.untyped", "bits that are set", build.counted(integer.population)),
    Form("prmt.b32", "four of eight bytes", build.integers(integer.permute, 3)),
    Form(
        "prmt.b32.permutation",
        "four of eight bytes, by a pattern",
        build.moded("permutation", integer.permute_by, U32, U32, U32),
    ),
    Form("fns.b32", "where the n-th set bit is", build.fixed(integer.nth_set, U32, U32, U32, S32)),
    Form(
        "bmsk.mode.b32", "a mask of b bits from a on", build.moded("mode", integer.mask_bits, U32, U32)
    ),
    Form("szext.mode.u32", "the lowest b bits of a", build.moded("mode", integer.extend, U32, U32)),
    Form(
        "szext.mode.s32",
        "the lowest b bits of a, sign extended",
        build.moded("mode", integer.extend, S32, U32),
    ),
    # Comparisons and choices.
    Form("setp.cmp{.bool}.sint{|}", "a against b", build.setp(compare.INTEGERS)),
    Form("setp.ucmp{.bool}.uint{|}", "a against b", build.setp(compare.INTEGERS)),
    Form("setp.bcmp{.bool}.bits{|}", "a against b", build.setp(compare.INTEGERS)),
    Form("setp.fcmp{.bool}{.ftz}.f32{|}", "a against b", build.setp(compare.FLOATS)),
    Form("setp.fcmp{.bool}.f64{|}", "a against b", build.setp(compare.FLOATS)),
    Form("setp.fcmp{.bool}{.ftz}.f16", "a against b", build.setp(compare.FLOATS)),
    Form("setp.fcmp{.bool}.bf16", "a against b", build.setp(compare.FLOATS)),
    Form("setp.fcmp{.bool}{.ftz}.f16x2|", "a against b in either half", build.setp_halves),
    Form("setp.fcmp{.bool}.bf16x2|", "a against b in either half", build.setp_halves),
    Form(
        "set.cmp{.bool}.mark.sint",
        "a against b, as a number",
        build.set_number("mark", compare.INTEGERS),
    ),
    Form(
        "set.ucmp{.bool}.mark.uint",
        "a against b, as a number",
        build.set_number("mark", compare.INTEGERS),
    ),
    Form(
        "set.bcmp{.bool}.mark.bits",
        "a against b, as a number",
        build.set_number("mark", compare.INTEGERS),
    ),
    Form(
        "set.fcmp{.bool}{.ftz}.mark.f32",
        "a against b, as a number",
        build.set_number("mark", compare.FLOATS),
    ),
    Form(
        "set.fcmp{.bool}.mark.f64", "a against b, as a number", build.set_number("mark", compare.FLOATS)
    ),
    Form(
        "set.fcmp{.bool}{.ftz}.markh.f16",
        "a against b, as a number",
        build.set_number("markh", compare.FLOATS),
    ),
    Form(
        "set.fcmp{.bool}.markb.bf16",
        "a against b, as a number",
        build.set_number("markb", compare.FLOATS),
    ),
    Form(
        "set.fcmp{.bool}{.ftz}.f16x2.f16x2",
        "a against b, as numbers in either half",
        build.set_halves("f16"),
    ),
    Form(
        "set.fcmp{.bool}{.ftz}.word.f16x2",
        "a against b, as masks in either half",
        build.set_halves("u16"),
    ),
    Form(
        "set.fcmp{.bool}.bf16x2.bf16x2",
        "a against b, as numbers in either half",
        build.set_halves("bf16"),
    ),
    Form(
        "set.fcmp{.bool}.word.bf16x2", "a against b, as masks in either half", build.set_halves("u16")
    ),
    Form("selp.any", "a where c, else b", build.leading(compare.select, 2, BOOL)),
    Form("slct.any.s32", "a where c >= 0, else b", build.slct),
    Form("slct{.ftz}.any.f32", "a where c >= 0, else b", build.slct),
    # Floating point, rounded once.
    Form("add{.rnd}{.ftz}{.sat}.f32", "a + b", build.rounded("add")),
    Form("add{.rnd}{.ftz}.f32x2", "a + b in either half", build.rounded("add")),
    Form("add{.rnd}.f64", "a + b", build.rounded("add")),
    Form("add{.rn}{.ftz}{.sat}.half", "a + b", build.rounded("add")),
    Form("add{.rn}.bfloat16", "a + b", build.rounded("add")),
    Form("sub{.rnd}{.ftz}{.sat}.f32", "a - b", build.rounded("sub")),
    Form("sub{.rnd}{.ftz}.f32x2", "a - b in either half", build.rounded("sub")),
    Form("sub{.rnd}.f64", "a - b", build.rounded("sub")),
    Form("sub{.rn}{.ftz}{.sat}.half", "a - b", build.rounded("sub")),
    Form("sub{.rn}.bfloat16", "a - b", build.rounded("sub")),
    Form("add{.rnd}{.sat}.f32.short", "a + b, a of 16 bits", build.mixed("add")),
    Form("sub{.rnd}{.sat}.f32.short", "a - b, a of 16 bits", build.mixed("sub")),
    Form("mul{.rnd}{.ftz}{.sat}.f32", "a * b", build.rounded("mul")),
    Form("mul{.rnd}{.ftz}.f32x2", "a * b in either half", build.rounded("mul")),
    Form("mul{.rnd}.f64", "a * b", build.rounded("mul")),
    Form("mul{.rn}{.ftz}{.sat}.half", "a * b", build.rounded("mul")),
    Form("mul{.rn}.bfloat16", "a * b", build.rounded("mul")),
    Form("fma.rnd{.ftz}{.sat}.f32", "a * b + c", build.rounded("fma")),
    Form("fma.rnd{.ftz}.f32x2", "a * b + c in either half", build.rounded("fma")),
    Form("fma.rnd.f64", "a * b + c", build.rounded("fma")),
    Form("fma.rn{.ftz}{.sat}.half", "a * b + c", build.rounded("fma")),
    Form("fma.rn{.ftz}.relu.half", "a * b + c, at least 0", build.rounded("fma")),
    Form("fma.rn{.relu}.bfloat16", "a * b + c, at least 0 with .relu", build.rounded("fma")),
    Form("fma.rnd{.sat}.f32.short", "a * b + c, a and b of 16 bits", build.mixed("fma")),
    Form("mad.rnd{.ftz}{.sat}.f32", "a * b + c", build.rounded("fma")),
    Form("mad.rnd.f64", "a * b + c", build.rounded("fma")),
    Form("div.rnd{.ftz}.f32", "a / b", build.rounded("div")),
    Form("div.rnd.f64", "a / b", build.rounded("div")),
    Form("rcp.rnd{.ftz}.f32", "1 / a", build.rounded("rcp")),
    Form("rcp.rnd.f64", "1 / a", build.rounded("rcp")),
    Form("sqrt.rnd{.ftz}.f32", "the square root of a", build.rounded("sqrt")),
    Form("sqrt.rnd.f64", "the square root of a", build.rounded("sqrt")),
    Form("abs{.ftz}.f32", "the size of a", build.floats(np.abs, 1)),
    Form("abs.f64", "the size of a", build.floats(np.abs, 1)),
    Form("abs{.ftz}.half", "the size of a", build.floats(np.abs, 1)),
    Form("abs.bfloat16", "the size of a", build.floats(np.abs, 1)),
    Form("neg{.ftz}.f32", "-a", build.floats(np.negative, 1)),
    Form("neg.f64", "-a", build.floats(np.negative, 1)),
    Form("neg{.ftz}.half", "-a", build.floats(np.negative, 1)),
    Form("neg.bfloat16", "-a", build.floats(np.negative, 1)),
    Form("min{.ftz}{.NaN}{.xorsign.abs}.f32", "the lesser, -0 below +0", build.extreme("min")),
    Form("min.f64", "the lesser, -0 below +0", build.extreme("min")),
    Form("min{.ftz}{.NaN}{.xorsign.abs}.half", "the lesser, -0 below +0", build.extreme("min")),
    Form("min{.NaN}{.xorsign.abs}.bfloat16", "the lesser, -0 below +0", build.extreme("min")),
    Form("max{.ftz}{.NaN}{.xorsign.abs}.f32", "the greater, -0 below +0", build.extreme("max")),
    Form("max.f64", "the greater, -0 below +0", build.extreme("max")),
    Form("max{.ftz}{.NaN}{.xorsign.abs}.half", "the greater, -0 below +0", build.extreme("max")),
    Form("max{.NaN}{.xorsign.abs}.bfloat16", "the greater, -0 below +0", build.extreme("max")),
    Form("testp.property.float", "what kind of number a is", build.testp),
    Form("copysign.float", "b with the sign of a", build.integers(floating.copy_sign, 2)),
    # Approximations.
    Form(
        "div.approx{.ftz}.f32",
        "a / b",
        build.floats(approximate.divide_by_inverse, 2),
        "2 ulp where b is from 2**-126 to 2**126",
    ),
    Form("div.full{.ftz}.f32", "a / b", build.floats(approximate.divide, 2), "2 ulp"),
    Form("rcp.approx{.ftz}.f32", "1 / a", build.approximated(approximate.reciprocal), "1 ulp"),
    Form(
        "rcp.approx.ftz.f64",
        "1 / a, upper 32 bits",
        build.approximated(approximate.reciprocal_seed),
        "relative 2**-20",
    ),
    Form(
        "sqrt.approx{.ftz}.f32",
        "the square root of a",
        build.approximated(approximate.root),
        "relative 2**-23",
    ),
    Form(
        "rsqrt.approx{.ftz}.f32",
        "1 / square root of a",
        build.approximated(approximate.inverse_root),
        "relative 2**-22.9",
    ),
    Form(
        "rsqrt.approx.f64",
        "1 / square root of a",
        build.approximated(approximate.inverse_root),
        "relative 2**-50",
    ),
    Form(
        "rsqrt.approx.ftz.f64",
        "1 / square root of a, upper 32 bits",
        build.approximated(approximate.inverse_root_seed),
        "relative 2**-20",
    ),
    Form(
        "ex2.approx{.ftz}.f32",
        "2 to the power of a",
        build.approximated(approximate.power),
        "relative 2**-22",
    ),
    Form(
        "ex2.approx.half",
        "2 to the power of a",
        build.approximated(approximate.power),
        "relative 2**-9.9",
    ),
    Form(
        "ex2.approx.ftz.bfloat16",
        "2 to the power of a",
        build.approximated(approximate.power),
        "relative 2**-7",
    ),
    Form(
        "lg2.approx{.ftz}.f32",
        "the logarithm of a to base 2",
        build.approximated(approximate.logarithm),
        "relative 2**-22; absolute for a from 0.5 to 2",
    ),
    Form(
        "sin.approx{.ftz}.f32",
        "the sine of a",
        build.approximated(approximate.sine),
        "absolute 2**-20.5 up to 2 pi, 2**-14.7 up to 100 pi",
    ),
    Form(
        "cos.approx{.ftz}.f32",
        "the cosine of a",
        build.approximated(approximate.cosine),
        "absolute 2**-20.5 up to 2 pi, 2**-14.7 up to 100 pi",
    ),
    Form(
        "tanh.approx.f32",
        "the hyperbolic tangent of a",
        build.approximated(approximate.tangent),
        "relative 2**-11",
    ),
    Form(
        "tanh.approx.half",
        "the hyperbolic tangent of a",
        build.approximated(approximate.tangent),
        "absolute 2**-10.987",
    ),
    Form(
        "tanh.approx.bfloat16",
        "the hyperbolic tangent of a",
        build.approximated(approximate.tangent),
        "absolute 2**-8",
    ),
    # Conversions.
    Form("cvt{.sat}.to.from", "an integer as an integer", build.int_to_int),
    Form("cvt.integral{.ftz}{.sat}.to.f32", "a number as an integer", build.float_to_int),
    Form("cvt.integral{.sat}.to.f64", "a number as an integer", build.float_to_int),
    Form("cvt.integral{.sat}.to.f16", "a number as an integer", build.float_to_int),
    Form("cvt.integral.int.bf16", "a number as an integer", build.bfloat16_to_int),
    Form("cvt.rnd{.ftz}{.sat}.f32.from", "an integer as a number", build.int_to_float(F32)),
    Form("cvt.rnd{.sat}.f64.from", "an integer as a number", build.int_to_float(F64)),
    Form("cvt.rnd{.sat}.f16.from", "an integer as a number", build.int_to_float(F16)),
    Form("cvt.rnd.bf16.int", "an integer as a number", build.int_to_bfloat16),
    Form("cvt{.integral}{.ftz}{.sat}.f32.f32", "a, or the integer next to it", build.integral(F32)),
    Form("cvt{.integral}{.sat}.f64.f64", "a, or the integer next to it", build.integral(F64)),
    Form("cvt{.integral}{.sat}.f16.f16", "a, or the integer next to it", build.integral(F16)),
    Form("cvt.integral.bf16.bf16", "the integer next to a", build.integral_bfloat16),
    Form("cvt.rnd{.ftz}{.sat}.f32.f64", "the number next to a", build.float_to_float(F64, F32)),
    Form("cvt.rnd{.sat}.f16.f64", "the number next to a", build.float_to_float(F64, F16)),
    Form("cvt.rnd{.ftz}{.sat}.f16.f32", "the number next to a", build.single_to_half),
    Form("cvt.rnd.f16.bf16", "the number next to a", build.from_bfloat16(F16)),
    Form("cvt.rnd.bf16.f64", "the number next to a", build.to_bfloat16),
    Form("cvt.rnd.bf16.f16", "the number next to a", build.to_bfloat16),
    Form("cvt.rnz.relu.f16.f32", "the number next to a, at least 0", build.to_short("f16")),
    Form(
        "cvt.rnz{.relu}.bf16.f32", "the number next to a, at least 0 with .relu", build.to_short("bf16")
    ),
    Form("cvt.rnz{.relu}.f16x2.f32", "a above b, each rounded", build.to_shorts("f16")),
    Form("cvt.rnz{.relu}.bf16x2.f32", "a above b, each rounded", build.to_shorts("bf16")),
    Form("cvt.rnz{.relu}.tf32.f32", "the number next to a, at least 0 with .relu", build.to_tf32),
    Form("cvt.rna.tf32.f32", "the number next to a", build.to_tf32),
    Form(
        "cvt.rn.satfinite{.relu}.byte.f32",
        "a above b, each rounded and clamped",
        build.singles_to_bytes,
    ),
    Form(
        "cvt.rn.satfinite{.relu}.byte.f16x2",
        "either half of a, rounded and clamped",
        build.halves_to_bytes,
    ),
    Form("cvt.rn{.relu}.f16x2.byte", "either half of a", build.bytes_to_halves),
    Form("cvt{.ftz}{.sat}.f64.f32", "the same number", build.float_to_float(F32, F64)),
    Form("cvt{.ftz}{.sat}.f32.f16", "the same number", build.float_to_float(F16, F32)),
    Form("cvt{.sat}.f64.f16", "the same number", build.float_to_float(F16, F64)),
    Form("cvt{.ftz}.f32.bf16", "the same number", build.from_bfloat16(F32)),
    Form("cvt.f64.bf16", "the same number", build.from_bfloat16(F64)),
    Form("cvt.pack.sat.packed.s32", "a above b, each clamped", build.pack),
    Form("cvt.pack.sat.octet.s32.b32", "c above a above b, a and b clamped", build.pack_onto),
)


@lru_cache(maxsize=4096)
def instruction(opcode: str) -> Instruction | None:
    """Return the instruction for `opcode`, or None. A comparison followed by `|` has two results."""
    for form in _by_mnemonic().get(opcode.split(".", 1)[0], ()):
        modifiers = form.modifiers(opcode)
        if modifiers is not None:
            return replace(form.build(modifiers), exact=not form.bound)
    return None


def mnemonics() -> Container[str]:
    """Return the mnemonics that have a row."""
    return _by_mnemonic()


@cache
def _by_mnemonic() -> dict[str, list[Form]]:
    index: dict[str, list[Form]] = {}
    for form in FORMS:
        index.setdefault(form.mnemonic, []).append(form)
    return index
