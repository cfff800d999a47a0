"""Threads of the emulator: divergence, barriers, waits, calls, and the ways a kernel ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preheat.emulator.wave import Wave
from tests.emulator.conftest import Cuda
from tests.emulator.support import HEAD, Machine, entry, fault

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(21)


# Divergence


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 97, 256])
def test_loops_of_every_length_end_for_each_thread_by_itself(cuda: Cuda, threads: int) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* n, int* steps) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        long long v = n[i]; int s = 0;
        while (v != 1) { v = v % 2 ? 3 * v + 1 : v / 2; s++; if (s > 500) break; }
        steps[i] = s;
    }""")
    start = RNG.integers(1, 5000, 3 * threads, dtype=np.int32)
    steps = np.zeros_like(start)
    machine(3, threads, start, steps)

    def collatz(v: int) -> int:
        count = 0
        while v != 1:
            v = 3 * v + 1 if v % 2 else v // 2
            count = count + 1
        return count

    assert steps.tolist() == [collatz(v) for v in start.tolist()]


def test_registers_are_right_after_all_threads_have_met_at_a_shuffle() -> None:
    machine = Machine(entry(".param .u64 out", """
    ld.param.u64 %d1, [out];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %d2, %r1, 4, %d1;
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %p1, %r2, 0;
    mov.u32 %r3, 10;
    bra.uni APART;
MEET:                                          // even threads are here first, and wait
    shfl.sync.bfly.b32 %r4, %r3, 1, 31, 0xffffffff;
    @%p1 bra OTHER;
    add.u32 %r3, %r4, 100;                     // some threads write what all had done with
    bra.uni DONE;
OTHER:
    add.u32 %r3, %r4, 200;
    bra.uni DONE;
APART:
    @%p1 bra MEET;
    add.u32 %r3, %r1, 20;
    bra.uni MEET;
DONE:
    st.global.u32 [%d2], %r3;
    ret;
    """))  # fmt: skip
    out = np.zeros(32, np.uint32)
    machine(1, 32, out)
    assert out.tolist() == [110 if i % 2 else i + 221 for i in range(32)]


