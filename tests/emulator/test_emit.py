"""Emitted instructions: moves, address conversions, carries, copies; and invalid PTX."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.emulator.coverage import coverage
from preheat.errors import InvalidCodeError, UnsupportedInstructionError
from preheat.model import ptx
from tests.emulator.conftest import Cuda
from tests.emulator.support import Machine, entry

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(25)


def run(body: str, *inputs: Array, results: int = 1, threads: int = 37, outside: str = "") -> Array:
    """64-bit words that each thread leaves in %d20, %d21, …; it finds its inputs in %d10, %d11, ….

    %r1 is the number of the thread, %r10, %r11, … are the inputs' lower halves.
    """
    params = ", ".join(f".param .u64 p{i}" for i in range(len(inputs) + 1))
    loads = "".join(
        f"ld.param.u64 %d1, [p{i}]; add.u64 %d2, %d1, %d0; ld.global.u64 %d{10 + i}, [%d2];\n"
        f"cvt.u32.u64 %r{10 + i}, %d{10 + i};\n"
        for i in range(len(inputs))
    )
    stores = "".join(f"st.global.u64 [%d2+{8 * i}], %d{20 + i};\n" for i in range(results))
    text = entry(
        params,
        f"""
        mov.u32 %r1, %tid.x; mul.wide.u32 %d0, %r1, 8;
        {loads}
        {body}
        ld.param.u64 %d1, [p{len(inputs)}]; mad.wide.u32 %d2, %r1, {8 * results}, %d1;
        {stores}
        ret;""",
        outside=outside,
    )
    out = np.zeros((threads, results), np.uint64)
    Machine(text)(1, threads, *inputs, out)
    return out[:, 0] if results == 1 else out


def words(count: int = 37) -> Array:
    return RNG.integers(0, 2**64, count, dtype=np.uint64)


# Moves


def test_words_are_taken_apart_and_put_together() -> None:
    a = words()
    found = run(
        """
        mov.b64 {%r2, %r3}, %d10;
        mov.b64 %d20, {%r3, %r2};
        mov.b64 {%h1, %h2, %h3, %h4}, %d10;
        mov.b64 %d21, {%h4, %h1, %h2, %h3};
        mov.b32 {%h5, _}, %r3;
        mov.b32 %r4, {%h5, %h5};
        cvt.u64.u32 %d22, %r4;
        """,
        a,
        results=3,
    )
    low, high = a & 0xFFFFFFFF, a >> 32
    parts = [a >> (16 * i) & 0xFFFF for i in range(4)]
    np.testing.assert_array_equal(found[:, 0], high | low << 32)
    np.testing.assert_array_equal(
        found[:, 1], parts[3] | parts[0] << 16 | parts[1] << 32 | parts[2] << 48
    )
    np.testing.assert_array_equal(found[:, 2], parts[2] | parts[2] << 16)


def test_bits_of_floats_move_unchanged() -> None:
    a = words()
    found = run(
        """
        mov.b32 %f1, %r10; mov.f32 %f2, %f1; mov.b32 %r2, %f2; cvt.u64.u32 %d20, %r2;
        mov.b64 %e1, %d10; mov.b64 %d21, %e1;
        mov.b32 %r3, 0f3FC00000; cvt.u64.u32 %d22, %r3;
        mov.b64 %d23, 0dC000000000000000;
        mov.b32 %f3, 1073741824; mov.b32 %r4, %f3; cvt.u64.u32 %d24, %r4;
        """,
        a,
        results=5,
    )
    np.testing.assert_array_equal(found[:, 0], a & 0xFFFFFFFF)
    np.testing.assert_array_equal(found[:, 1], a)
    assert found[0, 2:].tolist() == [0x3FC00000, 0xC000000000000000, 1 << 30]


def test_a_register_that_nothing_wrote_is_zero() -> None:
    assert not run("mov.u64 %d20, %d25;").any()


def test_sums_of_singles_take_operands_of_16_bits() -> None:
    found = run(
        """
        mov.b64 {%h1, %h2, %h3, %h4}, %d10; mov.b32 %f1, %r11;
        add.f32.f16 %f2, %h1, %f1; sub.rz.f32.bf16 %f3, %h3, %f1; fma.rn.f32.bf16 %f4, %h3, %h4, %f1;
        mov.b32 %r2, %f2; mov.b32 %r3, %f3; mov.b32 %r4, %f4;
        mov.b64 %d20, {%r2, %r3}; cvt.u64.u32 %d21, %r4;
        """,
        np.full(37, 0x3C00 | 0x3FC0 << 32 | 0xC000 << 48, np.uint64),  # 1.0, and 1.5 and -2.0
        np.full(37, 0x3E800000, np.uint64),  # 0.25
        results=2,
    )
    assert found.view(np.float32)[0].tolist() == [1.25, 1.25, -2.75, 0.0]


def test_numbers_of_16_and_8_bits_become_each_other() -> None:
    """Without a modifier, a conversion between float16 and bfloat16 rounds to nearest even."""
    found = run(
        """
        mov.b64 {%h1, %h2, %h3, %h4}, %d10;
        cvt.bf16.f16 %h5, %h1; cvt.bf16.f16 %h6, %h2; cvt.f16.bf16 %h7, %h3; cvt.rz.bf16.f16 %h8, %h2;
        mov.b64 %d20, {%h5, %h6, %h7, %h8};
        cvt.rn.bf16x2.e4m3x2 %r2, %h4; cvt.rn.relu.bf16x2.e5m2x2 %r3, %h4; mov.b64 %d21, {%r2, %r3};
        cvt.rn.satfinite.e4m3x2.bf16x2 %h9, %r11; cvt.rn.satfinite.relu.e5m2x2.bf16x2 %h10, %r11;
        mov.b32 %r4, {%h9, %h10}; cvt.u64.u32 %d22, %r4;
        """,
        # 1 + 2**-8 and 1 + 3 * 2**-8 in float16, -1.5 in bfloat16, and the bytes 0x38 and 0x81.
        np.full(37, 0x3C04 | 0x3C0C << 16 | 0xBFC0 << 32 | 0x3881 << 48, np.uint64),
        np.full(37, 0xBF804700, np.uint64),  # -1 and 32768 in bfloat16
        results=3,
    )
    assert found[0].tolist() == [
        0x3F80 | 0x3F82 << 16 | 0xBE00 << 32 | 0x3F81 << 48,
        0x3F80BB00 | 0x3F000000 << 32,  # 1 and -2**-9; 0.5, and 0 instead of -2**-16
        0xB87E | 0x0078 << 16,  # -1 and 448, the largest; 0 instead of -1, and 32768
    ]


# Addresses


def test_generic_addresses_know_their_space() -> None:
    outside = ".global .align 8 .u64 g; .const .align 8 .u64 c[2] = {3, 4};"
    asks = "".join(
        f"isspacep.{space} %p1, %d{i}; selp.u32 %r2, {1 << bit}, 0, %p1;\n"
        f"or.b32 %r{20 + i}, %r{20 + i}, %r2;\n"
        for i in (3, 4, 5, 6)
        for bit, space in enumerate(("global", "shared", "local", "const"))
    )
    found = run(
        f"""
        .shared .align 8 .b8 s[64]; .local .align 8 .b8 l[64];
        mov.u64 %d7, g; cvta.global.u64 %d3, %d7;
        mov.u64 %d7, s; cvta.shared.u64 %d4, %d7;
        mov.u64 %d7, l; cvta.local.u64 %d5, %d7;
        mov.u64 %d7, c; cvta.const.u64 %d6, %d7;
        {asks}
        mov.b64 %d20, {{%r23, %r24}}; mov.b64 %d21, {{%r25, %r26}};
        cvta.to.shared.u64 %d8, %d4; mov.u64 %d9, s; sub.u64 %d22, %d8, %d9;
        ld.const.u64 %d23, [c+8]; ld.u64 %d24, [%d6];
        """,
        results=5,
        outside=outside,
    )
    assert found[0].tolist() == [1 | 2 << 32, 4 | 8 << 32, 0, 4, 3]


def test_kernel_parameters_can_be_pointed_at(cuda: Cuda) -> None:
    machine = cuda("""
    struct Table { int v[16]; };
    extern "C" __global__ void k(int* out, const __grid_constant__ Table t) {
        out[threadIdx.x] = t.v[15 - threadIdx.x]; }""")
    table = RNG.integers(-(2**31), 2**31, 16, dtype=np.int32)
    out = np.zeros(16, np.int32)
    machine(1, 16, out, table.view(np.dtype([("v", "i4", 16)]))[0])
    np.testing.assert_array_equal(out, table[::-1])


def test_asynchronous_copies_have_arrived_when_waited_for(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(const float4* in, float4* out) {
        __shared__ float4 s[64];
        unsigned to = (unsigned)__cvta_generic_to_shared(&s[threadIdx.x]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(in + threadIdx.x));
        asm volatile("cp.async.commit_group; cp.async.wait_group 0;");
        __syncthreads();
        out[threadIdx.x] = s[63 - threadIdx.x];
    }""")
    values = RNG.standard_normal((64, 4)).astype(np.float32)
    out = np.zeros_like(values)
    machine(1, 64, values, out)
    np.testing.assert_array_equal(out, values[::-1])


