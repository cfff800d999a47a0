"""PTX is checked before it is assembled: every rule with its line, and similar legal code."""

from __future__ import annotations

import pytest

from preheat.errors import PtxError
from preheat.model.arch import Arch
from preheat.model.program import Program
from preheat.toolchain import lint
from preheat.toolchain.compiler import Toolchain

GOOD = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p)
{
    .reg .b32 %r<4>;
    .reg .f32 %f<4>;
    .reg .f64 %fd<4>;
    // here
    ret;
}
"""
HERE = 9  # the line that `with_line` replaces


def with_line(line: str) -> str:
    return GOOD.replace("    // here", line)


def refused(text: str) -> PtxError:
    with pytest.raises(PtxError) as caught:
        lint.check(text, "k.ptx")
    return caught.value


def test_good_ptx_comes_back_parsed() -> None:
    module = lint.check(GOOD, "k.ptx")
    assert module.target == ("sm_80",)
    assert list(module.entries) == ["k"]


# Text


def test_a_byte_order_mark_is_refused() -> None:
    error = refused("\ufeff" + GOOD)
    assert (error.rule, error.line, error.program) == ("bom", 1, "k.ptx")
    assert error.text.endswith(".version 8.0")


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_empty_text_is_refused(text: str) -> None:
    error = refused(text)
    assert (error.rule, error.line, error.text.strip()) == ("empty", 1, "")


@pytest.mark.parametrize(
    "line", ["    // größer", "    /* ü */", '    .pragma "é";', "    mov.u32 %r1, ²;"]
)
def test_a_byte_beyond_ascii_is_refused_even_in_a_comment(line: str) -> None:
    error = refused(with_line(line))
    assert (error.rule, error.line, error.text) == ("ascii", HERE, line)


def test_the_first_byte_beyond_ascii_is_the_one_named() -> None:
    error = refused(GOOD.replace(".address_size 64", ".address_size 64 // µ").replace("here", "ä"))
    assert error.line == 3
    assert "'µ'" in str(error)


@pytest.mark.parametrize(
    ("gone", "named"), [(".version 8.0", ".version"), (".target sm_80", ".target")]
)
def test_a_missing_directive_is_refused_by_name(gone: str, named: str) -> None:
    error = refused(GOOD.replace(gone, ""))
    assert (error.rule, error.line) == ("syntax", 1)
    assert f"no {named} directive" in str(error)


def test_a_parameter_without_a_type_is_refused_with_its_line() -> None:
    error = refused(GOOD.replace(".param .u64 p", ".param p"))
    assert (error.rule, error.line) == ("syntax", 4)
    assert error.text == ".visible .entry k(.param p)"


def test_a_body_that_is_never_closed_is_refused_with_its_line() -> None:
    error = refused(GOOD.rstrip().removesuffix("}"))
    assert (error.rule, error.line, error.text) == ("syntax", 5, "{")


# Registers


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ("    .reg .b32 %tid;", "%tid"),
        ("    .reg .u32 %r9, %ctaid, %r10;", "%ctaid"),
        ("    .reg.b32 %laneid;", "%laneid"),
        ("    { .reg .b32 %warpid; }", "%warpid"),
        ("    .reg .b64 %globaltimer;", "%globaltimer"),
        ("    .reg .b32 %envreg31;", "%envreg31"),
        ("    .reg .b32 %pm<3>;", "%pm0"),
        ("    .reg .b64 %clock<65>;", "%clock64"),
        ("    .reg .b64 %pm3_64;", "%pm3_64"),
        ("    .reg .b32 %reserved_smem_offset_begin;", "%reserved_smem_offset_begin"),
        ("    .reg .b32 %current_graph_exec;", "%current_graph_exec"),
    ],
)
def test_a_register_that_hides_a_special_one_is_refused(line: str, hidden: str) -> None:
    error = refused(with_line(line))
    assert (error.rule, error.line, error.text) == ("shadow", HERE, line)
    assert f"{hidden} hides the special register {hidden}" in str(error)


@pytest.mark.parametrize(
    "line",
    [
        "    .reg .b32 %tid<5>;",  # %tid0 to %tid4, which no instruction defines
        "    .reg .b64 %clock<64>;",  # stops short of %clock64
        "    .reg .b32 %envreg32, %pm8, %tidy, %ctaid_x;",
        "    .reg .b32 tid;",
        "    mov.u32 %r1, %tid.x;",
        "    // .reg .b32 %tid;",
        "    /* .reg .b32 %tid; */",
    ],
)
def test_names_that_hide_nothing_pass(line: str) -> None:
    assert list(lint.check(with_line(line), "k.ptx").entries) == ["k"]


def test_device_functions_are_checked_too() -> None:
    function = ".func f()\n{\n    .reg .b32 %ntid;\n    ret;\n}\n"
    error = refused(GOOD + function)
    assert (error.rule, error.line) == ("shadow", GOOD.count("\n") + 3)


# Rounding


@pytest.mark.parametrize(
    ("line", "opcode"),
    [
        ("    div.f32 %f1, %f2, %f3;", "div.f32"),
        ("    div.ftz.f32 %f1, %f2, %f3;", "div.ftz.f32"),
        ("    div.f64 %fd1, %fd2, %fd3;", "div.f64"),
        ("    sqrt.f32 %f1, %f2;", "sqrt.f32"),
        ("    rcp.f64 %fd1, %fd2;", "rcp.f64"),
        ("    @%p1 rcp.ftz.f32 %f1, %f2;", "rcp.ftz.f32"),
        ("    @ !%p1 div.f32 %f1, %f2, %f3;", "div.f32"),
        ("$L: sqrt.f64 %fd1, %fd2;", "sqrt.f64"),
        ("    {div.f32 %f1, %f2, %f3;}", "div.f32"),
        ("    div.f32\t%f1, %f2, %f3;", "div.f32"),
        ("    div.f32%f1, %f2, %f3;", "div.f32"),
    ],
)
def test_a_float_operation_that_does_not_say_how_it_rounds_is_refused(line: str, opcode: str) -> None:
    error = refused(with_line(line))
    assert (error.rule, error.line, error.text) == ("rounding", HERE, line)
    assert f"{opcode} needs a rounding mode" in str(error)


@pytest.mark.parametrize(
    "line",
    [
        "    div.u32 %r1, %r2, %r3;",
        "    div.s64 %rd1, %rd2, %rd3;",
        "    div.rn.f32 %f1, %f2, %f3;",
        "    div.full.f32 %f1, %f2, %f3;",
        "    div.approx.ftz.f32 %f1, %f2, %f3;",
        "    div.rz.f64 %fd1, %fd2, %fd3;",
        "    sqrt.approx.ftz.f32 %f1, %f2;",
        "    sqrt.rm.f32 %f1, %f2;",
        "    rcp.rp.ftz.f32 %f1, %f2;",
        "    rcp.approx.ftz.f64 %fd1, %fd2;",
        "    rsqrt.approx.f32 %f1, %f2;",
        "    add.f32 %f1, %f2, %f3;",
        "    // div.f32 %f1, %f2, %f3;",
        "    mov.u32 %r1, %r2; /* sqrt.f32 %f1, %f2; */",
    ],
)
def test_operations_that_round_as_said_or_not_at_all_pass(line: str) -> None:
    assert list(lint.check(with_line(line), "k.ptx").entries) == ["k"]


@pytest.mark.parametrize("line", ["    div.f32 %f1, %f2, %f3;", "    sqrt.f64 %fd1, %fd2;"])
def test_what_the_lint_refuses_the_assembler_refuses_too(toolchain: Toolchain, line: str) -> None:
    message = {"do": "ptx", "label": "k.ptx", "arch": "sm_90", "options": []}
    reply, _ = toolchain.pool.call(message, {"source": with_line(line).encode()})
    assert reply["status"] == "ERROR_PTX_COMPILE"


def test_a_hidden_special_register_is_something_the_assembler_lets_pass(toolchain: Toolchain) -> None:
    text = with_line("    .reg .b32 %tid;\n    mov.u32 %tid, 5;")
    message = {"do": "ptx", "label": "k.ptx", "arch": "sm_90", "options": []}
    reply, _ = toolchain.pool.call(message, {"source": text.encode()})
    assert reply["status"] == "SUCCESS"
    assert refused(text).rule == "shadow"


# In use


def test_the_first_broken_rule_is_reported_with_program_line_and_text() -> None:
    text = with_line("    div.f32 %f1, %f2, %f3;\n    .reg .b32 %tid;")
    assert str(refused(text)) == (
        f"k.ptx:{HERE}: div.f32 needs a rounding mode, .approx or .full\n    div.f32 %f1, %f2, %f3;"
    )


def test_assembling_lints_first(toolchain: Toolchain) -> None:
    program = Program.of(with_line("    rcp.f32 %f1, %f2;"), label="norm.ptx")
    with pytest.raises(PtxError) as caught:
        toolchain.compile(program, Arch.parse("sm_90"))
    assert (caught.value.program, caught.value.line) == ("norm.ptx", HERE)
