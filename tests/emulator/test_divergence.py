"""A sanitized emulator stops at a barrier that not all threads of a block reach together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

import preheat
from preheat import EmulatorFault, Gpu
from preheat.errors import SourceLine
from tests.emulator.conftest import Cuda
from tests.emulator.support import Machine, entry, fault

GROUPS = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
"""
HEAD = """\
__device__ __noinline__ void meet(int* x) { x[threadIdx.x] += 1; __syncthreads(); x[threadIdx.x] += 1; }
"""


class Divergent(NamedTuple):
    """A kernel body, the line of the thread that waits, and what is said of the others."""

    body: str
    line: int
    said: str
    threads: int = 64


EXITED = "passes barrier 0, which {} of the 64 threads of its block have not reached"
ELSEWHERE = "passes barrier 0, at which {} of the 64 threads of its block are at other instructions"

# Line 1 of a body is line 6 of the source.
DIVERGENT = {
    "a barrier in a branch": Divergent(
        """if (threadIdx.x < 40)
             __syncthreads();
           x[threadIdx.x] = 1;""",
        7,
        f"{EXITED.format(24)}: thread (40, 0, 0) exited at program.cu:",
    ),
    "a barrier in a branch and one after it": Divergent(
        """if (threadIdx.x < 40)
             __syncthreads();
           x[threadIdx.x] = 1;
           __syncthreads();
           x[63 - threadIdx.x] = 2;""",
        7,
        f"{ELSEWHERE.format(24)}: thread (40, 0, 0) is at program.cu:9, PTX line ",
    ),
    "a barrier in both branches": Divergent(
        """if (threadIdx.x < 40)
             __syncthreads();
           else
             __syncthreads();
           x[threadIdx.x] = 1;""",
        7,
        f"{ELSEWHERE.format(24)}: thread (40, 0, 0) is at program.cu:9, PTX line ",
    ),
    "a loop that threads repeat differently often": Divergent(
        """for (int i = threadIdx.x; i < 100; i += 64) {
             x[i & 63] += 1;
             __syncthreads();
             x[i & 63] += 1;
           }""",
        8,
        f"{EXITED.format(28)}: thread (36, 0, 0) exited at program.cu:",
    ),
    "an early return": Divergent(
        """if (threadIdx.x >= n)
             return;
           x[threadIdx.x] = 1;
           __syncthreads();
           x[threadIdx.x] = x[n - 1 - threadIdx.x];""",
        9,
        f"{EXITED.format(14)}: thread (50, 0, 0) exited at program.cu:6, PTX line ",
    ),
    "the return of a whole warp": Divergent(
        """if (threadIdx.x / 32 == 1) return;
           __syncthreads();
           x[threadIdx.x] = 1;""",
        7,
        f"{EXITED.format(32)}: thread (32, 0, 0) exited at program.cu:6, PTX line ",
    ),
    "a barrier that counts": Divergent(
        """if (threadIdx.x >= n) return;
           x[threadIdx.x] = __syncthreads_count(threadIdx.x & 1);""",
        7,
        f"{EXITED.format(14)}: thread (50, 0, 0) exited at program.cu:6, PTX line ",
    ),
    "two calls of a function": Divergent(
        """if (threadIdx.x & 1)
             meet(x);
           else
             meet(x + 1);""",
        4,
        "passes barrier 0, at which 32 of the 64 threads of its block came to it through other calls: "
        "thread (1, 0, 0) came through the call at program.cu:7, PTX line ",
    ),
    "a return before the barrier of a cooperative group": Divergent(
        """if (threadIdx.x >= n) return;
           cg::this_thread_block().sync();
           x[threadIdx.x] = 1;""",
        7,
        f"{EXITED.format(14)}: thread (50, 0, 0) exited at program.cu:6, PTX line ",
    ),
}

