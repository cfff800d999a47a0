"""A kernel of Triton, in a module of its own, so that a bake can import it without the server."""

import triton
import triton.language as tl


@triton.jit
def scale(x, out, n, alpha, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) * alpha, mask=mask)