def test_nested_branches_meet_again(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* a, int* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return;
        int v = a[i], r = 0;
        for (int j = 0; j < (v & 7); j++) {
            if (v & 16) { if (j & 1) continue; r += j; if (r > 9) break; }
            else if (v & 32) r -= a[(i + j) % n]; else r ^= j * v;
        }
        out[i] = r + (v & 8 ? out[i] : v);
    }""")
    n = 1013
    a, out = RNG.integers(0, 10**6, n, dtype=np.int32), RNG.integers(0, 99, n, dtype=np.int32)
    expected = []
    for i, (v, o) in enumerate(zip(a.tolist(), out.tolist(), strict=True)):
        r = 0
        for j in range(v & 7):
            if v & 16:
                if j & 1:
                    continue
                r += j
                if r > 9:
                    break
            elif v & 32:
                r -= int(a[(i + j) % n])
            else:
                r ^= j * v
        expected.append(r + (o if v & 8 else v))
    machine(8, 128, a, out, np.int32(n))
    np.testing.assert_array_equal(out, np.array(expected, np.int64).astype(np.int32))


def test_guards_apply_to_every_kind_of_instruction() -> None:
    text = entry(
        ".param .u64 at, .param .u64 out",
        """
        ld.param.u64 %d1, [at];
        ld.param.u64 %d2, [out];
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %d3, %r1, 4;
        add.u64 %d4, %d1, %d3;
        add.u64 %d5, %d2, %d3;
        and.b32 %r2, %r1, 1;
        setp.eq.u32 %p1, %r2, 1;
        setp.gt.u32 %p2, %r1, 40;
        mov.u32 %r3, 7;
        @%p1 add.u32 %r3, %r3, %r1;
        @!%p1 mul.lo.u32 %r3, %r1, 2;
        @%p1 ld.global.u32 %r3, [%d4];
        @%p2 exit;
        @!%p1 st.global.u32 [%d5], %r3;
        @%p1 atom.global.add.u32 %r4, [%d5], %r3;
        @%p1 bra DONE;
        st.global.u32 [%d4], 9;
        DONE:
        ret;""",
    )
    at = RNG.integers(0, 10**6, 65, dtype=np.uint32)
    out = np.full(65, 5, np.uint32)
    before = at.copy()
    Machine(text)(1, 65, at, out)
    i = np.arange(65)
    lives, odd = i <= 40, i % 2 == 1
    np.testing.assert_array_equal(out, np.where(lives, np.where(odd, before + 5, 2 * i), 5))
    np.testing.assert_array_equal(at, np.where(lives & ~odd, 9, before))


def test_registers_keep_their_values_across_divergence_and_aliases() -> None:
    text = entry(
        ".param .u64 out",
        """
        ld.param.u64 %d1, [out];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %r1;
        mov.u32 %r3, 5;
        setp.lt.u32 %p1, %r1, 20;
        @%p1 bra SMALL;
        add.u32 %r2, %r2, 100;
        setp.lt.u32 %p2, %r1, 30;
        @%p2 add.u32 %r3, %r3, 1;
        bra JOIN;
        SMALL:
        mov.u32 %r3, %r1;
        add.u32 %r1, %r1, 1000;
        JOIN:
        mov.u32 %r4, %tid.x;
        mul.wide.u32 %d2, %r4, 12;
        add.u64 %d3, %d1, %d2;
        st.global.u32 [%d3], %r1;
        st.global.u32 [%d3+4], %r2;
        st.global.u32 [%d3+8], %r3;
        ret;""",
    )
    out = np.zeros((40, 3), np.uint32)
    Machine(text)(1, 40, out)
    for i, row in enumerate(out.tolist()):
        assert row == ([1000 + i, i, i] if i < 20 else [i, i + 100, 6 if i < 30 else 5])


def test_a_jump_table_takes_each_thread_to_its_own_place() -> None:
    text = entry(
        ".param .u64 out, .param .u32 most",
        """
        ld.param.u64 %d1, [out];
        ld.param.u32 %r5, [most];
        mov.u32 %r1, %tid.x;
        rem.u32 %r2, %r1, %r5;
        mul.wide.u32 %d2, %r1, 4;
        add.u64 %d3, %d1, %d2;
        TABLE: .branchtargets A, B, C;
        brx.idx %r2, TABLE;
        A: mov.u32 %r3, 10; bra END;
        B: mov.u32 %r3, 20; bra END;
        C: mov.u32 %r3, 30;
        END: st.global.u32 [%d3], %r3;
        ret;""",
    )
    out = np.zeros(50, np.uint32)
    machine = Machine(text)
    machine(1, 50, out, np.uint32(3))
    assert out.tolist() == [10 * (1 + i % 3) for i in range(50)]
    assert "beyond the end of its branch table" in str(fault(machine, 1, 50, out, np.uint32(4)))


# Geometry


@pytest.mark.parametrize(
    ("grid", "block"),
    [((1,), (1,)), ((3, 2), (5, 7)), ((2, 3, 2), (4, 2, 3)), ((7,), (33,)), ((1, 1, 5), (32, 2))],
)
def test_threads_know_where_they_are(cuda: Cuda, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out) {
        int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int* o = out + 8 * (b * blockDim.x * blockDim.y * blockDim.z + t);
        unsigned lane, warp;
        asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm("mov.u32 %0, %%warpid;" : "=r"(warp));
        o[0] = threadIdx.x; o[1] = threadIdx.y; o[2] = threadIdx.z;
        o[3] = blockIdx.x; o[4] = blockIdx.y; o[5] = blockIdx.z; o[6] = lane; o[7] = warp;
    }""")
    gx, gy, gz = (*grid, 1, 1)[:3]
    bx, by, bz = (*block, 1, 1)[:3]
    out = np.full((gz, gy, gx, bz, by, bx, 8), -1, np.int32)
    machine(grid, block, out)
    for index in np.ndindex(out.shape[:-1]):
        block_z, block_y, block_x, z, y, x = index
        t = (z * by + y) * bx + x
        assert out[index].tolist() == [x, y, z, block_x, block_y, block_z, t % 32, t // 32]


def test_a_grid_of_many_blocks_runs_in_waves_with_the_same_result(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(long long* out, int n) {
        __shared__ int part[64];
        part[threadIdx.x] = blockIdx.x; __syncthreads();
        long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = i * i + part[63 - threadIdx.x];
    }""")
    n = 99_991
    out = np.zeros(n, np.int64)
    machine(-(-n // 64), 64, out, np.int32(n))
    i = np.arange(n)
    np.testing.assert_array_equal(out, i * i + i // 64)


@pytest.mark.parametrize("geometry", [(0, 32), (1, 0), ((1, 0, 3), 8)])
def test_a_launch_of_nothing_does_nothing(geometry: tuple[Any, Any]) -> None:
    out = np.zeros(1, np.uint32)
    Machine(entry(".param .u64 out", "ld.param.u64 %d1, [out]; st.global.u32 [%d1], 1; ret;"))(
        *geometry, out
    )
    assert out[0] == 0


def test_special_registers_tell_the_launch() -> None:
    names = {
        "%ntid.x": 48, "%ntid.y": 2, "%ntid.z": 1, "%nctaid.x": 3, "%nctaid.y": 1, "%nwarpid": 3,
        "%smid": 0,
        "%nsmid": 1, "%dynamic_smem_size": 40, "%total_smem_size": 40, "%cluster_nctaid.x": 1,
        "%cluster_ctaid.y": 0, "%cluster_ctarank": 0, "%nclusterid.x": 3, "%envreg0": 0,
    }  # fmt: skip
    reads = "".join(
        f"mov.u32 %r1, {name}; st.global.u32 [%d1+{4 * i}], %r1;\n" for i, name in enumerate(names)
    )
    out = np.full(len(names), 0xDEAD, np.uint32)
    Machine(entry(".param .u64 out", f"ld.param.u64 %d1, [out];\n{reads}ret;"))(
        3, (48, 2), out, shared=40
    )
    assert dict(zip(names, out.tolist(), strict=True)) == names


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("eq", lambda i: 1 << i),
        ("lt", lambda i: (1 << i) - 1),
        ("le", lambda i: (2 << i) - 1),
        ("gt", lambda i: 0xFFFFFFFF & ~((2 << i) - 1)),
        ("ge", lambda i: 0xFFFFFFFF & ~((1 << i) - 1)),
    ],
)
def test_lane_masks_are_right_for_every_lane(name: str, mask: Any) -> None:
    out = np.zeros(40, np.uint32)
    text = entry(
        ".param .u64 out",
        f"""
        ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.u64 %d3, %d1, %d2;
        mov.u32 %r2, %lanemask_{name}; st.global.u32 [%d3], %r2; ret;""",
    )
    Machine(text)(1, 40, out)
    assert out.tolist() == [mask(i % 32) for i in range(40)]


def test_clocks_go_forward_and_the_same_way_every_time(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(long long* out) {
        long long a = clock64(); __nanosleep(100); long long b = clock64();
        out[0] = b - a; out[1] = a; out[2] = (unsigned)clock();
    }""")
    first, again = np.zeros(3, np.int64), np.zeros(3, np.int64)
    machine(1, 32, first)
    machine(1, 32, again)
    assert first[0] > 0
    np.testing.assert_array_equal(first, again)


# Barriers


def test_the_halves_of_a_clock_are_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wave, "clock", lambda _: 0x1234_8765_4321)
    text = entry(
        ".param .u64 out",
        """
        ld.param.u64 %d1, [out];
        mov.u32 %r1, %clock; mov.u32 %r2, %clock_hi; st.global.v2.u32 [%d1], {%r1, %r2};
        mov.u32 %r3, %globaltimer_lo; mov.u32 %r4, %globaltimer_hi;
        st.global.v2.u32 [%d1+8], {%r3, %r4};
        mov.u64 %d2, %clock64; mov.u64 %d3, %globaltimer; st.global.v2.u64 [%d1+16], {%d2, %d3};
        ret;""",
    )
    out = np.zeros(4, np.uint64)
    Machine(text)(1, 1, out)
    assert set(out.tolist()) == {0x1234_8765_4321}


