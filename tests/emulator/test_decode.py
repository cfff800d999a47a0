"""PTX text is decoded to operations and blocks: names, numbers, variables, control flow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preheat.emulator.control_flow import basic_blocks, defs, is_guard_branch, uses
from preheat.emulator.decode import (
    Address,
    CompoundAddress,
    DecodedFunction,
    Expression,
    Immediate,
    Negated,
    Register,
    ResultPair,
    SpecialRegister,
    Symbol,
    Vector,
    VideoOperand,
    decode,
)
from preheat.model import ptx
from tests.emulator.support import HEAD


def body(text: str) -> DecodedFunction:
    (function,) = ptx.parse(f"{HEAD}.entry k(.param .u64 a)\n{{\n{text}\n}}").functions
    return decode(function)


def operands(text: str) -> tuple[Any, ...]:
    declared = (
        ".reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .shared .b8 tile[64];"
        ".reg .v4 .f32 v; .reg.v2.b32 %v<3>;"
    )
    (op,) = body(f"{declared}\n{text}").ops
    return op.operands


def r(number: int) -> Register:
    return Register(f"%r{number}", "b32")


# Operands


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add.s32 %r1, %r2, -7;", (r(1), r(2), Immediate("-7"))),
        ("mov.u32 %r1, %tid.x;", (r(1), SpecialRegister("%tid.x"))),
        ("mov.u32 %r1, WARP_SZ;", (r(1), Immediate("32"))),
        ("mov.u32 %r1, tile;", (r(1), Symbol("tile"))),
        ("mov.u64 %rd1, table+8;", (Register("%rd1", "b64"), Symbol("table", 8))),
        ("ld.shared.b32 %r1, [%r2+-4];", (r(1), Address(r(2), -4))),
        ("ld.shared.b32 %r1, [%r2-4];", (r(1), Address(r(2), -4))),
        ("ld.shared.b32 %r1, [tile+12];", (r(1), Address(Symbol("tile", 12), 0))),
        ("ld.global.b32 %r1, [4096];", (r(1), Address(Immediate("4096"), 0))),
        ("mov.b64 {%r1, _}, %rd1;", (Vector((r(1), None)), Register("%rd1", "b64"))),
        ("selp.b32 %r1, %r2, 0, !%p1;", (r(1), r(2), Immediate("0"), Negated(Register("%p1", "pred")))),
        ("shfl.sync.up.b32 %r1|%p1, %r2, 1, 0, -1;", (
            ResultPair((r(1), Register("%p1", "pred"))),
            r(2), Immediate("1"), Immediate("0"), Immediate("-1"))),
        ("setp.eq.s32 %p1|_, %r1, %r2;", (ResultPair((Register("%p1", "pred"), None)), r(1), r(2))),
        ("tex.1d.v2.s32.s32 {%r1, %r2}|%p1, [%rd1, {%r3}];", (
            ResultPair((Vector((r(1), r(2))), Register("%p1", "pred"))),
            CompoundAddress((Register("%rd1", "b64"), Vector((r(3),)))))),
        ("tex.1d.v2.s32.s32 {%r1, _}, [texture, sampler, %r3];", (
            Vector((r(1), None)), CompoundAddress((Symbol("texture"), Symbol("sampler"), r(3))))),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, 0}], [tile+16];", (
            CompoundAddress((Register("%rd1", "b64"), Vector((r(1), Immediate("0"))))),
            Address(Symbol("tile", 16), 0))),
        ("vmad.s32.s32.u32 %r1, -%r2.b0, %r3.h1, -%r4;", (
            r(1),
            VideoOperand(r(2), "b0", True), VideoOperand(r(3), "h1"), VideoOperand(r(4), "", True))),
        ("vadd4.u32.u32.u32 %r1.b10, %r2, %r3.b7654, 0;", (
            VideoOperand(r(1), "b10"), r(2), VideoOperand(r(3), "b7654"), Immediate("0"))),
        ("mov.b32 %v1.y, v.x;", (Register("%v1.y", "b32"), Register("v.x", "f32"))),
        ("ld.global.v4.f32 v, [%rd1];", (
            Vector(tuple(Register(f"v.{axis}", "f32") for axis in "xyzw")),
            Address(Register("%rd1", "b64"), 0))),
        ("add.s32 %r1, %r2, 4*(2+1);", (r(1), r(2), Expression("4*(2+1)"))),
        ("add.s32 %r1, %r2, (1 << 3) | ~2;", (r(1), r(2), Expression("(1 << 3) | ~2"))),
        ("ld.shared.b32 %r1, [tile + 4 * 3];", (r(1), Expression("[tile + 4 * 3]"))),
    ],
)  # fmt: skip
def test_an_operand_is_taken_apart(text: str, expected: tuple[Any, ...]) -> None:
    assert operands(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "add.s32 %r1, ?;",
        "ld.global.b32 %r1, [%r1*4];",
        "shfl.sync.up.b32 %r1|%q, %r2, 1, 0, -1;",
        "tex.1d.v2.s32.s32 {%r1, %r2), [%rd1, {%r3})}];",
        "tex.1d.v2.s32.s32 %r1, [%rd1, {?}];",
        "mov.f32 %r1, v.b0;",
        "add.s32 %r1, %r2, (1+);",
    ],
)
def test_text_that_is_no_operand_is_a_fault_with_its_line(text: str) -> None:
    with pytest.raises(ptx.SyntaxFault, match="is no") as caught:
        operands(text)
    assert caught.value.line == 7


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("-1", "u4", 0xFFFFFFFF),
        ("0x1FU", "u4", 31),
        ("017", "i4", 15),
        ("0b101", "i8", 5),
        ("-9223372036854775808", "i8", -(2**63)),
        ("18446744073709551615", "i8", -1),
        ("300", "u1", 44),
        ("0f3FC00000", "f4", 1.5),
        ("0F3fc00000", "f4", 1.5),
        ("0f3FC00000", "u4", 0x3FC00000),
        ("0f3FC00000", "f8", 1.5),
        ("0d400A000000000000", "f8", 3.25),
        ("0d400A000000000000", "u8", 0x400A000000000000),
        ("1.25e2", "f8", 125.0),
        ("0x3C00", "f2", 1.0),
        ("3", "f4", 3.0),
        ("1", "?", True),
        ("0", "?", False),
    ],
)
def test_a_number_means_what_its_type_makes_of_it(text: str, dtype: str, expected: float) -> None:
    value = Immediate(text).value(np.dtype(dtype))
    assert value.dtype == np.dtype(dtype)
    assert value == expected


# Scopes


def test_names_of_inner_scopes_hide_those_outside_and_end_with_them() -> None:
    found = body(
        ".reg .b32 x;\nmov.u32 x, 1;\n{ .reg .b16 x; mov.u16 x, 2; { mov.u16 x, 3; } }\nmov.u32 x, 4;\n"
        "{ .reg .b16 x; mov.u16 x, 5; }"
    )
    names = [op.operands[0] for op in found.ops]
    assert [n.kind for n in names if isinstance(n, Register)] == ["b32", "b16", "b16", "b32", "b16"]
    assert names[0] == names[3]
    assert names[1] == names[2]
    assert len(set(names)) == 3


def test_a_label_is_found_in_its_own_scope_even_ahead() -> None:
    found = body(
        "{ bra L; L: mov.u32 %r, 1; }\n{ bra L; L: ret; }\n.reg .b32 %r;".replace("%r, 1", "%r, 1")
    )
    jumps = [op.operands[0] for op in found.ops if op.mnemonic == "bra"]
    assert len(set(jumps)) == 2
    targets = [found.labels[jump.name] for jump in jumps if isinstance(jump, Symbol)]
    assert [found.ops[at].opcode for at in targets] == ["mov.u32", "ret"]


def test_directives_that_only_tell_others_something_are_passed_over() -> None:
    found = body(
        '.loc 1 2 3\n.pragma "nounroll";\n.pragma"nounroll";\n.file 1 "x.cu"\n'
        ".loc 1 4 5, function_name $L__info0, inlined_at 1 2 3\n"
        "P: .callprototype(.param .b32 _) _ (.param .align 8 .b8 _[16]);\nQ: .calltargets f, g;\nret;"
    )
    assert [op.opcode for op in found.ops] == ["ret"]


def test_statements_without_known_shape_can_be_set_aside() -> None:
    text = ".reg .b32 %r<9>;\n.reg .nonsense x;\nadd.s32 %r1, ?;\nadd.s32 %r1, %r2, 3;\n@%q ret;\nret;"
    (function,) = ptx.parse(f"{HEAD}.entry k(.param .u64 a)\n{{\n{text}\n}}").functions
    rejected: list[ptx.Statement] = []
    found = decode(function, rejected)
    assert [op.opcode for op in found.ops] == ["add.s32", "ret"]
    assert [statement.line for statement in rejected] == [7, 8, 10]


def test_variables_of_a_body_are_kept_with_their_scope() -> None:
    found = body(
        ".shared .align 16 .b8 s[64];\n.local .f32 l[4];\n{ .param .b64 p; }\n{ .param .b32 p; }"
    )
    assert [(v.space, v.size, v.align) for v in found.variables.values()] == [
        ("shared", 64, 16), ("local", 16, 4), ("param", 8, 8), ("param", 4, 4)
    ]  # fmt: skip
    assert len(found.variables) == 4


def test_a_brace_that_closes_nothing_is_a_fault() -> None:
    function = ptx.Function("k", "entry", (), (), (), (), 1, "ret; } ret;", 1)
    with pytest.raises(ptx.SyntaxFault, match="closes nothing"):
        decode(function)


# Variables of modules


def variables(text: str) -> dict[str, ptx.Variable]:
    return ptx.parse(HEAD + text).variables


def test_variables_are_read_with_space_size_alignment_and_values() -> None:
    found = variables(
        ".global .align 8 .u64 at = generic(table)+4;\n.visible .const .align 4 .b8 t[3] = {1, 2};\n"
        ".shared .f32 a, b[4][2];\n.extern .shared .align 16 .b8 dyn[];\n.global .v4 .f32 q;\n"
        ".global .attribute(.managed) .u32 m=5;.weak .global .f64 d = 0d3FF0000000000000;"
    )
    assert [(v.name, v.space, v.size, v.align, v.initial) for v in found.values()] == [
        ("at", "global", 8, 8, ("generic(table)+4",)),
        ("t", "const", 3, 4, ("1", "2")),
        ("a", "shared", 4, 4, ()),
        ("b", "shared", 32, 4, ()),
        ("dyn", "shared", 0, 16, ()),
        ("q", "global", 16, 16, ()),
        ("m", "global", 4, 4, ("5",)),
        ("d", "global", 8, 8, ("0d3FF0000000000000",)),
    ]
    assert found["dyn"].linkage == (".extern",)
    assert [v.line for v in found.values()] == [4, 5, 6, 6, 7, 8, 9, 9]


def test_variables_inside_functions_are_not_of_the_module() -> None:
    text = ".global .u32 a;\n.entry k() { .shared .b8 s[4]; ld.global.u32 %r1, [a]; }\n.global .u32 b;"
    assert {name: v.line for name, v in variables(text).items()} == {"a": 4, "b": 6}


def test_a_definition_wins_over_declarations() -> None:
    for text in (
        ".extern .global .u32 x;\n.global .u32 x = 3;",
        ".global .u32 x = 3;\n.extern .global .u32 x;",
    ):
        assert variables(text)["x"].initial == ("3",)


@pytest.mark.parametrize("text", [".global .bogus x;", ".global .u32 x y;"])
def test_a_variable_without_type_or_name_is_a_fault(text: str) -> None:
    with pytest.raises(ptx.SyntaxFault):
        variables(text)


# Flow


def test_blocks_end_at_branches_and_begin_at_labels() -> None:
    found = basic_blocks(
        body(
            ".reg .pred %p<2>; .reg .b32 %r<9>;\n"
            "mov.u32 %r1, 1;\nsetp.eq.u32 %p1, %r1, 1;\n@%p1 bra L;\n"
            "mov.u32 %r2, 2;\nL:\nbar.sync 0;\nmov.u32 %r3, %r1;\nbra M;\nmov.u32 %r4, 4;\nM: ret;"
        )
    )
    assert [[op.opcode for op in block.ops] for block in found] == [
        ["mov.u32", "setp.eq.u32", "bra"], ["mov.u32"], ["bar.sync"], ["mov.u32", "bra"], ["mov.u32"],
        ["ret"], ["ret"],
    ]  # fmt: skip
    assert [block.successors for block in found] == [(2, 1), (2,), (3,), (5,), (5,), (), ()]
    assert [block.reachable for block in found] == [True, True, True, True, False, True, False]


def test_a_guarded_instruction_is_branched_around() -> None:
    found = basic_blocks(body(".reg .pred %p<2>; .reg .b32 %r<9>;\n@!%p1 mov.u32 %r1, 1;\nret;"))
    around = found[0].ops[0]
    assert is_guard_branch(around)
    assert around.guard == (Register("%p1", "pred"), False)
    assert found[0].successors == (2, 1)
    assert found[1].ops[0].guard is None


def test_registers_live_from_where_they_are_set_to_where_they_are_last_read() -> None:
    found = basic_blocks(
        body(
            ".reg .pred %p<2>; .reg .b32 %r<9>;\nmov.u32 %r1, 0; mov.u32 %r2, 9; mov.u32 %r3, 3;\n"
            "L: add.u32 %r1, %r1, %r2;\nsetp.lt.u32 %p1, %r1, 99;\n@%p1 bra L;\nmov.u32 %r4, %r1;\nret;"
        )
    )
    assert found[0].live_out == {"%r1", "%r2"}
    assert found[1].live_out == {"%r1", "%r2"}
    assert found[2].live_in == {"%r1"}


@pytest.mark.parametrize(
    ("text", "writes", "reads"),
    [
        ("st.global.v2.b32 [%rd1], {%r1, %r2};", set(), {"%rd1", "%r1", "%r2"}),
        ("ld.global.v2.b32 {%r1, _}, [%rd1];", {"%r1"}, {"%rd1"}),
        ("red.global.add.u32 [%rd1], %r1;", set(), {"%rd1", "%r1"}),
        ("atom.global.add.u32 %r2, [%rd1], %r1;", {"%r2"}, {"%rd1", "%r1"}),
        ("shfl.sync.up.b32 %r1|%p1, %r2, %r3, 0, -1;", {"%r1", "%p1"}, {"%r2", "%r3"}),
        ("addc.cc.u32 %r1, %r2, %r3;", {"%r1", "%carry"}, {"%r2", "%r3", "%carry"}),
        ("bar.red.popc.u32 %r1, 0, !%p1;", {"%r1"}, {"%p1"}),
        ("bar.sync %r1;", set(), {"%r1"}),
    ],
)
def test_what_an_operation_writes_and_reads(text: str, writes: set[str], reads: set[str]) -> None:
    (op,) = body(f".reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;\n{text}").ops
    assert {register.name for register in defs(op)} == writes
    assert {register.name for register in uses(op)} == reads


def test_a_jump_to_nowhere_is_a_fault() -> None:
    with pytest.raises(ptx.SyntaxFault, match="no label there"):
        basic_blocks(body("bra there;"))


@pytest.mark.parametrize("number", ["09", "1x", "0xG", "1.2.3", "0f12", "--1"])
def test_a_value_that_is_no_number_is_a_fault(number: str) -> None:
    for text in (f"add.s32 %r1, %r2, {number};", f"ld.shared.b32 %r1, [%r2+{number}];"):
        with pytest.raises(ptx.SyntaxFault):
            operands(text)
