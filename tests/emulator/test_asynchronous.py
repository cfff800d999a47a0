"""Asynchronous copies and mbarriers, on every device against a model; their faults on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.errors import EmulatorFault
from preheat.gpu import Gpu
from tests.emulator.support import Machine, entry

# Copies

FORMS = (
    ("cp.async.ca.shared.global [%r9], [%d9], 4;", 4, "all"),
    ("cp.async.ca.shared.global [%r9], [%d9], 8, 8;", 8, "all"),
    ("cp.async.ca.shared.global [%r9], [%d9], 4, %r2;", 4, "some"),
    ("cp.async.ca.shared::cta.global.L2::64B [%r9], [%d9], 8, %r2;", 8, "some"),
    ("cp.async.ca.shared.global.L2::256B [%r9], [%d9], 16, %r2;", 16, "some"),
    ("cp.async.cg.shared.global [%r9], [%d9], 16, %r2;", 16, "some"),
    ("cp.async.cg.shared.global.L2::128B [%r9], [%d9], 16, 5;", 16, "five"),
    ("cp.async.cg.shared.global.L2::cache_hint [%r9], [%d9], 16, %d3;", 16, "all"),
    ("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r9], [%d9], 16, %r2, %d3;", 16, "some"),
    ("cp.async.ca.shared.global [%r9], [%d9], 8, %p1;", 8, "odd"),
    ("cp.async.ca.shared.global [%r9], [%d9], 16, !%p1;", 16, "even"),
    ("cp.async.ca.shared.global.L2::cache_hint [%r9], [%d9], 4, %p1, %d3;", 4, "odd"),
)


def test_a_copy_reads_as_many_bytes_as_it_is_given_and_fills_up_with_zeros(device: Gpu) -> None:
    steps = "".join(
        f"""
        st.shared.v4.b32 [%r9], {{0x55555555, 0x55555555, 0x55555555, 0x55555555}};
        min.u32 %r2, %r3, {size};
        {form}
        cp.async.commit_group; cp.async.wait_group 0; cp.async.wait_all;
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r9];
        st.global.v4.b32 [%d2+{16 * 64 * at}], {{%r4, %r5, %r6, %r7}};"""
        for at, (form, size, _) in enumerate(FORMS)
    )
    text = entry(
        ".param .u64 in, .param .u64 out",
        f"""
        .shared .align 16 .b8 tile[1024];
        mov.u32 %r1, %tid.x; mul.wide.u32 %d4, %r1, 16;
        ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out];
        add.s64 %d9, %d1, %d4; add.s64 %d2, %d2, %d4;
        mov.u32 %r8, tile; mad.lo.u32 %r9, %r1, 16, %r8;
        rem.u32 %r3, %r1, 17; and.b32 %r8, %r1, 1; setp.eq.u32 %p1, %r8, 1;
        createpolicy.fractional.L2::evict_last.b64 %d3, 1.0;
        {steps}
        ret;""",
    )
    given = np.random.default_rng(1).integers(0, 256, (64, 16), dtype=np.uint8)
    out = device.zeros((len(FORMS), 64, 16), "uint8")
    device.kernel(text, "k")[1, 64](device.array(given), out)
    thread = np.arange(64)
    counts = {
        "all": thread + 99, "some": thread % 17, "five": thread * 0 + 5,
        "odd": 99 * (thread % 2 == 0), "even": 99 * (thread % 2),
    }  # fmt: skip
    for (form, size, kind), found in zip(FORMS, out.numpy(), strict=True):
        expected = np.where(np.arange(16) < np.minimum(counts[kind], size)[:, None], given, 0)
        expected[:, size:] = 0x55
        np.testing.assert_array_equal(found, expected, form)


COPY = """
.shared .align 16 .b8 tile[64];
ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out]; mov.u32 %r1, tile;
{copy}
ld.shared.b32 %r3, [tile]; st.global.b32 [%d2], %r3; ret;
"""


def copied(copy: str, given: bytes = b"\x01\x02\x03\x04" * 4) -> int:
    out = np.zeros(1, np.uint32)
    text = entry(".param .u64 in, .param .u64 out", COPY.format(copy=copy))
    Machine(text)(1, 1, np.frombuffer(given, np.uint8), out)
    return int(out[0])


def test_a_copy_touches_no_more_of_its_source_than_it_reads() -> None:
    short = b"\x01\x02\x03\x04\x05\x06"
    assert copied("cp.async.cg.shared.global [%r1], [%d1], 16, 6;", short) == 0x04030201
    assert copied("cp.async.cg.shared.global [%r1], [4096], 16, 0;") == 0
    assert copied("setp.eq.u32 %p1, 1, 1; cp.async.ca.shared.global [%r1], [4096], 8, %p1;") == 0


@pytest.mark.parametrize(
    ("copy", "said"),
    [
        ("cp.async.cg.shared.global [%r1], [%d1], 16, 17;", "copies 17 of 16 bytes"),
        ("cp.async.cg.shared.global [%r1], [%d1+8], 16;", "reads 16 bytes at"),
        ("cp.async.cg.shared.global [%r1], [%d1+2], 16, 3;", "reads 3 bytes at"),
        ("cp.async.cg.shared.global [%r1], [%d1+16], 16, 1;", "reads 1 byte at"),
        ("cp.async.ca.shared.global [%r1+2], [%d1], 4, 1;", "writes 4 bytes at"),
        ("cp.async.ca.shared.global [%r1+64], [%d1], 4, 0;", "writes 4 bytes at shared address 0x40"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r1], 24;", "copies 24 bytes"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r1], 32;", "writes 32 bytes at"),
    ],
)
def test_a_copy_that_a_gpu_would_not_survive_is_a_fault(copy: str, said: str) -> None:
    with pytest.raises(EmulatorFault, match=said):
        copied(copy)


# Barriers in shared memory


@dataclass
class Model:
    """An mbarrier in Python's own integers: which phase it is in and what that waits for."""

    pending: int
    expected: int
    phase: int = 0
    bytes: int = 0

    def change(self, arrivals: int = 0, more: int = 0, dropped: int = 0) -> int:
        before = self.phase
        self.bytes += more
        self.pending -= arrivals
        self.expected -= dropped
        if self.pending == self.bytes == 0:
            self.phase = self.phase + 1
            self.pending = self.expected
        return before


