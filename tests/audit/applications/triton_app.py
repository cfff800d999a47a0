"""One Triton kernel in two variants."""

import torch
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) * factor, mask=mask)


x = torch.arange(1024, device="cuda", dtype=torch.float32)
for block in (256, 512):
    out = torch.empty_like(x)
    scale[(1024 // block,)](x, out, 1024, 2.0, BLOCK=block)
    assert torch.equal(out, 2 * x)
print("right")
