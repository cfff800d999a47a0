"""Measure the host cost of calls of `preheat.Ops`, on tensors of torch and on our arrays, beside torch.

The operands are tiny and everything is given to the calls, so that the device is never behind: a time
is that of a call in a burst, with no wait for the device. Contenders take turns, each round beginning
with another one. Shown are the median of the rounds, their spread (the interquartile range as a share
of the median), and how many times faster than torch preheat is. Every result is
compared with torch's first. Not like for like: torch's rms_norm, marked with *, has no variant that is
given its result.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import preheat
from common import options, ratio, report, spread, us

SIDE, CALLS, ROUNDS = 64, 300, 15
TYPE = "bfloat16"
EPS = 1e-6
TORCH = "torch"
TENSORS = "preheat, torch tensors"
ARRAYS = "preheat, our arrays"
SIDE_STREAM = "preheat, torch tensors, side stream"

try:
    torch: Any = importlib.import_module("torch")
except ImportError:
    sys.exit("torch is not installed")


class Operands(NamedTuple):
    """Two matrices, memory for results, a row with its gradient, and a workspace."""

    a: Any
    b: Any
    c: Any
    d: Any
    gamma: Any
    g_gamma: Any
    room: Any


def tensors(ops: preheat.Ops) -> Operands:
    """Return operands of torch."""
    kind = getattr(torch, TYPE)
    torch.manual_seed(1)
    matrices = [torch.randn(SIDE, SIDE, device="cuda").to(kind) for _ in range(4)]
    rows = [torch.randn(SIDE, device="cuda").to(kind) for _ in range(2)]
    room = torch.empty(ops.rms_norm_workspace(SIDE, SIDE, TYPE), device="cuda")
    a, b, c, d = matrices
    gamma, g_gamma = rows
    return Operands(a, b, c, d, gamma, g_gamma, room)


class Contender(NamedTuple):
    """A call, and the function that measures it."""

    call: Callable[[], object]
    measure: Callable[[Callable[[], object]], float]


def of_preheat(ops: preheat.Ops, theirs: Operands) -> dict[str, Callable[[], object]]:
    """Return the calls of preheat by op."""
    a, b, c, d, gamma, g_gamma, room = theirs
    shipped = preheat.Ops(ops.gpu, blas=False)
    pair = (c, d)
    gradients = (c, g_gamma)
    calls: dict[str, Callable[[], object]] = {
        "silu_backward": lambda: ops.silu_backward(a, b, out=c),
        "rms_norm": lambda: ops.rms_norm(a, gamma, eps=EPS, out=c),
        "softmax": lambda: ops.softmax(a, out=c),
        "swiglu_backward": lambda: ops.swiglu_backward(a, b, a, out=pair),
        "rms_norm_backward": lambda: ops.rms_norm_backward(
            a, b, gamma, eps=EPS, out=gradients, workspace=room
        ),
        "gemm, shipped kernel": lambda: shipped.gemm(a, b, out=c),
    }
    if ops.blas is not None:
        calls["gemm, cuBLAS"] = lambda: ops.gemm(a, b, out=c)
    return calls


def of_torch(theirs: Operands) -> dict[str, Callable[[], object]]:
    """Return the calls of torch by op."""
    a, b, c = theirs[:3]
    gamma = theirs.gamma
    aten = torch.ops.aten
    norm = torch.nn.functional.rms_norm
    return {
        "silu_backward": lambda: aten.silu_backward.grad_input(a, b, grad_input=c),
        "rms_norm": lambda: norm(a, (SIDE,), gamma, EPS),
        "softmax": lambda: aten._softmax.out(a, -1, False, out=c),
        "gemm, shipped kernel": lambda: torch.mm(a, b, out=c),
        "gemm, cuBLAS": lambda: torch.mm(a, b, out=c),
    }


def check(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Exit unless preheat's result agrees with torch's within the precision of the type."""
    wanted = theirs().float().cpu().clone()
    made = ours()
    is_tensor = isinstance(made, torch.Tensor)
    found = made.float().cpu() if is_tensor else torch.from_numpy(made.numpy("float32"))
    if not torch.allclose(found, wanted, rtol=0.02, atol=0.05):
        sys.exit(f"{name}: the results of preheat and torch differ")


def burst(call: Callable[[], object]) -> float:
    """Return the microseconds of a call."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def in_side_stream(call: Callable[[], object]) -> float:
    """Return the microseconds of a call while another stream of torch is the current one."""
    with torch.cuda.stream(_side_stream()):
        return burst(call)


def _side_stream() -> Any:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


_streams: list[Any] = []


def rows_of(name: str, contenders: dict[str, Contender]) -> list[tuple[str, ...]]:
    """Measure the contenders of one op in turns, and return the rows of the table."""
    times: dict[str, list[float]] = {title: [] for title in contenders}
    titles = list(contenders)
    for turn in range(-1, ROUNDS):  # The first round is for warming up.
        for title in (*titles[turn % len(titles) :], *titles[: turn % len(titles)]):
            call, measure = contenders[title]
            time_of_call = measure(call)
            if turn >= 0:
                times[title].append(time_of_call)
    theirs = statistics.median(times[TORCH]) if TORCH in times else None
    rows: list[tuple[str, ...]] = []
    for title, taken in times.items():
        middle = statistics.median(taken)
        mark = "*" if (name, title) == ("rms_norm", TORCH) else ""
        compared = "" if theirs is None or title == TORCH else ratio(theirs, middle)
        rows.append((name, f"{title}{mark}", us(middle), spread(taken), compared))
    return rows


def main() -> None:
    args = options(__doc__).parse_args()
    try:
        gpu = preheat.device("cuda")
    except preheat.NoGpuError as why:
        sys.exit(str(why))
    ops = preheat.Ops(gpu)
    theirs = tensors(ops)
    mine = Operands(*(gpu.array(each) for each in theirs))
    by_torch: dict[str, Callable[[], Any]] = of_torch(theirs)
    with_tensors = of_preheat(ops, theirs)
    with_arrays = of_preheat(ops, mine)
    rows: list[tuple[str, ...]] = []
    for name, call in with_tensors.items():
        if name in by_torch:
            check(name, call, by_torch[name])
            check(name, with_arrays[name], by_torch[name])
        contenders = {TENSORS: Contender(call, burst), ARRAYS: Contender(with_arrays[name], burst)}
        if name in by_torch:
            contenders[TORCH] = Contender(by_torch[name], burst)
        if name == "gemm, cuBLAS":
            contenders[SIDE_STREAM] = Contender(call, in_side_stream)
        rows += rows_of(name, contenders)
    title = f"Host cost of a call, {SIDE}x{SIDE} {TYPE}, median of {ROUNDS} rounds"
    head = ("", "", "a call", "spread", "torch / preheat")
    report("bench_ops", title, head, rows, into=args.json)


if __name__ == "__main__":
    main()
