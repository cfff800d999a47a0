"""Kernels like those of Triton's tutorials agree with NumPy on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from tests.adapters.triton import tutorial_kernels as kernels
from tests.adapters.triton.compiled import Launcher
from tests.adapters.triton.numbers import blocks, philox, uniform, unwritten

SIZES = (1, 31, 33, 128, 1009)
SHAPES = ((1, 1), (3, 31), (7, 33), (2, 128), (5, 211))

every_arch = pytest.mark.parametrize("launch", [80, 90, 100], indirect=True, ids="sm_{}".format)


@every_arch
@pytest.mark.parametrize("n", SIZES)
def test_add(launch: Launcher, rng: np.random.Generator, n: int) -> None:
    x, y = rng.standard_normal((2, n)).astype("f4")
    out = unwritten(n)
    launch(kernels.add, "*fp32 *fp32 *fp32 i32", blocks(n, 128), x, y, out, n, block=128)
    np.testing.assert_array_equal(out, x + y)


@pytest.mark.parametrize("n", SIZES)
def test_add_in_a_dependent_launch(launch: Launcher, rng: np.random.Generator, n: int) -> None:
    x, y = rng.standard_normal((2, n)).astype("f4")
    out = unwritten(n)
    launch(kernels.add_dependent, "*fp32 *fp32 *fp32 i32", blocks(n, 128), x, y, out, n, block=128)
    np.testing.assert_array_equal(out, x + y)


@every_arch
@pytest.mark.parametrize("n", SIZES)
def test_add_of_arrays_that_are_not_aligned(launch: Launcher, rng: np.random.Generator, n: int) -> None:
    x, y = rng.standard_normal((2, n + 3)).astype("f4")
    out = unwritten(n + 1)
    types = "*fp32 *fp32 *fp32 i64"
    launch(kernels.add, types, blocks(n, 256), x[3:], y[2:-1], out[1:], n, block=256, aligned=False)
    np.testing.assert_array_equal(out[1:], x[3:] + y[2:-1])


@every_arch
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_softmax(
    launch: Launcher, rng: np.random.Generator, rows: int, columns: int, stages: int
) -> None:
    x = (4 * rng.standard_normal((rows, columns))).astype("f4")
    out = unwritten(x.shape)
    types = "*fp32 *fp32 i32 i32"
    launch(kernels.softmax, types, 2, x, out, rows, columns, block=256, stages=stages)
    powers = np.exp(x.astype("f8") - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, powers / powers.sum(1, keepdims=True), rtol=4e-6, atol=1e-12)


@every_arch
@pytest.mark.parametrize("n", SIZES)
def test_dropout(launch: Launcher, rng: np.random.Generator, n: int) -> None:
    x, keep = rng.standard_normal(n).astype("f4"), rng.random(n) > 0.4
    out = unwritten(n)
    types = "*fp32 *i1 *fp32 i32 fp32"
    launch(kernels.dropout, types, blocks(n, 128), x, keep, out, n, 0.4, block=128)
    np.testing.assert_allclose(out, np.where(keep, x / 0.6, 0), rtol=4e-7)


@every_arch
@pytest.mark.parametrize("seed", [0, 123, 2**31 - 1])
@pytest.mark.parametrize("n", SIZES)
def test_seeded_dropout(launch: Launcher, rng: np.random.Generator, n: int, seed: int) -> None:
    x = rng.standard_normal(n).astype("f4")
    out = unwritten(n)
    types = "*fp32 *fp32 i32 fp32 i32"
    launch(kernels.seeded_dropout, types, blocks(n, 256), x, out, n, 0.5, seed, block=256)
    kept = uniform(philox(seed, np.arange(n))[0]) > 0.5
    np.testing.assert_array_equal(out, np.where(kept, x * 2, 0))


@every_arch
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_layer_norm(launch: Launcher, rng: np.random.Generator, rows: int, columns: int) -> None:
    x = (rng.standard_normal((rows, columns)) - 2.3).astype("f2")
    weight, bias = rng.random((2, columns)).astype("f4")
    out, mean, inverse = unwritten(x.shape, "f2"), unwritten(rows), unwritten(rows)
    types = "*fp16 *fp32 *fp32 *fp16 *fp32 *fp32 i32 fp32"
    launch(
        kernels.layer_norm, types, rows, x, weight, bias, out, mean, inverse, columns, 1e-5, block=128
    )
    exact = x.astype("f8")
    expected_mean = exact.mean(1)
    expected_inverse = 1 / np.sqrt(exact.var(1) + 1e-5)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-5)
    np.testing.assert_allclose(inverse, expected_inverse, rtol=1e-5)
    normal = (exact - expected_mean[:, None]) * expected_inverse[:, None]
    np.testing.assert_allclose(out, normal * weight + bias, rtol=1e-3, atol=1e-3)


@every_arch
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_layer_norm_backward(
    launch: Launcher, rng: np.random.Generator, rows: int, columns: int
) -> None:
    """The rows of a group add to the same sums, so that programs wait for each other's lock."""
    groups = 2
    x, dy = rng.standard_normal((2, rows, columns)).astype("f4")
    weight = rng.random(columns).astype("f4")
    exact = x.astype("f8")
    mean, inverse = exact.mean(1), 1 / np.sqrt(exact.var(1) + 1e-5)
    dx = unwritten(x.shape)
    parts = np.zeros((2, groups, columns), "f4")
    locks = np.zeros(2 * groups, "i4")
    launch(
        kernels.layer_norm_backward,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *i32 i32",
        rows,
        *(dx, dy, *parts, x, weight, mean.astype("f4"), inverse.astype("f4"), locks, columns),
        groups=groups,
        block=256,
        aligned=False,
    )
    normal = (exact - mean[:, None]) * inverse[:, None]
    scaled = dy.astype("f8") * weight
    along = (normal * scaled).mean(1, keepdims=True)
    expected = (scaled - normal * along - scaled.mean(1, keepdims=True)) * inverse[:, None]
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-5)
    assert locks[:groups].tolist() == [0] * groups
    for part, total in zip(parts, ((dy * normal).sum(0), dy.sum(0, "f8")), strict=True):
        out = unwritten(columns)
        tile: dict[str, Any] = {"tall": 32, "wide": 32, "aligned": False}
        grid, types = blocks(columns, 32), "*fp32 *fp32 i32 i32"
        launch(kernels.sum_of_groups, types, grid, part, out, groups, columns, **tile)
        np.testing.assert_allclose(out, total, rtol=1e-4, atol=1e-5)


