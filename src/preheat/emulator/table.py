"""The instructions that only compute: each variant has one function and one test.

An opcode that matches no variant is not supported. No modifier is ever ignored.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from preheat.emulator import approximate, builders, compare, floating, integer
from preheat.emulator.builders import Build, approximation, floats, rounded, same_type
from preheat.emulator.variant import BOOL, F16, F32, F64, S32, U32, Instruction, Variant

__all__ = ["VARIANTS", "Instruction", "Variant", "instruction", "mnemonics"]

#: The syntaxes of instructions with the result that PTX defines, and what builds each of them.
_EXACT: tuple[tuple[str, Build], ...] = (
    # Integers.
    ("mov.any mov.pred", same_type(lambda a: a, 1)),
    ("add.int add.int16x2", same_type(np.add, 2)),
    ("add.sat.s32", same_type(integer.add_saturating, 2)),
    ("sub.int", same_type(np.subtract, 2)),
    ("sub.sat.s32", same_type(integer.subtract_saturating, 2)),
    ("mul.lo.int", same_type(np.multiply, 2)),
    ("mul.hi.int", same_type(integer.multiply_high, 2)),
    ("mul.wide.narrow", builders.widening(integer.multiply_wide, 2)),
    ("mad.lo.int", same_type(integer.multiply_add, 3)),
    ("mad.hi.int", same_type(integer.plus(integer.multiply_high), 3)),
    ("mad.hi.sat.s32", same_type(integer.plus_saturating(integer.multiply_high), 3)),
    ("mad.wide.narrow", builders.widening(integer.plus(integer.multiply_wide), 3)),
    ("mul24.lo.word", same_type(integer.multiply_24, 2)),
    ("mul24.hi.word", same_type(integer.multiply_24_high, 2)),
    ("mad24.lo.word", same_type(integer.plus(integer.multiply_24), 3)),
    ("mad24.hi.word", same_type(integer.plus(integer.multiply_24_high), 3)),
    ("mad24.hi.sat.s32", same_type(integer.plus_saturating(integer.multiply_24_high), 3)),
    ("div.int", same_type(integer.divide, 2)),
    ("rem.int", same_type(integer.remainder, 2)),
    ("abs.sint", same_type(np.abs, 1)),
    ("neg.sint", same_type(np.negative, 1)),
    ("min.int min.int16x2", same_type(np.minimum, 2)),
    ("max.int max.int16x2", same_type(np.maximum, 2)),
    (
        "min.relu.s32 min.s32.relu min.relu.s16x2 min.s16x2.relu",
        same_type(floating.map_result(np.minimum, floating.relu), 2),
    ),
    (
        "max.relu.s32 max.s32.relu max.relu.s16x2 max.s16x2.relu",
        same_type(floating.map_result(np.maximum, floating.relu), 2),
    ),
    ("sad.int", same_type(integer.sum_of_differences, 3)),
    ("dp4a.atype.btype", builders.dp4a),
    ("dp2a.part.atype.btype", builders.dp2a),
    *(
        (f"{name}{4 // size}.dtype.atype.btype{{.op2}}", builders.simd(name, size))
        for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax")
        for size in (2, 1)
    ),
    ("vset2.atype.btype.cmp{.add}", builders.simd_set(2)),
    ("vset4.atype.btype.cmp{.add}", builders.simd_set(1)),
    # Bits.
    ("and.logical", same_type(np.bitwise_and, 2)),
    ("or.logical", same_type(np.bitwise_or, 2)),
    ("xor.logical", same_type(np.bitwise_xor, 2)),
    ("not.logical", same_type(np.invert, 1)),
    ("cnot.bits", same_type(integer.is_zero, 1)),
    ("lop3.b32", same_type(integer.logic_3, 4)),
    ("shl.bits", builders.shift(np.left_shift, integer.shift_left)),
    ("shr.bits shr.int", builders.shift(np.right_shift, integer.shift_right)),
    ("shf.l.mode.b32", builders.by_modifier("mode", integer.funnel_left, U32, U32, U32)),
    ("shf.r.mode.b32", builders.by_modifier("mode", integer.funnel_right, U32, U32, U32)),
    ("bfe.long", builders.leading_operands(integer.extract, 1, U32, U32)),
    ("bfi.untyped", builders.leading_operands(integer.insert, 2, U32, U32)),
    ("bfind.long", builders.to_u32(integer.highest_bit)),
    ("bfind.shiftamt.long", builders.to_u32(integer.highest_bit_shift)),
    ("brev.untyped", same_type(integer.reverse, 1)),
    ("clz.untyped", builders.to_u32(integer.leading_zeros)),
    ("popc.untyped", builders.to_u32(integer.population)),
    ("prmt.b32", same_type(integer.permute, 3)),
    ("prmt.b32.permutation", builders.by_modifier("permutation", integer.permute_by, U32, U32, U32)),
    ("fns.b32", builders.fixed_types(integer.nth_set, U32, U32, U32, S32)),
    ("bmsk.mode.b32", builders.by_modifier("mode", integer.mask_bits, U32, U32)),
    ("szext.mode.u32", builders.by_modifier("mode", integer.extend, U32, U32)),
    ("szext.mode.s32", builders.by_modifier("mode", integer.extend, S32, U32)),
    # Comparisons and selections.
    (
        "setp.cmp{.bool}.sint{|} setp.ucmp{.bool}.uint{|} setp.bcmp{.bool}.bits{|}",
        builders.setp(compare.INTEGERS),
    ),
    (
        "setp.fcmp{.bool}{.ftz}.f32{|} setp.fcmp{.bool}.f64{|} setp.fcmp{.bool}{.ftz}.f16 "
        "setp.fcmp{.bool}.bf16",
        builders.setp(compare.FLOATS),
    ),
    ("setp.fcmp{.bool}{.ftz}.f16x2| setp.fcmp{.bool}.bf16x2|", builders.setp_halves),
    (
        "set.cmp{.bool}.settype.sint set.ucmp{.bool}.settype.uint set.bcmp{.bool}.settype.bits",
        builders.set_number("settype", compare.INTEGERS),
    ),
    (
        "set.fcmp{.bool}{.ftz}.settype.f32 set.fcmp{.bool}.settype.f64",
        builders.set_number("settype", compare.FLOATS),
    ),
    ("set.fcmp{.bool}{.ftz}.settypeh.f16", builders.set_number("settypeh", compare.FLOATS)),
    ("set.fcmp{.bool}.settypeb.bf16", builders.set_number("settypeb", compare.FLOATS)),
    ("set.fcmp{.bool}{.ftz}.f16x2.f16x2", builders.set_halves("f16")),
    ("set.fcmp{.bool}.bf16x2.bf16x2", builders.set_halves("bf16")),
    ("set.fcmp{.bool}{.ftz}.word.f16x2 set.fcmp{.bool}.word.bf16x2", builders.set_halves("u16")),
    ("selp.any", builders.leading_operands(compare.select, 2, BOOL)),
    ("slct.any.s32 slct{.ftz}.any.f32", builders.slct),
    # Floating point, rounded once.
    *(
        (f"{name}{suffix}", rounded(name))
        for name in ("add", "sub", "mul")
        for suffix in (
            "{.rnd}{.ftz}{.sat}.f32",
            "{.rnd}{.ftz}.f32x2",
            "{.rnd}.f64",
            "{.rn}{.ftz}{.sat}.half",
            "{.rn}.bfloat16",
        )
    ),
    ("add{.rnd}{.sat}.f32.f16type", builders.mixed_precision("add")),
    ("sub{.rnd}{.sat}.f32.f16type", builders.mixed_precision("sub")),
    ("fma.rnd{.ftz}{.sat}.f32 fma.rnd{.ftz}.f32x2 fma.rnd.f64", rounded("fma")),
    ("fma.rn{.ftz}{.sat}.half fma.rn{.ftz}.relu.half fma.rn{.relu}.bfloat16", rounded("fma")),
    ("fma.rnd{.sat}.f32.f16type", builders.mixed_precision("fma")),
    ("mad.rnd{.ftz}{.sat}.f32 mad.rnd.f64", rounded("fma")),
    ("div.rnd{.ftz}.f32 div.rnd.f64", rounded("div")),
    ("rcp.rnd{.ftz}.f32 rcp.rnd.f64", rounded("rcp")),
    ("sqrt.rnd{.ftz}.f32 sqrt.rnd.f64", rounded("sqrt")),
    ("abs{.ftz}.f32 abs.f64 abs{.ftz}.half abs.bfloat16", floats(np.abs, 1)),
    ("neg{.ftz}.f32 neg.f64 neg{.ftz}.half neg.bfloat16", floats(np.negative, 1)),
    *(
        (f"{name}{suffix}", builders.min_max(name))
        for name in ("min", "max")
        for suffix in (
            "{.ftz}{.NaN}{.xorsign.abs}.f32",
            ".f64",
            "{.ftz}{.NaN}{.xorsign.abs}.half",
            "{.NaN}{.xorsign.abs}.bfloat16",
        )
    ),
    ("testp.property.float", builders.testp),
    ("copysign.float", same_type(floating.copy_sign, 2)),
    # Conversions. The first operand of a packed result becomes its upper half.
    ("cvt{.sat}.to.from", builders.int_to_int),
    ("cvt.irnd{.ftz}{.sat}.to.f32 cvt.irnd{.sat}.to.f64 cvt.irnd{.sat}.to.f16", builders.float_to_int),
    ("cvt.irnd.to.bf16", builders.bfloat16_to_int),
    ("cvt.rnd{.ftz}{.sat}.f32.from", builders.int_to_float(F32)),
    ("cvt.rnd{.sat}.f64.from", builders.int_to_float(F64)),
    ("cvt.rnd{.sat}.f16.from", builders.int_to_float(F16)),
    ("cvt.rnd.bf16.from", builders.int_to_bfloat16),
    ("cvt{.irnd}{.ftz}{.sat}.f32.f32", builders.round_to_integral(F32)),
    ("cvt{.irnd}{.sat}.f64.f64", builders.round_to_integral(F64)),
    ("cvt{.irnd}{.sat}.f16.f16", builders.round_to_integral(F16)),
    ("cvt.irnd.bf16.bf16", builders.round_bfloat16_to_integral),
    ("cvt.rnd{.ftz}{.sat}.f32.f64", builders.float_to_float(F64, F32)),
    ("cvt.rnd{.sat}.f16.f64", builders.float_to_float(F64, F16)),
    ("cvt.rnd{.ftz}{.sat}.f16.f32", builders.single_to_half),
    ("cvt{.rnd}.f16.bf16", builders.from_bfloat16(F16)),
    ("cvt.rnd.bf16.f64 cvt{.rnd}.bf16.f16", builders.to_bfloat16),
    ("cvt.rnz.relu.f16.f32", builders.single_to_f16type("f16")),
    ("cvt.rnz{.relu}.bf16.f32", builders.single_to_f16type("bf16")),
    ("cvt.rdir.bf16.f32", builders.to_bfloat16),
    ("cvt.rnz{.relu}.f16x2.f32", builders.singles_to_packed("f16")),
    ("cvt.rnz{.relu}.bf16x2.f32", builders.singles_to_packed("bf16")),
    ("cvt.rnz{.relu}.tf32.f32 cvt.rna.tf32.f32", builders.to_tf32),
    ("cvt.rn.satfinite{.relu}.fp8.f32", builders.singles_to_fp8),
    ("cvt.rn.satfinite{.relu}.fp8.f16x2", builders.halves_to_fp8),
    ("cvt.rn.satfinite{.relu}.fp8.bf16x2", builders.bfloat16_to_fp8),
    ("cvt.rn{.relu}.f16x2.fp8", builders.fp8_to_halves),
    ("cvt.rn{.relu}.bf16x2.fp8", builders.fp8_to_bfloat16),
    ("cvt{.ftz}{.sat}.f64.f32", builders.float_to_float(F32, F64)),
    ("cvt{.ftz}{.sat}.f32.f16", builders.float_to_float(F16, F32)),
    ("cvt{.sat}.f64.f16", builders.float_to_float(F16, F64)),
    ("cvt{.ftz}.f32.bf16", builders.from_bfloat16(F32)),
    ("cvt.f64.bf16", builders.from_bfloat16(F64)),
    ("cvt.pack.sat.int16.s32", builders.pack),
    ("cvt.pack.sat.int8.s32.b32", builders.pack_bytes),
)

_SINE_BOUND = "absolute 2^-20.5 up to 2 pi, 2^-14.7 up to 100 pi"

#: The syntaxes of approximate instructions, what builds them, and the bound of their error.
_APPROXIMATE: tuple[tuple[str, Build, str], ...] = (
    (
        "div.approx{.ftz}.f32",
        floats(approximate.divide_by_inverse, 2),
        "2 ulp where b is from 2^-126 to 2^126",
    ),
    ("div.full{.ftz}.f32", floats(approximate.divide, 2), "2 ulp"),
    ("rcp.approx{.ftz}.f32", approximation(approximate.reciprocal), "1 ulp"),
    ("rcp.approx.ftz.f64", approximation(approximate.reciprocal_seed), "relative 2^-20"),
    ("sqrt.approx{.ftz}.f32", approximation(approximate.root), "relative 2^-23"),
    ("rsqrt.approx{.ftz}.f32", approximation(approximate.inverse_root), "relative 2^-22.9"),
    ("rsqrt.approx.f64", approximation(approximate.inverse_root), "relative 2^-50"),
    ("rsqrt.approx.ftz.f64", approximation(approximate.inverse_root_seed), "relative 2^-20"),
    ("ex2.approx{.ftz}.f32", approximation(approximate.power), "relative 2^-22"),
    ("ex2.approx.half", approximation(approximate.power), "relative 2^-9.9"),
    ("ex2.approx.ftz.bfloat16", approximation(approximate.power), "relative 2^-7"),
    (
        "lg2.approx{.ftz}.f32",
        approximation(approximate.logarithm),
        "relative 2^-22; absolute for a from 0.5 to 2",
    ),
    ("sin.approx{.ftz}.f32", approximation(approximate.sine), _SINE_BOUND),
    ("cos.approx{.ftz}.f32", approximation(approximate.cosine), _SINE_BOUND),
    ("tanh.approx.f32", approximation(approximate.tangent), "relative 2^-11"),
    ("tanh.approx.half", approximation(approximate.tangent), "absolute 2^-10.987"),
    ("tanh.approx.bfloat16", approximation(approximate.tangent), "absolute 2^-8"),
)

VARIANTS: tuple[Variant, ...] = (
    *(Variant(syntax, build) for syntaxes, build in _EXACT for syntax in syntaxes.split()),
    *(Variant(syntax, build, bound) for syntax, build, bound in _APPROXIMATE),
)


@lru_cache(maxsize=4096)
def instruction(opcode: str) -> Instruction | None:
    """Return the instruction for `opcode`, or None. A comparison followed by `|` has two results."""
    for variant in _by_mnemonic().get(opcode.split(".", 1)[0], ()):
        modifiers = variant.modifiers(opcode)
        if modifiers is not None:
            return replace(variant.build(modifiers), exact=not variant.bound)
    return None


def mnemonics() -> Container[str]:
    """Return the mnemonics that have a variant."""
    return _by_mnemonic()


@cache
def _by_mnemonic() -> dict[str, list[Variant]]:
    index: dict[str, list[Variant]] = {}
    for variant in VARIANTS:
        index.setdefault(variant.mnemonic, []).append(variant)
    return index
