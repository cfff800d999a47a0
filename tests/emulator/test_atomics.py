"""Atomic operations against the same updates done one thread after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.conftest import Cuda
from tests.emulator.support import Machine, entry

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(23)
PARAMS = ".param .u64 at, .param .u64 where, .param .u64 first, .param .u64 second, .param .u64 old"
DTYPES = {
    "u32": "u4",
    "s32": "i4",
    "b32": "u4",
    "u64": "u8",
    "s64": "i8",
    "b64": "u8",
    "f32": "f4",
    "f64": "f8",
}


def program(verb: str, kind: str, space: str = "global") -> str:
    """Every thread updates the word at its index in `where`; `old` receives the previous value."""
    size = int(kind[1:]) // 8
    second = ", %d11" if verb == "cas" else ""
    wide = f"b{8 * size}"
    return entry(
        PARAMS,
        f"""
        ld.param.u64 %d1, [at]; ld.param.u64 %d2, [where]; ld.param.u64 %d3, [first];
        ld.param.u64 %d4, [second]; ld.param.u64 %d5, [old];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r1, %r2, %r3, %r1;
        mul.wide.u32 %d6, %r1, 4; add.u64 %d7, %d2, %d6; ld.global.u32 %r4, [%d7];
        mul.wide.u32 %d8, %r4, {size}; add.u64 %d9, %d1, %d8;
        mul.wide.u32 %d6, %r1, {size};
        add.u64 %d12, %d3, %d6; ld.global.{wide} %d10, [%d12];
        add.u64 %d12, %d4, %d6; ld.global.{wide} %d11, [%d12];
        atom.{space}.{verb}.{kind} %d13, [%d9], %d10{second};
        add.u64 %d12, %d5, %d6; st.global.{wide} [%d12], %d13;
        ret;""",
    ).replace(".reg .b64 %d<32>", ".reg .b64 %d<32>; .reg .f64 %x<2>")


def updated(verb: str, old: Any, a: Any, b: Any) -> Any:
    """Return one update, by the manual, on NumPy scalars of the operation's type."""
    zero, one = old.dtype.type(0), old.dtype.type(1)
    match verb:
        case "add":
            return old + a
        case "min" | "max":
            return min(old, a) if verb == "min" else max(old, a)
        case "and" | "or" | "xor":
            return {"and": old & a, "or": old | a, "xor": old ^ a}[verb]
        case "inc":
            return zero if old >= a else old + one
        case "dec":
            return a if old == zero or old > a else old - one
        case "exch":
            return a
    return b if old == a else old


FORMS = [
    *((verb, kind) for verb in ("add", "min", "max") for kind in ("u32", "s32", "u64")),
    ("min", "s64"), ("max", "s64"),
    *((verb, kind) for verb in ("and", "or", "xor", "exch", "cas") for kind in ("b32", "b64")),
    ("add", "f32"), ("add", "f64"), ("inc", "u32"), ("dec", "u32"),
]  # fmt: skip


@pytest.mark.parametrize("addresses", [1, 3, 40, 5000])
@pytest.mark.parametrize(("verb", "kind"), FORMS)
def test_updates_happen_in_the_order_of_the_threads(verb: str, kind: str, addresses: int) -> None:
    dtype = np.dtype(DTYPES[kind])
    n = 3 * 77
    few = verb in ("cas", "inc", "dec")

    def draw(count: int) -> Array:
        if dtype.kind == "f":
            return RNG.standard_normal(count).astype(dtype)
        limits = np.iinfo(dtype)
        low, high = (0, 4) if few else (int(limits.min), int(limits.max))
        return RNG.integers(low, high, count, dtype=dtype, endpoint=True)

    memory, first, second = draw(addresses), draw(n), draw(n)
    where = RNG.integers(0, addresses, n, dtype=np.uint32)
    old = np.zeros(n, dtype)
    expected = memory.copy()
    found = np.zeros(n, dtype)
    with np.errstate(over="ignore"):
        for thread, at in enumerate(where):
            found[thread] = expected[at]
            expected[at] = updated(verb, expected[at], first[thread], second[thread])
    machine = Machine(program(verb, kind))
    machine(3, 77, memory, where, first, second, old)
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(old, found)


