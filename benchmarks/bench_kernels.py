"""The shipped kernels beside torch and a plain copy, on one GPU and in one run.

Every result is checked against float64 first. A time is what CUDA events measure around a burst of
calls that wait behind a sleeping GPU, so that no cost of the host is in it; contenders take turns, and
the median of their rounds counts. Calls go round several sets of operands, so that none is still in the
L2 cache.
Bytes are those of the operands and results, each counted once (twice where it is added to); the ceiling
is a copy within the device.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import preheat
import widths
from common import options, report, us
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.kernels import elementwise, gemm, nf4, rms_norm, softmax
from preheat.kernels.blas import Blas, find
from preheat.kernels.op import Op
from preheat.kernels.ops import Ops
from preheat.model.dtypes import dtype_of

try:
    torch: Any = importlib.import_module("torch")
except ImportError:
    sys.exit("torch is not installed")

OURS = "preheat"
TORCH = "torch"
SHIPPED = "shipped"
CUBLAS = "cuBLAS"
COPY = "copy"
DTYPES = "float32", "bfloat16"
EPS = 1e-6
L2 = 50 << 20  # Bytes. All sets of operands together have several times as many.
SLEEP, LONGEST = 4_000_000, 1 << 30  # Cycles: about 2 ms and half a second.
ELEMENTS = (8192, 14336)  # Of silu.
NORMS = (8192, 4096), (65536, 4096)  # Rows and widths of rms_norm.
# Elements (1 GiB of float32), and widths of rows.
SOFTMAX = 1 << 28
WIDTHS = (1024, 4096, 16384)
# Of products: tokens, width and rank.
SQUARE = 4096
LORA = (2048, 4096, 16)
LONG = (8192, 4096, 16)
CHECKED = 64  # Rows at either end of a result.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}

Act = Callable[[int], object]  # Takes the index of the call in the burst, which selects the operands.


@dataclass(frozen=True)
class Case:
    """What contenders do, how much work that is, and how far preheat's result is from float64."""

    title: str
    work: float  # Bytes, or operations of products.
    contenders: dict[str, Act]
    error: Callable[[], float]  # The error of preheat as a share of the tolerance.


@dataclass(frozen=True)
class Result:
    """One row: the seconds of each contender, round by round."""

    title: str
    work: float
    rounds: dict[str, list[float]]

    def seconds(self, name: str) -> float:
        """Return the median, or NaN for a contender that did not take part."""
        return statistics.median(self.rounds[name]) if name in self.rounds else math.nan

    def rate(self, name: str) -> float:
        """Return the work in 10^12 per second."""
        return self.work / self.seconds(name) / 1e12


