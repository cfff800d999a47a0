"""Kernels in Gluon, with a layout of their own and one that the caller chooses."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def scale(x_ptr, o_ptr, n, alpha, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = at < n
    gl.store(o_ptr + at, gl.load(x_ptr + at, mask=mask) * alpha, mask=mask)


@gluon.jit
def shift(x_ptr, o_ptr, n, BLOCK: gl.constexpr, layout: gl.constexpr):
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = at < n
    gl.store(o_ptr + at, gl.load(x_ptr + at, mask=mask) + 1.0, mask=mask)
