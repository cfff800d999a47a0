"""Memory of the emulator: permitted accesses, and the messages of faulty ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preheat.emulator.addresses import LOCAL_WINDOW
from preheat.emulator.memory import POISON, Memory
from preheat.errors import EmulatorFault
from tests.emulator.conftest import Cuda
from tests.emulator.support import Machine, entry

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(20)

#: out[i] = at[i * step + first], in words, for the threads below n.
PICK = """
extern "C" __global__ void k(const int* at, int* out, int step, int first, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = at[i * step + first];
}
"""


def words(count: int) -> Array:
    return RNG.integers(-(2**31), 2**31, count, dtype=np.int32)


def pick(machine: Machine, at: Array, out: Array, step: int, first: int, n: int) -> None:
    machine(-(-n // 64), 64, at, out, np.int32(step), np.int32(first), np.int32(n))


# The buffers of a device


def test_buffers_are_found_by_address_and_end_where_they_end() -> None:
    memory = Memory()
    for start in (300, 100, 200):
        memory.add(start, 50)
    assert memory.covers(100, 150, write=True)
    assert memory.covers(249, 250, write=True)
    assert not memory.covers(149, 151, write=False)
    assert not memory.covers(140, 210, write=False)
    assert not memory.covers(99, 100, write=False)
    assert not memory.covers(350, 351, write=False)


def test_the_same_bytes_may_be_there_more_than_once() -> None:
    memory = Memory()
    whole, half, again = memory.add(100, 100), memory.add(150, 50), memory.add(100, 100, writable=False)
    assert memory.covers(100, 200, write=True)
    memory.remove(whole)
    assert not memory.covers(100, 150, write=True)
    assert memory.covers(100, 200, write=False)
    assert memory.covers(150, 200, write=True)
    memory.remove(half)
    memory.remove(again)
    assert not memory.covers(150, 151, write=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_address_outside_is_found_among_many_buffers(overlap: bool) -> None:
    memory = Memory()
    for start in range(1000, 2000, 100):
        memory.add(start, 40, writable=start != 1500)
    if overlap:
        memory.add(1000, 20)
    inside = RNG.permutation(np.concatenate([np.arange(s, s + 37) for s in range(1000, 2000, 100)]))
    assert memory.first_outside(inside, 4, write=False) is None
    written = memory.first_outside(inside, 4, write=True)
    assert written == np.flatnonzero((inside >= 1500) & (inside < 1540))[0]
    for bad in (999, 1037, 1040, 5, 1937, 9999, -4096, -(2**63)):
        assert memory.first_outside(np.insert(inside, 17, bad), 4, write=False) == 17


def test_a_bad_address_is_located_by_a_buffer_close_to_it() -> None:
    memory = Memory()
    memory.add(0x1000, 0x100)
    memory.add(0x3000, 64, writable=False)
    gone = memory.add(0x2000, 16)
    memory.free(gone)
    memory.free(memory.add(0x10F0, 0x80))
    memory.free(memory.add(0x4000, 0x80))
    memory.remove(memory.add(0x4000, 0x10))
    near = "256-byte buffer at 0x1000"
    for address, said in {
        0x1100: f"reads 4 bytes at 0x1100, 0 bytes past the end of the {near}",
        0x1104: f"reads 4 bytes at 0x1104, 4 bytes past the end of the {near}",
        0xFFF: f"reads 4 bytes at 0xfff, 1 byte before the {near}",
        0x10FE: f"reads 4 bytes at 0x10fe, across the end of the {near}",
        0x1160: "reads 4 bytes at 0x1160, in a freed 128-byte buffer at 0x10f0",
        0x3048: "reads 4 bytes at 0x3048, 8 bytes past the end of the 64-byte buffer at 0x3000",
        0x4008: "reads 4 bytes at 0x4008, which no allocation contains",
        0x3140: "reads 4 bytes at 0x3140, 256 bytes past the end of the 64-byte buffer at 0x3000",
        0x3141: "reads 4 bytes at 0x3141, which no allocation contains",
        0xEFC: f"reads 4 bytes at 0xefc, 260 bytes before the {near}",
        0xEFB: "reads 4 bytes at 0xefb, which no allocation contains: the pointer is null",
        0x2008: "reads 4 bytes at 0x2008, in a freed 16-byte buffer at 0x2000",
    }.items():
        assert memory.describe(address, 4, write=False) == said
    assert memory.describe(0x3000, 4, write=True) == "writes 4 bytes at 0x3000, in read-only memory"
    null = "reads 1 byte at 0x0, which no allocation contains: the pointer is null"
    assert Memory().describe(0, 1, write=False) == null


def test_the_larger_a_buffer_is_the_further_an_access_beside_it_is_located_by_it() -> None:
    memory = Memory()
    memory.add(0x10000, 1000)
    memory.add(0x20000, 1 << 20)
    closest = {0x103E8 + 1000: 1000, 0x120000 + 4096: 1 << 20, 0x20000 - 4100: 1 << 20}
    for address, near in closest.items():
        assert f"the {near}-byte buffer" in memory.describe(address, 4, write=True)
    for address in (0x103E8 + 1001, 0x120000 + 4097, 0x20000 - 4101, 1 << 46, (1 << 64) - 4):
        assert memory.describe(address, 4, write=True).endswith(", which no allocation contains")


# What kernels read and write


@pytest.mark.parametrize(
    ("step", "first"), [(1, 0), (1, 3), (-1, 1099), (2, 5), (7, 1), (-3, 4000), (0, 17)]
)
@pytest.mark.parametrize("n", [1, 33, 64, 1009])
def test_even_steps_in_any_direction_read_the_right_words(
    cuda: Cuda, step: int, first: int, n: int
) -> None:
    at = words(8000)
    out = np.zeros(n, np.int32)
    pick(cuda(PICK), at, out, step, first, n)
    np.testing.assert_array_equal(out, at[np.arange(n) * step + first])


def test_scattered_words_are_gathered_and_scattered(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* from, const int* to, const double* in, double* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[to[i]] = in[from[i]] + in[from[i] + 1];
    }""")
    n = 1021
    source = RNG.integers(0, n - 1, n, dtype=np.int32)
    target = RNG.permutation(n).astype(np.int32)
    values = RNG.standard_normal(n)
    out = np.full(n, np.nan)
    machine(8, 128, source, target, values, out, np.int32(n))
    expected = np.empty(n)
    expected[target] = values[source] + values[source + 1]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_every_width_is_read_extended_and_written(cuda: Cuda, dtype: str) -> None:
    names = {
        "i1": "signed char",
        "u1": "unsigned char",
        "i2": "short",
        "u2": "unsigned short",
        "i4": "int",
    }
    names |= {
        "u4": "unsigned",
        "i8": "long long",
        "u8": "unsigned long long",
        "f4": "float",
        "f8": "double",
    }
    machine = cuda(f"""
    extern "C" __global__ void k(const {names[dtype]}* in, {names[dtype]}* copy, double* wide, int n) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) {{ copy[n - 1 - i] = in[i]; wide[i] = (double)in[i]; }}
    }}""")
    n = 77
    values = RNG.integers(0, 256, n * 8, dtype=np.uint8).view(dtype)[:n]
    values = np.where(np.isfinite(values), values, 1).astype(dtype)
    copy = np.zeros_like(values)
    wide = np.zeros(n)
    machine(1, 96, values, copy, wide, np.int32(n))
    np.testing.assert_array_equal(copy, values[::-1])
    np.testing.assert_array_equal(wide, values.astype(np.float64))


