"""SiLU and SwiGLU, forward and backward: `gx = gy s (1 + x - x s)` with `s = 1 / (1 + exp(-x))`."""

from __future__ import annotations

from pathlib import Path

from preheat.kernels.op import BLOCKS, Op, cpp_of, dimension, remembered
from preheat.kernels.rows import chunk_of

__all__ = ["MOST", "silu", "silu_backward", "swiglu", "swiglu_backward"]

_SOURCE = Path(__file__).with_name("elementwise.cu")
_BLOCK = 128  # threads, as in elementwise.cu; each has a chunk of every operand

#: Elements of one launch: chunks of floats have the fewest, four.
MOST = BLOCKS * _BLOCK * 4


@remembered
def silu(n: int, dtype: object) -> Op:
    """Arguments: x, y, n."""
    return _op("silu", n, dtype)


@remembered
def silu_backward(n: int, dtype: object) -> Op:
    """Arguments: gy, x, gx, n."""
    return _op("silu_backward", n, dtype)


@remembered
def swiglu(n: int, dtype: object) -> Op:
    """Arguments: gate, up, y, n; y is silu(gate) up."""
    return _op("swiglu", n, dtype)


@remembered
def swiglu_backward(n: int, dtype: object) -> Op:
    """Arguments: gy, gate, up, g_gate, g_up, n."""
    return _op("swiglu_backward", n, dtype)


def _op(name: str, n: int, dtype: object) -> Op:
    n, (element, cpp) = dimension("n", n, MOST), cpp_of(dtype)
    blocks = -(-n // (_BLOCK * chunk_of(element)))
    return Op(name, (("n", n),), _SOURCE, f"{name}<{cpp}>", (blocks,), (_BLOCK,))
