"""The PTX parser on hand-written text, on output of the compiler, and on invalid text."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from preheat.errors import PtxError
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.program import Program
from preheat.toolchain import lint
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.translate import Compiled
from tests.toolchain import support

HEAD = ".version 8.5\n.target sm_90\n.address_size 64\n"
Real = dict[str, Compiled]


def only(text: str) -> ptx.Function:
    """Return the one function of a module with the usual head."""
    (function,) = ptx.parse(HEAD + text).functions
    return function


def params(text: str) -> list[tuple[str, str, int, int, int]]:
    """Name, kind, offset, size and alignment of each parameter."""
    found = only(f".visible .entry k({text}) {{ ret; }}").params
    return [(p.name, p.kind, p.offset, p.size, p.align) for p in found]


def statements(body: str) -> list[str]:
    return [s.text for s in only(f".entry k()\n{{\n{body}\n}}").statements]


def statement(text: str) -> ptx.Statement:
    (found,) = only(f".entry k() {{ {text} }}").statements
    return found


# Directives of the module


def test_version_and_target_are_read() -> None:
    module = ptx.parse(".version 8.5\n.target sm_90a, texmode_unified\n.address_size 64\n")
    assert (module.version, module.target) == ((8, 5), ("sm_90a", "texmode_unified"))
    assert module.functions == ()


def test_directives_may_share_a_line() -> None:
    module = ptx.parse(".version 7.8 .target sm_80 .address_size 64\n.entry k { ret; }")
    assert (module.version, module.target) == ((7, 8), ("sm_80",))
    assert list(module.entries) == ["k"]


def test_directives_in_comments_do_not_count() -> None:
    module = ptx.parse(f"// .version 1.0\n/* .target sm_20\n*/\n{HEAD}")
    assert (module.version, module.target) == ((8, 5), ("sm_90",))


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (".target sm_90\n", ".version"),
        (".version 8.5\n", ".target"),
        (".version 8.5\n.target ,\n", ".target"),
        (".version\n.target sm_90\n", ".version"),
        ("", ".version"),
    ],
)
def test_a_missing_directive_is_named(text: str, missing: str) -> None:
    with pytest.raises(ptx.SyntaxFault, match=rf"no \{missing} directive") as caught:
        ptx.parse(text)
    assert caught.value.line == 1


def test_windows_line_ends_change_nothing() -> None:
    text = f"{HEAD}.visible .entry k(.param .u64 p)\n{{\n\tret;\n}}\n"
    unix, windows = ptx.parse(text), ptx.parse(text.replace("\n", "\r\n"))
    assert windows.target == unix.target
    assert windows.entries["k"].params == unix.entries["k"].params
    assert windows.entries["k"].statements == unix.entries["k"].statements


# Heads of functions


@pytest.mark.parametrize(
    ("head", "linkage"),
    [
        (".visible .entry k(.param .u32 n)", (".visible",)),
        (".weak .entry k(.param .u32 n)", (".weak",)),
        (".entry k(.param .u32 n)", ()),
        (".visible\n.entry\nk\n(\n\t.param .u32 n\n)", (".visible",)),
    ],
)
def test_an_entry_is_found_however_it_is_linked(head: str, linkage: tuple[str, ...]) -> None:
    found = only(f"{head}\n{{\n\tret;\n}}\n")
    assert (found.name, found.kind, found.linkage) == ("k", "entry", linkage)
    assert [p.name for p in found.params] == ["n"]


@pytest.mark.parametrize(
    "head", [".visible .entry k()", ".visible .entry k(\n\n)", ".visible .entry k"]
)
def test_an_entry_without_parameters_may_do_without_parentheses(head: str) -> None:
    assert only(f"{head} {{ ret; }}").params == ()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (".maxntid 128", (".maxntid 128",)),
        (".maxntid 128, 1, 1", (".maxntid 128, 1, 1",)),
        (".maxntid 128,\n 1, 1\n.minnctapersm 2", (".maxntid 128, 1, 1", ".minnctapersm 2")),
        (".explicitcluster\n.reqnctapercluster 2", (".explicitcluster", ".reqnctapercluster 2")),
        ("", ()),
    ],
)
def test_directives_between_head_and_body_are_kept(written: str, read: tuple[str, ...]) -> None:
    assert only(f".visible .entry k(.param .u32 n)\n{written}\n{{ ret; }}").directives == read


def test_a_function_has_return_parameters_and_parameters_of_its_own() -> None:
    found = only(
        ".func  (.param .align 8 .b8 result[16]) _Z1fii(\n"
        "\t.param .b32 _Z1fii_param_0,\n\t.param .b32 _Z1fii_param_1\n)\n{\n\tret;\n}\n"
    )
    assert (found.kind, found.name) == ("func", "_Z1fii")
    assert [(p.name, p.kind, p.size, p.align) for p in found.returns] == [("result", "b8", 16, 8)]
    assert [(p.name, p.offset) for p in found.params] == [("_Z1fii_param_0", 0), ("_Z1fii_param_1", 4)]


def test_a_declaration_has_no_body_and_hides_nothing() -> None:
    text = (
        ".extern .func  (.param .b32 result) vprintf\n(\n\t.param .b64 a,\n\t.param .b64 b\n)\n;\n"
        ".extern .func stop\n()\n.noreturn;\n"
        ".visible .entry k(.param .u32 n) { ret; }\n"
    )
    printf, stop, entry = ptx.parse(HEAD + text).functions
    assert (printf.name, printf.linkage, printf.body) == ("vprintf", (".extern",), None)
    assert [p.size for p in (*printf.returns, *printf.params)] == [4, 8, 8]
    assert (stop.name, stop.params, stop.body, stop.statements) == ("stop", (), None, ())
    assert [s.text for s in entry.statements] == ["ret"]


def test_entries_are_the_kernels_that_are_defined() -> None:
    text = ".func f() { ret; }\n.extern .entry gone();\n.entry a() { ret; }\n.weak .entry b { ret; }\n"
    assert list(ptx.parse(HEAD + text).entries) == ["a", "b"]


def test_the_line_of_a_function_is_that_of_its_head() -> None:
    text = HEAD + "\n// .entry no()\n.visible .entry a() { ret; }\n\n.visible\n.entry b()\n{ ret; }\n"
    assert [(f.name, f.line) for f in ptx.parse(text).functions] == [("a", 6), ("b", 9)]


def test_initialisers_with_braces_between_functions_are_passed_over() -> None:
    text = (
        ".entry a() { ret; }\n"
        ".global .align 8 .u64 table[2] = {a, b};\n.const .b8 s[3] = {65, 66, 0};\n"
        ".entry b() { ret; }\n"
    )
    assert list(ptx.parse(HEAD + text).entries) == ["a", "b"]


def test_a_body_that_is_never_closed_is_a_fault_with_its_line() -> None:
    with pytest.raises(ptx.SyntaxFault, match="never closed") as caught:
        ptx.parse(HEAD + "\n.entry k()\n{\n{ ret; }\n")
    assert caught.value.line == 6


# Parameters


def test_offsets_are_padded_to_each_alignment() -> None:
    assert params(".param .u8 a, .param .u64 b, .param .u16 c, .param .f32 d, .param .u8 e") == [
        ("a", "u8", 0, 1, 1),
        ("b", "u64", 8, 8, 8),
        ("c", "u16", 16, 2, 2),
        ("d", "f32", 20, 4, 4),
        ("e", "u8", 24, 1, 1),
    ]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (".param .align 64 .b8 x[128]", ("x", "b8", 64, 128, 64)),
        (".param .align 4 .b8 x[ 12 ]", ("x", "b8", 4, 12, 4)),
        (".param .b8 x[3]", ("x", "b8", 1, 3, 1)),
        (".param .b8 .align 8 x[16]", ("x", "b8", 8, 16, 8)),
        (".param .b32 x[4]", ("x", "b32", 4, 16, 4)),
        (".param .b8 x[]", ("x", "b8", 1, 0, 1)),
        (".param.u64 x", ("x", "u64", 8, 8, 8)),
        (".param\t.f16\n$x_1", ("$x_1", "f16", 2, 2, 2)),
        (".reg .f64 %fd1", ("%fd1", "f64", 8, 8, 8)),
        (".param .b128 x", ("x", "b128", 16, 16, 16)),
    ],
)
def test_a_parameter_is_read_in_every_spelling(
    written: str, read: tuple[str, str, int, int, int]
) -> None:
    assert params(f".param .u8 first, {written}")[1] == read


@pytest.mark.parametrize(
    "written",
    [
        ".param .u64 .ptr .global .align 16 p",
        ".param .u64 .ptr .align 1 p",
        ".param .u64 .ptr p",
        ".param .u64 .ptr.shared.align 4 p",
    ],
)
def test_a_marked_pointer_keeps_its_own_alignment(written: str) -> None:
    (found,) = only(f".entry k({written}) {{ ret; }}").params
    assert (found.name, found.kind, found.size, found.align, found.pointer) == ("p", "u64", 8, 8, True)


def test_a_plain_u64_is_not_called_a_pointer() -> None:
    (found,) = only(".entry k(.param .u64 ptr) { ret; }").params
    assert (found.name, found.pointer) == ("ptr", False)


@pytest.mark.parametrize(
    "written", [".param .u64", ".param p", ".param .bogus p", "?", ".param .u64 p<3>"]
)
def test_a_parameter_without_type_or_name_is_a_fault(written: str) -> None:
    with pytest.raises(ptx.SyntaxFault, match="has no known type") as caught:
        only(f"\n.entry k({written}) {{ ret; }}")
    assert caught.value.line == 5


def test_an_alignment_of_nothing_is_left_to_the_assembler() -> None:
    assert params(".param .align 0 .b8 x[16], .param .u32 n")[1][2] == 16


# Statements


def test_labels_predicates_vectors_and_scopes_are_distinguished() -> None:
    body = """\
    .reg .b16 %rs<3>;