# What CUDA or PTX defines, and compilers make of it.
UNIFORM = {
    "a uniform branch": "if (n > 7) __syncthreads(); else { x[0] = 1; __syncthreads(); }",
    "a branch on the block": "if (blockIdx.x & 1) __syncthreads(); x[threadIdx.x] = 1;",
    "blocks that return": "if (blockIdx.x & 1) return; __syncthreads(); x[threadIdx.x] = 1;",
    "a loop with a uniform bound": "for (int i = 0; i < n; i++) { x[threadIdx.x]++; __syncthreads(); }",
    "a loop that is unrolled": """
        #pragma unroll 8
        for (int i = 0; i < n; i++) { x[threadIdx.x] ^= x[threadIdx.x ^ i]; __syncthreads(); }""",
    "a loop from the thread's own number, equally often": """
        for (int i = threadIdx.x; i < 64 * n; i += 64) { x[i & 63] += i; __syncthreads(); }
        """,
    "a loop whose rounds diverge inside": """
        for (int i = 0; i < n; i++) {
            if (x[threadIdx.x] & 1) { x[threadIdx.x] += i; continue_: x[threadIdx.x] ^= 3; }
            else if (threadIdx.x > 40) goto continue_;
            __syncthreads();
        }""",
    "a function that all call": "if (n > 7) meet(x); meet(x);",
    "a return after the last barrier": "__syncthreads(); if (threadIdx.x >= n) return; x[0] = 1;",
    "cooperative groups": """
        auto block = cg::this_thread_block();
        block.sync();
        auto tile = cg::tiled_partition<8>(block);
        if (threadIdx.x < 32) tile.sync();
        block.sync();""",
    "a block's barrier of cooperative groups in two places": """
        auto block = cg::this_thread_block();
        if (threadIdx.x < 40) { x[0] = 1; block.sync(); } else { x[1] = 2; block.sync(); }""",
    "a barrier of the warp": "if (threadIdx.x & 1) __syncwarp(0xaaaaaaaa); x[threadIdx.x] = 1;",
    "a named barrier of one warp": """
        if (threadIdx.x < 32) asm volatile("bar.sync 1, 32;" ::: "memory");
        else asm volatile("bar.sync 2, 32;" ::: "memory");""",
    "a named barrier that others only arrive at": """
        if (threadIdx.x < 32) asm volatile("bar.arrive 1, 64;" ::: "memory");
        else asm volatile("bar.sync 1, 64;" ::: "memory");""",
    "a count in place of all threads, from two places": """
        if (threadIdx.x < 32) { x[0] = 1; asm volatile("bar.sync 0, 64;" ::: "memory"); }
        else asm volatile("bar.sync 0, 64;" ::: "memory");""",
    "a count of the threads that are left": """
        if (threadIdx.x >= 32) return;
        asm volatile("bar.sync 0, 32;" ::: "memory");""",
}  # fmt: skip


def source(body: str) -> str:
    groups = GROUPS if "cg::" in body else "\n\n\n"  # The header takes seconds to compile.
    return f'{groups}{HEAD}extern "C" __global__ void k(int* x, int n) {{\n{body}\n}}'


@pytest.fixture
def gpu() -> Gpu:
    gpu = preheat.device("emulator", sanitize=True)
    gpu.reset()
    return gpu


@pytest.mark.parametrize("case", DIVERGENT)
def test_a_divergent_barrier_is_found_and_both_threads_are_named(gpu: Gpu, case: str) -> None:
    body, line, said, threads = DIVERGENT[case]
    kernel = gpu.kernel(source(body), "k")
    with pytest.raises(EmulatorFault) as caught:
        kernel[3, threads](gpu.zeros(128, "int32"), 50)
    found = caught.value
    assert found.message.startswith(said)
    own = [place for place in found.source if place.text is not None]
    assert own[0][:2] == SourceLine("program.cu", line, "")[:2]
    assert (found.kernel, found.block, found.thread) == ("k", (0, 0, 0), (0, 0, 0))
    assert found.line is not None
    assert f"{found.line}" not in found.message.rpartition("PTX line ")[2].split()
    assert found.hint is not None
    gpu.reset()


