"""Random operands, and the formats and random numbers that NumPy does not have."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: The dtypes of arrays for the types of Triton. Those that NumPy lacks are arrays of bits.
DTYPES = {
    **{f"i{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"u{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"fp{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "bf16": np.dtype("u2"),
    "fp8e5": np.dtype("u1"),
    "fp8e4nv": np.dtype("u1"),
}

#: The bits of the significand, with the one that is not stored.
PRECISION = {"fp64": 53, "fp32": 24, "fp16": 11, "bf16": 8, "fp8e4nv": 4, "fp8e5": 3}


def blocks(n: int, block: int) -> int:
    """Return the number of blocks for `n` elements."""
    return -(-n // block)


def unwritten(shape: int | tuple[int, ...], dtype: Any = "f4") -> Array:
    """Return an array in which a value that no kernel has written shows."""
    if np.dtype(dtype).kind == "f":
        return np.full(shape, np.nan, dtype)
    return np.full(shape, np.iinfo(dtype).max, dtype)


def to_bits(x: Array, kind: str) -> Array:
    """Return numbers that are exact in `kind` as an array for that type."""
    x = np.asarray(x)
    if kind == "bf16":
        return (x.astype("f4").view("u4") >> 16).astype("u2")
    if kind == "fp8e5":
        return (x.astype("f2").view("u2") >> 8).astype("u1")
    if kind == "fp8e4nv":
        codes = np.arange(256, dtype="u1")
        finite = codes[~np.isnan(to_numbers(codes, kind))]
        values = to_numbers(finite, kind)
        order = np.argsort(values, kind="stable")
        nearest: Array = finite[order][np.searchsorted(values[order], x)]
        return nearest
    return x.astype(DTYPES[kind])


def to_numbers(stored: Array, kind: str) -> Array:
    """Return what an array of a type of Triton contains, in float64."""
    if kind == "bf16":
        return (stored.astype("u4") << 16).view("f4").astype("f8")
    if kind == "fp8e5":
        return (stored.astype("u2") << 8).view("f2").astype("f8")
    if kind == "fp8e4nv":
        exponent, fraction = (stored >> 3 & 15).astype("i4"), (stored & 7).astype("f8")
        size = np.where(
            exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, np.maximum(exponent, 1) - 10)
        )
        size = np.where(stored & 127 == 127, np.nan, size)
        return np.where(stored & 128, -size, size)
    return stored.astype("f8")


def random_values(
    rng: np.random.Generator, kind: str, shape: int | tuple[int, ...], top: int = 1000
) -> Array:
    """Return whole numbers up to `top` of either sign, or normal numbers, for a type of Triton."""
    if kind.startswith("u"):
        return rng.integers(0, top, shape).astype(DTYPES[kind])
    if kind.startswith("i"):
        return rng.integers(-top, top, shape).astype(DTYPES[kind])
    return to_bits(rng.integers(-64, 64, shape) / 16, kind)


def philox(seed: int, offsets: Array, rounds: int = 10) -> tuple[Array, Array, Array, Array]:
    """Return the four words of Philox-4x32 for each offset, as Salmon and others define it."""
    words = [offsets.astype("u8"), *(np.zeros(offsets.shape, "u8") for _ in range(3))]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        first = words[0] * np.uint64(0xD2511F53)
        second = words[2] * np.uint64(0xCD9E8D57)
        words = [
            second >> np.uint64(32) ^ words[1] ^ np.uint64(keys[0]),
            second & low,
            first >> np.uint64(32) ^ words[3] ^ np.uint64(keys[1]),
            first & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    a, b, c, d = (word.astype("u4").view("i4") for word in words)
    return a, b, c, d


def uniform(words: Array) -> Array:
    """Return numbers from 0 to 1 for words of Philox, as Triton makes them."""
    return np.where(words < 0, -words.astype("i8") - 1, words) * 4.6566127342e-10