@pytest.mark.parametrize("lanes", [2, 4])
def test_vectors_are_neighbouring_words(cuda: Cuda, lanes: int) -> None:
    fields = "xyzw"[:lanes]
    body = "".join(f"v.{a} = u.{b};" for a, b in zip(fields, reversed(fields), strict=True))
    machine = cuda(f"""
    extern "C" __global__ void k(const float{lanes}* in, float{lanes}* out, const int* order, int n) {{
        int i = threadIdx.x; if (i >= n) return;
        float{lanes} u = in[order[i]], v; {body} out[i] = v;
    }}""")
    n = 51
    values = RNG.standard_normal((n, lanes)).astype(np.float32)
    out = np.zeros_like(values)
    order = RNG.permutation(n).astype(np.int32)
    machine(1, 64, values, out, order, np.int32(n))
    np.testing.assert_array_equal(out, values[order, ::-1])


def test_of_several_writes_to_one_address_the_last_thread_stays() -> None:
    text = entry(
        ".param .u64 out",
        """
        ld.param.u64 %d1, [out];
        mov.u32 %r1, %tid.x;
        and.b32 %r2, %r1, 3;
        mul.wide.u32 %d2, %r2, 4;
        add.u64 %d3, %d1, %d2;
        st.global.u32 [%d3], %r1;
        st.global.u32 [%d1+16], %r1;
        ret;""",
    )
    out = np.zeros(5, np.uint32)
    Machine(text)(1, 71, out)
    assert out.tolist() == [68, 69, 70, 67, 70]


