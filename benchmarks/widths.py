"""The kernels over rows at every kind of width and alignment, beside torch, inside graphs.

`bench_kernels.py --widths` runs it. Each contender is captured once into a graph of torch, with calls
that go round several sets of operands; contenders take turns, and the median of their rounds counts. A
ratio is torch's time over ours.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from preheat.kernels import rms_norm, softmax
from preheat.kernels.op import Op
from preheat.kernels.ops import Ops

torch: Any = importlib.import_module("torch")

WIDTHS = (
    *range(1, 41), *range(127, 130), *range(1000, 1004), *range(4095, 4098),
    32000, 50257, 128256, 151936, 200000,
)  # fmt: skip
ROWS = 1, 7, 512, 8192
OFFSETS = 0, 1, 3
DTYPES = "float32", "float16", "bfloat16"
EPS = 1e-6
SETS = 16  # The most operands.
CALLS = 20  # The most calls of a graph.
WORK = 2 << 30  # Approximate bytes of a graph.
SAMPLED = 4  # Rows of a result that are compared with float64.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
# Errors of subnormal numbers.
SMALLEST = {
    "float32": 1e-37,
    "float16": 2.0**-25,
    "bfloat16": 1e-37,
}
WANTED = 0.95


@dataclass(frozen=True)
class Row:
    """One case, and the seconds of each contender."""

    op: str
    dtype: str
    rows: int
    width: int
    offset: int
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def shipped_ops(widths: Iterable[int] = WIDTHS) -> Iterator[Op]:
    """Return the ops that the cases launch."""
    for dtype, rows, width in itertools.product(DTYPES, ROWS, widths):
        yield softmax.softmax(rows, width, dtype)
        yield softmax.softmax_backward(rows, width, dtype)
        yield rms_norm.rms_norm(rows, width, dtype)
        yield from rms_norm.rms_norm_backward(rows, width, dtype)


class Sweep:
    """Buffers of one element type, and the cases on them."""

    def __init__(self, ops: Ops, dtype: str, elements: int) -> None:
        self.ops = ops
        self.dtype = dtype
        self.kind = getattr(torch, dtype)
        self.buffers = [torch.empty(elements, device="cuda", dtype=self.kind) for _ in range(3)]
        for buffer in self.buffers:
            for part in buffer.split(1 << 28):
                part.copy_(torch.randn(len(part), device="cuda"))

    def sets(self, rows: int, width: int, offset: int) -> list[tuple[Any, ...]]:
        """Return operands with this many elements before them."""
        size = rows * width
        step = -(-(size + offset) // 64) * 64
        number = min(SETS, self.buffers[0].numel() // step)
        starts = [i * step + offset for i in range(number)]
        return [tuple(b[s : s + size].view(rows, width) for b in self.buffers) for s in starts]

    def contenders(
        self, op: str, rows: int, width: int, offset: int
    ) -> tuple[list[Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Return the operands, what preheat and torch do with them, and the terms of the result."""
        ops = self.ops
        aten = torch.ops.aten
        sets = self.sets(rows, width, offset)
        shape = [width]
        gamma, g_gamma = self.buffers[2][-2 * width - 8 :][: 2 * width].view(2, width)
        if op == "softmax":
            return (
                sets,
                lambda x, _, y: ops.softmax(x, out=y),
                lambda x, _, y: aten._softmax.out(x, -1, False, out=y),
                lambda x, _: (torch.softmax(x, -1),),
            )
        if op == "softmax_backward":
            return (
                sets,
                lambda gy, y, gx: ops.softmax_backward(gy, y, out=gx),
                lambda gy, y, gx: aten._softmax_backward_data.out(gy, y, -1, self.kind, grad_input=gx),
                lambda gy, y: (y * gy, -y * (gy * y).sum(-1, keepdim=True)),
            )
        exact_gamma = gamma.double()
        if op == "rms_norm":
            return (
                sets,
                lambda x, _, y: ops.rms_norm(x, gamma, eps=EPS, out=y),
                lambda x, _, __: aten._fused_rms_norm(x, shape, gamma, EPS),
                lambda x, _: (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * exact_gamma,),
            )
        room = torch.empty(ops.rms_norm_workspace(rows, width, self.dtype), device="cuda")
        scale = aten._fused_rms_norm(sets[0][1], shape, gamma, EPS)[1]

        def exact(gy: Any, x: Any) -> Any:
            mean = x.square().mean(-1, keepdim=True) + EPS
            pull = x / mean * (x * gy * exact_gamma).mean(-1, keepdim=True)
            return exact_gamma * gy / mean.sqrt(), -pull / mean.sqrt()

        return (
            sets,
            lambda gy, x, gx: ops.rms_norm_backward(
                gy, x, gamma, eps=EPS, out=(gx, g_gamma), workspace=room
            ),
            lambda gy, x, _: aten._fused_rms_norm_backward(gy, x, shape, scale, gamma, [True, True]),
            exact,
        )

    def run(self, op: str, rows: int, width: int, offset: int, rounds: int) -> Row:
        sets, ours, theirs, exact = self.contenders(op, rows, width, offset)
        ours(*sets[0])
        a, b, c = (each[:SAMPLED].double() for each in sets[0])
        terms = exact(a, b)
        room = sum(term.abs() for term in terms)
        bound = TOLERANCE[self.dtype] * (room + room.square().mean().sqrt()) + SMALLEST[self.dtype]
        error = ((c - sum(terms)).abs() / bound).max().item()
        if not error <= 1:
            raise SystemExit(
                f"{op} {self.dtype} {rows}x{width}+{offset}: {error:.3g} times the tolerance"
            )
        nbytes = 3 * rows * width * self.kind.itemsize
        calls = max(1, min(CALLS, WORK // nbytes))
        graphs = [self._graph(act, sets, calls) for act in (ours, theirs)]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for graph, seen in zip(graphs, times, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                seen.append(start.elapsed_time(end) / 1e3 / calls)
        mine, other = map(statistics.median, times)
        return Row(op, self.dtype, rows, width, offset, mine, other)

    def _graph(self, act: Callable[..., Any], sets: list[Any], calls: int) -> Any:
        act(*sets[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                act(*sets[call % len(sets)])
        graph.replay()
        torch.cuda.synchronize()
        return graph


OPS = "softmax", "softmax_backward", "rms_norm", "rms_norm_backward"


def sweep(
    ops: Ops,
    *,
    rounds: int = 5,
    widths: Iterable[int] = WIDTHS,
    rows: Iterable[int] = ROWS,
    offsets: Iterable[int] = OFFSETS,
    dtypes: Iterable[str] = DTYPES,
    seconds: float = float("inf"),
) -> list[Row]:
    """Run every case. Cases after `seconds` are skipped."""
    widths = list(widths)
    rows = list(rows)
    until = time.monotonic() + seconds
    found = []
    for dtype in dtypes:
        one = Sweep(ops, dtype, max(widths) * max(rows) + (1 << 22))
        for case in itertools.product(OPS, rows, widths, offsets):
            if time.monotonic() > until:
                break
            found.append(one.run(*case, rounds))
        del one
        torch.cuda.empty_cache()
    return found


def tables(found: list[Row]) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Return titles, heads and rows: each kernel by element type, and the ten best cases of torch."""
    head: tuple[str, ...] = ("", "cases", "worst", "median", f"below {WANTED}")
    rows: list[tuple[str, ...]] = []
    for op, dtype in itertools.product(OPS, DTYPES):
        ratios = [row.ratio for row in found if (row.op, row.dtype) == (op, dtype)]
        if ratios:
            few = sum(ratio < WANTED for ratio in ratios)
            middle = statistics.median(ratios)
            rows.append(
                (f"{op} {dtype}", str(len(ratios)), f"{min(ratios):.2f}", f"{middle:.2f}", str(few))
            )
    yield "Every width: torch's time over ours", head, rows
    worst = sorted(found, key=lambda row: row.ratio)[:10]
    yield (
        "The ten cases where torch is best",
        ("", "preheat", "torch", "ratio"),
        [
            (
                f"{row.op} {row.dtype} {row.rows}x{row.width} at +{row.offset}",
                f"{row.ours * 1e6:.2f} µs",
                f"{row.theirs * 1e6:.2f} µs",
                f"{row.ratio:.2f}",
            )
            for row in worst
        ],
    )