@every_arch
@pytest.mark.parametrize("rows", [1, 31, 67])
def test_sum_of_groups(launch: Launcher, rng: np.random.Generator, rows: int) -> None:
    x = rng.standard_normal((rows, 77)).astype("f4")
    out = unwritten(77)
    types = "*fp32 *fp32 i32 i32"
    launch(kernels.sum_of_groups, types, 3, x, out, rows, 77, tall=32, wide=32)
    np.testing.assert_allclose(out, x.sum(0, "f8"), rtol=1e-5, atol=1e-5)


@every_arch
@pytest.mark.parametrize("rows", [1, 31, 33, 67])
def test_row_products(launch: Launcher, rng: np.random.Generator, rows: int) -> None:
    a, b = rng.standard_normal((2, 3, rows, 64)).astype("f2")
    out = unwritten((3, rows))
    types = "*fp16 *fp16 *fp32 i32"
    launch(kernels.row_products, types, (blocks(rows, 32), 3), a, b, out, rows, width=64, block=32)
    np.testing.assert_allclose(out, (a.astype("f8") * b).sum(-1), rtol=1e-5, atol=1e-4)


@every_arch
@pytest.mark.parametrize("kind", ["fp32", "fp64"])
@pytest.mark.parametrize("n", SIZES)
def test_arcsine(launch: Launcher, rng: np.random.Generator, n: int, kind: str) -> None:
    x = rng.uniform(-1, 1, n).astype(kind.replace("fp32", "f4").replace("fp64", "f8"))
    x[: n // 8] = 1
    x[-1] = -1
    out = unwritten(n, x.dtype)
    launch(kernels.arcsine, f"*{kind} *{kind} i32", blocks(n, 128), x, out, n, block=128)
    tolerance = {"fp32": 1e-6, "fp64": 1e-15}[kind]
    np.testing.assert_allclose(out, np.arcsin(x.astype("f8")), rtol=tolerance, atol=tolerance)
