"""Calls of device functions, traps, assertions, printf, and functions that are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from preheat.emulator import wave
from preheat.emulator.group import Frame
from preheat.emulator.wave import Wave
from preheat.errors import UnsupportedInstructionError
from tests.emulator.conftest import Cuda
from tests.emulator.support import Machine, entry, fault

Array = np.ndarray[Any, Any]


def test_functions_return_structures_and_recurse_at_different_depths(cuda: Cuda) -> None:
    machine = cuda("""
    struct Two { long long sum; float half; short tag; };
    __device__ __noinline__ Two both(int a, float b, const Two& t) {
        Two r; r.sum = a + t.sum; r.half = b / 2 + t.half; r.tag = t.tag + 1; return r; }
    __device__ __noinline__ long long ackermann(long long m, long long n) {
        return m == 0 ? n + 1 : n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1)); }
    extern "C" __global__ void k(long long* out, float* half, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return;
        Two t = {100, 0.25f, 3};
        if (i % 3) t = both(i, i * 1.5f, t);
        if (i % 2) t = both(-i, 1.0f, t);
        out[2 * i] = ackermann(i % 3, i % 4); out[2 * i + 1] = t.sum * 1000 + t.tag; half[i] = t.half;
    }""")
    n = 61
    out, half = np.zeros((n, 2), np.int64), np.zeros(n, np.float32)
    machine(2, 32, out, half, np.int32(n))

    def ackermann(m: int, n: int) -> int:
        return n + 1 if m == 0 else ackermann(m - 1, ackermann(m, n - 1) if n else 1)

    for i in range(n):
        total = 100
        tag = 3
        part = np.float32(0.25)
        if i % 3:
            total, tag, part = total + i, tag + 1, part + np.float32(i * 1.5) / np.float32(2)
        if i % 2:
            total, tag, part = total - i, tag + 1, part + np.float32(0.5)
        assert out[i].tolist() == [ackermann(i % 3, i % 4), total * 1000 + tag]
        assert half[i] == part


def test_functions_are_called_through_pointers(cuda: Cuda) -> None:
    machine = cuda("""
    typedef int (*F)(int);
    __device__ int one(int x) { return x + 1; }
    __device__ int two(int x) { return x > 20 ? x * 2 : one(x) * 7; }
    __device__ int three(int x) { __syncwarp(__activemask()); return -x; }
    __device__ F table[3] = {one, two, three};
    extern "C" __global__ void k(int* out, F* given) {
        int i = threadIdx.x; F f = i % 4 == 3 ? given[0] : table[i % 4];
        out[i] = f(i) + table[0](i);
    }""")
    out, given = np.zeros(70, np.int32), np.zeros(1, np.uint64)
    table = machine.module.symbol("table")
    assert table is not None
    machine.device.copy_out(given.data, table.address + 16, machine.stream)
    machine(1, 70, out, given)

    def value(i: int) -> int:
        two = i * 2 if i > 20 else (i + 1) * 7
        return [i + 1, two, -i, -i][i % 4] + i + 1

    assert out.tolist() == [value(i) for i in range(70)]
    given[0] = 12345
    found = fault(machine, 1, 70, out, given)
    assert "calls 0x3039, which is not a function" in str(found)
    assert found.thread == (3, 0, 0)


_THREE_TIMES = """
.func (.param .b32 r) three(.param .b32 a) {
    .reg .b32 %r<3>; ld.param.b32 %r1, [a]; mul.lo.u32 %r1, %r1, 3; st.param.b32 [r], %r1; ret;
}
"""


_BYTES_OF_POINTER = ", ".join(f"0xFF{'00' * i}(three)" for i in range(8))


_THROUGH_POINTER = """
    ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; ld.global.u64 %d2, [table+8];
    {
    .param .b32 given; .param .b32 got; st.param.b32 [given], %r1;
    P: .callprototype (.param .b32 _) _ (.param .b32 _);
    call (got), %d2, (given), P; ld.param.b32 %r2, [got];
    }
    mul.wide.u32 %d3, %r1, 4; add.s64 %d1, %d1, %d3; st.global.u32 [%d1], %r2; ret;