# Carries


def test_wide_sums_and_differences_carry() -> None:
    a, b, c, d = (words() for _ in range(4))
    a[:8] = 2**64 - 1
    c[:4] = 2**64 - 1
    found = run(
        """
        add.cc.u64 %d20, %d10, %d12; addc.cc.u64 %d21, %d11, %d13; addc.u64 %d22, 0, 0;
        sub.cc.u64 %d23, %d10, %d12; subc.cc.u64 %d24, %d11, %d13; subc.u64 %d25, 0, 0;
        add.cc.u32 %r2, %r10, %r12; addc.u32 %r3, 0, 0; mov.b64 %d26, {%r2, %r3};
        """,
        a,
        b,
        c,
        d,
        results=7,
    )
    for i, row in enumerate(found.tolist()):
        first, second = int(a[i]) | int(b[i]) << 64, int(c[i]) | int(d[i]) << 64
        total, difference = first + second, (first - second) % 2**192
        assert row[:3] == [total >> 64 * k & (2**64 - 1) for k in range(3)]
        assert row[3:6] == [difference >> 64 * k & (2**64 - 1) for k in range(3)]
        assert row[6] == (int(a[i]) & 0xFFFFFFFF) + (int(c[i]) & 0xFFFFFFFF)


@pytest.mark.parametrize("bits", [32, 64])
def test_wide_products_carry(bits: int) -> None:
    a, b, c = (words() for _ in range(3))
    a[:6] = b[:6] = c[:6] = 2**64 - 1
    r = "%r" if bits == 32 else "%d"
    out = (
        "cvt.u64.u32 %d20, %r20; cvt.u64.u32 %d21, %r21; cvt.u64.u32 %d22, %r22;" if bits == 32 else ""
    )
    found = run(
        f"""
        mad.lo.cc.u{bits} {r}20, {r}10, {r}11, {r}12;
        madc.hi.cc.u{bits} {r}21, {r}10, {r}11, {r}12;
        addc.u{bits} {r}22, 0, 0;
        {out}
        """,
        a,
        b,
        c,
        results=3,
    )
    mask = 2**bits - 1
    for i, row in enumerate(found.tolist()):
        x, y, z = (int(v[i]) & mask for v in (a, b, c))
        total = x * y + z + (z << bits)
        assert row == [total & mask, total >> bits & mask, total >> 2 * bits]