class Bench:
    """The GPU, and how contenders are timed on it."""

    def __init__(self, gpu: preheat.Gpu, args: argparse.Namespace) -> None:
        self.gpu = gpu
        self.args = args
        self.place = torch.device("cuda")
        self.ops = Ops(gpu, blas=False)
        found = find(gpu)
        self.blas = None if isinstance(found, str) else Blas(gpu, "default", found=found)
        self.without = found if isinstance(found, str) else None
        self.sleep = SLEEP

    def random(self, *shape: int, dtype: str) -> Any:
        return torch.randn(*shape, device=self.place, dtype=torch.float32).to(getattr(torch, dtype))

    def sets(self, *shapes: tuple[int, ...], dtype: str) -> list[tuple[Any, ...]]:
        """Return copies of operands of these shapes that together exceed the cache."""
        size = sum(map(math.prod, shapes)) * dtype_of(dtype).size
        times = max(2, -(-6 * L2 // size))
        return [tuple(self.random(*shape, dtype=dtype) for shape in shapes) for _ in range(times)]

    def burst(self, act: Act, calls: int) -> float:
        """Return the seconds of a call, with the host ahead of the GPU throughout."""
        while self.sleep < LONGEST:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self.sleep)
            start.record()
            for call in range(calls):
                act(call)
            late = start.query()  # The GPU woke up before everything was submitted.
            end.record()
            end.synchronize()
            if not late:
                return float(start.elapsed_time(end)) / calls / 1e3
            self.sleep *= 2
        sys.exit("a contender waits for the GPU")

    def compete(self, case: Case) -> Result:
        """Check preheat's result, warm up all contenders, then let them take turns."""
        error = case.error()
        if not error <= 1:
            sys.exit(f"{case.title}: {error:.3g} times the tolerated error")
        for act in case.contenders.values():
            act(0)
        torch.cuda.synchronize()
        self.sleep = SLEEP
        longest = max(self.burst(act, 2) for act in case.contenders.values())
        calls = max(4, min(24, int(self.args.burst / 1e3 / longest)))
        rounds: dict[str, list[float]] = {name: [] for name in case.contenders}
        for _ in range(self.args.rounds):
            for name, act in case.contenders.items():
                rounds[name].append(self.burst(act, calls))
        return Result(case.title, case.work, rounds)


def off(found: Any, wanted: Any, dtype: str) -> float:
    """Return the largest error as a share of the tolerance, relative to the usual magnitude."""
    room = TOLERANCE[dtype] * (wanted.abs() + wanted.square().mean().sqrt())
    return float(((found.double() - wanted).abs() / room).max())


def ends(*tensors: Any) -> list[Any]:
    """Return the first and the last rows of each, in float64."""
    return [torch.cat((each[:CHECKED], each[-CHECKED:])).double() for each in tensors]


# Kernels bound by memory bandwidth


def silu_cases(bench: Bench, dtype: str) -> Iterator[Case]:
    ops = bench.ops
    aten = torch.ops.aten
    shape = ELEMENTS
    sets = bench.sets(*[shape] * 5, dtype=dtype)
    one = math.prod(shape) * dtype_of(dtype).size
    title = f"{shape[0]}x{shape[1]} {dtype}"
    at = partial(at_turns, sets)

    def backward_error() -> float:
        gy, x, gx, *_ = sets[0]
        ops.silu_backward(gy, x, out=gx)
        dy, v, found = ends(gy, x, gx)
        s = torch.sigmoid(v)
        return off(found, dy * s * (1 + v * (1 - s)), dtype)

    def error() -> float:
        _, x, y, *_ = sets[0]
        ops.silu(x, out=y)
        v, found = ends(x, y)
        return off(found, v * torch.sigmoid(v), dtype)

    def swiglu_error() -> float:
        gy, gate, up, g_gate, g_up = sets[0]
        ops.swiglu_backward(gy, gate, up, out=(g_gate, g_up))
        dy, a, b, found_a, found_b = ends(gy, gate, up, g_gate, g_up)
        s = torch.sigmoid(a)
        return max(off(found_a, dy * b * s * (1 + a * (1 - s)), dtype), off(found_b, dy * a * s, dtype))

    yield Case(
        f"silu_backward {title}",
        3 * one,
        {
            OURS: at(lambda gy, x, gx, *_: ops.silu_backward(gy, x, out=gx)),
            TORCH: at(lambda gy, x, gx, *_: aten.silu_backward.grad_input(gy, x, grad_input=gx)),
        },
        backward_error,
    )
    yield Case(
        f"silu {title}",
        2 * one,
        {
            OURS: at(lambda _, x, y, *__: ops.silu(x, out=y)),
            TORCH: at(lambda _, x, y, *__: aten.silu.out(x, out=y)),
        },
        error,
    )
    yield Case(
        f"swiglu_backward {title}",
        5 * one,
        {OURS: at(lambda gy, a, b, ga, gb: ops.swiglu_backward(gy, a, b, out=(ga, gb)))},
        swiglu_error,
    )


def softmax_cases(bench: Bench, width: int, dtype: str) -> Iterator[Case]:
    ops = bench.ops
    aten = torch.ops.aten
    rows = SOFTMAX // width
    sets = bench.sets(*[(rows, width)] * 3, dtype=dtype)
    for _, y, _ in sets:
        y.copy_(torch.softmax(y, -1))
    one = rows * width * dtype_of(dtype).size
    kind = getattr(torch, dtype)
    at = partial(at_turns, sets)

    def backward_error() -> float:
        gy, y, gx = sets[0]
        ops.softmax_backward(gy, y, out=gx)
        dy, v, found = ends(gy, y, gx)
        return off(found, v * (dy - (dy * v).sum(-1, keepdim=True)), dtype)

    def error() -> float:
        x, _, y = sets[0]
        ops.softmax(x, out=y)
        v, found = ends(x, y)
        return off(found, torch.softmax(v, -1), dtype)

    def torch_backward(gy: Any, y: Any, gx: Any) -> object:
        return aten._softmax_backward_data.out(gy, y, -1, kind, grad_input=gx)

    title = f"{rows}x{width} {dtype}"
    yield Case(
        f"softmax_backward {title}",
        3 * one,
        {
            OURS: at(lambda gy, y, gx: ops.softmax_backward(gy, y, out=gx)),
            TORCH: at(torch_backward),
        },
        backward_error,
    )
    yield Case(
        f"softmax {title}",
        2 * one,
        {
            OURS: at(lambda x, _, y: ops.softmax(x, out=y)),
            TORCH: at(lambda x, _, y: aten._softmax.out(x, -1, False, out=y)),
        },
        error,
    )


def rms_norm_cases(bench: Bench, rows: int, width: int, dtype: str) -> Iterator[Case]:
    ops = bench.ops
    sets = bench.sets(*[(rows, width)] * 3, dtype=dtype)
    one = rows * width * dtype_of(dtype).size
    gamma, g_gamma = (bench.random(width, dtype=dtype) for _ in range(2))
    room = torch.empty(ops.rms_norm_workspace(rows, width, dtype), device=bench.place)
    at = partial(at_turns, sets)

    def backward(gy: Any, x: Any, gx: Any) -> object:
        return ops.rms_norm_backward(gy, x, gamma, eps=EPS, out=(gx, g_gamma), workspace=room)

    def backward_error() -> float:
        gy, x, gx = sets[0]
        backward(gy, x, gx)
        dy = gy.double()
        v = x.double()
        g = gamma.double()
        mean = v.square().mean(-1, keepdim=True) + EPS
        pull = v / mean * (v * dy * g).mean(-1, keepdim=True)
        columns = dy * v / mean.sqrt()
        return max(off(gx, (g * dy - pull) / mean.sqrt(), dtype), off(g_gamma, columns.sum(0), dtype))

    def error() -> float:
        _, x, y = sets[0]
        ops.rms_norm(x, gamma, eps=EPS, out=y)
        v, found = ends(x, y)
        by = (v.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return off(found, v * by * gamma.double(), dtype)

    title = f"{rows}x{width} {dtype}"
    known = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
    theirs, theirs_backward = (fused if known else by_autograd)(sets, gamma)
    yield Case(
        f"rms_norm_backward {title}",
        3 * one,
        {OURS: at(backward), TORCH: theirs_backward},
        backward_error,
    )
    yield Case(
        f"rms_norm {title}",
        2 * one,
        {OURS: at(lambda _, x, y: ops.rms_norm(x, gamma, eps=EPS, out=y)), TORCH: theirs},
        error,
    )


def fused(sets: list[Any], gamma: Any) -> tuple[Act, Act]:
    """Return torch's own RMSNorm, forward and backward."""
    aten = torch.ops.aten
    shape = list(gamma.shape)
    number = len(sets)
    scales = [aten._fused_rms_norm(x, shape, gamma, EPS)[1] for _, x, _ in sets]

    def backward(i: int) -> object:
        gy, x, _ = sets[i % number]
        wanted = [True, True]
        return aten._fused_rms_norm_backward(gy, x, shape, scales[i % number], gamma, wanted)

    return lambda i: aten._fused_rms_norm(sets[i % number][1], shape, gamma, EPS), backward


def by_autograd(sets: list[Any], gamma: Any) -> tuple[Act, Act]:
    """Return RMSNorm by autograd, for versions of torch without a fused one."""
    norm = torch.nn.functional.rms_norm
    shape = list(gamma.shape)
    number = len(sets)
    leaves = [(x.detach().requires_grad_(), gamma.detach().requires_grad_()) for _, x, _ in sets]
    results = [norm(x, shape, weight, EPS) for x, weight in leaves]

    def backward(i: int) -> object:
        i %= number
        return torch.autograd.grad(results[i], leaves[i], sets[i][0], retain_graph=True)

    return lambda i: norm(sets[i % number][1], shape, gamma, EPS), backward


def at_turns(sets: list[tuple[Any, ...]], do: Callable[..., object]) -> Act:
    """Return `do` with one set of operands after the other."""
    return lambda call: do(*sets[call % len(sets)])


def memory_cases(bench: Bench) -> Iterator[Case]:
    for dtype in DTYPES:
        yield from silu_cases(bench, dtype)
    for dtype in DTYPES:
        for width in WIDTHS:
            yield from softmax_cases(bench, width, dtype)
    for dtype in DTYPES:
        for rows, width in NORMS:
            yield from rms_norm_cases(bench, rows, width, dtype)


# Products


@dataclass(frozen=True)
class Product:
    """A product as each library calls it. Shapes are those of two operands and the result."""

    title: str
    shapes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    flops: float
    ours: Callable[..., object]  # Takes ops, a, b, c.
    theirs: Callable[..., object]  # Takes a, b, c.
    add: bool = False  # Accumulates into the result, which is read as well.

    @property
    def touched(self) -> int:
        """Return the number of elements read and written."""
        return sum(map(math.prod, self.shapes)) + self.add * math.prod(self.shapes[2])


def products(m: int, n: int, k: int) -> Iterator[Product]:
    flops = 2.0 * m * n * k
    title = f"m={m} n={n} k={k}"
    yield Product(
        f"gemm {title}",
        ((m, k), (k, n), (m, n)),
        flops,
        lambda ops, a, b, c: ops.gemm(a, b, out=c),
        lambda a, b, c: torch.mm(a, b, out=c),
    )
    yield Product(
        f"gemm_backward_a {title}",
        ((m, n), (k, n), (m, k)),
        flops,
        lambda ops, gc, b, ga: ops.gemm_backward_a(gc, b, out=ga),
        lambda gc, b, ga: torch.mm(gc, b.T, out=ga),
    )
    yield Product(
        f"gemm_backward_b {title}",
        ((m, k), (m, n), (k, n)),
        flops,
        lambda ops, a, gc, gb: ops.gemm_backward_b(a, gc, out=gb),
        lambda a, gc, gb: torch.mm(a.T, gc, out=gb),
    )


def lora_products(s: int, h: int, r: int) -> Iterator[Product]:
    """Return the products of LoRA's y = (xA)B with x[s, h] and rank r."""
    into, back, weight = products(s, r, h)
    yield replace(into, title=f"xA: gemm [{s}x{h}] [{h}x{r}]")
    out, inner, second = products(s, h, r)
    yield replace(inner, title=f"gI: gemm_backward_a [{s}x{h}] [{r}x{h}]^T")
    yield replace(second, title=f"gB: gemm_backward_b [{s}x{r}]^T [{s}x{h}]")
    yield replace(weight, title=f"gA: gemm_backward_b [{s}x{h}]^T [{s}x{r}]")
    yield replace(
        back,
        title=f"gx +=: gemm_backward_a [{s}x{r}] [{h}x{r}]^T",
        ours=lambda ops, gc, b, ga: ops.gemm_backward_a(gc, b, out=ga, accumulate=True),
        theirs=lambda gc, b, ga: torch.addmm(ga, gc, b.T, out=ga),
        add=True,
    )
    yield replace(out, title=f"(xA)B: gemm [{s}x{r}] [{r}x{h}]")


def product_case(bench: Bench, product: Product, dtype: str, *, in_bytes: bool) -> Case:
    sets = bench.sets(*product.shapes, dtype=dtype)
    blas = bench.blas
    contenders: dict[str, Act] = {
        SHIPPED: at_turns(sets, partial(product.ours, bench.ops)),
        TORCH: at_turns(sets, product.theirs),
    }
    makers = [bench.ops]
    if blas is not None:
        makers.append(Ops(bench.gpu, blas=blas))
        contenders[CUBLAS] = at_turns(sets, partial(product.ours, makers[-1]))

    def error() -> float:
        a, b, c = sets[0]
        before = c.clone()
        exact = torch.empty_like(c, dtype=torch.float64)
        exact.copy_(before)
        product.theirs(a.double(), b.double(), exact)
        worst = 0.0
        for ops in makers:
            c.copy_(before)
            product.ours(ops, a, b, c)
            worst = max(worst, off(c, exact, dtype))
        c.copy_(before)
        return worst

    work = product.touched * dtype_of(dtype).size if in_bytes else product.flops
    return Case(f"{product.title} {dtype}", work, contenders, error)


def product_cases(bench: Bench) -> Iterator[Case]:
    for dtype in DTYPES:
        for product in products(SQUARE, SQUARE, SQUARE):
            yield product_case(bench, product, dtype, in_bytes=False)

    for dtype in DTYPES:
        yield nf4_case(bench, dtype)


def nf4_case(bench: Bench, dtype: str) -> Case:
    """Compare a weight in NF4 with the same weight dequantised before, which torch multiplies."""
    (m, _, _) = LORA
    kind = getattr(torch, dtype)
    packed = nf4.quantize(torch.randn(SQUARE, SQUARE).numpy())
    there = packed.on(bench.gpu)
    weight = torch.from_numpy(nf4.dequantize(packed)).to(bench.place).to(kind)
    sets = bench.sets((m, SQUARE), (m, SQUARE), dtype=dtype)

    def error() -> float:
        gc, ga = sets[0]
        bench.ops.gemm_backward_a(gc, there, out=ga)
        return off(ga, gc.double() @ weight.double().T, dtype)

    return Case(
        f"gemm_backward_a, NF4, m={m} n={SQUARE} k={SQUARE} {dtype}",
        2.0 * m * SQUARE * SQUARE,
        {
            SHIPPED: at_turns(sets, lambda gc, ga: bench.ops.gemm_backward_a(gc, there, out=ga)),
            TORCH: at_turns(sets, lambda gc, ga: torch.mm(gc, weight.T, out=ga)),
        },
        error,
    )


def lora_cases(bench: Bench) -> Iterator[Case]:
    for dtype in DTYPES:
        for product in (*lora_products(*LORA), *lora_products(*LONG)):
            yield product_case(bench, product, dtype, in_bytes=True)


def prepare(gpu: preheat.Gpu, ops: Iterable[Op]) -> None:
    """Compile all kernels that the cases need, on all CPU cores."""
    wanted = {(op.program, op.entry): ManifestProgram(op.program, entries=(op.entry,)) for op in ops}
    gpu.warm(Manifest(tuple(wanted.values())))


def shipped_ops() -> Iterator[Op]:
    """Return the ops that the cases launch."""
    for dtype in DTYPES:
        for elements in (elementwise.silu, elementwise.silu_backward, elementwise.swiglu_backward):
            yield elements(math.prod(ELEMENTS), dtype)
        for width in WIDTHS:
            yield softmax.softmax(SOFTMAX // width, width, dtype)
            yield softmax.softmax_backward(SOFTMAX // width, width, dtype)
        for rows, width in NORMS:
            yield rms_norm.rms_norm(rows, width, dtype)
            yield from rms_norm.rms_norm_backward(rows, width, dtype)
        shapes = [(SQUARE,) * 3]
        for tokens, width, rank in (LORA, LONG):
            shapes += [(tokens, rank, width), (tokens, width, rank)]
        for m, n, k in shapes:
            for product in (gemm.gemm, gemm.gemm_backward_a, gemm.gemm_backward_b):
                yield product(m, n, k, dtype)
        yield gemm.gemm_backward_a_nf4(LORA[0], SQUARE, SQUARE, dtype)


# Tables


def share(value: float, other: float) -> str:
    return "-" if math.isnan(value / other) else f"{value / other:.1%}"


def times(theirs: float, ours: float) -> str:
    return "-" if math.isnan(theirs / ours) else f"{theirs / ours:.3f} x"


def shown(seconds: float) -> str:
    return "-" if math.isnan(seconds) else us(seconds * 1e6)


def rate(value: float, unit: str) -> str:
    return "-" if math.isnan(value) else f"{value:.2f} {unit}"


def memory_row(case: Result, copy: float, ours: str = OURS) -> tuple[str, ...]:
    mine, theirs = case.rate(ours), case.rate(TORCH)
    return (
        case.title, f"{case.work / 2**20:.0f} MiB",
        shown(case.seconds(ours)), rate(mine, "TB/s"), share(mine, copy),
        shown(case.seconds(TORCH)), rate(theirs, "TB/s"), share(theirs, copy),
        times(case.seconds(TORCH), case.seconds(ours)),
        shown(case.seconds(CUBLAS)) if ours == SHIPPED else "",
    )  # fmt: skip


def product_row(case: Result) -> tuple[str, ...]:
    return (
        case.title,
        *(shown(case.seconds(SHIPPED)), rate(case.rate(SHIPPED), "TFLOP/s")),
        *(shown(case.seconds(TORCH)), rate(case.rate(TORCH), "TFLOP/s")),
        share(case.rate(SHIPPED), case.rate(TORCH)),
        *(shown(case.seconds(CUBLAS)), share(case.rate(CUBLAS), case.rate(TORCH))),
    )


def target_rows(memory: list[Result], large: list[Result], copy: float) -> Iterator[tuple[str, ...]]:
    for case in memory:
        if "_backward" in case.title and TORCH in case.rounds:
            yield target(case.title, "of the copy", case.rate(OURS) / copy, 0.85)
            yield target(case.title, "of torch", case.rate(OURS) / case.rate(TORCH), 1.0)
    for case in large:
        if "NF4" not in case.title:
            yield target(case.title, "of torch", case.rate(SHIPPED) / case.rate(TORCH), 0.6)
        if CUBLAS in case.rounds:
            value = case.rate(CUBLAS) / case.rate(TORCH)
            yield target(case.title, "cuBLAS, of torch", value, 0.97)


def target(title: str, of: str, value: float, least: float) -> tuple[str, ...]:
    met = "met" if value >= least else "missed"
    return title, of, f"{value:.1%}", f"at least {least:.0%}", met


def copy_case(bench: Bench) -> Case:
    """Return the upper bound: a copy of 512 MiB within the device."""
    sets = bench.sets(*[(1 << 27,)] * 2, dtype="float32")
    copy = at_turns(sets, lambda a, b: b.copy_(a))
    return Case("copy of 512 MiB", 2 * 4 << 27, {COPY: copy}, lambda: 0.0)


def compare(bench: Bench) -> None:
    args = bench.args

    def table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
        report("bench_kernels", title, head, list(rows), into=args.json)

    def timed(cases: Iterable[Case]) -> list[Result]:
        chosen = (case for case in cases if re.search(args.only, case.title))
        return [bench.compete(case) for case in chosen]

    before = bench.compete(copy_case(bench))
    memory, large, lora = (timed(cases(bench)) for cases in (memory_cases, product_cases, lora_cases))
    after = bench.compete(copy_case(bench))
    copy = max(before.rate(COPY), after.rate(COPY))
    rows = [
        (each.title, when, shown(each.seconds(COPY)), rate(each.rate(COPY), "TB/s"))
        for when, each in (("first", before), ("last", after))
    ]
    table("The ceiling, of which the faster counts", ("", "", "time", "rate"), rows)
    head = ("", "bytes", "preheat", "rate", "of the copy", "torch", "rate", "of the copy", "of torch")
    table(
        "Kernels that memory bounds",
        (*head, ""),
        (memory_row(case, copy) for case in memory),
    )
    table(
        "Products: shipped kernels, torch.mm (TF32 off) and cuBLAS through preheat",
        ("", "shipped", "rate", "torch", "rate", "of torch", "cuBLAS", "of torch"),
        map(product_row, large),
    )
    table(
        "Products of LoRA: {} or {} tokens, {} wide, rank {}".format(LORA[0], *LONG),
        (*head, "cuBLAS"),
        (memory_row(case, copy, SHIPPED) for case in lora),
    )
    table("Targets", ("", "", "measured", "wanted", ""), target_rows(memory, large, copy))
    if bench.without:
        print(f"\ncuBLAS through preheat was not measured: {bench.without}.")


def compare_widths(bench: Bench) -> None:
    """Compare the kernels over rows with torch, in a separate result file."""
    found = widths.sweep(Ops(bench.gpu, blas=False), rounds=bench.args.rounds)
    for title, head, rows in widths.tables(found):
        report("bench_widths", title, head, rows, into=bench.args.json)


@contextmanager
def started(args: argparse.Namespace) -> Iterator[Bench]:
    """Return the GPU, with a cache of its own and the shipped kernels compiled."""
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        for variable in ("PREHEAT_CACHE_DIR", "PREHEAT_LOCK_DIR"):
            os.environ[variable] = str(Path(place) / variable)
        try:
            gpu = preheat.device("cuda")
        except preheat.NoGpuError as why:
            sys.exit(str(why))
        torch.set_float32_matmul_precision("highest")
        torch.manual_seed(20261115)
        prepare(gpu, widths.shipped_ops() if args.widths else shipped_ops())
        yield Bench(gpu, args)


def arguments(about: str | None) -> argparse.Namespace:
    parser = options(about)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--burst", type=float, default=8, help="milliseconds of a turn, about")
    parser.add_argument("--only", default="", help="rows whose title this regular expression finds")
    parser.add_argument(
        "--widths", action="store_true", help="kernels over rows at every width instead"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__)
    with started(args) as bench:
        if args.widths:
            compare_widths(bench)
        else:
            compare(bench)


if __name__ == "__main__":
    main()