$L__BB0_1:
    @%p1 bra $L__BB0_2;
    @!%p2 ld.global.v2.f32 {%f1, %f2}, [%rd1+8];
    { .reg .b16 hl,hu; mov.b32 {hl,hu}, %r1; }
$L__BB0_2: ret;"""
    assert statements(body) == [
        ".reg .b16 %rs<3>",
        "$L__BB0_1:",
        "@%p1 bra $L__BB0_2",
        "@!%p2 ld.global.v2.f32 {%f1, %f2}, [%rd1+8]",
        "{",
        ".reg .b16 hl,hu",
        "mov.b32 {hl,hu}, %r1",
        "}",
        "$L__BB0_2:",
        "ret",
    ]


def test_directives_of_modules_are_read_or_passed_over() -> None:
    module = ptx.parse(
        HEAD
        + """
    .file 1 "x.cu", 1700000000, 99
    .pragma "nounroll";
    .global .texref texture;
    .global .samplerref sampler = { addr_mode_0 = clamp_to_edge, filter_mode = nearest };
    .global .surfref surface;
    .global .attribute(.unified(19, 95)) .u32 shared_by_all = 7;
    .func helper() { ret; }
    .func other();
    .alias other, helper;
    .visible .entry k(.param .texref t) .maxntid 32, 1, 1 .pragma "nounroll"; { ret; }
    .section .debug_str { .b8 1, 2, 3
    info: .b8 4 }
    """
    )
    assert list(module.variables) == ["texture", "sampler", "surface", "shared_by_all"]
    assert module.variables["shared_by_all"].initial == ("7",)
    assert list(module.entries) == ["k"]
    assert module.entries["k"].directives[0] == ".maxntid 32, 1, 1"
    assert module.bodies["other"] is module.bodies["helper"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (".reg .b32 %r<5>, x;", [("%r", 5, "b32"), ("x", None, "b32")]),
        (".reg.pred p;", [("p", None, "pred")]),
        (".reg .v4 .f32 v, %w<2>;", [("v", None, "v4.f32"), ("%w", 2, "v4.f32")]),
    ],
)
def test_registers_are_declared_with_their_kinds(
    text: str, expected: list[tuple[str, int | None, str]]
) -> None:
    assert list(ptx.declared_registers(statement(text))) == expected


@pytest.mark.parametrize("text", [".reg .nonsense x;", ".reg x;", ".reg .b32 x y;", ".reg .v3 .f32 x;"])
def test_what_declares_no_register_is_a_fault(text: str) -> None:
    with pytest.raises(ptx.SyntaxFault, match="declares no register"):
        list(ptx.declared_registers(statement(text)))


def test_comments_and_strings_hold_no_statements() -> None:
    body = """\
    // bra there;
    /* ret; } { */ mov.u32 %r1, 5; // trap;
    .pragma "nounroll; }";
    ret;"""
    assert statements(body) == ["mov.u32 %r1, 5", ".pragma", "ret"]


def test_statements_know_their_lines() -> None:
    text = HEAD + (
        ".entry k()\n{\n"  # lines 4 and 5
        "\tmov.u32 %r1,\n\t\t5;\n"  # line 6, over two lines
        "\t/* two\n\tlines */ ret;\n"  # starts on line 9
        "$L: bra $L;\n"  # both on line 10
        "\t.loc 1 3 5\n"  # line 11, no semicolon
        "\ttrap;\n}\n"
    )
    (function,) = ptx.parse(text).functions
    assert [(s.line, s.text) for s in function.statements] == [
        (6, "mov.u32 %r1, 5"),
        (9, "ret"),
        (10, "$L:"),
        (10, "bra $L"),
        (11, ".loc 1 3 5"),
        (12, "trap"),
    ]


def test_a_statement_that_lost_its_semicolon_is_still_seen() -> None:
    assert statements("mov.u32 %r1, 5;\nret") == ["mov.u32 %r1, 5", "ret"]


def test_calls_and_their_prototypes_are_one_statement_each() -> None:
    body = """\
    { // callseq 0, 0
    .param .b32 param0;
    st.param.f32 [param0], %f1;
    call.uni (retval0),
    _Z6helperf,
    (
    param0
    );
    } // callseq 0
    prototype_0 : .callprototype (.param .b32 _) _ (.param .b64 _);"""
    assert statements(body) == [
        "{",
        ".param .b32 param0",
        "st.param.f32 [param0], %f1",
        "call.uni (retval0), _Z6helperf, ( param0 )",
        "}",
        "prototype_0 :",
        ".callprototype (.param .b32 _) _ (.param .b64 _)",
    ]


@pytest.mark.parametrize(
    ("text", "guard", "opcode", "operands"),
    [
        ("ret;", None, "ret", ()),
        ("add.s32 %r1, %r2, 7;", None, "add.s32", ("%r1", "%r2", "7")),
        ("@%p1 bra $L;", "%p1", "bra", ("$L",)),
        ("@!%p1 mov.u32 %r1,%r2;", "!%p1", "mov.u32", ("%r1", "%r2")),
        ("@ ! %p1 exit;", "!%p1", "exit", ()),
        ("ld.L1::evict_last.f32 %f1, [%rd1];", None, "ld.L1::evict_last.f32", ("%f1", "[%rd1]")),
        ("mov.b64 {%r1, %r2}, %rd1;", None, "mov.b64", ("{%r1, %r2}", "%rd1")),
        ("mov.b32{h1,h2}, %r1;", None, "mov.b32", ("{h1,h2}", "%r1")),
        ("tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [t, {%f5,%f6}];", None, "tex.2d.v4.f32.f32",
         ("{%f1,%f2,%f3,%f4}", "[t, {%f5,%f6}]")),
        ("call.uni (r), f, (a, b);", None, "call.uni", ("(r)", "f", "(a, b)")),
        ("mov.u64 %rd1, k@tail , 5;", None, "mov.u64", ("%rd1", "k@tail", "5")),
    ],
)  # fmt: skip
def test_an_instruction_is_guard_opcode_and_operands(
    text: str, guard: str | None, opcode: str, operands: tuple[str, ...]
) -> None:
    found = statement(text)
    assert found.instruction() == (guard, opcode, operands)


# What the compiler really emits


@pytest.fixture(scope="module")
def real(toolchain: Toolchain) -> Real:
    program = Program.of(support.KERNELS, names=support.NAMES)
    return {arch: toolchain.compile(program, Arch.parse(arch)) for arch in support.ARCHS}


#: Size and alignment of the C++ types of the kernels in `support`.
CPP = {
    "bool": (1, 1),
    "char": (1, 1),
    "short": (2, 2),
    "int": (4, 4),
    "long long": (8, 8),
    "float": (4, 4),
    "double": (8, 8),
    "Pair": (24, 8),
    "Wide": (128, 64),
    "__half": (2, 2),
    "float4": (16, 16),
}


@pytest.mark.parametrize("arch", support.ARCHS)
def test_the_layout_is_what_the_cpp_types_imply(real: Real, arch: str) -> None:
    module = ptx.parse(real[arch].ptx.decode())
    seen = []
    for entry in real[arch].entries:
        offset = 0
        for declared, read in zip(entry.parameters, module.entries[entry.name].params, strict=True):
            assert declared.type is not None
            size, align = (8, 8) if declared.type.endswith("*") else CPP[declared.type]
            offset = -(-offset // align) * align
            assert (read.offset, read.size, read.align) == (offset, size, align), (entry, declared)
            offset += size
        seen.append(len(entry.parameters))
    assert sorted(seen) == [0, 2, 2, 3, 3, 3, 12]


@pytest.mark.parametrize("arch", support.ARCHS)
def test_the_layout_is_what_the_machine_code_has(real: Real, arch: str) -> None:
    truth = support.parameters(real[arch].cubin)
    assert len(truth) == len(real[arch].entries) == 7
    for entry in real[arch].entries:
        layout = [(p.offset, p.size) for p in entry.parameters]
        if entry.name == "wide":  # aligned beyond 16 bytes: counted from address 0, not from the block
            assert [size for _, size in layout] == [size for _, size in truth["wide"]]
        else:
            assert layout == truth[entry.name]


@pytest.mark.parametrize("arch", support.ARCHS)
def test_only_the_newer_dialect_marks_pointers(real: Real, arch: str) -> None:
    for entry in real[arch].entries:
        for parameter in entry.parameters:
            is_pointer = str(parameter.type).endswith("*")
            assert parameter.pointer == (is_pointer and arch == "sm_100")


@pytest.mark.parametrize("arch", support.ARCHS)
def test_launch_bounds_are_read_in_both_dialects(real: Real, arch: str) -> None:
    module = ptx.parse(real[arch].ptx.decode())
    expected = ".maxntid 128" if arch == "sm_100" else ".maxntid 128, 1, 1"
    assert module.entries["every"].directives == (expected,)
    assert module.entries["nothing"].directives == ()


@pytest.mark.parametrize("arch", support.ARCHS)
def test_every_function_and_statement_of_real_ptx_is_understood(real: Real, arch: str) -> None:
    text = real[arch].ptx.decode()
    module = ptx.parse(text)
    lines = text.split("\n")
    assert module.target == (arch,)
    assert [f.name for f in module.functions if f.kind == "func"] == ["_Z6helperfi"]
    depth = 0
    opcodes = set()
    for function in module.functions:
        for found in function.statements:
            assert found.text.split()[0].rstrip(";") in lines[found.line - 1]
            depth += {"{": 1, "}": -1}.get(found.text, 0)
            assert depth >= 0
            opcodes.add(found.opcode.split(".")[0])
    assert depth == 0
    assert opcodes >= {"ld", "st", "cvt", "call", "setp", "bra", "ret", "{", "}"}


@pytest.mark.parametrize("arch", support.ARCHS)
def test_real_ptx_passes_the_lint(real: Real, arch: str) -> None:
    assert list(lint.check(real[arch].ptx.decode(), "k.ptx").entries) == [
        e.name for e in real[arch].entries
    ]


def test_a_device_function_has_its_return_value(real: Real) -> None:
    for arch in support.ARCHS:
        helper = ptx.parse(real[arch].ptx.decode()).functions[0]
        assert [(p.name, p.kind, p.size) for p in helper.returns] == [("func_retval0", "b32", 4)]
        assert [p.offset for p in helper.params] == [0, 4]


# Invalid text

WORDS = st.sampled_from(
    ".version .target .entry .func .visible .extern .param .align .ptr .reg .u64 .b8 .f32 .maxntid 8.5 "
    'sm_90 k x 4 0 %tid %r<4> div.f32 @%p1 // /* */ " ( ) [ ] { } ; , : < > \\ \n \r \t'.split(" ")
)


def survives(text: str) -> None:
    """The parser and the lint accept or refuse any text, without other exceptions."""
    lines = text.split("\n")
    try:
        for function in ptx.parse(text).functions:
            for found in function.statements:
                _ = found.instruction()
    except ptx.SyntaxFault as refused:
        fault: ptx.SyntaxFault | None = refused
    else:
        fault = None
    assert fault is None or 1 <= fault.line <= len(lines)
    try:
        lint.check(text, "k.ptx")
    except PtxError as refused:
        error: PtxError | None = refused
    else:
        error = None
    assert error is None or lines[error.line - 1] == error.text


@given(st.text() | st.lists(WORDS).map(" ".join))
@example("\ufeff")
@example(HEAD + ".entry k(.param .align 0 .b8 x[8]) { ret; }")
@example(HEAD + f".entry k(.param .b8 x[{'9' * 5000}]) {{ .reg .b32 %r<{'9' * 5000}>; ret; }}")
@example(f".version {'1' * 5000}.0\n.target sm_90\n.address_size {'1' * 5000}\n")
def test_random_text_never_crashes_the_parser(text: str) -> None:
    survives(text)
    survives(HEAD + text)
    survives(f"{HEAD}.entry k({text}) {{ {text} }}")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_real_ptx_never_crashes_the_parser(real: Real, data: st.DataObject) -> None:
    text = real[data.draw(st.sampled_from(support.ARCHS))].ptx.decode()
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(start + data.draw(st.integers(0, 40)), len(text))
        text = text[:start] + data.draw(WORDS | st.text(max_size=8)) + text[end:]
    survives(text)


def test_the_work_to_parse_grows_with_the_text_and_no_faster(real: Real) -> None:
    head, body = real["sm_80"].ptx.decode().split(".address_size 64", 1)

    def work(times: int) -> float:
        """Return the processor time of parsing, which does not depend on other processes."""
        ptx.parse.cache_clear()
        started = time.thread_time()
        assert len(ptx.parse(head + times * body).functions) == times * 8
        return time.thread_time() - started

    little = min(work(40) for _ in range(5))
    assert work(400) < 30 * little  # ten times; growing by the square it was seventy
