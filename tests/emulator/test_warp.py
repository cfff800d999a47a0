"""Warp instructions: shuffles, votes, matches and reductions, on whole, short and partial warps."""

from __future__ import annotations

from functools import reduce
from operator import add, and_, or_, xor
from typing import Any

import numpy as np
import pytest

from preheat.errors import EmulatorFault
from tests.emulator.conftest import Cuda
from tests.emulator.support import Machine, entry

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(22)
FULL = 0xFFFFFFFF


def warps(count: int, threads: int) -> list[tuple[int, list[int]]]:
    """Return each thread's lane, and the threads of its warp, for blocks of `threads`."""
    out = []
    for thread in range(count):
        block, inside = divmod(thread, threads)
        first = block * threads + inside // 32 * 32
        last = min(first + 32, (block + 1) * threads)
        out.append((inside % 32, list(range(first, last))))
    return out


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Return the lane that a lane reads, and whether that is in range: the rules of the PTX manual."""
    keep, clamp = c >> 8 & 31, c & 31
    low, limit = lane & keep, lane & keep | clamp & ~keep
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | b & ~keep}[mode]
    valid = source >= limit if mode == "up" else source <= limit
    return (source if valid else lane), valid


SHUFFLE = """
ld.param.u64 %d1, [at];
ld.param.u64 %d2, [out];
ld.param.u32 %r10, [b];
ld.param.u32 %r11, [c];
ld.param.u32 %r12, [spread];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mad.lo.u32 %r4, %r2, %r3, %r1;
mul.wide.u32 %d3, %r4, 4;
add.u64 %d4, %d1, %d3;
ld.global.u32 %r5, [%d4];
mad.lo.u32 %r13, %r12, %r1, %r10;
shfl.sync.MODE.b32 %r6|%p1, %r5, %r13, %r11, -1;
selp.u32 %r7, 1, 0, %p1;
mul.wide.u32 %d5, %r4, 8;
add.u64 %d6, %d2, %d5;
st.global.v2.u32 [%d6], {%r6, %r7};
ret;
"""
PARAMS = ".param .u64 at, .param .u64 out, .param .u32 b, .param .u32 c, .param .u32 spread"


@pytest.mark.parametrize("threads", [32, 45, 96])
@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("spread", [0, 3])
def test_shuffles_read_the_lane_that_the_manual_says(
    mode: str, width: int, threads: int, spread: int
) -> None:
    machine = Machine(entry(PARAMS, SHUFFLE.replace("MODE", mode)))
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    values = RNG.integers(0, 2**32, 2 * threads, dtype=np.uint32)
    for b in (0, 1, 2, 5, 16, 31):
        out = np.full((2 * threads, 2), 7, np.uint32)
        machine(2, threads, values, out, np.uint32(b), np.uint32(c), np.uint32(spread))
        for thread, (lane, warp) in enumerate(warps(2 * threads, threads)):
            source, valid = shuffled(mode, lane, (b + spread * (thread % threads)) & 31, c)
            assert out[thread, 1] == valid
            if source < len(warp):  # The value of an absent lane is undefined.
                assert out[thread, 0] == values[warp[source]]


def test_sums_over_warps_of_diverged_blocks(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const float* x, float* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        float v = 0;
        if (i < n) for (int j = 0; j <= i % 5; j++) v += x[(i + j) % n];
        for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffff, v, o);
        if ((threadIdx.x & 31) == 0) out[i / 32] = v;
    }""")
    n = 1000
    x = RNG.standard_normal(n).astype(np.float32)
    out = np.full(32, np.nan, np.float32)
    machine(8, 128, x, out, np.int32(n))
    i = np.arange(1024)
    each = [sum(float(x[(k + j) % n]) for j in range(k % 5 + 1)) if k < n else 0.0 for k in i]
    np.testing.assert_allclose(out, np.reshape(each, (32, 32)).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8, 37])