def test_a_carry_belongs_to_each_thread() -> None:
    a = words()
    found = run(
        """
        setp.lt.u32 %p1, %r1, 10;
        @%p1 bra SMALL;
        add.cc.u64 %d5, %d10, %d10;
        bra JOIN;
        SMALL: add.cc.u64 %d5, 1, 1;
        JOIN: addc.u64 %d20, 0, 0;
        """,
        a,
    )
    np.testing.assert_array_equal(found, np.where(np.arange(37) < 10, 0, a >> 63))


# Invalid text


@pytest.mark.parametrize(
    "statement",
    [
        "shfl;", "shfl.sync.bfly.b32 %r1, %r2;", "vote.sync.odd.pred %p1, %p2, -1;", "ld %r1, [%d1];",
        "ld.global.b32 %r1, %d1;", "ld.global.v2.b32 %r1, [%d1];", "ld.global.texture.b32 %r1, [%d1];",
        "st.global.b32 [%d1];", "atom.global.nand.b32 %r1, [%d1], %r2;", "atom.global.add.u32 %r1;",
        "mov.b32 %r1;", "add.u32 %r1, %r2, 1.5;", "mov.b128 %r1, %r2;", "cvta.to.nowhere.u64 %d1, %d2;",
        "cvta.u64 %d1, %d2;",
        "bar.wait 0;", "bar;", "bar.red.popc.u32 %d1, 0, %p1;",
        "bar.red.and.pred k, 0, %p1;", "mbarrier.init.noComplete.b64 [%d1], 1;",
        "barrier.cluster.arrive.acquire;", "barrier.cluster.wait.relaxed;", "barrier.cluster.sync;",
        "barrier.cluster.arrive 0;", "barrier.cluster;", "barrier.sync;", "mapa.u32 %r1, %r2, %r3;",
        "mapa.shared.u32 %r1, %r2, %r3;", "mapa.shared::cluster.u64 %d1, %d2;", "mapa;",
        "getctarank.u32 %r1, %r2;", "getctarank.shared::cluster.b32 %r1, %r2;",
        "cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 16, [%r3];",
        "redux.sync.mul.s32 %r1, %r2, -1;", "redux.sync.add.f32 %f1, %f2, -1;",
        "redux.sync.max.ftz.f32 %f1, %f2, -1;", "redux.sync.min.abs.s32 %r1, %r2, -1;",
        "match.any %r1;",
        "mad.hi.cc.s32 %r1, %r2, %r3, %r4;", "isspacep.moon %p1, %d1;", "cp.async.bulk.wait_all;",
        "mov.u32 %r1, %nosuch;", "add.u32 %r1, %r2;", "add.u32 5, %r2, %r3;", "elect.sync %r1;",
        "setp.eq.u32 %p1|%p2, %r1;",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f2};",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2};",
        "mma.sync.aligned.m16n8k8.row.col.bf16.bf16.bf16.bf16 {%r1,%r2}, {%r1,%r2}, {%r3}, {%r4,%r5};",
        "mma;", "ldmatrix.sync.aligned.m8n8.b16 {%r1}, [%r2];", "ldmatrix %r1, [%r2];",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];",
        "ldmatrix.sync.aligned.m8n8.x1.global.b16 {%r1}, [%d2];",
        "stmatrix.sync.aligned.m8n8.x2.x4.b16 [%d2], {%r1,%r2};",
        "movmatrix.sync.aligned.m8n8.b16 %r1, %r2;",
        "call (%r1), k, (%r2);", "ld.global.b32 %q1, [%d1];",
    ],
)  # fmt: skip
def test_a_form_that_is_not_known_is_refused_with_its_line(statement: str) -> None:
    text = entry("", f".reg .b128 %q<4>;\n{statement}\nret;")
    with pytest.raises(UnsupportedInstructionError) as caught:
        Machine(text).module.function("k")
    assert caught.value.line == text.split("\n").index(statement) + 1
    assert [form.supported for form in coverage(ptx.parse(text))].count(False) == 1


