"""SiLU and SwiGLU, forward and backward: `gx = gy s (1 + x - x s)` with `s = 1 / (1 + exp(-x))`."""

from __future__ import annotations

from pathlib import Path

from preheat.kernels.op import Op, cpp_of, dimension
from preheat.kernels.rows import COMMON, chunk_of

__all__ = ["silu", "silu_backward", "swiglu", "swiglu_backward"]

_SOURCE = Path(__file__).with_name("elementwise.cu")
_BLOCK, _CHUNKS = 256, 2  # as in elementwise.cu
_MOST = 2**40  # elements; they make fewer blocks than a grid can have


def silu(n: int, dtype: object) -> Op:
    """Arguments: x, y, n."""
    return _op("silu", n, dtype)


def silu_backward(n: int, dtype: object) -> Op:
    """Arguments: gy, x, gx, n."""
    return _op("silu_backward", n, dtype)


def swiglu(n: int, dtype: object) -> Op:
    """Arguments: gate, up, y, n; y is silu(gate) up."""
    return _op("swiglu", n, dtype)


def swiglu_backward(n: int, dtype: object) -> Op:
    """Arguments: gy, gate, up, g_gate, g_up, n."""
    return _op("swiglu_backward", n, dtype)


def _op(name: str, n: int, dtype: object) -> Op:
    n, (element, cpp) = dimension("n", n, _MOST), cpp_of(dtype)
    blocks = -(-n // (_BLOCK * _CHUNKS * chunk_of(element)))
    return Op(name, (("n", n),), _SOURCE, f"{name}<{cpp}>", (blocks,), (_BLOCK,), shares=COMMON)