def test_results_that_nobody_reads_change_nothing(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const float* x, float* sums, unsigned* counts, int n) {
        __shared__ unsigned local[8];
        if (threadIdx.x < 8) local[threadIdx.x] = 0;
        __syncthreads();
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) atomicAdd(sums + i % 5, x[i]);
        if (i < n) { atomicAdd(local + i % 8, 1u); atomicMax(counts + 8, (unsigned)i); }
        __syncthreads();
        if (threadIdx.x < 8) atomicAdd(counts + threadIdx.x, local[threadIdx.x]);
    }""")
    n = 1111
    x = RNG.standard_normal(n).astype(np.float32)
    sums = np.zeros(5, np.float32)
    counts = np.zeros(9, np.uint32)
    machine(9, 128, x, sums, counts, np.int32(n))
    expected = np.zeros(5, np.float32)
    for i, value in enumerate(x):
        expected[i % 5] += value
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(counts, [*np.bincount(np.arange(n) % 8), n - 1])


@pytest.mark.parametrize("kind", ["__half", "__nv_bfloat16", "__half2"])
def test_halves_are_added_one_after_another(cuda: Cuda, kind: str) -> None:
    header = "cuda_bf16.h" if "bfloat" in kind else "cuda_fp16.h"
    cast = {"__half": "__int2half_rn(v)", "__nv_bfloat16": "__int2bfloat16_rn(v)"}
    value = cast.get(kind, "__halves2half2(__int2half_rn(v), __int2half_rn(-v))")
    machine = cuda(f"""
    #include <{header}>
    extern "C" __global__ void k({kind}* sums) {{
        int v = threadIdx.x % 4; atomicAdd(sums + threadIdx.x % 3, {value});
    }}""")
    sums = np.zeros(3 * (2 if kind == "__half2" else 1), np.uint16)
    machine(1, 60, sums)
    totals = [sum(t % 4 for t in range(60) if t % 3 == slot) for slot in range(3)]
    if kind == "__nv_bfloat16":
        assert (sums.astype(np.uint32) << 16).view(np.float32).tolist() == totals
    else:
        halves = sums.view(np.float16)
        signed = [s * t for t in totals for s in (1, -1)] if kind == "__half2" else totals
        assert halves.tolist() == signed


def test_counters_of_shared_memory_belong_to_each_block(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out) {
        __shared__ int next; if (threadIdx.x == 0) next = 100 * blockIdx.x;
        __syncthreads();
        out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(&next, 1 + (threadIdx.x & 1));
    }""")
    out = np.zeros((4, 50), np.int32)
    machine(4, 50, out)
    steps = np.concatenate(([0], np.cumsum(1 + (np.arange(49) & 1))))
    np.testing.assert_array_equal(out, 100 * np.arange(4)[:, None] + steps)


@pytest.mark.parametrize("count", [2, 4])
def test_vectors_of_floats_are_added_element_by_element(count: int) -> None:
    old = ", ".join(f"%f{i + 1}" for i in range(count))
    added = ", ".join(f"%f{count - i}" for i in range(count))  # a result may be an operand
    text = entry(
        ".param .u64 at, .param .u64 values, .param .u64 old",
        f"""
        ld.param.u64 %d1, [at]; ld.param.u64 %d2, [values]; ld.param.u64 %d3, [old];
        mov.u32 %r1, %tid.x; mul.wide.u32 %d4, %r1, {4 * count};
        add.u64 %d2, %d2, %d4; add.u64 %d3, %d3, %d4;
        ld.global.v{count}.f32 {{{added}}}, [%d2];
        atom.global.add.v{count}.f32 {{{old}}}, [%d1], {{{added}}};
        st.global.v{count}.f32 [%d3], {{{old}}};
        red.global.add.v{count}.f32 [%d1+{4 * count}], {{{old}}};
        ret;""",
    )
    values = RNG.integers(1, 1000, (33, count)).astype(np.float32)
    room = np.zeros(64, np.uint8)
    at = room[-room.ctypes.data % 16 :][: 8 * count].view(np.float32).reshape(2, count)
    found = np.zeros_like(values)
    Machine(text)(1, 33, at, values, found)
    sums = values.cumsum(0)
    np.testing.assert_array_equal(found, sums - values)
    np.testing.assert_array_equal(at, [sums[-1], found.sum(0)])