@pytest.mark.parametrize("threads", [1, 32, 45, 256])
def test_threads_that_exited_are_not_waited_for(cuda: Cuda, threads: int) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* in, int* out, int live) {
        __shared__ int s[256];
        s[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
        if ((int)threadIdx.x >= live + (int)blockIdx.x) return;
        __syncthreads();
        int v = s[blockDim.x - 1 - threadIdx.x];
        __syncthreads();
        out[blockIdx.x * blockDim.x + threadIdx.x] = v;
    }""")
    values = RNG.integers(0, 10**6, (5, threads), dtype=np.int32)
    out = np.full_like(values, -1)
    live = max(threads // 3, 1)
    machine(5, threads, values, out, np.int32(live))
    alive = np.arange(threads) < live + np.arange(5)[:, None]
    np.testing.assert_array_equal(out, np.where(alive, values[:, ::-1], -1))


def test_a_barrier_waits_for_threads_that_come_late(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out) {
        __shared__ int s[128]; int i = threadIdx.x, v = 0;
        for (int j = 0; j < i * 3; j++) v += j ^ i;
        s[i] = v;
        if (i % 2) __syncthreads(); else { s[i] += 1; __syncthreads(); }
        out[blockIdx.x * 128 + i] = s[127 - i];
    }""")
    out = np.zeros((2, 128), np.int32)
    machine(2, 128, out)
    values = [sum(j ^ i for j in range(3 * i)) + (i % 2 == 0) for i in range(128)]
    np.testing.assert_array_equal(out, [values[::-1]] * 2)


