"""Instructions on matrices, on every device against NumPy; their faults on the emulator.

The tests lay out fragments one element at a time, as the PTX manual writes it down.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.emulator.coverage import coverage
from preheat.errors import EmulatorFault
from preheat.gpu import Gpu
from preheat.model import ptx
from tests.emulator.support import Machine, entry

Array = np.ndarray[Any, Any]
LANES = range(32)


# Fragments as the manual has them: (row, column) of element i of a lane


def of_a(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return group + 8 * (i // 2 % 2), 2 * thread + (i & 1) + 8 * (i // 4)


def of_b(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return 2 * thread + (i & 1) + 8 * (i // 2), group


def of_c(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return group + 8 * (i // 2), 2 * thread + (i & 1)


def spread(matrices: Array, of: Any, count: int) -> Array:
    """Return the `count` elements of each lane, for matrices along the first axis."""
    places = [[of(lane, i) for i in range(count)] for lane in LANES]
    return np.array([[[m[place] for place in row] for row in places] for m in matrices], matrices.dtype)


def gathered(fragments: Array, of: Any, shape: tuple[int, int]) -> Array:
    """Return the matrices that fragments make up."""
    found = np.zeros((len(fragments), *shape), fragments.dtype)
    for lane in LANES:
        for i in range(fragments.shape[2]):
            found[(slice(None), *of(lane, i))] = fragments[:, lane, i]
    return found


def bfloat16(values: Array) -> Array:
    """Return the bits of the bfloat16 below each number."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bits_of(values: Array, kind: str) -> Array:
    return bfloat16(values) if kind == "bf16" else values.astype(np.float16).view(np.uint16)