def test_warps_continue_when_others_have_exited(cuda: Cuda, rows: int) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* x, int* out, int rows) {
        int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
        if (row >= rows || row % 5 == 4) return;
        int v = x[32 * row + lane], w = __shfl_up_sync(0xffffffff, v, 3);
        out[32 * row + lane] = w * 2 + (__ballot_sync(0xffffffff, v > 0) >> lane & 1);
    }""")
    x = RNG.integers(-(2**20), 2**20, (rows, 32), dtype=np.int32)
    out = np.full_like(x, 7)
    machine(-(-rows // 4), 128, x, out, np.int32(rows))
    above = np.concatenate([x[:, :3], x[:, :-3]], 1)
    skipped = (np.arange(rows) % 5 == 4)[:, None]
    np.testing.assert_array_equal(out, np.where(skipped, 7, above * 2 + (x > 0)))


ASK = """
extern "C" __global__ void k(const int* v, const unsigned* mask, unsigned* out, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, part = (threadIdx.x / rounds) & 1;
    unsigned m = mask[2 * (i / 32) + part], *o = out + 10 * i;
    int x = v[i];
    if (part) {
        o[0] = __ballot_sync(m, x > 2); o[1] = __all_sync(m, x > -3); o[2] = __any_sync(m, x > 3);
    } else {
        o[0] = __ballot_sync(m, x > 2); o[1] = __all_sync(m, x > -3); o[2] = __any_sync(m, x > 3);
    }
    int same;
    o[3] = __match_any_sync(m, x); o[4] = __match_all_sync(m, x < 2 + i / 32, &same); o[5] = same;
    o[6] = __reduce_add_sync(m, x); o[7] = __reduce_min_sync(m, x);
    o[8] = __reduce_xor_sync(m, (unsigned)x);
    o[9] = __activemask();
}
"""


@pytest.mark.parametrize("rounds", [1, 4, 16])
def test_votes_matches_and_reductions_are_among_those_the_mask_names(cuda: Cuda, rounds: int) -> None:
    count = 128
    lanes = np.arange(32)
    odd = int(sum(1 << int(lane) for lane in lanes if lane // rounds & 1))
    masks = np.tile(np.array([FULL & ~odd, odd], np.uint32), count // 32)
    values = RNG.integers(-4, 5, count, dtype=np.int32)
    out = np.full((count, 10), 0xDEAD, np.uint32)
    cuda(ASK)(2, 64, values, masks, out, np.int32(rounds))
    for thread, (lane, warp) in enumerate(warps(count, 64)):
        mask = odd if lane // rounds & 1 else FULL & ~odd
        named = [t for t in warp if mask >> (t - warp[0]) & 1]
        x = {t - warp[0]: int(values[t]) for t in named}
        bits = sum(1 << i for i, v in x.items() if v > 2)
        alike = sum(1 << i for i, v in x.items() if v == x[lane])
        agreed = len({v < 2 + thread // 32 for v in x.values()}) == 1
        total = sum(x.values()) & FULL
        assert out[thread].tolist()[:9] == [
            bits, all(v > -3 for v in x.values()), any(v > 3 for v in x.values()), alike,
            mask if agreed else 0, agreed,
            total, min(x.values()) & FULL, reduce(xor, x.values()) & FULL,
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "kind", "combine"),
    [
        ("add", "u32", lambda a, b: add(a, b) & FULL),
        ("and", "b32", and_),
        ("or", "b32", or_),
        ("xor", "b32", xor),
        ("min", "u32", min),
        ("max", "u32", max),
    ],
)
def test_every_reduction_of_a_short_warp(verb: str, kind: str, combine: Any) -> None:
    text = entry(
        ".param .u64 at, .param .u64 out",
        f"""
        ld.param.u64 %d1, [at]; ld.param.u64 %d2, [out];
        mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4; add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3;
        ld.global.u32 %r2, [%d4];
        redux.sync.{verb}.{kind} %r3, %r2, -1;
        st.global.u32 [%d5], %r3; ret;""",
    )
    values = RNG.integers(0, 2**32, 45, dtype=np.uint32)
    out = np.zeros(45, np.uint32)
    Machine(text)(1, 45, values, out)
    first, second = (reduce(combine, part.tolist()) for part in (values[:32], values[32:]))
    assert out.tolist() == [first] * 32 + [second] * 13


@pytest.mark.parametrize("verb", ["min", "max"])
@pytest.mark.parametrize("of", ["", ".abs"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_every_reduction_of_floats_in_partial_warps(verb: str, of: str, nan: str) -> None:
    """NaN counts only with `.NaN`, unless there is nothing else, and -0 is less than +0."""
    text = entry(
        ".param .u64 at, .param .u64 out",
        f"""
        ld.param.u64 %d1, [at]; ld.param.u64 %d2, [out];
        mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4; add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3;
        mov.u32 %r4, %laneid; and.b32 %r5, %r4, 1; setp.eq.u32 %p1, %r5, 1;
        ld.global.f32 %f2, [%d4];
        @%p1 bra ODD;
        redux.sync.{verb}{of}{nan}.f32 %f3, %f2, 0x55555555; bra DONE;
        ODD: redux.sync.{verb}{of}{nan}.f32 %f3, %f2, 0xAAAAAAAA;
        DONE: st.global.f32 [%d5], %f3; ret;""",
    )
    values = RNG.standard_normal(5 * 32).astype(np.float32)
    values[32] = np.nan  # One of the even lanes of its warp, and all odd lanes.
    values[33:64:2] = np.nan
    values[64:96] = np.where(RNG.random(32) < 0.5, np.float32(0), np.float32(-0.0))
    values[[64, 65]], values[[66, 67]] = 0.0, -0.0
    values[100], values[101] = np.inf, -np.inf
    out = np.zeros(5 * 32 - 3, np.float32)
    Machine(text)(1, out.size, values[: out.size], out)
    for thread, result in enumerate(out):
        warp = values[thread // 32 * 32 : out.size][:32]
        group = [abs(x) if of else x for x in warp[thread % 2 :: 2].tolist()]
        numbers = [x for x in group if x == x]
        if not numbers or (nan and len(numbers) < len(group)):
            assert np.isnan(result)
            continue
        # Python takes the zeros for equal: their signs decide.
        best = (min if verb == "min" else max)(numbers, key=lambda x: (x, np.copysign(1, x)))
        assert (result, np.signbit(result)) == (best, np.signbit(best))


def test_one_lane_is_elected_and_all_know_which() -> None:
    text = entry(
        ".param .u64 out",
        """
        ld.param.u64 %d1, [out];
        mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 8; add.u64 %d3, %d1, %d2;
        elect.sync %r2|%p1, 0xFFFFFFF8;
        selp.u32 %r3, 1, 0, %p1;
        st.global.v2.u32 [%d3], {%r2, %r3}; ret;""",
    )
    out = np.full((64, 2), 9, np.uint32)
    Machine(text)(1, 64, out)
    assert out.tolist() == [[3, int(i % 32 == 3)] for i in range(64)]


def test_active_threads_are_those_that_took_the_same_way(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(unsigned* out) {
        unsigned m;
        if (threadIdx.x % 3 == 0) { m = __activemask(); out[threadIdx.x] = m; }
        else { m = __activemask(); out[threadIdx.x] = m + 0; }
    }""")
    out = np.zeros(40, np.uint32)
    machine(1, 40, out)
    third = sum(1 << i for i in range(32) if i % 3 == 0)
    assert out[0] == third
    assert out[1] == FULL & ~third
    assert out[33] == sum(1 << i for i in range(8) if (i + 32) % 3 == 0)