def random_steps(rng: np.random.Generator, count: int) -> tuple[list[str], list[int]]:
    """Instructions of one thread on one mbarrier, each of which leaves a number, and those numbers."""
    start = int(rng.integers(40, 60))
    model = Model(start, start)
    tokens = {0: -1}
    lines = [f"mbarrier.init.shared.b64 [%r1], {start};"]
    numbers: list[int] = []
    while len(numbers) < count:
        n = int(rng.integers(1, max(model.pending, 1) + 1))
        kind = str(
            rng.choice(["arrive", "all", "drop", "expect", "more", "complete", "parity", "state"])
        )
        token = int(rng.integers(0, 4))
        if kind in ("arrive", "all") and model.pending:
            n = model.pending if kind == "all" else n
            lines.append(f"mbarrier.arrive.release.cta.shared::cta.b64 %d{10 + token}, [%r1], {n};")
            tokens[token] = model.change(n)
        elif kind == "drop" and model.expected > 3 and model.pending > 1:
            lines.append(f"mbarrier.arrive_drop.shared.b64 %d{10 + token}, [%r1];")
            tokens[token] = model.change(1, dropped=1)
        elif kind == "expect":
            lines.append(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], {16 * n};")
            model.change(more=16 * n)
        elif kind == "more" and model.pending:
            lines.append(f"mbarrier.arrive.expect_tx.shared.b64 %d{10 + token}, [%r1], {16 * n};")
            tokens[token] = model.change(1, more=16 * n)
        elif kind == "complete" and model.bytes:
            done = int(rng.choice([model.bytes, min(16, model.bytes)]))
            lines.append(f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], {done};")
            model.change(more=-done)
        elif kind == "parity":
            parity = int(rng.integers(0, 2))
            # An H200 sometimes lets a try_wait succeed where nothing is left that could end the phase.
            complete = model.phase % 2 != parity
            verb = str(rng.choice(["test_wait", "try_wait"])) if complete else "test_wait"
            lines.append(f"mbarrier.{verb}.parity.shared.b64 %p1, [%r1], {parity};")
            lines.append(f"selp.u32 %r2, 1, 0, %p1; st.global.u32 [%d1+{4 * len(numbers)}], %r2;")
            numbers.append(int(complete))
        elif kind == "state" and tokens.get(token, -1) >= model.phase - 1:
            if tokens[token] < 0:
                continue
            lines.append(f"mbarrier.test_wait.shared.b64 %p1, [%r1], %d{10 + token};")
            lines.append(f"selp.u32 %r2, 1, 0, %p1; st.global.u32 [%d1+{4 * len(numbers)}], %r2;")
            numbers.append(int(model.phase > tokens[token]))
    return lines, numbers


