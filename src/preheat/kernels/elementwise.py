"""SiLU and SwiGLU, forward and backward: `gx = gy s (1 + x - x s)` with `s = 1 / (1 + exp(-x))`."""

from __future__ import annotations

from pathlib import Path

from preheat.kernels.op import MAX_BLOCKS, Op, cpp_of, dimension, memoize
from preheat.kernels.rows import chunk_size

__all__ = ["MAX_ELEMENTS", "silu", "silu_backward", "swiglu", "swiglu_backward"]

_SOURCE = Path(__file__).with_name("elementwise.cu")
_BLOCK = 128  # Threads, as in elementwise.cu. Each processes one chunk of every operand.

#: The most elements of one launch, with four elements per thread as in chunks of floats.
MAX_ELEMENTS = MAX_BLOCKS * _BLOCK * 4


@memoize
def silu(n: int, dtype: object) -> Op:
    """Kernel arguments: x, y, n."""
    return _op("silu", n, dtype)


@memoize
def silu_backward(n: int, dtype: object) -> Op:
    """Kernel arguments: gy, x, gx, n."""
    return _op("silu_backward", n, dtype)


@memoize
def swiglu(n: int, dtype: object) -> Op:
    """y = silu(gate) up. Kernel arguments: gate, up, y, n."""
    return _op("swiglu", n, dtype)


@memoize
def swiglu_backward(n: int, dtype: object) -> Op:
    """Kernel arguments: gy, gate, up, g_gate, g_up, n."""
    return _op("swiglu_backward", n, dtype)


def _op(name: str, n: int, dtype: object) -> Op:
    n = dimension("n", n, MAX_ELEMENTS)
    element, cpp = cpp_of(dtype)
    blocks = -(-n // (_BLOCK * chunk_size(element)))
    return Op(name, (("n", n),), _SOURCE, f"{name}<{cpp}>", (blocks,), (_BLOCK,))
