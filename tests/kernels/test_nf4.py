"""NF4 on the host, and products with matrices in NF4."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from preheat import Gpu
from preheat.errors import InputError
from preheat.kernels import gemm
from preheat.kernels.nf4 import BLOCK, VALUES, Nf4, dequantize, quantize
from preheat.kernels.ops import Ops
from tests.kernels.conftest import DTYPES, Operand, exact, same_bits
from tests.kernels.products import framed, product_agrees

Random = Callable[..., Operand]
TABLE = np.array(VALUES, "float32")


def normal(*shape: int, seed: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# On the host


def test_the_first_code_of_a_byte_is_in_its_upper_half() -> None:
    quantized = quantize(np.array([[-1, 1, 0, VALUES[9]]]))
    assert [f"{byte:02x}" for byte in quantized.codes] == ["0f", "79"]
    assert quantized.scales.tolist() == [1]
    assert (quantized.codes.dtype, quantized.scales.dtype) == ("uint8", "float32")


def test_the_values_are_quantiles_of_the_normal_distribution() -> None:
    """As QLoRA makes them: eight above zero, zero, and seven below it, from the same probability."""
    quantile = NormalDist().inv_cdf
    outermost = 0.9677083
    above = [quantile(p) for p in np.linspace(outermost, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(outermost, 0.5, 8)[:-1]]
    values = np.sort([*below, 0.0, *above]) / max(above)
    assert np.abs(values - TABLE).max() < 1e-6


@pytest.mark.parametrize("scale", [1.0, 0.03125, 6.5, 1e-30])
def test_every_value_of_the_table_comes_back_exactly(scale: float) -> None:
    block = np.tile(TABLE, BLOCK // 16) * np.float32(scale)
    found = dequantize(quantize(block[None]))
    assert (found == block).all()
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 7), (3, 5), (1, 64), (5, 13), (7, 33), (4, 96), (129, 65)]
)
def test_every_element_becomes_the_nearest_value_of_its_block(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    quantized = quantize(weight)
    assert quantized.codes.shape == (-(-weight.size // 2),)
    assert quantized.scales.shape == (-(-weight.size // BLOCK),)
    flat = weight.ravel()
    found = dequantize(quantized)
    assert found.shape == shape
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK].astype(float)
        choices = np.abs(block).max() * TABLE.astype(float)
        nearest = choices[np.abs(block[:, None] - choices).argmin(axis=1)]
        assert found.ravel()[start : start + BLOCK] == pytest.approx(nearest, rel=1e-6)


def test_halfway_between_two_values_it_is_the_lower_one() -> None:
    between = (TABLE[1:] + TABLE[:-1]) / 2
    found = dequantize(quantize(np.append(between, np.float32(1))[None]))
    assert (found[0, :-1] == TABLE[:-1]).all()


def test_a_block_of_zeros_stays_zero() -> None:
    weight = np.zeros((3, BLOCK), "float32")
    weight[1] = normal(BLOCK)
    found = dequantize(quantize(weight))
    assert (found[[0, 2]] == 0).all()
    assert (found[1] != 0).any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300])
def test_a_value_that_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(InputError, match="weight has elements that are infinite or not a number"):
        quantize(np.array([[1, wrong]]))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 5)])
def test_a_value_that_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"weight of shape .* is not a matrix"):
        quantize(np.ones(shape))


@pytest.mark.parametrize(
    "wrong",
    ["x", [[1], [2, 3]], object(), 10**400, np.full((2, 2), 1 + 2j), np.ones((2, 2), "complex64")],
    ids=["text", "ragged", "object", "huge", "complex", "real parts"],
)
def test_what_float32_cannot_hold_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="weight cannot be read as float32"):
        quantize(wrong)


def test_a_matrix_on_a_device_has_to_come_to_the_host_first(open_device: Callable[..., Gpu]) -> None:
    quantized = quantize(normal(3, 5))
    there = quantized.on(open_device("emulator"))
    for name in ("codes", "scales"):
        moved = quantized._replace(**{name: getattr(there, name)})
        with pytest.raises(InputError, match=f"{name} is Array, not a NumPy array") as caught:
            dequantize(moved)
        assert f"copy it to the host first: {name}.numpy()" in str(caught.value.hint)
    with pytest.raises(InputError, match="quantized is ndarray, not an Nf4"):
        dequantize(normal(3, 5))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [5, (15,), (3, 5, 1), (-3, -5), (3, 5.0), "ab", None])
def test_a_shape_that_is_no_matrix_is_refused(shape: Any) -> None:
    with pytest.raises(InputError, match=r"shape .* is not the shape of a matrix"):
        quantize(normal(3, 5))._replace(shape=shape).check()


@pytest.mark.parametrize("which", ["codes", "scales"])
def test_codes_and_scales_must_belong_to_the_shape(which: str) -> None:
    quantized = quantize(normal(7, 33))
    for wrong in (getattr(quantized, which)[:-1], getattr(quantized, which).astype("int32")):
        with pytest.raises(InputError, match=rf"{which} of a \(7, 33\) matrix are"):
            dequantize(quantized._replace(**{which: wrong}))


# On a device


def rounded(values: Any, dtype: str) -> Any:
    """Return the values from which an array is made; bfloat16, which NumPy lacks, is rounded here."""
    return values.astype("float16") if dtype == "float16" else values


def check(gpu: Gpu, gc: Operand, quantized: Nf4, dtype: str, tile: int | None = None) -> None:
    """Compare a product with the dequantised matrix in float64."""
    (m, n) = gc.exact.shape
    (k, _) = quantized.shape
    codes, scales, _ = quantized.on(gpu)
    ga, whole = framed(gpu, (m, k), dtype)
    op = gemm.gemm_backward_a_nf4(m, n, k, dtype, tile=tile)
    op.launch(gpu, gc.array, codes, scales, ga, m, n, k, False)
    there = exact(gpu.array(rounded(dequantize(quantized), dtype), dtype))
    product_agrees("gemm_backward_a", exact(ga), gc.exact, there, dtype)
    assert np.isnan(exact(whole)).sum() == whole.size - ga.size, "it wrote beyond the result"


@pytest.mark.parametrize("tile", gemm.tiles("float32"))
def test_the_product_dequantises_blocks_that_end_anywhere(
    device: Gpu, random: Random, tile: int
) -> None:
    for m, n, k in ((1, 1, 1), (7, 33, 65), (33, 7, 31), (5, 129, 3), (9, 64, 20), (3, 66, 5)):
        check(device, random(m, n), quantize(normal(k, n)), "float32", tile)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_shorter_types_take_it_too(device: Gpu, random: Random, dtype: str) -> None:
    check(device, random(33, 70, dtype=dtype), quantize(normal(21, 70)), dtype)


@pytest.mark.parametrize("shape", [(3, 5), (5, 13), (7, 33), (4, 96), (70, 65)])
def test_times_one_it_is_what_the_bytes_say(device: Gpu, shape: tuple[int, int]) -> None:
    """Random codes and scales, read here element by element."""
    rng = np.random.default_rng(5)
    size = shape[0] * shape[1]
    codes = rng.integers(0, 256, -(-size // 2), dtype="uint8")
    scales = rng.standard_normal(-(-size // 64), dtype="float32")
    there = Nf4(device.array(codes), device.array(scales), shape)
    found = Ops(device).gemm_backward_a(device.array(np.eye(shape[1], dtype="float32")), there).numpy()
    for row, column in np.ndindex(*shape):
        at = row * shape[1] + column
        code = int(f"{codes[at // 2]:02x}"[at % 2], 16)
        assert found[column, row] == np.float32(VALUES[code]) * scales[at // 64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [37, 72])
def test_it_is_the_product_with_the_dequantised_matrix_bit_for_bit(
    device: Gpu, random: Random, dtype: str, n: int
) -> None:
    """The matrix is rounded to the type of the product."""
    ops = Ops(device, blas=False)
    gc = random(9, n, dtype=dtype)
    quantized = quantize(normal(20, n))
    found = ops.gemm_backward_a(gc.array, quantized.on(device))
    b = device.array(rounded(dequantize(quantized), dtype), dtype)
    assert same_bits(found, ops.gemm_backward_a(gc.array, b))


def test_without_tensor_cores_it_is_rounded_alike(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator", arch="sm_75")
    quantized = quantize(normal(20, 37))
    gc = gpu.array(normal(9, 37, seed=2), "bfloat16")
    check(gpu, Operand(gc, exact(gc)), quantized, "bfloat16")


def test_it_adds_to_the_previous_values(ops: Ops, device: Gpu, random: Random) -> None:
    gc = random(9, 37)
    old = random(9, 20)
    quantized = quantize(normal(20, 37))
    found = ops.gemm_backward_a(gc.array, quantized.on(device), out=old.array, accumulate=True)
    there = dequantize(quantized).astype(float)
    product_agrees("gemm_backward_a", exact(found), gc.exact, there, "float32", old=old.exact)


def test_codes_of_another_shape_are_refused_before_the_launch(
    ops: Ops, device: Gpu, random: Random
) -> None:
    quantized = quantize(normal(20, 37)).on(device)
    with pytest.raises(InputError, match=r"b\[k, n\] has n=37, where the other matrix has n=36"):
        ops.gemm_backward_a(random(9, 36).array, quantized)
    with pytest.raises(InputError, match=r"codes of a \(20, 38\) matrix are uint8 of shape \(380,\)"):
        ops.gemm_backward_a(random(9, 38).array, quantized._replace(shape=(20, 38)))


def test_codes_and_scales_with_gaps_are_refused(open_device: Callable[..., Gpu]) -> None:
    ops = Ops(open_device("emulator"))
    quantized = quantize(normal(8, 40))
    gc = normal(3, 40)
    for name in ("codes", "scales"):
        wrong: Any
        for wrong, why in (
            (np.repeat(getattr(quantized, name), 2)[::2], "is not contiguous"),
            ([1, 2], "is list, not an array"),
        ):
            with pytest.raises(InputError, match=f"{name} {why}"):
                ops.gemm_backward_a(gc, quantized._replace(**{name: wrong}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes_agree_with_float64(open_device: Callable[..., Gpu], dtype: str) -> None:
    gpu = open_device("cuda")
    rng = np.random.default_rng(2)
    host = rng.standard_normal((1000, 4096), dtype=np.float32)
    array = gpu.array(host.astype("float16") if dtype == "float16" else host, dtype)
    check(gpu, Operand(array, exact(array)), quantize(normal(2048, 4096)), dtype)
