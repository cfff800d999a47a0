"""Messages of compilers are parsed: rows with lines and carets, resources, and varying parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.errors import CompileError
from preheat.model.arch import Arch
from preheat.model.artifact import Resources
from preheat.model.program import Program
from preheat.toolchain import report
from preheat.toolchain.compiler import Toolchain

SM_80, SM_90 = Arch.parse("sm_80"), Arch.parse("sm_90")
ANY = Program.of("//", label="k.cu")


def rejected(toolchain: Toolchain, program: Program) -> CompileError:
    with pytest.raises(CompileError) as caught:
        toolchain.compile(program, SM_90)
    return caught.value


# Diagnostics of the front end


@pytest.fixture(scope="module")
def three(toolchain: Toolchain) -> CompileError:
    """Return two errors, the second indented by tabs, and a warning."""
    source = '__global__ void k(int* o) {\n  int unused;\n  *o = "text";\n\t\t*o = oops;\n}\n'
    return rejected(toolchain, Program.of(source, label="k.cu"))


def test_a_row_has_file_line_message_source_and_column(three: CompileError) -> None:
    row = three.rows[0]
    assert (row.file, row.line, row.severity) == ("k.cu", 3, "error")
    assert row.message == 'a value of type "const char *" cannot be assigned to an entity of type "int"'
    assert row.source is not None
    assert row.source.strip() == '*o = "text";'
    assert row.column is not None
    assert row.source[row.column - 1] == "="


def test_an_error_in_a_template_names_the_instances_that_led_to_it(toolchain: Toolchain) -> None:
    source = (
        'template <class T> __device__ void inner(T*) { static_assert(sizeof(T) == 4, "four"); }\n'
        "template <class T> __global__ void outer(T* x) { inner(x); }\n"
    )
    error = rejected(toolchain, Program.of(source, label="k.cu", names=["outer<double>"]))
    (row,) = error.rows
    assert row.context == (
        "note: the final comparison was 8 == 4",
        "in the instantiation of void inner(T *) [with T=double] at line 2",
        "in the instantiation of void outer(T *) [with T=double]",
    )
    assert str(error).endswith("\n    ".join(("^", *row.context)))


def test_lines_indented_by_tabs_have_source_and_column_too(three: CompileError) -> None:
    row = three.rows[1]
    assert (row.line, row.message) == (4, 'identifier "oops" is undefined')
    assert row.source is not None
    assert row.column is not None
    assert row.source[row.column - 1 :].startswith("oops;")


def test_warnings_are_rows_but_not_errors(three: CompileError) -> None:
    assert [row.severity for row in three.rows] == ["error", "error", "warning"]
    assert three.rows[2].line == 2
    assert "unused" in three.rows[2].message
    assert "unused" not in str(three)
    assert "unused" in three.log


def test_the_error_names_program_architecture_and_options(toolchain: Toolchain) -> None:
    source = "__global__ void k(int* o) { *o = oops; }"
    program = Program.of(source, label="step.cu", options=["-use_fast_math"])
    error = rejected(toolchain, program)
    assert (error.program, error.arch, error.options) == ("step.cu", "sm_90", ("-use_fast_math",))
    assert str(error).startswith("step.cu does not compile for sm_90 with -use_fast_math\nstep.cu:1:")
    assert "1 error detected in the compilation of" in error.log


def test_an_error_in_a_header_file_names_that_file(toolchain: Toolchain, tmp_path: Path) -> None:
    folder = tmp_path / "my (old) preheat" / "preheat"  # parentheses and names of our own in the path
    folder.mkdir(parents=True)
    (folder / "bad.h").write_text("\n__device__ int f() { return nope; }\n")
    error = rejected(toolchain, Program.of('#include "bad.h"\n', label="k.cu", include=[folder]))
    (row,) = error.rows
    assert (row.file, row.line) == (f"{folder}/bad.h", 2)
    assert "@0" not in error.log
    assert '"k.cu"' in error.log


def test_an_error_in_a_header_in_memory_names_that_header(toolchain: Toolchain) -> None:
    headers = {"mine.h": "__device__ int f() { return nope; }"}
    error = rejected(toolchain, Program.of('#include "mine.h"\n', headers=headers))
    assert [(row.file, row.line) for row in error.rows] == [("mine.h", 1)]


def test_a_header_that_is_missing_says_which(toolchain: Toolchain) -> None:
    error = rejected(toolchain, Program.of("\n#include <nope/nope.h>\n", label="k.cu"))
    (row,) = error.rows
    assert error.hint == "name the directory that contains nope/nope.h: include=[…], or -I DIR"
    assert (row.file, row.line, row.severity) == ("k.cu", 2, "catastrophic error")
    assert row.message == 'cannot open source file "nope/nope.h"'


def test_an_error_deep_in_a_template_is_one_row(toolchain: Toolchain) -> None:
    source = (
        'template <class T> struct A { static_assert(sizeof(T) == 5, "size(3): error: no"); };\n'
        "template <class T> __device__ void f() { A<T> a; }\n"
        "__global__ void k() { f<int>(); }\n"
    )
    (row,) = rejected(toolchain, Program.of(source)).rows
    assert (row.line, row.message) == (1, 'static assertion failed with "size(3): error: no"')


def test_an_option_the_compiler_does_not_know_is_a_row(toolchain: Toolchain) -> None:
    (row,) = rejected(toolchain, Program.of("//", options=["--bogus"])).rows
    assert (row.file, row.line, row.severity) == ("nvrtc", None, "error")
    assert "--bogus" in row.message


# Diagnostics of the assembler


def test_an_error_in_inline_assembly_is_not_blamed_on_a_line_of_the_source(
    toolchain: Toolchain,
) -> None:
    source = '__global__ void k(int* o) { asm("bogus.u32 %0;" : "=r"(*o)); }\n' + "//\n" * 100
    first, *_ = rejected(toolchain, Program.of(source, label="k.cu")).rows
    assert first.message == "Not a name of any known instruction: 'bogus'"
    assert (first.file, first.source) == ("PTX of k.cu", None)


def test_too_much_shared_memory_is_a_row(toolchain: Toolchain) -> None:
    source = "__global__ void k(int* o) { __shared__ int x[99999]; x[*o] = 1; *o = x[o[1]]; }"
    error = rejected(toolchain, Program.of(source))
    (row,) = error.rows
    assert (row.file, row.severity) == ("ptxas", "error")
    assert "uses too much shared data" in row.message
    assert "\0" not in error.log


def test_rows_of_the_assembler_carry_the_line_they_are_about(toolchain: Toolchain) -> None:
    text = (
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n"
        "\t.reg .b32 %r<4>;\n\tadd.u32 %r1, %r9, %r2;\n\tbogus.u32 %r1;\n\tret;\n}\n"
    )
    rows = rejected(toolchain, Program.of(text, label="k.ptx")).rows
    assert {(row.file, row.line, row.source) for row in rows if row.line is not None} == {
        ("k.ptx", 7, "add.u32 %r1, %r9, %r2;"),
        ("k.ptx", 8, "bogus.u32 %r1;"),
    }
    assert any("Unknown symbol '%r9'" in row.message for row in rows)


def test_a_log_without_rows_is_shown_whole(toolchain: Toolchain) -> None:
    with pytest.raises(CompileError) as caught:
        toolchain.compile(Program.of("//"), Arch.parse("sm_80a"))
    assert caught.value.rows == ()
    assert "Command-line error" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ptxas info    : Used 10 registers, used 0 barriers",
        '1 error detected in the compilation of "k.cu".',
        "  x(3): error: indented, so part of a source line",
        'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"',
        "k.cu(1): note #3453-D: the final comparison was 4 == 5",
    ],
)
def test_other_lines_of_a_log_are_no_rows(line: str) -> None:
    assert report.diagnostics(line, ANY) == ()


# Names the user knows


@pytest.mark.parametrize(
    ("log", "reported"),
    [
        ("/preheat/k.cu(3): error: no", "k.cu(3): error: no"),
        ('of "/preheat/k.cu".', 'of "k.cu".'),
        ("@0/sub/x.h(1): error: no", "/home/me/preheat/inc/sub/x.h(1): error: no"),
        ("@cuda/cuda_fp16.h(1): error", "/opt/@0/include/cuda_fp16.h(1): error"),
        ("@1/x.h(1): error: no", "@1/x.h(1): error: no"),
        ("user@0/x and a/@0/x stay", "user@0/x and a/@0/x stay"),
        ("/home/me/preheat/k.cu stays", "/home/me/preheat/k.cu stays"),
    ],
)
def test_the_workers_names_become_the_users(log: str, reported: str) -> None:
    roots = {"0": "/home/me/preheat/inc", "cuda": "/opt/@0/include"}
    assert report.localize(log, roots) == reported


# Resources


def resources(toolchain: Toolchain, program: Program, arch: Arch = SM_90) -> dict[str, Resources]:
    found = {e.title: e.resources for e in toolchain.compile(program, arch).entries}
    return {name: used for name, used in found.items() if used is not None}


@pytest.mark.parametrize("arch", [SM_80, SM_90])
def test_registers_shared_memory_and_barriers_are_counted(toolchain: Toolchain, arch: Arch) -> None:
    source = """
    __global__ void plain(float* x) { x[threadIdx.x] *= 2; }
    extern "C" __global__ void shared(float* x) {
        __shared__ float s[256];
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = s[255 - threadIdx.x];
    }
    """
    found = resources(toolchain, Program.of(source), arch)
    assert found.keys() == {"plain", "shared"}
    assert found["plain"].shared == found["plain"].stack == found["plain"].barriers == 0
    assert (found["shared"].shared, found["shared"].barriers) == (1024, 1)
    assert all(4 <= used.registers <= 64 for used in found.values())


def test_spills_and_stack_are_counted_in_bytes(toolchain: Toolchain) -> None:
    many = "\n".join(f"float a{i} = x[threadIdx.x + {i} * n];" for i in range(64))
    total = "+".join(f"a{i} * a{63 - i}" for i in range(64))
    source = f"__global__ void k(float* x, int n) {{ {many} __syncthreads(); x[0] = {total}; }}"
    roomy = resources(toolchain, Program.of(source))["k"]
    tight = resources(toolchain, Program.of(source, options=["-maxrregcount=24"]))["k"]
    assert roomy.spill_stores == roomy.spill_loads == roomy.stack == 0
    assert roomy.registers > 24 >= tight.registers
    assert tight.spill_stores > 0
    assert tight.spill_loads > 0
    assert tight.stack > 0


def test_what_a_called_function_uses_is_not_added_to_the_next_kernel(toolchain: Toolchain) -> None:
    source = """
    __device__ __noinline__ int deep(int n) { int a[64]; for (int i = 0; i < 64; i++) a[i] = i * n;
                                              return a[n & 63] + a[(n >> 3) & 63]; }
    __global__ void caller(int* x) { x[0] = deep(x[1]); }
    __global__ void alone(int* x) { x[0] = 1; }
    """
    found = resources(toolchain, Program.of(source))
    assert found["alone"].stack == 0
    assert found["alone"].registers < found["caller"].registers


def test_assembled_ptx_has_its_resources_too(toolchain: Toolchain) -> None:
    text = (
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n"
        "\t.shared .align 4 .b8 s[512];\n\t.reg .b32 %r<2>;\n\tmov.u32 %r1, s;\n"
        "\tst.shared.u32 [%r1], %r1;\n\tbar.sync 0;\n\tret;\n}\n"
    )
    found = resources(toolchain, Program.of(text))["k"]
    assert (found.shared, found.barriers, found.spill_stores) == (512, 1, 0)
    assert found.registers > 0


def test_properties_of_another_function_are_not_the_kernels() -> None:
    log = """\
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for helper
ptxas         .     64 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for k
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 2 barriers, 80 bytes cumulative stack size, 32 bytes smem
"""
    assert report.resources(log) == {"k": Resources(registers=8, shared=32, stack=16, barriers=2)}


def test_an_older_way_to_tell_shared_memory_is_read() -> None:
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
        "ptxas info    : Used 12 registers, 256+16 bytes smem, 360 bytes cmem[0]\n"
    )
    assert report.resources(log) == {"k": Resources(registers=12, shared=256)}


# What varies from run to run


def test_timing_lines_are_split_off_and_nothing_else() -> None:
    used = "ptxas info    : Used 4 registers\n"
    timing = "ptxas info    : Compile time = 1.236 ms\n"
    assert report.split_timing(used + timing + used + timing) == (used + used, timing + timing)
    assert report.split_timing(used) == (used, "")


def test_the_log_of_a_program_is_the_same_every_time(toolchain: Toolchain) -> None:
    program = Program.of("#warning hello\n__global__ void k(int* x) { x[0] = 1; }")
    one, two = (toolchain.compile(program, SM_90) for _ in range(2))
    assert one.log == two.log
    assert "#warning directive: hello" in one.log
    assert "Compile time" in one.timing
    assert "Compile time" not in one.log


# Names that were asked for


def test_the_message_of_the_compiler_about_a_probe_count_for_its_name() -> None:
    log = """\
__nv_name_map(2): error: identifier "flot" is undefined
  #pragma nv_mangled_name &sig<decltype(tk<flot>)>
                                           ^

__nv_name_map(3): error: Error in parsing name expression for lowered name lookup. Input name \
expression was: " tk < flot >"
  #pragma nv_mangled_name tk<flot>
                          ^
"""
    rows = report.diagnostics(log, ANY)
    probes = {"tk<flot>": "&sig<decltype(tk<flot>)>", "k": "&sig<decltype(k)>"}
    assert report.rejected_names(rows, ["k", "tk<flot>"], probes) == {
        "tk<flot>": 'identifier "flot" is undefined'
    }
    assert report.rejected_names(rows, ["k"], probes) == {}
    other = report.diagnostics(f"k.cu(1): error: no\n{log}", ANY)
    assert report.rejected_names(other, ["tk<flot>"], probes) == {}