"""


@pytest.mark.parametrize(
    "table",
    [
        f".b8 table[16] = {{1, 0, 0, 0, 0, 0, 0, 0, {_BYTES_OF_POINTER}}};",
        ".u64 table[2] = {7, generic(three)};",
        ".u64 table[2] = {7, three};",
    ],
)
def test_functions_that_only_a_table_names_can_be_called(table: str) -> None:
    outside = f"{_THREE_TIMES}.global .align 8 {table}"
    out = np.zeros(33, np.uint32)
    Machine(entry(".param .u64 out", _THROUGH_POINTER, outside=outside))(1, 33, out)
    np.testing.assert_array_equal(out, 3 * np.arange(33))


def test_what_a_pointer_might_lead_to_may_be_unknown_until_it_does(cuda: Cuda) -> None:
    source = """
    struct A {
        __device__ virtual int f(int x) { return x; }
        __device__ virtual void g() {
            asm volatile("{ .reg .pred p; istypep.texref p, %0; }" :: "l"(this));
        }
    };
    struct B : A {
        int k; __device__ B(int k) : k(k) {} __device__ int f(int x) override { return x * k; }
    };
    extern "C" __global__ void k(int* out) {
        int t = threadIdx.x; A a; B b(t + 1); A* p = t % 3 ? (A*)&b : &a; out[t] = p->f(t);
        $
    }"""
    out = np.zeros(33, np.int32)
    i = np.arange(33)
    cuda(source.replace("$", ""))(1, 33, out)
    np.testing.assert_array_equal(out, np.where(i % 3 == 0, i, i * (i + 1)))
    with pytest.raises(UnsupportedInstructionError, match=r"textures: istypep\.texref"):
        cuda(source.replace("$", "p->g();"))(1, 33, out)


def test_deep_recursion_of_many_threads_takes_little_memory(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = cuda("""
    __device__ __noinline__ int f(int d, int a) {
        int b[8]; for (int i = 0; i < 8; i++) b[i] = a + i * d;
        if (d == 0) return a;
        int r = f(d - 1, a + 1); return r + b[(r + d) & 7];
    }
    extern "C" __global__ void k(int* out, int d) {
        int t = blockIdx.x * blockDim.x + threadIdx.x; out[t] = f(d, t);
    }""")
    taken = []
    reserve = Wave._reserve

    def watched(self: Wave, top: int) -> None:
        reserve(self, top)
        taken.append(self.local.nbytes)

    monkeypatch.setattr(Wave, "_reserve", watched)
    out = np.zeros(64 * 256, np.int32)
    depth = 40
    machine(64, 256, out, np.int32(depth))

    def expected(d: int, a: Array) -> Array:
        if d == 0:
            return a
        r = expected(d - 1, a + 1)
        b: Array = a + ((r + d) & 7) * d
        return np.add(r, b)

    np.testing.assert_array_equal(out, expected(depth, np.arange(64 * 256)))
    assert max(taken) < 64 << 20


def test_calls_that_find_no_memory_are_a_fault(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    machine = cuda("""
    __device__ __noinline__ int f(int d) { return d ? f(d - 1) * 3 + 1 : 5; }
    extern "C" __global__ void k(int* out) { out[threadIdx.x] = f(threadIdx.x); }""")
    monkeypatch.setattr(wave, "Frame", lambda *a: full() if len(a) > 3 else Frame(*a))
    assert "no memory for 1 nested calls" in str(fault(machine, 1, 33, np.zeros(33, np.int32)))


def test_local_variables_of_called_functions_are_aligned_as_they_say() -> None:
    text = entry(
        ".param .u64 out",
        """
        .local .align 4 .b8 mine[20];
        {.param .b64 got; call (got), f; ld.param.b64 %d2, [got];}
        ld.param.u64 %d1, [out]; st.global.u64 [%d1], %d2; ret;""",
        outside=""".func (.param .b64 r) f() {
        .local .align 128 .b8 own[8]; .reg .b64 %d<2>;
        mov.u64 %d1, own; st.param.b64 [r], %d1; ret; }""",
    )
    out = np.ones(1, np.uint64)
    Machine(text)(1, 1, out)
    assert out[0] % 128 == 0


def test_a_barrier_inside_a_function_is_one_for_all_callers(cuda: Cuda) -> None:
    machine = cuda("""
    __device__ __noinline__ int turn(int* s, int i, int n) {
        s[i] = i * i; __syncthreads(); return s[n - 1 - i]; }
    extern "C" __global__ void k(int* out) {
        __shared__ int s[96];
        int extra = threadIdx.x % 5 ? 1 : 2;
        out[threadIdx.x] = turn(s, threadIdx.x, blockDim.x) * extra;
    }""")
    out = np.zeros(96, np.int32)
    machine(1, 96, out)
    i = np.arange(96)
    np.testing.assert_array_equal(out, (95 - i) ** 2 * np.where(i % 5, 1, 2))


def test_endless_recursion_is_a_fault(cuda: Cuda) -> None:
    machine = cuda("""
    __device__ __noinline__ int deep(volatile int* p, int n) {
        return *p > 0 ? n : deep(p, n + 1) + *p; }
    extern "C" __global__ void k(int* p) { p[0] = deep(p, 0); }""")
    assert "nested calls" in str(fault(machine, 1, 1, np.zeros(1, np.int32)))


def test_a_trap_names_the_thread_that_fell_into_it(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* p) { if (p[threadIdx.x] < 0) __trap(); }""")
    values = np.ones(64, np.int32)
    machine(1, 64, values)
    values[37] = -1
    found = fault(machine, 1, 64, values)
    assert found.thread == (37, 0, 0)
    assert "trapped" in str(found)


