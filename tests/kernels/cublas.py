"""A cuBLAS for the emulator, which records how it is called and returns correct results."""

from __future__ import annotations

import ctypes
import enum
import itertools
from typing import Any

import numpy as np

__all__ = ["Cublas"]


class Cublas:
    """The bindings of cuBLAS, which compute at once in the emulator's memory, as the manual says."""

    class cuBLASError(Exception):  # noqa: N801
        pass

    Operation = enum.IntEnum("Operation", {"N": 0, "T": 1})
    Math = enum.IntEnum(
        "Math",
        {
            "DEFAULT_MATH": 0,
            "PEDANTIC_MATH": 2,
            "TF32_TENSOR_OP_MATH": 3,
            "DISALLOW_REDUCED_PRECISION_REDUCTION": 16,
        },
    )
    ComputeType = enum.IntEnum(
        "ComputeType",
        {"COMPUTE_32F": 68, "COMPUTE_32F_PEDANTIC": 69, "COMPUTE_32F_FAST_TF32": 77},
    )

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: str | None = None
        self._handles = itertools.count(1000)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of every call of one function."""
        return [call[1:] for call in self.calls if call[0] == name]

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise self.cuBLASError("INVALID_VALUE (7)")

    def create(self) -> int:
        handle = next(self._handles)
        self._called("create", handle)
        return handle

    def destroy(self, handle: int) -> None:
        self._called("destroy", handle)

    def set_stream(self, handle: int, stream: int) -> None:
        self._called("set_stream", handle, stream)

    def set_workspace(self, handle: int, address: int, size: int) -> None:
        self._called("set_workspace", handle, address, size)

    def set_math_mode(self, handle: int, mode: int) -> None:
        self._called("set_math_mode", handle, mode)

    def gemm_ex(self, handle: int, *given: Any) -> None:
        transa, transb, m, n, k, alpha, a, atype, lda, b, btype, ldb, beta, c, ctype, ldc, *how = given
        self._called("gemm_ex", handle, atype, *how)
        assert atype == btype == ctype
        left = columns(a, (k, m) if transa else (m, k), lda, atype)
        right = columns(b, (n, k) if transb else (k, n), ldb, btype)
        result = columns(c, (m, n), ldc, ctype)
        product = (left.T if transa else left).astype(float) @ (right.T if transb else right).astype(
            float
        )
        old = ctypes.c_float.from_address(beta).value
        result[:] = ctypes.c_float.from_address(alpha).value * product + (old * result if old else 0)


def columns(address: int, shape: tuple[int, int], stride: int, kind: int) -> Any:
    """Return a column-major matrix in memory."""
    assert stride >= shape[0]
    dtype = np.dtype({0: "float32", 2: "float16"}[kind])
    size = ((shape[1] - 1) * stride + shape[0]) * dtype.itemsize
    flat = np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, (dtype.itemsize, stride * dtype.itemsize))