@pytest.mark.parametrize("seed", range(4))
def test_phases_end_when_arrivals_and_bytes_are_complete(device: Gpu, seed: int) -> None:
    lines, expected = random_steps(np.random.default_rng(seed), 40)
    body = "\n".join(
        [
            ".shared .align 8 .b64 bar; mov.u32 %r1, bar; ld.param.u64 %d1, [out];",
            *lines,
            "mbarrier.inval.shared.b64 [%r1]; ret;",
        ]
    )
    out = device.zeros(len(expected), "uint32")
    device.kernel(entry(".param .u64 out", body), "k")[1, 1](out)
    assert out.numpy().tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_a_state_knows_how_many_arrivals_its_phase_waited_for(device: Gpu) -> None:
    body = """
    .shared .align 8 .b64 bar; mov.u32 %r1, bar; ld.param.u64 %d1, [out];
    mbarrier.init.shared.b64 [%r1], 9;
    mbarrier.arrive.noComplete.shared.b64 %d2, [%r1], 3;
    mbarrier.pending_count.b64 %r2, %d2;
    mbarrier.arrive_drop.noComplete.shared.b64 %d3, [%r1], 2;
    mbarrier.pending_count.b64 %r3, %d3;
    st.global.v2.u32 [%d1], {%r2, %r3}; ret;"""
    out = device.zeros(2, "uint32")
    device.kernel(entry(".param .u64 out", body), "k")[1, 1](out)
    assert out.numpy().tolist() == [9, 6]


RING = """
.shared .align 8 .b64 full[2]; .shared .align 8 .b64 empty[2]; .shared .align 4 .b32 tile[64];
mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; mov.u32 %r3, %ctaid.x;
ld.param.u64 %d1, [out]; mad.lo.u32 %r4, %r3, 320, %r2; mad.wide.u32 %d1, %r4, 4, %d1;
setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [full], 32; mbarrier.init.shared.b64 [full+8], 32;
mbarrier.init.shared.b64 [empty], 32; mbarrier.init.shared.b64 [empty+8], 32;
READY: bar.sync 0;
mov.u32 %r5, full; mov.u32 %r6, empty; mov.u32 %r7, tile; mov.u32 %r8, 0;
setp.ge.u32 %p2, %r1, 32;
LOOP:
and.b32 %r9, %r8, 1; shr.u32 %r10, %r8, 1; and.b32 %r10, %r10, 1;
mad.lo.u32 %r11, %r9, 8, %r5; mad.lo.u32 %r12, %r9, 8, %r6;
mad.lo.u32 %r13, %r9, 128, %r7;
@%p2 bra CONSUME;
xor.b32 %r14, %r10, 1;
WAIT_EMPTY: mbarrier.try_wait.parity.shared.b64 %p3, [%r12], %r14; @!%p3 bra WAIT_EMPTY;
mad.lo.u32 %r15, %r2, 4, %r13; mad.lo.u32 %r16, %r8, 1000, %r2; mad.lo.u32 %r16, %r3, 7, %r16;
st.shared.u32 [%r15], %r16;
mbarrier.arrive.shared.b64 _, [%r11];
bra NEXT;
CONSUME:
WAIT_FULL: mbarrier.test_wait.parity.shared.b64 %p3, [%r11], %r10; @!%p3 bra WAIT_FULL;
sub.u32 %r15, 31, %r2; mad.lo.u32 %r15, %r15, 4, %r13; ld.shared.u32 %r16, [%r15];
st.global.u32 [%d1], %r16; add.s64 %d1, %d1, 128;
mbarrier.arrive.shared.b64 %d2, [%r12];
NEXT: add.u32 %r8, %r8, 1; setp.lt.u32 %p4, %r8, 10; @%p4 bra LOOP;
ret;
"""