def test_barriers_with_a_count_wait_for_that_many() -> None:
    text = entry(
        ".param .u64 out",
        """
        .shared .b32 s[128];
        ld.param.u64 %d1, [out];
        mov.u32 %r1, %tid.x;
        shl.b32 %r2, %r1, 2;
        mov.u32 %r3, s;
        add.u32 %r4, %r3, %r2;
        setp.lt.u32 %p1, %r1, 64;
        @%p1 bra WRITER;
        bar.sync 3, 128;
        sub.u32 %r5, %r4, 256;
        ld.shared.u32 %r6, [%r5];
        mul.wide.u32 %d2, %r1, 4;
        add.u64 %d3, %d1, %d2;
        st.global.u32 [%d3+-256], %r6;
        ret;
        WRITER:
        mul.lo.u32 %r6, %r1, %r1;
        st.shared.u32 [%r4], %r6;
        bar.arrive 3, 128;
        bar.sync 1, 64;
        ret;""",
    )
    out = np.zeros(64, np.uint32)
    Machine(text)(1, 128, out)
    np.testing.assert_array_equal(out, np.arange(64) ** 2)


def test_barriers_reduce_predicates_over_each_block_only(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* p, int* out) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        int c = __syncthreads_count(p[i] > 0), a = __syncthreads_and(p[i] > 0);
        int o = __syncthreads_or(p[i] > 5);
        out[3 * i] = c; out[3 * i + 1] = a != 0; out[3 * i + 2] = o != 0;
    }""")
    p = RNG.integers(-3, 5, (6, 70), dtype=np.int32)
    p[1], p[2], p[3, 69] = 2, 0, 9
    out = np.full((6, 70, 3), -1, np.int32)
    machine(6, 70, p, out)
    expected = np.stack([(p > 0).sum(1), (p > 0).all(1), (p > 5).any(1)], 1)
    np.testing.assert_array_equal(out, np.broadcast_to(expected[:, None], out.shape))


def test_blocks_pass_their_barriers_at_different_times(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* o, int n) {
        __shared__ int s[32]; int t = threadIdx.x, x = t + 1;
        if (t < 16)
            for (int j = 0; j < n * (int)blockIdx.x; j++) { if (x & 1) x = x * 3 + 1; else x >>= 1; }
        s[t] = x; __syncthreads(); x = s[t ^ 1]; __syncthreads(); o[blockIdx.x * 32 + t] = x;
    }""")
    out = np.zeros((4, 32), np.int32)
    machine(4, 32, out, np.int32(3000))
    x = np.tile(np.arange(1, 33), (4, 1))
    for block in range(4):
        own = x[block, :16]
        for _ in range(3000 * block):
            own[...] = np.where(own & 1, own * 3 + 1, own >> 1)
    np.testing.assert_array_equal(out, x[:, np.arange(32) ^ 1])