def test_one_access_may_go_to_several_buffers(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* a, const int* b, int* c, int* d, int n) {
        int i = threadIdx.x; if (i >= n) return;
        const int* from = i % 3 ? a : b; int* to = i % 2 ? c : d;
        to[i] = from[i] + 1;
    }""")
    n = 200
    a = words(n)
    b = words(n)
    c = np.zeros(n, np.int32)
    d = np.zeros(n, np.int32)
    machine(1, 256, a, b, c, d, np.int32(n))
    i = np.arange(n)
    expected = np.where(i % 3, a, b) + np.int32(1)
    np.testing.assert_array_equal(c, np.where(i % 2, expected, 0))
    np.testing.assert_array_equal(d, np.where(i % 2, 0, expected))


def test_generic_addresses_of_shared_local_and_global_memory_mix_in_one_access(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out, int* global, int which) {
        __shared__ int shared[64]; int local[4];
        int i = threadIdx.x;
        for (int j = 0; j < 4; j++) local[j] = 1000 + i + (j ^ which);
        shared[i] = 2000 + i;
        __syncthreads();
        int* p = i % 3 == 0 ? &shared[63 - i] : i % 3 == 1 ? &local[(i + which) & 3] : &global[i];
        atomicAdd(p, 5);
        out[i] = *p;
    }""")
    out = np.zeros(64, np.int32)
    memory = words(64) // 2
    before = memory.copy()
    machine(1, 64, out, memory, np.int32(2))
    i = np.arange(64)
    local = 1005 + i + (((i + 2) & 3) ^ 2)
    np.testing.assert_array_equal(
        out, np.select([i % 3 == 0, i % 3 == 1], [2005 + 63 - i, local], before + 5)
    )


