"""A server that launches a kernel of Triton for requests of several sizes.

It does not import preheat. The commands in run.sh record it, bake its kernels, and start it sealed.
"""

import sys

import torch

from kernels import scale

BLOCK = 1024


def serve(n: int) -> None:
    """Answer a request of `n` values."""
    x, out = (torch.empty(n, dtype=torch.float32, device="cuda") for _ in range(2))
    scale[((n + BLOCK - 1) // BLOCK,)](x, out, n, 2.0, BLOCK=BLOCK)


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:]] or [4096]
    for size in sizes:
        serve(size)
    print("served", *sizes)