def test_a_failed_assertion_says_what_and_where(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const int* p) { assert(p[threadIdx.x] >= 0 && "all positive"); }""")
    values = np.ones(64, np.int32)
    machine(1, 64, values)
    values[50] = -1
    found = fault(machine, 1, 64, values)
    assert found.thread == (50, 0, 0)
    assert "all positive" in str(found)
    assert ".cu:2" in str(found)


def test_printf_writes_every_kind_of_argument(cuda: Cuda, capsys: pytest.CaptureFixture[str]) -> None:
    machine = cuda(r"""
    extern "C" __global__ void k(const char* text, double x, long long big) {
        if (threadIdx.x % 2)
            printf("%d|%5u|%-4d|%lld|%.3f|%e|%s|%c|%x|%p|100%%|%*d\n", -(int)threadIdx.x, threadIdx.x,
                   7, big, x, x, text, 'z', 255, (void*)16, 6, 42);
        else printf("plain\n");
    }""")
    text = np.frombuffer(b"hello\0", np.uint8).copy()
    machine(1, 4, text, np.float64(math.pi), np.int64(-(2**40)))
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        [
            "plain",
            "plain",
            *(
                f"-{i}|{i:5d}|7   |{-(2**40)}|3.142|3.141593e+00|hello|z|ff|0x10|100%|    42"
                for i in (1, 3)
            ),
        ]
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ('"%c|%c", (char)200, 321', "\ufffd|A"),
        ('"%#o|%#o|%#6o|%o", 8, 0, 8, 8', "010|0|   010|10"),
        ('"%a|%.2a|%A|%.0a", 1.5, 1.999, -0.1, 1.0', "0x1.8p+0|0x1.00p+1|-0X1.999999999999AP-4|0x1p+0"),
        ('"%.*f|%.*f|%*d|%-*d|", -1, 2.5, 2, 2.5, -4, 3, 4, 3', "2.500000|2.50|3   |3   |"),
        ('"%8.1a|%a|%-6A|", 1.0/0.0, 0.0, -1.0/0.0', "     inf|0x0p+0|-INF  |"),
        ('"%8p|%p", (void*)16, (void*)255', "    0x10|0xff"),
        ('"%s|%8s", (char*)0, (char*)0', "(null)|  (null)"),
    ],
)
def test_printf_writes_as_c_does(
    cuda: Cuda, capsys: pytest.CaptureFixture[str], call: str, text: str
) -> None:
    cuda(f'extern "C" __global__ void k() {{ printf({call}); }}')(1, 1)
    assert capsys.readouterr().out == text


def test_printf_returns_how_many_arguments_it_had(cuda: Cuda) -> None:
    machine = cuda("""extern "C" __global__ void k(int* out) {
        int t = threadIdx.x;
        if (t > 3) out[t] = printf(t == 7 ? "%% %*d %s\\n" : "%d\\n", t, t, "x");
        else out[t] = printf("\\n") - 1;
    }""")
    out = np.zeros(9, np.int32)
    machine(1, 9, out)
    assert out.tolist() == [-1, -1, -1, -1, 1, 1, 1, 3, 1]


def test_a_fault_inside_printf_names_the_thread(cuda: Cuda) -> None:
    machine = cuda("""extern "C" __global__ void k() {
        if (threadIdx.x > 3) printf("%s\\n", threadIdx.x == 7 ? (char*)1234567 : "ok");
    }""")
    assert fault(machine, 1, 16).thread == (7, 0, 0)


@pytest.mark.parametrize(
    "parameters", [".param .b32 a, .param .b32 b", ".param .align 4 .b8 a[4096]", ".param .b64 a", ""]
)
def test_a_call_with_other_parameters_than_the_function_has_is_a_fault(parameters: str) -> None:
    text = entry(
        "",
        "{.param .b32 p0; st.param.b32 [p0], 1; call f, (p0);} ret;",
        outside=f".func f({parameters}) {{ ret; }}",
    )
    assert "calls f with parameters that differ from its declaration" in str(fault(Machine(text), 1, 1))


def test_a_call_of_printf_with_other_parameters_is_a_fault() -> None:
    text = entry("", "{.param .b32 p0; st.param.b32 [p0], 1; call vprintf, (p0);} ret;")
    assert "calls vprintf with parameters that differ" in str(fault(Machine(text), 1, 1))


def test_an_unknown_function_is_refused_by_name_before_anything_runs() -> None:
    text = entry(
        ".param .u64 out",
        """
        ld.param.u64 %d1, [out];
        st.global.u32 [%d1], 1;
        tanh.approx.bf16x4 %r1, %r2;
        ret;""",
    )
    out = np.zeros(1, np.uint32)
    with pytest.raises(
        UnsupportedInstructionError, match=r"does not support this form of tanh: tanh\.approx\.bf16x4"
    ) as caught:
        Machine(text)(1, 1, out)
    assert caught.value.line == text.split("\n").index("tanh.approx.bf16x4 %r1, %r2;") + 1
    assert out[0] == 0


def test_a_truth_table_in_a_register_is_refused_by_name() -> None:
    text = entry("", "mov.u32 %r5, %tid.x; lop3.b32 %r1, %r2, %r3, %r4, %r5; ret;")
    with pytest.raises(UnsupportedInstructionError, match="lop3 with its truth table in a register"):
        Machine(text)(1, 1)


def test_what_cannot_be_reached_may_be_unknown() -> None:
    text = entry(
        ".param .u64 out", "ld.param.u64 %d1, [out]; st.global.u32 [%d1], 1; ret;\nwgmma.fence;\nret;"
    )
    out = np.zeros(1, np.uint32)
    Machine(text)(1, 1, out)
    assert out[0] == 1


def test_functions_that_the_machine_lacks_are_refused_by_name() -> None:
    text = entry("", "\ncall elsewhere;\nret;", outside=".extern .func elsewhere();")
    with pytest.raises(UnsupportedInstructionError, match="the function elsewhere, which") as caught:
        Machine(text)(1, 1)
    assert caught.value.line == text.split("\n").index("call elsewhere;") + 1


def test_an_alias_calls_the_function_that_it_names() -> None:
    outside = """
    .func (.param .b32 r) three() { st.param.b32 [r], 3; ret; }
    .func (.param .b32 r) other();
    .alias other, three;"""
    body = """
    .param .b32 r0; .param .b32 r1;
    call (r0), other; ld.param.b32 %r1, [r0];
    ld.param.u64 %d1, [out]; mov.u64 %d2, other; P: .callprototype(.param .b32 _) _ ();
    call (r1), %d2, P; ld.param.b32 %r2, [r1];
    st.global.v2.b32 [%d1], {%r1, %r2}; ret;"""
    out = np.zeros(2, np.uint32)
    Machine(entry(".param .u64 out", body, outside=outside))(1, 1, out)
    assert out.tolist() == [3, 3]
