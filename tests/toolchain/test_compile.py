"""CUDA C++ through the toolchain: one compile, its outputs, and errors that are not its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preheat.errors import CompileError, InputError, ToolchainError
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.toolchain import frames, nvrtc
from preheat.toolchain.compiler import Toolchain
from tests.conftest import SAXPY
from tests.processes import TIMEOUT_SECONDS

SM_90 = Arch.parse("sm_90")


def test_one_compile_gives_machine_code_and_ptx(toolchain: Toolchain) -> None:
    compiled = toolchain.compile(Program.of(SAXPY), SM_90)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert b".target sm_90\n" in compiled.ptx
    assert not compiled.ptx.endswith(b"\0")
    (entry,) = compiled.entries
    assert str(entry) == "saxpy(float, float const*, float*, int)"
    assert entry.resources is not None
    assert entry.resources.registers > 0
    assert compiled.opened == ()
    assert compiled.seconds > 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_100", "sm_100f", "sm_103a", "sm_121"])
def test_the_architecture_keeps_its_suffix(toolchain: Toolchain, arch: str) -> None:
    compiled = toolchain.compile(Program.of(SAXPY), Arch.parse(arch))
    assert f".target {arch}\n".encode() in compiled.ptx


PROGRAMS = {
    "extern C": SAXPY,
    "anonymous namespace": """
        namespace { struct Own { int a; }; __device__ int counter; }
        namespace { __global__ void k(Own o, int* x) { *x = o.a + counter++; } }
        """,
    "internal linkage": "static __device__ int n; static __global__ void k(int* x) { *x = n++; }",
    "lambda": "__global__ void k(int* x) { auto f = [](int a) { return a * a; }; *x = f(*x); }",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_every_process_makes_the_same_bytes(toolchain: Toolchain, what: str) -> None:
    program = Program.of(PROGRAMS[what], label="k.cu")
    here = toolchain.compile(program, SM_90)
    other = Toolchain(Events(), timeout=TIMEOUT_SECONDS)
    there = other.compile(program, SM_90)
    other.close()
    assert (there.cubin, there.ptx, there.entries) == (here.cubin, here.ptx, here.entries)


def test_the_label_is_the_file_name_the_program_sees(toolchain: Toolchain) -> None:
    source = "__device__ char where[] = __FILE__;\n__global__ void k(char* x) { *x = where[*x]; }"
    cubin = toolchain.compile(Program.of(source, label="step.cu"), SM_90).cubin
    assert b"/preheat/step.cu\0" in cubin


def test_options_reach_the_compiler_in_their_order(toolchain: Toolchain) -> None:
    source = "__global__ void k(int* x) { *x = VALUE; }"
    one, two, last = (
        toolchain.compile(Program.of(source, options=options), SM_90).ptx
        for options in (["-DVALUE=1"], ["-DVALUE=2"], ["-DVALUE=1", "-UVALUE", "-DVALUE=2"])
    )
    assert one != two
    assert last == two


def test_an_own_random_seed_is_respected(toolchain: Toolchain) -> None:
    program = Program.of(PROGRAMS["anonymous namespace"], options=["--frandom-seed=7"])
    (entry,) = toolchain.compile(program, SM_90).entries
    assert "_00000007" in entry.name


def test_headers_in_memory_are_found_by_name(toolchain: Toolchain) -> None:
    headers = {
        "shape/size.h": "#define SIZE 4\n",
        "type.h": '#include "shape/size.h"\nusing T = float;\n',
    }
    source = '#include "type.h"\n__global__ void k(T* x) { x[SIZE] = 1; }'
    compiled = toolchain.compile(Program.of(source, headers=headers), SM_90)
    assert set(compiled.opened or ()) == {"type.h", "shape/size.h"}
    assert compiled.entries[0].parameters[0].type == "float*"


def test_text_beyond_ascii_is_allowed_in_cuda(toolchain: Toolchain) -> None:
    source = '// größer ≥ π\n__device__ char s[] = "π";\n__global__ void k(char* x) { *x = s[*x]; }'
    assert "π".encode() in toolchain.compile(Program.of(source), SM_90).cubin


@pytest.mark.parametrize("source", ["// nothing", "// nothing\n", "__device__ int f() { return 1; }"])
def test_a_program_without_kernels_has_no_entries(toolchain: Toolchain, source: str) -> None:
    compiled = toolchain.compile(Program.of(source), SM_90)
    assert compiled.entries == ()
    assert compiled.cubin.startswith(b"\x7fELF")


def test_warnings_are_kept_in_the_log_of_a_compile_that_succeeds(toolchain: Toolchain) -> None:
    source = "__global__ void k(int* x) { int unused; *x = 1; }"
    assert 'variable "unused" was declared but never referenced' in (
        toolchain.compile(Program.of(source), SM_90).log
    )


def test_code_that_no_device_loads_is_refused_whatever_option_made_it(toolchain: Toolchain) -> None:
    program = Program.of('extern "C" __global__ void k() {}', label="k.cu", options=["-Xptxas=-c"])
    with pytest.raises(InputError, match=r"k\.cu: with -Xptxas=-c the compiler produces code that"):
        toolchain.compile(program, SM_90)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("NVRTC_ERROR_COMPILATION", CompileError),
        ("NVRTC_ERROR_INVALID_OPTION", CompileError),
        ("NVRTC_ERROR_OUT_OF_MEMORY", ToolchainError),
        ("NVRTC_ERROR_INTERNAL_ERROR", ToolchainError),
        ("NVRTC_ERROR_BUILTIN_OPERATION_FAILURE", ToolchainError),
    ],
)
def test_only_a_rejection_is_the_programs_fault(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, status: str, error: type[Exception]
) -> None:
    _ = toolchain.located
    reply = frames.Frame({"status": status, "log": "/preheat/k.cu: the whole story"}, {})
    monkeypatch.setattr(toolchain.pool, "call", lambda *_: reply)
    with pytest.raises(error, match=r"k\.cu[^/]*\nk\.cu: the whole story") as caught:
        toolchain.compile(Program.of(SAXPY, label="k.cu"), SM_90)
    assert type(caught.value) is error


# What the compiler opened

CANARY = {"name": "Processing Header File", "args": {"detail": nvrtc.CANARY}}
OPENED = [{"name": "Processing Header File", "args": {"detail": f"@0/{n}.h"}} for n in "aba"]
OTHER = {"name": "Frontend", "args": {"detail": "@0/no.h"}}


def opened(tmp_path: Path, content: object) -> list[str] | None:
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return nvrtc.opened_headers(path)


def test_a_trace_lists_each_header_once(tmp_path: Path) -> None:
    assert opened(tmp_path, {"traceEvents": [CANARY, OTHER, *OPENED]}) == ["@0/a.h", "@0/b.h"]
    assert opened(tmp_path, {"traceEvents": [CANARY]}) == []


def test_a_trace_without_its_canary_is_not_believed(tmp_path: Path) -> None:
    assert opened(tmp_path, {"traceEvents": OPENED}) is None
    assert opened(tmp_path, {"traceEvents": []}) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"traceEvents": 7}',
        '{"traceEvents": [{"name": "Processing Header File"}]}',
    ],
)
def test_a_damaged_trace_is_not_believed(tmp_path: Path, content: str) -> None:
    assert opened(tmp_path, content) is None


def test_a_trace_that_was_never_written_is_not_believed(tmp_path: Path) -> None:
    assert nvrtc.opened_headers(tmp_path / "gone.json") is None