def test_a_count_of_predicates_is_a_number_like_any_other(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* o, int n) {
        int c = __syncthreads_count(threadIdx.x % 3 == 0);
        o[threadIdx.x] = c * n - 5 + (c > -1) + c / n;
    }""")
    out = np.zeros(64, np.int32)
    machine(1, 64, out, np.int32(-3))
    assert set(out.tolist()) == {22 * -3 - 5 + 1 - 7}


def test_threads_that_run_together_can_name_different_barriers(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* in, int* out) {
        __shared__ int s[128]; int t = threadIdx.x, i = blockIdx.x * 128 + t, id = 1 + t / 64, any;
        s[t] = in[i];
        asm volatile("bar.sync %0, 64;" :: "r"(id) : "memory");
        asm volatile("{.reg .pred a, b; setp.gt.s32 a, %1, 90;"
                     "bar.red.or.pred b, %2, 64, a; selp.s32 %0, 1, 0, b;}"
                     : "=r"(any) : "r"(s[t]), "r"(id) : "memory");
        out[i] = s[t ^ 32] * 2 + any;
    }""")
    values = RNG.integers(0, 90, (3, 2, 64), dtype=np.int32)
    values[1, 0, 7] = values[2, 1, 63] = 99
    out = np.zeros_like(values)
    machine(3, 128, values, out)
    high = (values > 90).any(2, keepdims=True)
    np.testing.assert_array_equal(out, values[..., np.arange(64) ^ 32] * 2 + high)


@pytest.mark.parametrize("threads", [33, 40, 64])
def test_a_barrier_with_a_count_counts_whole_warps(cuda: Cuda, threads: int) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out, int early) {
        int t = threadIdx.x; if (t == early) return;
        if (t % 2) asm volatile("bar.sync 1, 64;" ::: "memory");
        else asm volatile("bar.sync 1, 64;" ::: "memory");
        out[t] = t + 1;
    }""")
    out = np.zeros(threads, np.int32)
    machine(1, threads, out, np.int32(3))
    np.testing.assert_array_equal(out, np.where(np.arange(threads) == 3, 0, np.arange(1, threads + 1)))


def test_a_barrier_that_some_threads_never_reach_is_a_fault_at_its_line() -> None:
    text = entry(
        ".param .u64 out",
        """
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 40;
        @%p1 bra OTHER;
        bar.sync 0;
        ret;
        OTHER:
        bar.sync 1;
        bar.sync 0;
        ret;""",
    )
    found = fault(Machine(text), 1, 64, np.zeros(1))
    assert "waits at barrier 0 for threads of its block that never come" in str(found)
    assert (found.text, found.thread) == ("bar.sync 0", (40, 0, 0))
    assert found.line == text.split("\n").index("bar.sync 0;") + 1


# Waiting for one another


def test_a_lock_that_all_threads_want_is_had_by_each_in_turn(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* lock, int* total) {
        while (atomicCAS(lock, 0, 1) != 0) ;
        *(volatile int*)total = *(volatile int*)total + (int)threadIdx.x + 1;
        __threadfence();
        atomicExch(lock, 0);
    }""")
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    machine(2, 33, lock, total)
    assert total[0] == 2 * sum(range(34))


