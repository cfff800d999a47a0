"""Measure the host cost of calls of `preheat.Ops` on tensors of torch, beside torch.

The tensors are tiny and everything is given to the calls, so that the device is never behind: a time is
that of a call in a burst, with no wait for the device, the best of some rounds in which contenders take
turns.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import preheat
from common import options, report, us

SIDE, CALLS, ROUNDS = 64, 300, 7
TYPE = "bfloat16"

try:
    torch: Any = importlib.import_module("torch")
except ImportError:
    sys.exit("torch is not installed")


def contenders(gpu: preheat.Gpu) -> dict[str, Callable[[], object]]:
    """Return the measured functions by name."""
    kind = getattr(torch, TYPE)
    aten = torch.ops.aten
    a, b, c, d, e = (torch.randn(SIDE, SIDE, device="cuda").to(kind) for _ in range(5))
    gamma, g_gamma = (torch.randn(SIDE, device="cuda").to(kind) for _ in range(2))
    ops, shipped = preheat.Ops(gpu), preheat.Ops(gpu, blas=False)
    room = torch.empty(ops.rms_norm_workspace(SIDE, SIDE, TYPE), device="cuda")
    outs = (c, g_gamma)
    products = "cuBLAS" if ops.blas is not None else "shipped kernels, again"
    return {
        "silu_backward": lambda: ops.silu_backward(a, b, out=c),
        "silu_backward, torch": lambda: aten.silu_backward.grad_input(a, b, grad_input=c),
        "swiglu_backward": lambda: ops.swiglu_backward(a, b, c, out=(d, e)),
        "rms_norm_backward": lambda: ops.rms_norm_backward(
            a, b, gamma, eps=1e-6, out=outs, workspace=room
        ),
        "gemm, shipped kernel": lambda: shipped.gemm(a, b, out=c),
        f"gemm, {products}": lambda: ops.gemm(a, b, out=c),
        "gemm, torch": lambda: torch.mm(a, b, out=c),
    }


def burst(call: Callable[[], object]) -> float:
    """Return the microseconds of a call."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def main() -> None:
    args = options(__doc__).parse_args()
    try:
        gpu = preheat.device("cuda")
    except preheat.NoGpuError as why:
        sys.exit(str(why))
    calls = contenders(gpu)
    for call in calls.values():
        burst(call)
    rounds = [{name: burst(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    rows = [(name, us(min(each[name] for each in rounds))) for name in calls]
    title = f"Host cost of a call, {SIDE}x{SIDE} {TYPE}"
    report("bench_ops", title, ("", "a call"), rows, into=args.json)


if __name__ == "__main__":
    main()
