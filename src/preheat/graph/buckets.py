"""Buckets: a few sizes that batches are padded to, so that a few graphs serve every batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from preheat.devices.array import Array
from preheat.devices.host import element_bytes, host_array, integer
from preheat.errors import InputError
from preheat.model.dtypes import dtype_of
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

__all__ = ["bucket", "buckets", "padded"]

_SMALL = (1, 2, 4, 8)  # sizes for which padding to the next step would cost the most


def buckets(limit: int, step: int = 8) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, then the multiples of `step` after 8, and `limit` as the last.

    Examples:
        >>> preheat.buckets(20, step=8)
        (1, 2, 4, 8, 16, 20)
    """
    limit = integer(limit, "a limit")
    step = integer(step, "a step")
    if limit < 1 or step < 1:
        raise InputError(f"there are no buckets up to {limit} in steps of {step}", hint="use 1 or more")
    steps = range(_SMALL[-1] // step * step + step, limit, step)
    return (*(size for size in _SMALL if size < limit), *steps, limit)


def bucket(n: int, sizes: Iterable[int]) -> int:
    """Return the smallest of `sizes` that is at least `n`.

    Raises:
        InputError: All sizes are smaller.

    Examples:
        >>> preheat.bucket(5, [1, 2, 4, 8])
        8
    """
    n = integer(n, "a number of rows")
    if n < 0:
        raise InputError(f"no bucket holds {n}: it is negative")
    if not isinstance(sizes, Iterable):
        raise InputError(f"{sizes!r} is not a collection of sizes", hint=f"buckets({sizes!r})")
    numbers = [integer(size, "a size") for size in sizes]
    fits = [size for size in numbers if size >= n]
    if not fits:
        shown = ", ".join(map(str, sorted(numbers)[-4:])) or "none"
        raise InputError(f"no bucket holds {n}; the largest are: {shown}", hint="buckets(limit)")
    return min(fits)


def padded(array: Any, size: int, fill: complex = 0) -> np.ndarray[Any, Any]:
    """Return a host array, padded with rows of `fill` to `size` rows if it has fewer.

    Args:
        array: An array on the host.
        size: The number of rows of the result.
        fill: The value of the rows that are added.

    Raises:
        InputError: The array has more rows.

    Examples:
        >>> preheat.padded(np.array([1, 2, 3]), 5)
        array([1, 2, 3, 0, 0])
    """
    host = _on_host(array)
    size = integer(size, "a number of rows")
    if not host.ndim or len(host) > size:
        raise InputError(f"an array of shape {host.shape} cannot be padded to {size} rows")
    if len(host) == size:
        return host
    out = np.empty((size, *host.shape[1:]), host.dtype)
    out[: len(host)] = host
    out[len(host) :] = _element(fill, host.dtype)
    return out


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, Array) or hasattr(array, "__cuda_array_interface__"):
        hint = "pad the rows on the host, then write them: x.write(padded(rows, size))"
        raise InputError(f"{type(array).__name__} on a device cannot be padded", hint=hint)
    return array if isinstance(array, np.ndarray) else host_array(array, None)


def _element(fill: Any, dtype: np.dtype[Any]) -> Any:
    """Return `fill` as an element of `dtype`; `InputError` if it does not fit."""
    if dtype.kind in "biuf":
        kind = dtype_of(dtype.newbyteorder("="))
        return np.frombuffer(element_bytes(fill, kind), kind.numpy())[0]
    try:
        return np.full((), fill, dtype)[()]
    except (TypeError, ValueError) as bad:
        raise InputError(f"{fill!r} does not fit {dtype}: {bad}") from None