def test_a_warp_hands_tiles_to_another_through_a_ring_of_barriers(device: Gpu) -> None:
    out = device.zeros((3, 10, 32), "uint32")
    device.kernel(entry(".param .u64 out", RING), "k")[3, 64](out)
    block, turn, lane = np.ogrid[:3, :10, :32]
    np.testing.assert_array_equal(out.numpy(), 1000 * turn + 31 - lane + 7 * block)


TRANSFERS = """
.shared .align 16 .b8 tile[512]; .shared .align 8 .b64 bars[3];
mov.u32 %r1, %tid.x; ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out];
mov.u32 %r2, tile; mad.lo.u32 %r3, %r1, 16, %r2; sub.u32 %r4, 31, %r1; mad.lo.u32 %r4, %r4, 16, %r2;
mul.wide.u32 %d3, %r1, 16; add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3; mov.u32 %r5, bars;
setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [bars], 32; mbarrier.init.shared.b64 [bars+8], 32;
mbarrier.init.shared.b64 [bars+16], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
cp.async.cg.shared.global [%r3], [%d4], 16;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];
A: mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0; @!%p2 bra A;
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4]; st.global.v4.b32 [%d5], {%r10, %r11, %r12, %r13};
bar.sync 0;
cp.async.cg.shared.global [%r3], [%d4+512], 16;
cp.async.mbarrier.arrive.shared::cta.b64 [%r5+8];
mbarrier.arrive.shared.b64 %d6, [%r5+8];
B: mbarrier.try_wait.shared.b64 %p2, [%r5+8], %d6; @!%p2 bra B;
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4]; st.global.v4.b32 [%d5+512], {%r10, %r11, %r12, %r13};
bar.sync 0;
@%p1 bra C;
fence.proxy.async.shared::cta;
mbarrier.arrive.expect_tx.shared.b64 _, [%r5+16], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1+1024], 512, [%r5+16];
C: mbarrier.try_wait.parity.shared.b64 %p2, [%r5+16], 0; @!%p2 bra C;
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4];
bar.sync 0;
st.shared.v4.b32 [%r3], {%r10, %r11, %r12, %r13};
fence.proxy.async.shared::cta; bar.sync 0;
@%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d2+1024], [%r2], 512;
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
END: ret;
"""


def test_copies_arrive_on_barriers(device: Gpu) -> None:
    given = np.random.default_rng(2).integers(0, 2**32, (3, 32, 4), dtype=np.uint32)
    out = device.zeros(given.shape, "uint32")
    text = entry(".param .u64 in, .param .u64 out", TRANSFERS)
    device.kernel(text, "k")[1, 32](device.array(given), out)
    np.testing.assert_array_equal(out.numpy(), given[:, ::-1])