def test_memory_that_nothing_wrote_is_poison(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(unsigned* out, int which) {
        __shared__ unsigned shared[32]; volatile unsigned local[4];
        if (which > 100) { shared[threadIdx.x ^ 1] = 3; local[which & 3] = 2; }
        out[2 * threadIdx.x] = shared[threadIdx.x];
        out[2 * threadIdx.x + 1] = local[which & 3];
    }""")
    out = np.zeros(64, np.uint32)
    machine(1, 32, out, np.int32(1))
    assert set(out.tolist()) == {POISON * 0x01010101}
    device = machine.device
    fresh = bytearray(64)
    device.copy_out(memoryview(fresh), device.allocate(64, machine.stream), machine.stream)
    assert set(fresh) == {POISON}


# Faults


def fault(machine: Machine, *args: Any, **launch: Any) -> EmulatorFault:
    with pytest.raises(EmulatorFault) as caught:
        machine(*args, **launch)
    return caught.value


def test_a_read_past_the_end_names_kernel_line_thread_and_buffer(cuda: Cuda) -> None:
    machine = cuda(PICK)
    at = words(100)
    out = np.zeros(128, np.int32)
    found = fault(machine, 4, 32, at, out, np.int32(1), np.int32(0), np.int32(128))
    assert (found.block, found.thread, found.address) == ((3, 0, 0), (4, 0, 0), at.ctypes.data + 400)
    assert found.kernel == "k"
    assert found.line is not None
    lines = machine.artifact.ptx.decode().split("\n")
    assert found.text.split() == lines[found.line - 1].strip().rstrip(";").split()
    assert found.text.startswith("ld.global")
    where = f"0 bytes past the end of the 400-byte buffer at 0x{at.ctypes.data:x}"
    assert f"reads 4 bytes at 0x{found.address:x}, {where}" in str(found)


def test_a_write_before_the_beginning_is_a_fault(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out, int back) { out[(int)threadIdx.x - back] = 1; }""")
    out = words(64)[32:]  # the words before it are there, but were not lent
    before = out.copy()
    found = fault(machine, 1, 32, out, np.int32(2))
    assert found.address == out.ctypes.data - 8
    assert found.thread == (0, 0, 0)
    assert "writes 4 bytes" in str(found)
    assert "8 bytes before the 128-byte buffer" in str(found)
    np.testing.assert_array_equal(out, before)


def test_a_null_pointer_is_a_fault(cuda: Cuda) -> None:
    machine = cuda('extern "C" __global__ void k(int* out) { out[threadIdx.x] = 1; }')
    found = fault(machine, 1, 32, np.uint64(0))
    assert found.address == 0


@pytest.mark.parametrize("bad", [2**64 - 4096, 2**63, 2**63 + 8])
def test_an_address_in_the_upper_half_is_a_fault_of_its_thread(bad: int) -> None:
    text = entry(
        ".param .u64 out, .param .u64 bad",
        """
        ld.param.u64 %d1, [out]; ld.param.u64 %d2, [bad];
        mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4; add.u64 %d1, %d1, %d3;
        setp.eq.u32 %p1, %r1, 5; selp.b64 %d4, %d2, %d1, %p1;
        ld.global.u32 %r2, [%d4]; st.global.u32 [%d1], %r2; ret;""",
    )
    with pytest.raises(EmulatorFault, match="reads 4 bytes") as caught:
        Machine(text)(1, 33, words(33), np.uint64(bad))
    assert (caught.value.address, caught.value.thread) == (bad, (5, 0, 0))