def test_blocks_of_one_wave_can_wait_for_one_another(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(volatile int* flag, int* out) {
        if (blockIdx.x == 0) { while (flag[0] == 0) ; out[threadIdx.x] = flag[1]; }
        else { flag[1] = 77; __threadfence(); flag[0] = 1; }
    }""")
    flag, out = np.zeros(2, np.int32), np.zeros(8, np.int32)
    machine(2, 8, flag, out)
    assert set(out.tolist()) == {77}


def test_waiting_for_what_never_comes_is_a_fault_and_no_hang(cuda: Cuda) -> None:
    machine = cuda(
        'extern "C" __global__ void k(volatile int* p) { while (p[threadIdx.x] == 0) ; p[0] = 2; }',
        patience=5000,
    )
    found = fault(machine, 1, 4, np.zeros(4, np.int32))
    assert "no progress" in str(found)
    assert "5,000" in str(found)
    assert found.hint is not None


@pytest.mark.parametrize(
    ("loop", "factor"),
    [
        ("volatile int l[2]; l[0] = 0; while (p[1] == 0) l[0] = l[0] + 1;", 1),
        ("while (p[1] == 0) p[0] = 1;", 10),
        ("while (p[1] == 0) __syncthreads();", 10),
        ("while (atomicAdd((int*)p + 1, 0) == 0) atomicAdd((int*)p, 1);", 10),
    ],
)
def test_writing_and_passing_barriers_is_progress_for_a_while_only(
    cuda: Cuda, loop: str, factor: int
) -> None:
    machine = cuda(f'extern "C" __global__ void k(volatile int* p) {{ {loop} }}', patience=500)
    found = fault(machine, 1, 32, np.zeros(4, np.int32))
    assert f"no progress: {500 * factor:,} basic blocks" in str(found)
    assert ("wrote" in str(found)) == (factor == 1)
    assert "patience=" in str(found.hint)


def test_a_kernel_may_compute_for_long_without_writing(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out, int n) {
        int x = threadIdx.x;
        for (int i = 0; i < n; i++) { if (x & 1) x = x * 3 + 1; else x >>= 1; if (x == 12345) break; }
        out[threadIdx.x] = x + 1;
    }""")
    assert machine.device.patience >= 5_000_000
    out = np.zeros(2, np.int32)
    machine(1, 2, out, np.int32(3001))
    assert out.tolist() == [1, 5]  # 3,000 is a multiple of the three steps from 1 to 1


def test_waiting_for_a_time_ends_soon(cuda: Cuda) -> None:
    machine = cuda(
        """extern "C" __global__ void k(int* out) {
        long long t = clock64(); while (clock64() - t < 2000000) ; out[threadIdx.x] = 1;
    }""",
        patience=5000,
    )
    out = np.zeros(32, np.int32)
    machine(1, 32, out)
    assert out.all()


def test_a_cooperative_grid_synchronises(cuda: Cuda) -> None:
    machine = cuda("""
    #include <cooperative_groups.h>
    extern "C" __global__ void k(int* a, int* b) {
        int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
        for (int round = 0; round < 3; round++) {
            a[i] += i + round; cooperative_groups::this_grid().sync();
            b[i] += a[n - 1 - i]; cooperative_groups::this_grid().sync();
        }
    }""")
    n = 40 * 96
    a, b = np.zeros(n, np.int32), np.zeros(n, np.int32)
    machine(40, 96, a, b, cooperative=True)
    i = np.arange(n)
    np.testing.assert_array_equal(a, 3 * i + 3)
    np.testing.assert_array_equal(b, sum((r + 1) * (n - 1 - i) + (r * (r + 1)) // 2 for r in range(3)))
    assert "trapped" in str(fault(machine, 40, 96, a, b))


# Ends


def test_an_empty_kernel_does_nothing() -> None:
    Machine(f"{HEAD}.visible .entry k() {{ }}")(2, 64)


def test_the_same_launch_gives_the_same_bits(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const float* x, float* sum, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) atomicAdd(sum + (i % 3), x[i] * (i % 7 ? 1.0f : x[(i * 31) % n]));
    }""")
    n = 40_000
    x = RNG.standard_normal(n).astype(np.float32)
    results = []
    for _ in range(2):
        total = np.zeros(3, np.float32)
        machine(-(-n // 96), 96, x, total, np.int32(n))
        results.append(total.tobytes())
    assert results[0] == results[1]