@pytest.mark.parametrize(
    ("statement", "said", "instead"),
    [
        ("tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [tx, {%f1, %f1}];", "textures: tex.2d.v4.f32.f32",
         "read global memory"),
        ("tex.cube.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d2, {%f1, %f1, %f1, %f1}];", "textures: tex.cube",
         "read global memory"),
        ("tex.grad.1d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d2, {%f1}], {%f5}, {%f6};", "textures: tex.grad",
         "read global memory"),
        ("tex.1d.v2.f16x2.f32 {%r1,%r2}, [%d2, {%f1}];", "textures: tex.1d.v2.f16x2",
         "read global memory"),
        ("tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}|%p1, [tx, sm, {%f5,%f6}], {%r1,%r2}, %f7;",
         "textures: tex.2d.v4.f32.f32", "read global memory"),
        ("tld4.r.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [tx, {%f5,%f6}];", "textures: tld4.r", "read global"),
        ("txq.level.width.b32 %r1, [tx], %r2;", "textures: txq.level.width.b32", "read global memory"),
        ("suld.b.2d.v2.b32.trap {%r1,%r2}, [su, {%r3, %r4}];", "surfaces: suld.b", "read and write"),
        ("sust.p.1d.b32.clamp [%d1, {%r3}], {%r4};", "surfaces: sust.p.1d.b32.clamp", "read and write"),
        ("sust.b.1d.v2.b32.trap [%d1, {%r3}], {%r4};", "surfaces: sust.b.1d.v2", "read and write"),
        ("sured.b.add.2d.u32.trap [%d1, {%r3, %r4}], %r5;", "surfaces: sured.b", "read and write"),
        ("suq.width.b32 %r1, [su];", "surfaces: suq.width.b32", "read and write global memory"),
        ("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
         " [%r1], [%d1, {%r3, %r4, %r5}], [%r2], {%h1};", "tensor copies: cp.async.bulk.tensor.3d",
         "use cp.async"),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%d1, {%r3, %r4}], [%r1];",
         "tensor copies: cp.reduce", "use cp.async"),
        ("cp.async.bulk.prefetch.tensor.1d.L2.global [%d1, {%r3}];", "tensor copies", "use cp.async"),
        ("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%f1}, [%r1], %r2;",
         "tensor-core instructions: wmma.load", "use fma"),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1,%r2}, [%r5];",
         "tensor-core instructions: ldmatrix", "use fma"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f2};",
         "tensor-core instructions: mma.sync", "use fma"),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3];",
         "asynchronous stores to other blocks of a cluster: st.async", "use st or red with .shared"),
        ("red.async.shared::cluster.mbarrier::complete_tx::bytes.inc.u32 [%r1], %r2, [%r3];",
         "asynchronous stores to other blocks of a cluster: red.async", "use st or red"),
        ("clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];",
         "cluster launch control: clusterlaunchcontrol.try_cancel", "launch one block for each tile"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
         " [%r1], [%d1], 16, [%r2], %h1;", "this form of cp.async: cp.async.bulk.shared", "on a GPU"),
        ("setmaxnreg.inc.sync.aligned.u32 240;", "setmaxnreg.inc", "preheat emulate --coverage"),
        ("ld.shared.b32 %r1, [%r2 + 4*3];", "this form of ld: ld.shared.b32", "kernel on a GPU"),
        ("cp.async.cg.shared.global [%r1], [%d1], %r2;", "this form of cp.async: cp.async.cg", "GPU"),
    ],
)  # fmt: skip
def test_a_refused_instruction_is_named_with_an_alternative(
    statement: str, said: str, instead: str
) -> None:
    outside = (
        ".global .texref tx; .global .surfref su;\n"
        ".global .samplerref sm = { addr_mode_0 = clamp_to_edge, filter_mode = nearest };"
    )
    text = entry("", f"\n{statement}\nret;", outside=outside)
    with pytest.raises(UnsupportedInstructionError) as caught:
        Machine(text).module.function("k")
    assert f"the emulator does not support {said}" in str(caught.value)
    assert instead in (caught.value.hint or "")
    assert caught.value.line == text.split("\n").index(statement) + 1
    assert caught.value.text == statement.removesuffix(";")