PREPARED = """
.shared .align 8 .b64 bar; .shared .align 8 .b64 raw; .reg .b32 %b; mov.u32 %b, bar;
mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [%b], 4;
READY: bar.sync 0;
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mbarrier.arrive.shared.b64 _, [raw];", "shared address 0x8 that is not initialised"),
        ("mbarrier.inval.shared.b64 [raw];", "not initialised"),
        ("mbarrier.test_wait.parity.shared.b64 %p2, [raw], 0;", "not initialised"),
        ("mbarrier.init.shared.b64 [raw], 0;", "for 0 arrivals; there may be 1 to 1048575"),
        ("mbarrier.init.shared.b64 [raw], 1048576;", "for 1048576 arrivals"),
        ("mbarrier.arrive.shared.b64 _, [%b], 5;", "waits for fewer arrivals"),
        ("mbarrier.arrive.noComplete.shared.b64 %d1, [%b], 4;", "by an arrival with .noComplete"),
        ("mbarrier.expect_tx.shared.b64 [%b], 1048575;", "more than 1048575 bytes"),
        ("mov.u64 %d2, g; cvta.global.u64 %d2, %d2; mbarrier.arrive.b64 %d1, [%d2];", "global memory"),
        ("W: mbarrier.try_wait.parity.shared.b64 %p2, [%b], 0; @!%p2 bra W;", "bytes that never come"),
    ],
)  # fmt: skip
def test_a_barrier_that_is_used_wrongly_is_a_fault(body: str, said: str) -> None:
    text = entry("", f"{PREPARED}\n{body}\nret;", outside=".global .align 8 .b64 g;")
    with pytest.raises(EmulatorFault, match=said) as caught:
        Machine(text, patience=20_000)(2, 2)
    assert caught.value.line == text.split("\n").index(body) + 1


def test_reserved_shared_memory_is_apart_from_that_of_the_kernel(device: Gpu) -> None:
    body = """
    .shared .align 4 .b32 mine[64];
    mov.u32 %r1, %tid.x; mov.u32 %r2, mine; mad.lo.u32 %r2, %r1, 4, %r2; st.shared.u32 [%r2], %r1;
    mov.u32 %r3, %reserved_smem_offset_1; cvt.u64.u32 %d1, %r3; cvta.shared.u64 %d1, %d1;
    mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
    add.u32 %r4, %r1, 100; st.u32 [%d1], %r4; bar.sync 0;
    ld.param.u64 %d3, [out]; mul.wide.u32 %d2, %r1, 8; add.s64 %d3, %d3, %d2;
    ld.shared.u32 %r5, [%r2]; ld.u32 %r6, [%d1]; st.global.v2.u32 [%d3], {%r5, %r6}; ret;"""
    out = device.zeros((64, 2), "uint32")
    device.kernel(entry(".param .u64 out", body), "k")[1, 64](out)
    np.testing.assert_array_equal(out.numpy(), np.arange(64)[:, None] + [0, 100])


# What the libraries of CUDA make of them

LIBRARY = """
#include <cuda/barrier>
#include <cuda/pipeline>
struct Block {
    __device__ unsigned size() const { return blockDim.x; }
    __device__ unsigned thread_rank() const { return threadIdx.x; }
    __device__ void sync() const { __syncthreads(); }
};
extern "C" __global__ void staged(const int* in, int* out, int rows) {
    __shared__ int tiles[2][64];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto pipeline = cuda::make_pipeline(Block(), &state);
    for (int ahead = 0, row = 0; row < rows; row++) {
        for (; ahead < rows && ahead < row + 2; ahead++) {
            pipeline.producer_acquire();
            cuda::memcpy_async(Block(), tiles[ahead % 2], in + ahead * 64, sizeof(*tiles), pipeline);
            pipeline.producer_commit();
        }
        pipeline.consumer_wait();
        out[row * 64 + threadIdx.x] = tiles[row % 2][63 - threadIdx.x];
        pipeline.consumer_release();
    }
}
extern "C" __global__ void awaited(const int4* in, int4* out, int rows) {
    __shared__ cuda::barrier<cuda::thread_scope_block> ready;
    __shared__ alignas(16) int4 tile[64];
    if (threadIdx.x == 0) init(&ready, blockDim.x);
    __syncthreads();
    for (int row = 0; row < rows; row++) {
        cuda::memcpy_async(Block(), tile, in + 64 * row, cuda::aligned_size_t<16>(sizeof(tile)), ready);
        ready.arrive_and_wait();
        out[64 * row + threadIdx.x] = tile[63 - threadIdx.x];
        ready.arrive_and_wait();
    }
}
"""


@pytest.mark.parametrize("name", ["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pipelines_and_barriers_of_the_cuda_library(
    open_device: Callable[..., Gpu], compiler: Builder, name: str
) -> None:
    gpu = open_device(name, builder=compiler)
    for kernel, width in (("staged", 1), ("awaited", 4)):
        given = np.random.default_rng(width).integers(0, 2**31, (5, 64, width), dtype=np.int32)
        out = gpu.zeros(given.shape, "int32")
        gpu.kernel(LIBRARY, kernel)[1, 64](gpu.array(given), out, 5)
        np.testing.assert_array_equal(out.numpy(), given[:, ::-1])
