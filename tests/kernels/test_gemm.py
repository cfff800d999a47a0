"""Products of matrices and their gradients, against float64 within the bound that `gemm` states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preheat
from preheat import Array, Gpu
from preheat.build.builder import Builder
from preheat.errors import InputError
from preheat.kernels import gemm
from preheat.kernels.nf4 import quantize
from preheat.kernels.op import Op, trace_ops
from preheat.kernels.ops import Ops
from preheat.model.arch import Arch
from tests.kernels.conftest import DTYPES, ROUNDING, Operand, exact, gradient, same_bits, shifted
from tests.kernels.products import FORMS, framed, op_of, product_agrees, shape_of

Random = Callable[..., Operand]
SIZES = 1, 7, 31, 33, 65, 129
HOST = {"float16": np.float16, "bfloat16": np.float32}  # what arrays of a type are made from
ROUND_TRIP = [(SIZES[i], SIZES[i - 1], SIZES[i - 2]) for i in range(len(SIZES))]  # each in every place

forms = pytest.mark.parametrize("name", FORMS)


def run(gpu: Gpu, op: Op, a: Array, b: Array, c: Array, *, add: bool = False) -> None:
    op.launch(gpu, a, b, c, *(size for _, size in op.dims), add)


def check(gpu: Gpu, random: Random, op: Op, dtype: str = "float32", shift: int = 0) -> Array:
    """Compute a product of random matrices into memory that holds NaN, and check all of it."""
    (left, right, result) = FORMS[op.name]
    dims = dict(op.dims)
    a, b = (random(*shape_of(axes, dims), dtype=dtype) for axes in (left, right))
    c, whole = framed(gpu, shape_of(result, dims), dtype, shift)
    run(gpu, op, a.array, b.array, c)
    product_agrees(op.name, exact(c), a.exact, b.exact, dtype)
    assert np.isnan(exact(whole)).sum() == whole.size - c.size, "it wrote beyond the result"
    return c


@forms
@pytest.mark.parametrize("tile", gemm.tiles("float32"))
def test_every_size_is_right_in_every_place(device: Gpu, random: Random, name: str, tile: int) -> None:
    for m, n, k in ROUND_TRIP:
        check(device, random, op_of(name, {"m": m, "n": n, "k": k}, tile=tile))


@forms
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_shorter_types_are_summed_in_fp32(device: Gpu, random: Random, name: str, dtype: str) -> None:
    for m, n, k in ((33, 65, 129), (64, 36, 68), (130, 7, 31)):
        check(device, random, op_of(name, {"m": m, "n": n, "k": k}, dtype), dtype, shift=m % 4)


LARGE_TILES = [
    ("gemm", "bfloat16", 256),
    ("gemm_backward_a", "float16", 128),
    ("gemm_backward_b", "bfloat16", 64),
    ("gemm_backward_b", "float16", 256),
]


@pytest.mark.parametrize(("name", "dtype", "tile"), LARGE_TILES)
def test_shorter_types_are_right_in_large_tiles(
    device: Gpu, random: Random, name: str, dtype: str, tile: int
) -> None:
    """Rows of whole chunks, other rows, and more parts than stages."""
    for m, n, k in ((65, 36, 33), (136, 264, 72), (24, 16, 264), (264, 8, 16)):
        check(device, random, op_of(name, {"m": m, "n": n, "k": k}, dtype, tile), dtype)


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_halves_at_any_address(device: Gpu, random: Random, shift: int) -> None:
    dims = {"m": 17, "n": 31, "k": 127}
    for name in FORMS:
        for dtype in DTYPES[1:]:
            check(device, random, op_of(name, dims, dtype), dtype, shift)


def test_products_of_halves_need_no_tensor_cores(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator", arch="sm_75")
    rng = np.random.default_rng(8)
    a, b = (
        gpu.array(rng.standard_normal(shape, dtype=np.float32), "bfloat16")
        for shape in ((40, 21), (21, 150))
    )
    c, whole = framed(gpu, (40, 150), "bfloat16")
    run(gpu, gemm.gemm(40, 150, 21, "bfloat16", tile=256), a, b, c)
    product_agrees("gemm", exact(c), exact(a), exact(b), "bfloat16")
    assert np.isnan(exact(whole)).sum() == whole.size - c.size


@given(
    st.sampled_from(sorted(FORMS)),
    st.tuples(*[st.integers(1, 70)] * 3),
    st.integers(0, 3),
)
@settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_any_shape_at_any_address(
    device: Gpu, random: Random, name: str, sizes: tuple[int, int, int], shift: int
) -> None:
    check(device, random, op_of(name, dict(zip("mnk", sizes, strict=True))), shift=shift)


ALIGNED = [("float32", 128), ("float32", 64), ("float32", 32), ("bfloat16", 32), ("float16", 64)]


#: Every other pair of a form and a tile, with each form and each tile. The others are long tests.
ALIGNED_FORMS = [
    pytest.param(
        name, dtype, tile, id=f"{dtype}-{tile}-{name}",
        marks=pytest.mark.long if (turn + number) % 2 else (),
    )
    for turn, (dtype, tile) in enumerate(ALIGNED)
    for number, name in enumerate(FORMS)
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "tile"), ALIGNED_FORMS)
def test_alignment_changes_no_bit(device: Gpu, name: str, dtype: str, tile: int) -> None:
    """Of sums that would be zero, nothing but rounding is left: it shows the order of additions."""
    dims = {"m": 80, "n": 144, "k": 272}
    op = op_of(name, dims, dtype, tile)
    (left, right, result) = FORMS[name]
    (summed,) = set(left) - set(result)
    rng = np.random.default_rng()
    halves = {**dims, summed: dims[summed] // 2}
    parts = [rng.standard_normal(shape_of(axes, halves), dtype=np.float32) for axes in (left, right)]
    first = np.concatenate((parts[0], -parts[0]), left.index(summed))
    second = np.concatenate((parts[1], parts[1]), right.index(summed))
    a, b = (
        device.array(each.astype(dtype) if dtype == "float16" else each, dtype)
        for each in (first, second)
    )
    wanted = device.empty(shape_of(result, dims), dtype)
    run(device, op, a, b, wanted)
    assert np.count_nonzero(exact(wanted)) > wanted.size // 8
    for x, y in (
        (shifted(device, a), b),
        (a, shifted(device, b)),
        (shifted(device, a), shifted(device, b)),
    ):
        c = shifted(device, wanted).fill(0)
        run(device, op, x, y, c)
        assert same_bits(c, wanted)


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulating_adds_to_the_previous_values(
    ops: Ops, random: Random, name: str, dtype: str
) -> None:
    dims = {"m": 33, "n": 20, "k": 37}
    left, right, result = FORMS[name]
    a, b, c = (random(*shape_of(axes, dims), dtype=dtype) for axes in (left, right, result))
    found = getattr(ops, name)(a.array, b.array, out=c.array, accumulate=True)
    assert found is c.array
    product_agrees(name, exact(found), a.exact, b.exact, dtype, old=c.exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [64, 32])
def test_nan_stays_in_its_row(device: Gpu, random: Random, dtype: str, tile: int) -> None:
    a, b = random(5, 37, dtype=dtype), random(37, 6, dtype=dtype)
    spoilt = a.exact.astype("float16" if dtype == "float16" else "float32")
    spoilt[1, 36], spoilt[3, 0] = np.nan, np.inf
    c = device.empty((5, 6), dtype)
    run(device, gemm.gemm(5, 6, 37, dtype, tile=tile), device.array(spoilt, dtype), b.array, c)
    found = exact(c)
    assert np.isnan(found[1]).all()
    assert np.isinf(found[3]).all()
    assert np.isfinite(found[[0, 2, 4]]).all()


def test_gradients_are_those_of_the_product(ops: Ops, random: Random) -> None:
    a, b, gc = random(5, 7), random(7, 3), random(5, 3)
    by_a = gradient(lambda x: x @ b.exact, a.exact, gc.exact)
    by_b = gradient(lambda x: a.exact @ x, b.exact, gc.exact)
    assert np.allclose(ops.gemm_backward_a(gc.array, b.array).numpy(), by_a, rtol=1e-5, atol=1e-6)
    assert np.allclose(ops.gemm_backward_b(a.array, gc.array).numpy(), by_b, rtol=1e-5, atol=1e-6)


@forms
def test_a_newer_dialect_of_ptx_gives_the_same_bits(open_device: Callable[..., Gpu], name: str) -> None:
    dims = {"m": 33, "n": 20, "k": 37}
    rng = np.random.default_rng(7)
    left, right, result = FORMS[name]
    hosts = [rng.standard_normal(shape_of(axes, dims), dtype=np.float32) for axes in (left, right)]
    found = []
    for index, arch in enumerate(("sm_90", "sm_100")):
        gpu = open_device(f"emulator:{index}", arch=arch)
        a, b = map(gpu.array, hosts)
        c = gpu.empty(shape_of(result, dims))
        run(gpu, op_of(name, dims), a, b, c)
        found.append(c)
    assert same_bits(*found)


@forms
@pytest.mark.parametrize("length", [1, 16, 136])
def test_no_product_of_halves_reads_shared_memory_that_nothing_wrote(name: str, length: int) -> None:
    gpu = preheat.device("emulator", sanitize=True)
    left, right, result = FORMS[name]
    (summed,) = set(left) - set(result)
    dims = {"m": 8, "n": 8, "k": 8, summed: length}
    a, b = (gpu.zeros(shape_of(axes, dims), "float16").fill(1) for axes in (left, right))
    assert np.all(exact(getattr(Ops(gpu, blas=False), name)(a, b)) == length)


# Compiled code and launches


def test_the_tile_follows_from_the_shape_of_the_result() -> None:
    for rows, columns, tile in (
        (4096, 4096, 128), (2048, 1024, 128), (1024, 1024, 64), (4096, 65, 64), (512, 512, 32),
        (4096, 16, 32), (16, 4096, 32), (1 << 20, 16, 32), (1 << 20, 33, 64), (1, 1, 32),
    ):  # fmt: skip
        assert f", {tile}>" in gemm.gemm(rows, columns, 9, "float32").entry
        assert f", {tile}>" in gemm.gemm_backward_a(rows, 9, columns, "float32").entry
        assert f", {tile}>" in gemm.gemm_backward_b(9, columns, rows, "float32").entry


def test_tensor_cores_have_a_larger_tile_for_long_sums() -> None:
    for rows, columns, length, tile in (
        (4096, 4096, 4096, 256), (2048, 2048, 256, 256), (4096, 4096, 255, 128),
        (1024, 2048, 4096, 128), (1 << 20, 64, 4096, 64), (8192, 16, 4096, 32), (1, 1, 1, 32),
    ):  # fmt: skip
        for dtype in DTYPES[1:]:
            op = gemm.gemm(rows, columns, length, dtype)
            assert f", {tile}>" in op.entry, (rows, columns)
            assert f", {tile}>" in gemm.gemm_backward_a(rows, length, columns, dtype).entry
            assert f", {tile}>" in gemm.gemm_backward_b(length, columns, rows, dtype).entry
            assert op.grid == (-(-rows // min(tile, 128)) * -(-columns // tile),)


def test_the_launch_matches_its_description(device: Gpu, random: Random) -> None:
    ops = Ops(device, blas=False)
    a, b, gc = random(5, 7), random(7, 3), random(5, 3)
    with trace_ops() as seen:
        ops.gemm(a.array, b.array)
        ops.gemm_backward_a(gc.array, b.array)
        ops.gemm_backward_b(a.array, gc.array)
        ops.gemm_backward_a(gc.array, quantize(b.exact).on(device))
    made = (gemm.gemm, gemm.gemm_backward_a, gemm.gemm_backward_b, gemm.gemm_backward_a_nf4)
    assert seen == [function(m=5, n=3, k=7, dtype="float32") for function in made]


@forms
def test_two_blocks_of_the_largest_tile_of_floats_fit_and_no_register_is_spilt(
    shared_builder: Builder, name: str
) -> None:
    op = op_of(name, {"m": 1, "n": 1, "k": 1}, tile=128)
    uses = shared_builder.build(op.program, Arch.parse("sm_90")).entry(op.entry).resources
    assert uses is not None
    assert (uses.spill_stores, uses.spill_loads) == (0, 0)
    assert 0 < uses.registers <= 128


# Refused arguments


@pytest.mark.parametrize("name", [*FORMS, "gemm_backward_a_nf4"])
@pytest.mark.parametrize("axis", "mnk")
@pytest.mark.parametrize("size", [0, -3, 2**31, 2**31 - 100, 2**63])
def test_a_dimension_out_of_range_is_named(name: str, axis: str, size: int) -> None:
    with pytest.raises(InputError, match=rf"^{axis} -?\d+ is outside 1 to"):
        op_of(name, {"m": 5, "n": 5, "k": 5, axis: size})


def test_a_result_of_too_many_tiles_is_refused() -> None:
    with pytest.raises(InputError, match=r"^a result with k 2147000000 by n 2147000000 has more than"):
        gemm.gemm_backward_b(5, 2147000000, 2147000000, "float32")


def test_a_tile_that_no_kernel_makes_is_refused() -> None:
    with pytest.raises(InputError, match="tile 48 is none of 128, 64, 32"):
        gemm.gemm(5, 5, 5, "float32", tile=48)


def test_matrices_that_do_not_fit_are_named(device: Gpu, ops: Ops) -> None:
    a, b, flat, short = (
        device.zeros((5, 7)), device.zeros((6, 3)), device.zeros(7), device.zeros((7, 3), "float16")
    )  # fmt: skip
    refusals: list[tuple[Callable[..., object], tuple[Array, Array], str]] = [
        (ops.gemm, (a, b), r"b\[k, n\] has k=6, where the other matrix has k=7"),
        (ops.gemm_backward_a, (a, b), r"b\[k, n\] has n=3, where the other matrix has n=7"),
        (ops.gemm_backward_b, (a, b), r"gc\[m, n\] has m=6, where the other matrix has m=5"),
        (ops.gemm, (a, flat), r"b is a matrix, and cannot have the shape \(7,\)"),
        (ops.gemm, (a, short), "b is float16, not float32 as the other matrix"),
        (ops.gemm, (a, a[:0]), "b is empty"),
    ]
    for product, operands, why in refusals:
        with pytest.raises(InputError, match=why):
            product(*operands)


def test_a_result_that_cannot_be_is_refused(device: Gpu, ops: Ops) -> None:
    square, other = device.zeros((4, 4)), device.zeros((5, 7))
    with pytest.raises(InputError, match="out overlaps a"):
        ops.gemm(square, square, out=square)
    with pytest.raises(InputError, match="out is float32 of shape"):
        ops.gemm(square, square, out=other)
    with pytest.raises(InputError, match="accumulate=True adds to out, but no out was given"):
        ops.gemm_backward_b(square, square, accumulate=True)


# For hardware alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_runs_on_the_gpu(open_device: Callable[..., Gpu], dtype: str) -> None:
    """With its own compiled code: one times one."""
    gpu = open_device("cuda")
    dims = {"m": 1, "n": 1, "k": 1}
    one = gpu.zeros((1, 1), dtype).fill(1)
    there = quantize(np.ones((1, 1))).on(gpu)
    for name in (*FORMS, "gemm_backward_a_nf4"):
        for tile in gemm.tiles(dtype):
            op = op_of(name, dims, dtype, tile)
            c = gpu.zeros((1, 1), dtype)
            second = (there.codes, there.scales) if "nf4" in name else (one,)
            op.launch(gpu, one, *second, c, *dims.values(), False)
            assert exact(c) == 1, op.entry


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(4096, 4096, 4096), (1000, 4096, 1021), (2048, 16, 4096), (16, 4096, 2048), (8192, 33, 127)],
)
def test_real_sizes_agree_with_float64(
    open_device: Callable[..., Gpu], name: str, dtype: str, sizes: tuple[int, int, int]
) -> None:
    torch = pytest.importorskip("torch")
    dims = dict(zip("mnk", sizes, strict=True))
    (left, right, result) = FORMS[name]
    (summed,) = set(left) - set(result)
    kind = getattr(torch, dtype)
    a, b = (torch.randn(shape_of(axes, dims), device="cuda").to(kind) for axes in (left, right))
    out = torch.full(shape_of(result, dims), torch.nan, device="cuda", dtype=kind)
    getattr(Ops(open_device("cuda"), blas=False), name)(a, b, out=out)
    spec = f"{left},{right}->{result}"
    x = a.double()
    y = b.double()
    wanted, most = torch.einsum(spec, x, y), torch.einsum(spec, x.abs(), y.abs())
    bound = (
        gemm.error_bound(dims[summed], dtype) * most + 1.01 * ROUNDING[dtype] * wanted.abs() + 2.0**-25
    )
    assert bool(((out.double() - wanted).abs() <= bound).all())


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_runs_give_the_same_bits(open_device: Callable[..., Gpu], name: str, dtype: str) -> None:
    gpu = open_device("cuda")
    rng = np.random.default_rng(3)
    for sizes in ((1000, 1021, 2048), (4096, 16, 1024), (2048, 2048, 2048)):
        dims = dict(zip("mnk", sizes, strict=True))
        (left, right, result) = FORMS[name]
        a, b = (
            gpu.array(rng.standard_normal(shape_of(axes, dims), dtype=np.float32), dtype)
            for axes in (left, right)
        )
        op = op_of(name, dims, dtype)
        shape = shape_of(result, dims)
        first, again = gpu.empty(shape, dtype), gpu.empty(shape, dtype)
        run(gpu, op, a, b, first)
        for _ in range(20):
            run(gpu, op, a, b, again.fill(0))
            assert same_bits(first, again)


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("tile", gemm.tiles("bfloat16"))
def test_every_tile_of_halves_is_right_on_the_gpu(
    open_device: Callable[..., Gpu], name: str, dtype: str, tile: int
) -> None:
    gpu = open_device("cuda")
    rng = np.random.default_rng(tile)
    left, right, result = FORMS[name]
    for sizes in ((1, 1, 1), (31, 33, 37), (129, 257, 131), (136, 264, 200), (264, 520, 1032)):
        dims = dict(zip("mnk", sizes, strict=True))
        for shift in (0, 1, 3):
            operands = []
            for axes in (left, right):
                values = rng.standard_normal(shape_of(axes, dims), dtype=np.float32)
                room = gpu.empty(values.size + shift, dtype)
                view = Array(room.buffer, room.dtype, values.shape, shift * room.dtype.size)
                operands.append(view.write(gpu.array(values.astype(HOST[dtype]), dtype).numpy()))
            a, b = operands
            c, whole = framed(gpu, shape_of(result, dims), dtype, shift)
            run(gpu, op_of(name, dims, dtype, tile), a, b, c)
            product_agrees(name, exact(c), exact(a), exact(b), dtype)
            assert np.isnan(exact(whole)).sum() == whole.size - c.size
            old = exact(c)
            run(gpu, op_of(name, dims, dtype, tile), a, b, c, add=True)
            product_agrees(name, exact(c), exact(a), exact(b), dtype, old=old)


@pytest.mark.gpu
def test_a_result_of_more_than_2_to_the_31_elements_is_right_to_its_end(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("cuda")
    rng = np.random.default_rng(4)
    (m, n, k) = (70001, 40003, 3)
    a, b = (rng.standard_normal(shape).astype("float16") for shape in ((m, k), (k, n)))
    c = gpu.empty((m, n), "float16")
    run(gpu, gemm.gemm(m, n, k, "float16"), gpu.array(a), gpu.array(b), c)
    for rows in (slice(0, 2), slice(m - 2, m)):
        product_agrees("gemm", exact(c[rows]), a[rows].astype(float), b.astype(float), "float16")


@pytest.mark.gpu
def test_an_operand_of_more_than_2_to_the_31_elements_is_read_to_its_end(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("cuda")
    rng = np.random.default_rng(5)
    (m, n, k) = (2, 33, 70_000_001)
    gc, end = (rng.standard_normal(shape).astype("float16") for shape in ((m, n), (1000, n)))
    b = gpu.zeros((k, n), "float16")
    b[k - 1000 :].write(end)
    ga = gpu.empty((m, k), "float16")
    run(gpu, gemm.gemm_backward_a(m, n, k, "float16"), gpu.array(gc), b, ga)
    for row in range(m):
        found = exact(ga[row][k - 1000 :])[None]
        product_agrees(
            "gemm_backward_a", found, gc[row : row + 1].astype(float), end.astype(float), "float16"
        )