WORDS = st.sampled_from(
    "%r1 %r2 %d1 %p1 %h1 %f1 [%d1] [%r1+4] {%r1,%r2} %r1|%p1 !%p1 0 -1 0f3F800000 _ , , , , "
    "%tid.x tile L [%d1,{%r1,%f1}] [tile,tile,{%r1}] [%d1,%r2] {%r1,%r2}|%p1 %r1.b0 -%r2.h10 %r1.b3210 "
    "%v %v.x 4*(2+1) [tile+4*2] [tile,{}] %nosuch".split()
)
OPCODES = st.sampled_from(
    "add.u32 mov.b32 mov.b64 ld.global.b32 ld.v2.b32 st.shared.f32 atom.add.u32 red.global.add.f32 "
    "shfl.sync.up.b32 vote.sync.all.pred setp.eq.u32 selp.b32 bra brx.idx call bar.sync cp.async "
    "bar.red.popc.u32 barrier.cluster.wait mapa.u64 getctarank.shared::cluster.u32 "
    "cvta.shared.u64 addc.cc.u32 fma.rn.f32 cvt.u32.u64 isspacep.local elect.sync "
    "match.all.sync.b32 redux.sync.add.u32 ret tex.2d.v4.f32.f32 sust.b.1d.b32.trap mbarrier.init.b64 "
    "mbarrier.arrive.b64 mbarrier.try_wait.b64 cp.async.ca.shared.global vabsdiff4.u32.u32.u32.add "
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group prefetch.global.L1 "
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 stmatrix.sync.aligned.m8n8.x1.b16 movmatrix.sync "
    "movmatrix.sync.aligned.m8n8.trans.b16 mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16".split()
)
STATEMENTS = st.tuples(OPCODES, st.lists(WORDS, max_size=9)).map(lambda s: f"{s[0]} {' '.join(s[1])};")


@settings(max_examples=200, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=4))
def test_random_statements_are_made_ready_or_refused(statements: list[str]) -> None:
    declared = ".shared .b8 tile[64]; .reg .v2 .b32 %v;\n"
    text = entry("", declared + "\n".join(statements) + "\nL: ret;")
    with suppress(UnsupportedInstructionError, InvalidCodeError):
        Machine(text).module.function("k")
    assert sum(form.count for form in coverage(ptx.parse(text))) == len(statements) + 1