@pytest.mark.parametrize("case", DIVERGENT)
def test_the_default_mode_runs_it_as_a_gpu_does(case: str) -> None:
    gpu = preheat.device("emulator")
    gpu.kernel(source(DIVERGENT[case].body), "k")[3, 64](gpu.zeros(128, "int32"), 50)
    gpu.synchronize()


@pytest.mark.parametrize("case", UNIFORM)
def test_a_barrier_that_is_defined_is_no_fault(cuda: Cuda, case: str) -> None:
    machine = cuda(source(UNIFORM[case]), sanitize=True)
    for n in (1, 5, 12):
        machine(3, 64, np.zeros(128, np.int32), np.int32(n))


def test_the_barriers_of_a_grid_are_no_fault(cuda: Cuda) -> None:
    machine = cuda(source("cg::this_grid().sync(); x[threadIdx.x] = 1;"), sanitize=True)
    machine(3, 64, np.zeros(128, np.int32), np.int32(1), cooperative=True)


# In PTX: which blocks, barriers and forms count.

BRANCH = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    setp.lt.u32 %p1, %r1, 40;
    @%p1 bra FIRST;
    {};
    bra LAST;
FIRST:
    {};
LAST:
    ret;"""


@pytest.mark.parametrize(
    ("one", "other", "faulty"),
    [
        ("bar.sync 0", "bar.sync 0", True),
        ("bar.sync 3", "bar.sync 3", True),
        ("barrier.sync.aligned 0", "barrier.sync.aligned 0", True),
        ("barrier.sync 0", "bar.sync 0", True),
        ("barrier.sync 0", "barrier.sync 0", False),
        ("bar.red.popc.u32 %r3, 0, %p1", "bar.red.popc.u32 %r3, 0, %p1", True),
        ("bar.sync 0, 64", "bar.sync 0, 64", False),
        ("bar.sync 0, 64", "bar.sync 0", False),
    ],
)
def test_only_aligned_barriers_of_all_threads_must_be_one_instruction(
    one: str, other: str, faulty: bool
) -> None:
    machine = Machine(entry("", BRANCH.format(one, other)), sanitize=True)
    if not faulty:
        machine(2, 64)
        return
    found = fault(machine, 2, 64)
    number = "3" if "3;" in f"{one};" else "0"
    said = f"passes barrier {number}, at which 24 of the 64 threads of its block are at other"
    assert found.message.startswith(said)
    assert found.thread == (0, 0, 0)
    assert "thread (40, 0, 0) is at PTX line " in found.message


def test_the_block_at_fault_is_named() -> None:
    body = """
    mov.u32 %r1, %tid.z;
    mov.u32 %r2, %ctaid.x;
    setp.lt.u32 %p1, %r2, 2;
    setp.lt.u32 %p2, %r1, 2;
    @%p1 bra MEET;
    @!%p2 ret;
MEET:
    bar.sync 0;
    ret;"""
    text = entry("", body)
    found = fault(Machine(text, sanitize=True), 4, (4, 4, 4))
    assert found.block == (2, 0, 0)
    assert "32 of the 64 threads" in found.message
    line = text.split("\n").index("    @!%p2 ret;") + 1
    assert f"thread (0, 0, 2) exited at PTX line {line}" in found.message
    Machine(text)(4, (4, 4, 4))


def test_a_thread_that_never_exits_is_reported_where_it_waits() -> None:
    """Two barriers that wait for one another never complete, with and without checks."""
    for sanitize in (False, True):
        machine = Machine(entry("", BRANCH.format("bar.sync 0", "bar.sync 1")), sanitize=sanitize)
        assert "never come" in fault(machine, 1, 64).message
