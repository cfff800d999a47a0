"""Helpers for the tests of pools."""

from __future__ import annotations

from preheat.devices.array import Array
from preheat.graph.pool import Pool
from tests.graph.support import AxpyCase

KIB = 1024


def bytes_of(pool: Pool, n: int) -> Array:
    """Return a piece of `n` bytes."""
    return pool.empty(n, "uint8")


def add(job: AxpyCase, into: Array, a: int = 3) -> None:
    """`into += a * x`."""
    job.axpy[-(-job.n // 64), 64](a, job.x, into, job.n)


def fail(pool: Pool) -> None:
    """Take something, use it, and raise."""
    pool.zeros(1009, "int32")
    raise ZeroDivisionError
