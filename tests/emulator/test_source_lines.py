"""Faults name the line of the CUDA source, with and without line information."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import preheat
from preheat.build.builder import Builder
from preheat.build.code import find_source_lines
from preheat.build.seal import sealed
from preheat.emulator.device import EmulatorDevice
from preheat.errors import (
    ContextLostError,
    EmulatorFault,
    SourceLine,
    UnsupportedInstructionError,
)
from preheat.gpu import Gpu
from preheat.model import ptx
from preheat.model.lines import Lines, has_lines
from preheat.model.program import Program

SOURCE = """\
#include "deep.cuh"
__device__ float next(const float* x, int i) {
    return x[i + 1];
}
__device__ __noinline__ float twice(const float* x, int i) {
    return 2 * next(x, i);
}
__global__ void shift(float* x, int n) {
    int i = threadIdx.x;
    if (i < n)
        x[i] = twice(x, i);
}
__global__ void trap(int n) {
    volatile int own[4];  // local memory: its directive begins like that of a line
    own[n] = n;
    if (threadIdx.x == 3)
        __trap();
}
__global__ void stay() {
    if (threadIdx.x < 32)
        asm volatile("bar.sync 1, 96;");
}
__global__ void spin(volatile int* x) {
    while (*x == 0) {}
}
__global__ void check(int n) {
    assert(threadIdx.x < n);
}
__global__ void odd(char* x) {
    *(int*)(x + 1) = 1;
}
__global__ void unknown(char* x) {
    asm volatile("discard.global.L2 [%0], 128;" :: "l"(x));
}
__global__ void tile(float* out) {
    __shared__ float fixed[4];
    extern __shared__ float more[];
    fixed[threadIdx.x & 3] = 0;
    more[threadIdx.x] = 1;
    __syncthreads();
    *out = more[threadIdx.x ^ 1] + fixed[0];
}
__global__ void late(float* out) {
    __shared__ float cells[33];
    cells[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = cells[threadIdx.x + 1];
}
__global__ void down(int* out) {
    int i = threadIdx.x;
    out[i] = __shfl_down_sync(~0u, i, 8);
}
__global__ void header(float* x) {
    *x = deep(x);
}
"""
DEEP = """\
__device__ inline float deep(const float* x) {

    return x[1 << 20];
}
"""
HEADERS = {"deep.cuh": DEEP}
TEXT = SOURCE.splitlines()


@pytest.fixture
def open_gpu(compiler: Builder) -> Iterator[Callable[..., Gpu]]:
    opened: list[Gpu] = []

    def open_one(builder: Builder = compiler, **settings: Any) -> Gpu:
        opened.append(Gpu(EmulatorDevice(**settings), builder))
        return opened[-1]

    yield open_one
    for gpu in opened:
        gpu.close()


def line_of(text: str, source: str = SOURCE) -> int:
    """Return the number of the only line that contains `text`."""
    (number,) = (n for n, line in enumerate(source.splitlines(), 1) if text in line)
    return number


def fault(gpu: Gpu, name: str, block: int, *arguments: Any, **more: Any) -> EmulatorFault:
    kernel = gpu.module(SOURCE, label="k.cu", headers=HEADERS, **more)
    with pytest.raises(EmulatorFault) as caught:
        kernel[name][1, block](*arguments)
    return caught.value


CASES: dict[str, tuple[str, int, Callable[[Gpu], Any], str]] = {
    "trap": ("__trap();", 32, lambda _: (0,), "the kernel trapped"),
    "stay": ("bar.sync", 64, lambda _: (), "waits at barrier 1"),
    "spin": ("while (*x", 1, lambda gpu: (gpu.zeros(1, "int32"),), "no progress"),
    "check": ("assert(", 32, lambda _: (7,), "assertion 'threadIdx.x < n' failed"),
    "odd": ("*(int*)", 1, lambda gpu: (gpu.zeros(8, "int8"),), "not a multiple of 4"),
    "tile": ("more[threadIdx.x] = 1", 32, lambda gpu: (gpu.zeros(1),), "at shared address"),
    "late": ("cells[threadIdx.x + 1]", 32, lambda gpu: (gpu.zeros(32),), "nothing has written"),
    "down": ("__shfl_down", 20, lambda gpu: (gpu.zeros(20, "int32"),), "shuffles from lane 20"),
    "unknown": (
        "discard",
        1,
        lambda gpu: (gpu.zeros(1, "int8"),),
        "does not support discard.global.L2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_fault_names_its_line(name: str, open_gpu: Callable[..., Gpu]) -> None:
    text, block, arguments, said = CASES[name]
    gpu = open_gpu(patience=10_000, sanitize=name in ("late", "down"))
    found = fault(gpu, name, block, *arguments(gpu))
    number = next(n for n, line in enumerate(TEXT, 1) if text in line)
    assert found.source == (SourceLine("k.cu", number, TEXT[number - 1].strip()),)
    head, *shown = str(found).splitlines()
    assert f", k.cu:{number}, PTX line {found.line}" in head
    assert said in head
    assert shown == [f"    {TEXT[number - 1].strip()}", f"    {found.text}"]
    assert isinstance(found, UnsupportedInstructionError) == (name == "unknown")


@pytest.mark.parametrize("options", [(), ("-lineinfo",), ("-G",)], ids=lambda o: "".join(o) or "none")
def test_calls_are_shown_inlined_or_not(options: tuple[str, ...], open_gpu: Callable[..., Gpu]) -> None:
    gpu = open_gpu()
    x = gpu.zeros(100)
    found = fault(gpu, "shift", 128, x, 100, options=options)
    assert (found.thread, found.address) == ((99, 0, 0), x.address + 400)
    lines = [line_of("x[i + 1]"), line_of("2 * next"), line_of("twice(x, i);")]
    assert found.source == tuple(SourceLine("k.cu", n, TEXT[n - 1].strip()) for n in lines)
    head, *shown = str(found).splitlines()
    assert head.startswith(f"shift, k.cu:{lines[0]}, PTX line {found.line} (block (0, 0, 0), thread")
    assert [line.strip() for line in shown] == [
        "return x[i + 1];",
        f"called from k.cu:{lines[1]}: return 2 * next(x, i);",
        f"called from k.cu:{lines[2]}: x[i] = twice(x, i);",
        found.text,
    ]


def test_a_line_of_a_header_is_shown_with_the_call(open_gpu: Callable[..., Gpu]) -> None:
    gpu = open_gpu()
    found = fault(gpu, "header", 1, gpu.zeros(1))
    assert [str(place) for place in found.source] == ["deep.cuh:3", f"k.cu:{line_of('= deep')}"]
    assert found.source[0].text == "return x[1 << 20];"


def test_too_little_shared_memory_is_reported_with_what_to_pass(open_gpu: Callable[..., Gpu]) -> None:
    gpu = open_gpu()
    kernel = gpu.module(SOURCE, label="k.cu", headers=HEADERS)["tile"]
    out = gpu.zeros(1)
    kernel.launch(out, grid=1, block=64, shared=256)
    for _ in range(2):
        with pytest.raises(EmulatorFault) as caught:
            kernel.launch(out, grid=1, block=64, shared=128)
        assert "writes 4 bytes at shared address 0x90; there are 144 bytes of it" in str(caught.value)
        assert caught.value.hint == (
            "the launch gave 128 bytes of dynamic shared memory, and this needs 256: "
            "kernel.launch(…, grid=…, block=…, shared=256)"
        )
        gpu.reset()
        kernel = gpu.module(SOURCE, label="k.cu", headers=HEADERS)["tile"]
        out = gpu.zeros(1)


# Effects that it does not have


def test_a_manifest_has_what_was_asked_for_and_not_what_a_fault_compiled(
    compiler: Builder, open_gpu: Callable[..., Gpu]
) -> None:
    """A run on the emulator records what a GPU will ask for."""
    reported: list[Program] = []

    def sink(_: str, fields: Mapping[str, Any]) -> None:
        reported.append(fields["program"])

    compiler.events.subscribe(sink, "request")
    try:
        assert fault(open_gpu(), "trap", 32, 0).source
    finally:
        compiler.events.unsubscribe(sink)
    assert {program.options for program in reported} == {()}
    made = compiler.build(Program.of(SOURCE, label="k.cu", headers=HEADERS), "sm_90")
    assert not has_lines(made.ptx)


@pytest.mark.parametrize("mode", ["error", "warn"])
def test_a_sealed_process_compiles_nothing_for_a_line(
    mode: str, compiler: Builder, open_gpu: Callable[..., Gpu]
) -> None:
    text = "__global__ void k() { __trap(); }"
    programs = [Program.of(text, label="sealed.cu"), Program.of(text, label="lined.cu")]
    for program in (*programs, replace(programs[1], options=("-lineinfo",))):
        compiler.build(program, "sm_90")
    before = compiler.stats()["process"].get("compiles", 0)
    faults = []
    for program in programs:
        with sealed(mode), pytest.raises(EmulatorFault) as caught:
            open_gpu().kernel(program, "k")[1, 1]()
        faults.append(caught.value)
    assert str(faults[0]).startswith(f"k, PTX line {faults[0].line} (block")
    assert faults[0].hint == 'compile with options=["-lineinfo"] to see the line of the CUDA source'
    assert faults[1].source == (SourceLine("lined.cu", 1, text),), "what is stored may be used"
    assert compiler.stats()["process"].get("compiles", 0) == before


def test_code_of_a_bundle_is_located_by_the_text_of_the_program(compiler: Builder) -> None:
    """A bundle holds line information, and no sources."""
    program = Program.of("__global__ void k() { __trap(); }", label="lined.cu", options=["-lineinfo"])
    bare = replace(compiler.build(program, "sm_90"), sources={})
    (function,) = ptx.parse(bare.ptx.decode()).functions
    trap = next(statement.line for statement in function.statements if statement.text == "trap")
    for given, text in ((program, program.source), (None, None)):
        lines = find_source_lines(compiler, given, bare)
        assert lines is not None
        assert lines.of(function, trap) == (SourceLine("lined.cu", 1, text),)
    assert find_source_lines(compiler, None, replace(bare, ptx=b"")) is None


def test_other_code_gives_no_line(tmp_path: Path, open_gpu: Callable[..., Gpu]) -> None:
    """The header has changed since the launch, so that a new compile differs from the running code."""
    header = tmp_path / "h.cuh"
    header.write_text("__device__ int far() { return 100; }\n")
    source = '#include "h.cuh"\n__global__ void k(int* x) { x[far()] = 1; }\n'
    gpu = open_gpu()
    kernel = gpu.kernel(source, "k", include=[tmp_path])
    header.write_text("\n__device__ int far() { return 1000; }\n")
    with pytest.raises(EmulatorFault) as caught:
        kernel[1, 1](gpu.zeros(1, "int32"))
    assert caught.value.source == ()
    assert "-lineinfo" in str(caught.value.hint)


def test_ptx_without_line_information_is_located_by_its_own_lines(open_gpu: Callable[..., Gpu]) -> None:
    gpu = open_gpu()
    kernel = gpu.kernel(".version 8.5\n.target sm_90\n.address_size 64\n.entry k()\n{ trap; }\n", "k")
    with pytest.raises(preheat.EmulatorFault) as caught:
        kernel[1, 1]()
    assert (
        str(caught.value)
        == "k, PTX line 5 (block (0, 0, 0), thread (0, 0, 0)): the kernel trapped\n    trap"
    )
    assert (caught.value.source, caught.value.hint) == ((), None)


# The directives

LINED = """\
.version 8.5
.target sm_90
.address_size 64
.entry k()
{
    .reg .b32 %r<3>;
    mov.u32 %r1, 0;
    .loc 1 4 5
    mov.u32 %r1, 1;
    .loc 2 7 1, function_name $L__info_string0, inlined_at 1 4 5
    .loc 1 9 3, function_name $L__info_string1, inlined_at 2 7 1
    mov.u32 %r1, 2;
    .loc 1 0 5
$L__tmp0:
    mov.u32 %r1, 3;
    .loc 3 1 1, function_name $L__info_string1 + 4, inlined_at 1 8 2
    mov.u32 %r1, 4; mov.u32 %r2, 4;
    ret;
}
    .file 1 "/preheat/a.cu"
    .file 2 "/proc/self/cwd/@0/dir/b.cuh"
"""


def test_directives_are_followed_through_inlined_calls() -> None:
    lines = Lines(LINED, {"/preheat/a.cu": "\n".join(f"  line {n}" for n in range(1, 9))})
    (function,) = ptx.parse(LINED).functions
    at = {n: [str(place) for place in lines.of(function, n)] for n in (7, 9, 12, 15, 17, 18)}
    inner = ["a.cu:9", "dir/b.cuh:7", "a.cu:4"]
    assert at == {7: [], 9: ["a.cu:4"], 12: inner, 15: inner, 17: (last := ["?:1", "a.cu:8"]), 18: last}
    assert lines.of(function, 9) == (SourceLine("a.cu", 4, "line 4"),)
    assert [place.text for place in lines.of(function, 12)] == [None, None, "line 4"]
    assert lines.of(function, 1000) == ()


def test_lines_belong_to_the_same_instructions_only() -> None:
    lines = Lines(LINED, {})
    plain = "\n".join(line for line in LINED.splitlines() if ".loc" not in line and "$L" not in line)
    (function,) = ptx.parse(plain).functions
    assert [str(place) for place in lines.of(function, 8)] == ["a.cu:4"]
    for other in (
        plain.replace("%r1, 3", "%r1, 5"),
        plain.replace("    ret;\n", ""),
        plain.replace("k()", "q()"),
    ):
        (function,) = ptx.parse(other).functions
        assert lines.of(function, 8) == ()


def test_deep_calls_are_cut_short() -> None:
    places = [SourceLine("k.cu", n, f"f({n});") for n in range(1, 21)]
    shown = str(EmulatorFault("k", "bad", line=3, text="trap", source=places)).splitlines()
    assert shown[-2:] == ["    … and 12 more calls in .source", "    trap"]
    assert len(shown) == 1 + 8 + 2
    assert np.all([f"f({n});" in shown[n] for n in range(1, 9)])


def test_a_device_is_lost_before_anybody_looks_for_the_line(
    open_gpu: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = open_gpu()
    free = list[bool]()
    lock = gpu._device.lock  # type: ignore[attr-defined]

    def interrupted(*_: object) -> None:
        other = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        raise KeyboardInterrupt

    monkeypatch.setattr("preheat.devices.session.find_source_lines", interrupted)
    module = gpu.module(SOURCE, label="k.cu", headers=HEADERS)
    with pytest.raises(KeyboardInterrupt):
        module["trap"][1, 32](0)
    assert free == [True]  # no other thread waits for the lookup
    with pytest.raises(ContextLostError, match="the kernel trapped"):
        gpu.zeros(1)