def test_a_fault_in_one_of_many_diverged_threads_names_that_thread(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* at, int* out) {
        int i = blockIdx.x * blockDim.x + threadIdx.y * blockDim.x + threadIdx.x;
        if (threadIdx.y % 2) { if (threadIdx.x > 2) out[at[i]] = i; }
    }""")
    at, out = np.zeros(512, np.int32), np.zeros(1, np.int32)
    at[3 * 8 + 5] = 10**6
    found = fault(machine, 1, (8, 8), at, out)
    assert found.thread == (5, 3, 0)


def test_freed_memory_is_named(cuda: Cuda) -> None:
    machine = cuda('extern "C" __global__ void k(int* out) { out[threadIdx.x] = 1; }')
    address = machine.device.allocate(128, machine.stream)
    machine(1, 32, np.uint64(address))
    machine.device.free(address, machine.stream)
    assert "in a freed 128-byte buffer" in str(fault(machine, 1, 32, np.uint64(address)))


def test_memory_that_was_lent_before_is_not_called_freed(cuda: Cuda) -> None:
    machine = cuda('extern "C" __global__ void k(int* x) { x[threadIdx.x] = threadIdx.x; }')
    x = words(64)
    machine(1, 64, x)
    with pytest.raises(EmulatorFault, match="0 bytes past the end of the 128-byte buffer"):
        machine(1, 33, x[:32])


def test_read_only_memory_can_be_read_and_not_written(cuda: Cuda) -> None:
    machine = cuda(
        'extern "C" __global__ void k(int* at, int* out) { out[threadIdx.x] = at[threadIdx.x]; }'
    )
    fixed = words(32)
    out = np.zeros(32, np.int32)
    fixed.flags.writeable = False
    machine(1, 32, fixed, out)
    np.testing.assert_array_equal(out, fixed)
    found = fault(machine, 1, 32, out, fixed)
    assert "in read-only memory" in str(found)
    assert found.address == fixed.ctypes.data


def test_constant_memory_cannot_be_written(cuda: Cuda) -> None:
    machine = cuda("""
    __constant__ int table[8] = {1, 2, 3};
    extern "C" __global__ void k(int* out, int* to) {
        out[threadIdx.x] = table[threadIdx.x & 7];
        to[threadIdx.x] = 4;
    }""")
    out = np.ones(8, np.int32)
    symbol = machine.module.symbol("table")
    assert symbol is not None
    found = fault(machine, 1, 8, out, np.uint64(symbol.address))
    assert found.address == symbol.address
    assert "in read-only memory" in str(found)
    assert out.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_misaligned_addresses_are_faults(width: int) -> None:
    text = entry(
        ".param .u64 at, .param .u64 step",
        f"""
        ld.param.u64 %d1, [at];
        ld.param.u64 %d2, [step];
        cvt.u64.u32 %d3, %r0;
        mov.u32 %r1, %tid.x;
        cvt.u64.u32 %d3, %r1;
        mad.lo.u64 %d4, %d3, %d2, %d1;
        ld.global.b{8 * width} %d5, [%d4];
        ld.global.b{8 * width} %d5, [%d4+{width}];
        ret;""",
    )
    at = np.zeros(64, np.uint64)
    machine = Machine(text)
    machine(1, 16, at, np.uint64(width))
    found = fault(machine, 1, 16, at, np.uint64(width + 1))
    assert found.thread == (1, 0, 0)
    assert f"not a multiple of {width}" in str(found)


def test_an_odd_base_and_an_odd_distance_may_make_an_even_address() -> None:
    text = entry(
        ".param .u64 at, .param .u64 out",
        """
        ld.param.u64 %d1, [at];
        ld.param.u64 %d2, [out];
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %d3, %r1, 4;
        add.u64 %d4, %d1, %d3;
        add.u64 %d5, %d4, 3;
        add.u64 %d6, %d2, %d3;
        ld.global.u32 %r2, [%d5+1];
        st.global.u32 [%d6], %r2;
        ret;""",
    )
    at = words(20)
    out = np.zeros(19, np.int32)
    Machine(text)(1, 19, at, out)
    np.testing.assert_array_equal(out, at[1:])


def test_vectors_must_be_aligned_as_a_whole(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(float* at, float* out) {
        float4 v = *(float4*)(at + threadIdx.x); out[threadIdx.x] = v.x + v.y + v.z * v.w; }""")
    at, out = np.zeros(64, np.float32), np.zeros(32, np.float32)
    assert "not a multiple of 16" in str(fault(machine, 1, 32, at, out))


