"""A case of the corpus: a kernel, its launch, and the expected results."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Dim = int | tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """An argument that the kernel writes: its content before the launch, and the expected content."""

    before: Array
    expected: Array
    dtype: str  # what the device calls it; bfloat16 travels as the bits of uint16


@dataclass(frozen=True)
class Brain:
    """An argument of type bfloat16, as bits."""

    bits: NDArray[np.uint16]


@dataclass(frozen=True)
class Launch:
    """One launch: plain arrays are read, `Result`s are written, numbers and bytes go by value."""

    grid: Dim
    block: Dim
    args: tuple[Any, ...]
    shared: int = 0
    symbols: Mapping[str, Array | Result] = field(default_factory=dict)  # variables of the module


@dataclass(frozen=True)
class Case:
    """A kernel and how to check it: floats within `rtol * |expected| + atol`, integers exactly."""

    name: str
    source: str
    entry: str
    prepare: Callable[[Generator, int], Launch]
    sizes: Sequence[int]
    rtol: float
    atol: float
    options: Sequence[str]


def kernel(
    source: str,
    *,
    sizes: Sequence[int],
    entry: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    options: Sequence[str] = (),
) -> Callable[[Callable[[Generator, int], Launch]], Case]:
    """Make a case of `source` and the decorated function, which prepares a launch for one size."""

    def wrap(prepare: Callable[[Generator, int], Launch]) -> Case:
        name = prepare.__name__
        return Case(name, textwrap.dedent(source), entry or name, prepare, sizes, rtol, atol, options)

    return wrap


def writes(expected: Any, dtype: DTypeLike | None = None) -> Result:
    """Return an output that holds wrong values first: NaN, or the complement of an integer."""
    expected = np.asarray(expected)
    if dtype == "bfloat16":
        return Result(np.full(expected.shape, 0x7FFF, np.uint16), expected, "bfloat16")
    kind = np.dtype(dtype if dtype is not None else expected.dtype)
    before = np.full(expected.shape, np.nan, kind) if kind.kind == "f" else ~expected.astype(kind)
    return Result(before, expected, kind.name)


def updates(before: Array, expected: Any) -> Result:
    """Return an argument that is read and written in place."""
    return Result(before, np.asarray(expected), before.dtype.name)


def brain(values: Array) -> Brain:
    """Floats rounded to bfloat16, to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return Brain(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def unbrain(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Return the values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def wide(values: Array) -> NDArray[np.float64]:
    """Return the same values in float64, where references are computed."""
    return values.astype(np.float64)


def normal(rng: Generator, *shape: int) -> NDArray[np.float32]:
    """Normally distributed float32."""
    return rng.standard_normal(shape, dtype=np.float32)


def uniform(rng: Generator, low: float, high: float, *shape: int) -> NDArray[np.float32]:
    """Uniformly distributed float32."""
    return rng.uniform(low, high, shape).astype(np.float32)


def words(rng: Generator, shape: Dim, dtype: DTypeLike = np.int32) -> Array:
    """Integers from the whole range of their type."""
    limits = np.iinfo(np.dtype(dtype))
    return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def below(rng: Generator, low: int, high: int, *shape: int) -> NDArray[np.int32]:
    """int32 from `low` up to and not including `high`."""
    return rng.integers(low, high, shape, dtype=np.int32)


def blocks(n: int, per_block: int) -> int:
    """Return the number of blocks that cover `n`."""
    return -(-n // per_block)