def exact(bits: Array, kind: str) -> Array:
    """Return the numbers that 16 bits stand for."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float16).astype(np.float64)


# Products

FORMS = [
    ("m16n8k16", "f16", "f32"), ("m16n8k16", "bf16", "f32"), ("m16n8k16", "f16", "f16"),
    ("m16n8k8", "f16", "f32"), ("m16n8k8", "bf16", "f32"), ("m16n8k8", "f16", "f16"),
]  # fmt: skip


def product(shape: str, kind: str, total: str) -> str:
    """Return a kernel in which each warp multiplies its matrices, given and left as fragments."""
    first, second = (4, 2) if shape == "m16n8k16" else (2, 1)
    third = 4 if total == "f32" else 2
    a, b = (", ".join(f"%r{start + i}" for i in range(n)) for start, n in ((10, first), (20, second)))
    name = "f" if total == "f32" else "r2"
    c = ", ".join(f"%{name}{4 + i}" for i in range(third))

    def load(registers: str, pointer: str) -> str:
        named = registers.split(", ")
        return "".join(
            f"ld.global.b32 {register}, [{pointer}+{4 * i}];\n" for i, register in enumerate(named)
        )

    stores = "".join(f"st.global.b32 [%d4+{4 * i}], {r};\n" for i, r in enumerate(c.split(", ")))
    steps = "".join(
        f"ld.param.u64 %d{i}, [{p}]; mad.wide.u32 %d{i}, %r1, {4 * n}, %d{i};\n"
        for i, p, n in ((1, "a", first), (2, "b", second), (3, "c", third), (4, "d", third))
    )
    return entry(
        ".param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d",
        f"""
        mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
        mad.lo.u32 %r1, %r2, %r3, %r4;
        {steps}{load(a, "%d1")}{load(b, "%d2")}{load(c, "%d3")}
        mma.sync.aligned.{shape}.row.col.{total}.{kind}.{kind}.{total}
            {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};
        {stores} ret;""",
    )


def multiplied(
    device: Gpu, form: tuple[str, str, str], a: Array, b: Array, c: Array, block: int = 32
) -> Array:
    """Return what a kernel makes of matrices of bits: one product for each warp."""
    depth = a.shape[2]
    total = form[2]
    given = [
        spread(a, of_a, depth // 2),
        spread(b, of_b, depth // 4),
        spread(c, of_c, 4),
    ]
    out = device.zeros((len(a), 32, 4), "float32" if total == "f32" else "uint16")
    arrays = [device.array(np.ascontiguousarray(values)) for values in given]
    device.kernel(product(*form), "k")[len(a) * 32 // block, block](*arrays, out)
    return gathered(out.numpy(), of_c, (16, 8))


def agree(found: Array, a: Array, b: Array, c: Array, total: str) -> None:
    """A GPU keeps fewer bits of the smaller terms than float64 does."""
    terms = np.abs(a).max(axis=2)[:, :, None] * np.abs(b).max(axis=1)[:, None, :]
    scale = np.maximum(terms, np.abs(c)) * a.shape[2]
    unit = 2.0**-22 if total == "f32" else 2.0**-10
    error = np.abs(found - (a @ b + c))
    assert (error <= unit * scale + 2.0**-24 * (total == "f16")).all(), (error / scale).max()


@pytest.mark.parametrize(("warps", "block"), [(1, 32), (4, 128), (12, 64)])
@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_products_of_random_matrices(
    device: Gpu, form: tuple[str, str, str], warps: int, block: int
) -> None:
    shape, kind, total = form
    depth = 16 if shape == "m16n8k16" else 8
    rng = np.random.default_rng(depth + warps)
    a = bits_of(rng.standard_normal((warps, 16, depth)), kind)
    b = bits_of(rng.standard_normal((warps, depth, 8)), kind)
    c = rng.standard_normal((warps, 16, 8)).astype(np.float32)
    given = c if total == "f32" else bits_of(c, "f16")
    found = multiplied(device, form, a, b, given, block)
    left, right = exact(a, kind), exact(b, kind)
    added = c.astype(np.float64) if total == "f32" else exact(given, "f16")
    agree(found if total == "f32" else exact(found, "f16"), left, right, added, total)
    if device.name.startswith("emulator") and (depth, total) != (16, "f32"):
        # Small numbers: the sum in float64 is exact, or nearly so, and rounded once.
        wanted = left @ right + added
        kept = wanted.astype(np.float32) if total == "f32" else bits_of(wanted, "f16")
        assert np.mean(kept == found) > 0.99


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products_have_the_bits_that_an_h200_gave(device: Gpu, kind: str) -> None:
    """Operands of four magnitudes, and what they became there (2026-11-16, driver 580)."""
    model = device.model
    if device.name.startswith("cuda") and "H200" not in model and "H100" not in model:
        pytest.skip(f"{model} is neither an H200 nor an H100")
    with np.load(Path(__file__).with_name("mma_h200.npz")) as file:
        a, b, c, wanted = (file[f"{kind}_{part}"] for part in "abcd")
    arrays = [device.array(given) for given in (a.view(np.uint16), b.view(np.uint16), c)]
    out = device.zeros(wanted.shape, "float32")
    device.kernel(product("m16n8k16", kind, "f32"), "k")[len(a), 32](*arrays, out)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_sums_of_integers_are_exact(device: Gpu, form: tuple[str, str, str]) -> None:
    shape, kind, total = form
    depth = 16 if shape == "m16n8k16" else 8
    rng = np.random.default_rng(7)
    a, b = rng.integers(-8, 9, (2, 16, depth)), rng.integers(-8, 9, (2, depth, 8))
    c = rng.integers(-100, 101, (2, 16, 8)).astype(np.float32)
    given = c if total == "f32" else bits_of(c, "f16")
    found = multiplied(device, form, bits_of(a, kind), bits_of(b, kind), given)
    numbers = found if total == "f32" else exact(found, "f16")
    np.testing.assert_array_equal(numbers, a @ b + c)


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_nan_spreads(device: Gpu, form: tuple[str, str, str]) -> None:
    shape, kind, total = form
    depth = 16 if shape == "m16n8k16" else 8
    a = np.ones((1, 16, depth))
    b = np.ones((1, depth, 8))
    c = np.zeros((1, 16, 8), np.float32)
    a[0, 3, 5] = np.inf
    b[0, 2, 6] = -np.inf
    c[0, 9, 1] = np.nan
    a[0, 4, 1] = np.nan
    b[0, 1, 4] = 0
    a[0, 12, 2] = 0  # times an infinity
    given = c if total == "f32" else bits_of(c, "f16")
    found = multiplied(device, form, bits_of(a, kind), bits_of(b, kind), given)
    numbers = found if total == "f32" else exact(found, "f16")
    with np.errstate(invalid="ignore"):
        wanted = np.array(
            [[(a[0, i] * b[0, :, j]).sum() + c[0, i, j] for j in range(8)] for i in range(16)]
        )
    np.testing.assert_array_equal(numbers[0], wanted)
    assert all(kind(wanted).any() for kind in (np.isnan, np.isinf, np.isfinite))
    canonical = found.view(np.uint32 if total == "f32" else np.uint16)[np.isnan(numbers)]
    assert set(canonical.tolist()) == {0x7FFFFFFF if total == "f32" else 0x7FFF}


# Matrices in shared memory

FILL = """
.shared .align 16 .b8 tile[4096];
ld.param.u64 %d1, [in]; ld.param.u64 %d2, [at]; ld.param.u64 %d3, [out];
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;
mad.wide.u32 %d2, %r4, 4, %d2; mad.wide.u32 %d3, %r4, 16, %d3;
mad.wide.u32 %d1, %r2, 4096, %d1; mul.wide.u32 %d4, %r1, 16; add.u64 %d1, %d1, %d4;
mov.u32 %r5, tile; mad.lo.u32 %r6, %r1, 16, %r5; mov.u32 %r7, %r1;
fill:
ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%d1]; st.shared.v4.b32 [%r6], {%r8, %r9, %r10, %r11};
mad.wide.u32 %d1, %r3, 16, %d1; mad.lo.u32 %r6, %r3, 16, %r6;
add.u32 %r7, %r7, %r3; setp.lt.u32 %p1, %r7, 256; @%p1 bra fill;
bar.sync 0;
mov.b32 %r12, 0; mov.b32 %r13, 0; mov.b32 %r14, 0; mov.b32 %r15, 0;
ld.global.u32 %r16, [%d2]; add.u32 %r16, %r16, %r5;
"""
TAKE = "st.global.v4.b32 [%d3], {%r12, %r13, %r14, %r15}; ret;"
GENERIC = "cvt.u64.u32 %d5, %r16; cvta.shared.u64 %d5, %d5;"
LISTS = {1: "{%r12}", 2: "{%r12, %r13}", 4: "{%r12, %r13, %r14, %r15}"}
LOADS = [
    (count, transposed, space)
    for count in (1, 2, 4)
    for transposed in (False, True)
    for space in ("shared", "shared::cta", "")
]


@pytest.mark.parametrize(("count", "transposed", "space"), LOADS)
def test_rows_in_any_order_are_loaded_as_fragments(
    device: Gpu, count: int, transposed: bool, space: str
) -> None:
    words = ["sync.aligned.m8n8", f"x{count}", *["trans"] * transposed, *[space] * bool(space), "b16"]
    address = "%r16+-32" if space else "%d5+-32"
    body = f"{FILL}{GENERIC}ldmatrix.{'.'.join(words)} {LISTS[count]}, [{address}];\n{TAKE}"
    rng = np.random.default_rng(count)
    blocks, threads = 3, 96
    given = rng.integers(0, 1 << 16, (blocks, 2048), dtype=np.uint16)
    at = 16 * rng.integers(0, 256, (blocks, threads)) + 32
    at.reshape(-1, 32)[:, 8 * count :] = 0x7FFF1235  # of no account
    out = device.zeros((blocks, threads, 4), "uint32")
    text = entry(".param .u64 in, .param .u64 at, .param .u64 out", body)
    device.kernel(text, "k")[blocks, threads](
        device.array(given), device.array(at.astype(np.uint32)), out
    )
    found = out.numpy().view(np.uint16).reshape(blocks, threads // 32, 32, 4, 2)
    assert not found[:, :, :, count:].any()
    for block in range(blocks):
        for warp in range(threads // 32):
            for i in range(count):
                starts = at[block, 32 * warp + 8 * i :][:8] - 32
                matrix = np.array([given[block, start // 2 :][:8] for start in starts])
                matrix = matrix.T if transposed else matrix
                wanted = [[matrix[t // 4, 2 * (t % 4)], matrix[t // 4, 2 * (t % 4) + 1]] for t in LANES]
                np.testing.assert_array_equal(found[block, warp, :, i], wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stored_matrices_equal_the_loaded_ones(device: Gpu, count: int, transposed: bool) -> None:
    trans = ".trans" * transposed
    body = f"""{FILL}
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {LISTS[count]}, [%r16];
    xor.b32 %r17, %r16, 2048;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r17], {LISTS[count]};
    bar.sync 0;
    mad.lo.u32 %r18, %r1, 16, %r5; ld.shared.v4.b32 {{%r12, %r13, %r14, %r15}}, [%r18+2048];
    {TAKE}"""
    rng = np.random.default_rng(count)
    given = rng.integers(0, 1 << 32, (1024,), dtype=np.uint32)
    order = rng.permutation(64)
    out = device.zeros((64, 4), "uint32")
    text = entry(".param .u64 in, .param .u64 at, .param .u64 out", body)
    device.kernel(text, "k")[1, 64](
        device.array(given), device.array((16 * order).astype(np.uint32)), out
    )
    wanted = given[512:768].reshape(64, 4).copy()
    moved = order.reshape(2, 32)[:, : 8 * count].reshape(-1)
    wanted[moved] = given[:256].reshape(64, 4)[moved]
    np.testing.assert_array_equal(out.numpy(), wanted)


def test_a_matrix_is_transposed_between_registers(device: Gpu) -> None:
    body = """
    ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 4, %d1;
    ld.global.b32 %r2, [%d1]; movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;
    st.global.b32 [%d1], %r3; ret;"""
    given = np.random.default_rng(1).integers(0, 1 << 16, (3, 8, 8), dtype=np.uint16)
    x = device.array(given)
    device.kernel(entry(".param .u64 x", body), "k")[1, 96](x)
    np.testing.assert_array_equal(x.numpy(), given.swapaxes(1, 2))


# Both together: c = a b, a of 32 x 64, b of 64 x 32, a warp for each part of 16 x 16

TILED = """
.shared .align 16 .b8 as[4608];
.shared .align 16 .b8 bs[5120];
.reg .b32 %a<4>, %b<4>;
ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u64 %d3, [c];
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
mad.wide.u32 %d1, %r2, 4096, %d1; mad.wide.u32 %d2, %r2, 4096, %d2; mad.wide.u32 %d3, %r2, 4096, %d3;
mul.wide.u32 %d4, %r1, 16; add.u64 %d1, %d1, %d4; add.u64 %d2, %d2, %d4;
shr.u32 %r3, %r1, 3; and.b32 %r4, %r1, 7; mul.lo.u32 %r5, %r4, 16;
mov.u32 %r6, as; add.u32 %r5, %r5, %r6; mad.lo.u32 %r5, %r3, 144, %r5;
shr.u32 %r3, %r1, 2; and.b32 %r4, %r1, 3; mul.lo.u32 %r7, %r4, 16;
mov.u32 %r8, bs; add.u32 %r7, %r7, %r8; mad.lo.u32 %r7, %r3, 80, %r7;
ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%d1]; st.shared.v4.b32 [%r5], {%a0, %a1, %a2, %a3};
ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%d1+2048]; st.shared.v4.b32 [%r5+2304], {%a0, %a1, %a2, %a3};
ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%d2]; st.shared.v4.b32 [%r7], {%a0, %a1, %a2, %a3};
ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%d2+2048]; st.shared.v4.b32 [%r7+2560], {%a0, %a1, %a2, %a3};
bar.sync 0;
and.b32 %r9, %r1, 31; shr.u32 %r10, %r1, 6; shr.u32 %r11, %r1, 5; and.b32 %r11, %r11, 1;
and.b32 %r12, %r9, 15; shr.u32 %r13, %r9, 4;
mad.lo.u32 %r14, %r10, 16, %r12; mad.lo.u32 %r14, %r14, 144, %r6; mad.lo.u32 %r14, %r13, 16, %r14;
mad.lo.u32 %r15, %r12, 80, %r8; mad.lo.u32 %r15, %r11, 32, %r15; mad.lo.u32 %r15, %r13, 16, %r15;
mov.b32 %r16, 0;
mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
mov.f32 %f4, %f0; mov.f32 %f5, %f0; mov.f32 %f6, %f0; mov.f32 %f7, %f0;
again:
ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%a0, %a1, %a2, %a3}, [%r14];
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%b0, %b1, %b2, %b3}, [%r15];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {%f0, %f1, %f2, %f3}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, {%f0, %f1, %f2, %f3};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {%f4, %f5, %f6, %f7}, {%a0, %a1, %a2, %a3}, {%b2, %b3}, {%f4, %f5, %f6, %f7};
add.u32 %r14, %r14, 32; add.u32 %r15, %r15, 1280; add.u32 %r16, %r16, 1;
setp.lt.u32 %p1, %r16, 4; @%p1 bra again;
shr.u32 %r17, %r9, 2; and.b32 %r18, %r9, 3; mad.lo.u32 %r17, %r10, 16, %r17;
mul.lo.u32 %r17, %r17, 128; mad.lo.u32 %r17, %r11, 64, %r17; mad.lo.u32 %r17, %r18, 8, %r17;
cvt.u64.u32 %d5, %r17; add.u64 %d3, %d3, %d5;
st.global.v2.f32 [%d3], {%f0, %f1}; st.global.v2.f32 [%d3+1024], {%f2, %f3};
st.global.v2.f32 [%d3+32], {%f4, %f5}; st.global.v2.f32 [%d3+1056], {%f6, %f7};
ret;
"""


@pytest.mark.parametrize("blocks", [1, 5])
def test_a_product_in_tiles(device: Gpu, blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    a, b = (bfloat16(rng.standard_normal((blocks, *shape))) for shape in ((32, 64), (64, 32)))
    out = device.zeros((blocks, 32, 32), "float32")
    text = entry(".param .u64 a, .param .u64 b, .param .u64 c", TILED)
    device.kernel(text, "k")[blocks, 128](device.array(a), device.array(b), out)
    left, right = exact(a, "bf16"), exact(b, "bf16")
    agree(out.numpy(), left, right, np.zeros((blocks, 32, 32)), "f32")


def test_coverage_knows_these_instructions() -> None:
    forms = coverage(ptx.parse(entry(".param .u64 a, .param .u64 b, .param .u64 c", TILED)))
    assert all(form.supported for form in forms)


# Participating threads

ALONE = """
.shared .align 16 .b8 tile[512];
ld.param.u64 %d1, [out]; ld.param.u32 %r10, [n];
mov.u32 %r1, %tid.x; mov.u32 %r2, tile; and.b32 %r3, %r1, 31; mad.lo.u32 %r4, %r3, 16, %r2;
st.shared.v4.b32 [%r4], {%r1, %r1, %r1, %r1};
mov.b32 %r5, 0;
setp.ge.u32 %p1, %r1, %r10;
"""
MOVE = "movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r1;"
MULTIPLY = "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r5, %r6}, {%r1, %r1}, {%r1}, {%r1, %r1};"
LOAD = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r4];"
STORE = "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r5};"
LEAVE = "mad.wide.u32 %d1, %r1, 4, %d1; st.global.b32 [%d1], %r5; ret;"


def run(body: str, threads: int, n: int, *, sanitize: bool = False) -> Array:
    out = np.zeros(128, np.uint32)
    text = entry(".param .u64 out, .param .u32 n", ALONE + body)
    Machine(text, sanitize=sanitize)(1, threads, out, np.uint32(n))
    return out


@pytest.mark.parametrize("what", [MOVE, MULTIPLY, LOAD, STORE], ids=lambda text: text.split(".")[0])
@pytest.mark.parametrize(
    ("before", "threads", "n", "lane", "thread"),
    [
        ("@%p1 exit;", 32, 20, 20, 0),
        ("@%p1 bra done;", 64, 40, 8, 32),
        ("", 48, 99, 16, 32),
        ("", 7, 99, 7, 0),
    ],
    ids=["exited", "elsewhere", "a block of 48", "a block of 7"],
)
def test_a_warp_that_is_not_whole_is_a_fault(
    what: str, before: str, threads: int, n: int, lane: int, thread: int
) -> None:
    said = f"needs all 32 threads of its warp, and lane {lane} is not there"
    with pytest.raises(EmulatorFault, match=said) as caught:
        run(f"{before} {what}\ndone: {LEAVE}", threads, n)
    assert caught.value.thread == (thread, 0, 0)
    assert caught.value.text == what.removesuffix(";")


def test_threads_that_wait_elsewhere_are_a_fault() -> None:
    with pytest.raises(EmulatorFault, match="waits for threads of its warp that never come"):
        run(f"@%p1 bra done; {MOVE} bar.sync 0; {LEAVE}\ndone: bar.sync 0; {LEAVE}", 32, 9)


def test_whole_warps_apart_from_others_take_part() -> None:
    """Two of three warps go one way, and the last warp of a block of 80 threads is short."""
    lanes = np.arange(32, dtype=np.uint32).view(np.uint16).reshape(8, 8)
    for threads in (96, 80):
        for n in (32, 64):
            found = run(f"@%p1 bra done; {MOVE}\ndone: {LEAVE}", threads, n)
            for warp in range(n // 32):
                matrix = lanes + np.array([32 * warp, 0] * 4, np.uint16)
                wanted = np.ascontiguousarray(matrix.T).view(np.uint32).reshape(-1)
                np.testing.assert_array_equal(found[32 * warp :][:32], wanted)
            assert not found[n:].any()


def test_threads_that_part_meet_again_at_an_instruction() -> None:
    part = "@%p1 bra other; add.u32 %r1, %r1, 0; bra both;\nother: bra both;\nboth:"
    body = f"{part} {MOVE} {MULTIPLY} {LEAVE}"
    np.testing.assert_array_equal(run(body, 64, 13), run(f"{MOVE} {MULTIPLY} {LEAVE}", 64, 13))


# Addresses

FAULTS = [
    ("shr.u32 %r9, %r4, 1; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r9];",
     1, "reads 16 bytes at 0x8, which is not a multiple of 16"),
    ("add.u32 %r9, %r4, 2; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r9];",
     0, "multiple of 16"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r4+16];", 31, "reads 16 bytes"),
    ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5, %r6}, [%r4+272];", 15, "there are 512 bytes"),
    ("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r4+272], {%r5, %r6};", 15, "writes 16 bytes at"),
    ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4+4], {%r5};", 0, "multiple of 16"),
    ("ldmatrix.sync.aligned.m8n8.x1.b16 {%r5}, [%d1];", 0, "which is not in shared memory"),
    ("cvt.u64.u32 %d2, %r4; cvta.shared.u64 %d2, %d2; setp.eq.u32 %p2, %r1, 5;"
     "selp.b64 %d2, %d1, %d2, %p2; ldmatrix.sync.aligned.m8n8.x1.b16 {%r5}, [%d2];",
     5, "which is not in shared memory"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "thread", "said"), FAULTS)
def test_a_row_at_a_wrong_address_is_a_fault(what: str, thread: int, said: str) -> None:
    for sanitize in (False, True):
        with pytest.raises(EmulatorFault, match=said) as caught:
            run(f"{what} {LEAVE}", 32, 99, sanitize=sanitize)
        assert caught.value.thread == (thread, 0, 0)


def test_a_sanitized_emulator_knows_which_rows_were_written() -> None:
    head = ".shared .align 16 .b8 more[1024]; mov.u32 %r11, more; mad.lo.u32 %r11, %r1, 16, %r11;"
    take = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5, %r6}, [%r11+256];"
    put = "stmatrix.sync.aligned.m8n8.x{}.shared.b16 [%r11+256], {};"
    run(f"{head} {put.format(2, '{%r1, %r1}')} {take} {LEAVE}", 32, 99, sanitize=True)
    with pytest.raises(EmulatorFault, match="4 of which nothing has written") as caught:
        run(f"{head} {put.format(1, '{%r1}')} {take} {LEAVE}", 32, 99, sanitize=True)
    assert caught.value.thread == (8, 0, 0)