@pytest.mark.parametrize(
    ("dynamic", "index", "good"), [(0, 15, True), (0, 16, False), (64, 31, True), (64, 32, False)]
)
def test_shared_memory_ends_where_the_launch_says(
    cuda: Cuda, dynamic: int, index: int, good: bool
) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out, int index) {
        __shared__ int fixed[16]; extern __shared__ int more[];
        fixed[threadIdx.x & 15] = threadIdx.x;
        int* p = fixed;
        p[index] = 7;
        __syncthreads();
        out[threadIdx.x] = p[index] + (index > 1000 ? more[0] : 0);
    }""")
    out = np.zeros(16, np.int32)
    if good:
        machine(2, 16, out, np.int32(index), shared=dynamic)
        assert set(out.tolist()) == {7}
    else:
        found = fault(machine, 2, 16, out, np.int32(index), shared=dynamic)
        assert f"there are {64 + dynamic} bytes of it" in str(found)


def test_a_bad_generic_address_among_good_ones_names_its_thread(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* global, int bad, int far) {
        __shared__ int shared[32];
        int i = threadIdx.x;
        int* p = i % 2 ? &shared[i] : &global[i];
        if (i == bad) p += far;
        *(volatile int*)p = i;
    }""")
    values = np.zeros(32, np.int32)
    machine(1, 32, values, np.int32(7), np.int32(0))
    np.testing.assert_array_equal(values, np.where(np.arange(32) % 2, 0, np.arange(32)))
    found = fault(machine, 1, 32, values, np.int32(7), np.int32(100))
    assert found.thread == (7, 0, 0)
    assert "shared address 0x1ac; there are 128 bytes of it" in str(found)
    found = fault(machine, 1, 32, values, np.int32(8), np.int32(100))
    assert (found.thread, found.address) == ((8, 0, 0), values.ctypes.data + 4 * 108)


def test_local_memory_ends_with_the_thread_own_frame(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out, int index) {
        volatile int local[8];
        for (int j = 0; j < 8; j++) local[j] = threadIdx.x * 10 + j;
        out[threadIdx.x] = local[index];
    }""")
    out = np.zeros(40, np.int32)
    machine(1, 40, out, np.int32(5))
    np.testing.assert_array_equal(out, np.arange(40) * 10 + 5)
    assert "local address" in str(fault(machine, 1, 40, out, np.int32(9)))
    assert "local address" in str(fault(machine, 1, 40, out, np.int32(-1)))


# Addresses beyond all memory


@pytest.mark.parametrize("space", ["global", "shared", "local"])
@pytest.mark.parametrize("step", [4, 1 << 57, (1 << 63) - 4])
@pytest.mark.parametrize("start", [(1 << 63) - 8, 1 << 63, (1 << 64) - 8])
def test_addresses_that_wrap_around_are_a_fault(space: str, step: int, start: int) -> None:
    body = f"""
    .local .align 16 .b8 own[128];
    .shared .align 16 .b8 all[256];
    mov.u64 %d4, own;
    mov.u32 %r1, %tid.x;
    st.local.u32 [%d4], %r1;
    mov.u64 %d4, all;
    st.shared.u32 [%d4], %r1;
    ld.param.u64 %d1, [at];
    mul.wide.u32 %d2, %r1, 8;
    add.s64 %d1, %d1, %d2;
    ld.global.u64 %d3, [%d1];
    st.{space}.u32 [%d3], %r1;
    """
    at = np.array([(start + step * i) % (1 << 64) for i in range(64)], np.uint64)
    with pytest.raises(EmulatorFault, match=r"thread \(0, 0, 0\)\): writes 4 bytes at"):
        Machine(entry(".param .u64 at", body))(1, 64, at)


@pytest.mark.parametrize("address", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_format_beyond_all_memory_is_a_fault(address: int) -> None:
    outside = ".extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);"
    body = f"""
    {{
    .param .b64 f; .param .b64 a; .param .b32 r;
    st.param.b64 [f], {address};
    st.param.b64 [a], {address};
    call.uni (r), vprintf, (f, a);
    }}
    """
    with pytest.raises(
        EmulatorFault, match=f"reads 1 byte at 0x{address:x}|{address - LOCAL_WINDOW:#x}"
    ):
        Machine(entry("", body, outside=outside))(1, 1)