def test_lanes_wait_for_those_that_their_mask_names(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out) {
        int lane = threadIdx.x, v = lane;
        for (int j = 0; j < lane * lane; j++) v = v * 3 + j;
        __syncwarp();
        out[lane] = __shfl_sync(0xffffffff, v, 31 - lane);
    }""")
    out = np.zeros(32, np.int32)
    machine(1, 32, out)
    values = []
    for lane in range(32):
        v = lane
        for j in range(lane * lane):
            v = (v * 3 + j) & FULL
        values.append(v)
    np.testing.assert_array_equal(out.view(np.uint32), values[::-1])


def test_lanes_meet_at_any_barrier_of_their_warp(cuda: Cuda) -> None:
    machine = cuda("""
    __device__ __noinline__ void wait(unsigned mask) { __syncwarp(mask); }
    extern "C" __global__ void k(const int* in, volatile int* at, int* out) {
        int t = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
        int other = t + 30 - 2 * lane;
        if (lane == 31) return;
        if (lane < 16) { at[t] = in[t] + 1; __syncwarp(0x7FFFFFFF); out[t] = at[other] * 2; }
        else if (lane < 20) { at[t] = in[t] + 2; wait(0x7FFFFFFF); out[t] = at[other] * 3; }
        else { at[t] = in[t] + 3; __syncwarp(0x7FFFFFFF); out[t] = at[other] * 5; }
    }""")
    values = RNG.integers(0, 10**6, (3, 2, 32), dtype=np.int32)
    out = np.full_like(values, -1)
    machine(3, 64, values, np.zeros_like(values), out)
    way = np.digitize(np.arange(31), [16, 20])
    np.testing.assert_array_equal(
        out[..., :31], (values[..., :31] + way + 1)[..., ::-1] * np.array([2, 3, 5])[way]
    )
    assert (out[..., 31] == -1).all()


def test_a_shuffle_that_is_called_from_two_places_is_a_fault_with_a_hint(cuda: Cuda) -> None:
    machine = cuda("""
    __device__ __noinline__ int f(int v) { return __shfl_xor_sync(~0u, v, 16); }
    extern "C" __global__ void k(int* o) {
        int t = threadIdx.x, r; if (t < 16) r = f(t); else r = f(t * 2) + 1; o[t] = r;
    }""")
    with pytest.raises(EmulatorFault, match="waits for threads of its warp") as caught:
        machine(1, 32, np.zeros(32, np.int32))
    assert "same calls" in str(caught.value.hint)


def test_lanes_that_exited_are_not_waited_for(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(unsigned* out) {
        if (threadIdx.x % 4 == 1) return;
        out[threadIdx.x] = __ballot_sync(0xffffffff, threadIdx.x > 7);
    }""")
    out = np.zeros(32, np.uint32)
    machine(1, 32, out)
    bits = sum(1 << i for i in range(8, 32) if i % 4 != 1)
    assert out.tolist() == [0 if i % 4 == 1 else bits for i in range(32)]


def test_a_lane_that_never_comes_is_a_fault() -> None:
    text = entry(
        "",
        """
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 16;
        @%p1 bra SOME;
        bar.sync 0;
        ret;
        SOME:
        vote.sync.ballot.b32 %r2, %p1, -1;
        bar.sync 0;
        ret;""",
    )
    with pytest.raises(EmulatorFault, match="waits for threads of its warp that never come") as caught:
        Machine(text)(1, 32)
    assert caught.value.text.startswith("vote.sync")
    assert caught.value.thread == (0, 0, 0)
