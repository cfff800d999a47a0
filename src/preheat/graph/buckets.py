"""Buckets: a few sizes that batches are padded to, so that a few graphs serve every batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from preheat.errors import InputError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["bucket", "buckets", "padded"]

_SMALL = (1, 2, 4, 8)  # where padding to the next step would cost the most


def buckets(limit: int, step: int = 8) -> tuple[int, ...]:
    """1, 2, 4, 8, then the multiples of `step` after 8, ending in `limit` whatever it is."""
    if limit < 1 or step < 1:
        raise InputError(f"there are no buckets up to {limit} in steps of {step}", hint="use 1 or more")
    steps = range(_SMALL[-1] // step * step + step, limit, step)
    return (*(size for size in _SMALL if size < limit), *steps, limit)


def bucket(n: int, sizes: Iterable[int]) -> int:
    """The smallest of `sizes` that holds `n`."""
    known = tuple(sizes)
    fits = [size for size in known if size >= n >= 0]
    if not fits:
        shown = ", ".join(map(str, sorted(known)[-4:])) or "none"
        raise InputError(f"no bucket holds {n}; the largest are: {shown}", hint="buckets(limit)")
    return min(fits)


def padded(array: Any, size: int, fill: complex = 0) -> np.ndarray[Any, Any]:
    """A host array with its first axis brought to `size` by rows of `fill`; itself where it is so."""
    import numpy

    host = numpy.asarray(array)
    if not host.ndim or len(host) > size:
        raise InputError(f"an array of shape {host.shape} cannot be padded to {size} rows")
    if len(host) == size:
        return host
    out = numpy.full((size, *host.shape[1:]), fill, host.dtype)
    out[: len(host)] = host
    return out
