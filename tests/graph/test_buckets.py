"""Buckets: a few sizes that cover every batch size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from preheat import InputError, bucket, buckets, padded
from preheat.gpu import Gpu
from tests.devices.support import import_or_skip
from tests.graph.support import axpy_case


@pytest.mark.parametrize(
    ("limit", "step", "sizes"),
    [
        (1, 8, (1,)),
        (2, 8, (1, 2)),
        (3, 8, (1, 2, 3)),
        (8, 8, (1, 2, 4, 8)),
        (9, 8, (1, 2, 4, 8, 9)),
        (33, 8, (1, 2, 4, 8, 16, 24, 32, 33)),
        (40, 8, (1, 2, 4, 8, 16, 24, 32, 40)),
        (40, 16, (1, 2, 4, 8, 16, 32, 40)),
        (17, 3, (1, 2, 4, 8, 9, 12, 15, 17)),
        (10, 1, (1, 2, 4, 8, 9, 10)),
        (31, 100, (1, 2, 4, 8, 31)),
    ],
)
def test_sizes_double_to_eight_then_go_in_steps_and_end_in_the_limit(
    limit: int, step: int, sizes: tuple[int, ...]
) -> None:
    assert buckets(limit, step) == sizes


def test_the_step_is_eight_by_default() -> None:
    assert buckets(257) == (1, 2, 4, *range(8, 257, 8), 257)


@pytest.mark.parametrize(("limit", "step"), [(0, 8), (-3, 8), (8, 0), (8, -1)])
def test_buckets_of_nothing_are_refused(limit: int, step: int) -> None:
    with pytest.raises(InputError, match=f"up to {limit} in steps of {step}"):
        buckets(limit, step)


def test_a_bucket_is_the_smallest_that_holds_so_many() -> None:
    sizes = buckets(33)
    for n in range(34):
        found = bucket(n, sizes)
        assert found >= n
        assert not any(n <= size < found for size in sizes)


def test_sizes_may_come_in_any_order() -> None:
    assert bucket(3, iter([16, 4, 8])) == 4


def test_a_size_that_no_bucket_holds_is_refused_with_the_largest_size() -> None:
    with pytest.raises(InputError, match="no bucket holds 34; the largest are: 16, 24, 32, 33"):
        bucket(34, buckets(33))


def test_a_negative_number_of_rows_is_called_so() -> None:
    with pytest.raises(InputError, match="no bucket holds -1: it is negative"):
        bucket(-1, buckets(33))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: buckets("8"), "'8' is not a limit"),  # type: ignore[arg-type]
        (lambda: buckets(8, 2.5), "2.5 is not a step"),  # type: ignore[arg-type]
        (lambda: bucket(1.5, (1, 2)), "1.5 is not a number of rows"),  # type: ignore[arg-type]
        (lambda: bucket(1, 8), "8 is not a collection of sizes"),  # type: ignore[arg-type]
        (lambda: bucket(1, (1, None)), "None is not a size"),  # type: ignore[arg-type]
        (lambda: padded([1, 2], "3"), "'3' is not a number of rows"),  # type: ignore[arg-type]
        (lambda: padded([1, [2]], 3), "cannot read list as an array"),
    ],
)
def test_a_value_that_is_no_number_is_called_so(call: Callable[[], object], why: str) -> None:
    with pytest.raises(InputError, match=why):
        call()


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("int32", 1.5), ("int32", 2**31), ("uint8", -1), ("int16", "x"), ("float32", 1j),
        ("bool", [1, 2]), ("float32", None), ("complex64", "x"),
    ],
)  # fmt: skip
def test_a_fill_that_does_not_fit_is_refused(dtype: str, fill: Any) -> None:
    with pytest.raises(InputError, match=f"does not fit {dtype}"):
        padded(np.ones(3, dtype), 5, fill)


@pytest.mark.parametrize(
    ("dtype", "fill"), [(">i4", 258), ("float16", -2.5), ("complex64", 1 + 2j), ("bool", True)]
)
def test_a_fill_that_fits_is_exact(dtype: str, fill: Any) -> None:
    out = padded(np.ones(3, dtype), 5, fill)
    assert out.dtype == np.dtype(dtype)
    assert out.tolist() == [1, 1, 1, fill, fill]


def test_arrays_on_a_device_are_not_padded_on_any(device: Gpu) -> None:
    with pytest.raises(InputError, match="Array on a device cannot be padded") as refused:
        padded(device.zeros(3), 5)
    assert refused.value.hint is not None
    assert "x.write(padded(rows, size))" in refused.value.hint


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_nor_are_those_of_other_libraries(name: str) -> None:
    with pytest.raises(InputError, match="on a device cannot be padded"):
        padded(import_or_skip(name).ones(3, **({"device": "cuda"} if name == "torch" else {})), 5)


def test_without_sizes_there_is_no_bucket() -> None:
    with pytest.raises(InputError, match="no bucket holds 1; the largest are: none"):
        bucket(1, ())


def test_padding_adds_rows_and_keeps_type_and_content() -> None:
    rows = np.random.default_rng(5).integers(-99, 99, (5, 3), dtype=np.int16)
    out = padded(rows, 8, fill=-7)
    assert out.dtype == np.int16
    np.testing.assert_array_equal(out[:5], rows)
    np.testing.assert_array_equal(out[5:], np.full((3, 3), -7))
    assert (padded(rows, 6)[5:] == 0).all()


def test_padding_to_the_same_size_is_the_array_itself() -> None:
    rows = np.arange(1, 9)
    assert padded(rows, 8) is rows


@pytest.mark.parametrize("shape", [(9, 2), ()])
def test_what_cannot_be_padded_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cannot be padded to 8 rows"):
        padded(np.ones(shape), 8)


def test_a_few_graphs_serve_every_batch(device: Gpu) -> None:
    sizes = buckets(17)
    made = axpy_case(device, 17)
    graphs = device.graphs()
    want = made.ys.astype(np.int64)
    for n in (5, 3, 17, 6, 1, 7, 16, 4, 17, 8, 13):
        size = bucket(n, sizes)
        made.x.write(padded(padded(made.xs[:n], size), 17))
        graphs.run(size, partial(made.axpy[1, 32], 2, made.x, made.y, size))
        want[:n] += 2 * made.xs[:n]
    np.testing.assert_array_equal(made.y.numpy(), want)
    assert set(graphs) == {4, 8, 16, 17}  # 1 was seen once
