"""The shipped kernels with other parameters beside those that are shipped: which are best on a GPU."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench_kernels import (
    COPY,
    DTYPES,
    ELEMENTS,
    EPS,
    LORA,
    NORMS,
    SOFTMAX,
    WIDTHS,
    Bench,
    Case,
    Product,
    arguments,
    at_turns,
    copy_case,
    lora_products,
    off,
    prepare,
    rate,
    share,
    shown,
    started,
    torch,
)
from common import report
from preheat.dtypes import dtype_of
from preheat.kernels import elementwise, gemm, rms_norm, softmax
from preheat.kernels.op import Op, cpp_of, watching
from preheat.kernels.rows import Spread, chunk_of, row_op

NORM = NORMS[0]


class Variant(NamedTuple):
    """A kernel, and what to do with one set of operands."""

    op: Op
    do: Callable[..., object]


class Tuner:
    """The same kernels spread over threads in other ways, as programs of their own."""

    def __init__(self, bench: Bench, place: Path) -> None:
        self.bench, self.place = bench, place

    def cases(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """What there is to choose from, by name: each is compiled only when it is made."""
        for dtype in DTYPES:
            yield f"silu_backward {dtype}", partial(self.silu, dtype)
            for width in WIDTHS:
                yield f"softmax_backward {width} {dtype}", partial(self.softmax, width, dtype)
            yield f"rms_norm_backward {dtype}", partial(self.rms_norm, dtype)
        for product in lora_products(*LORA):
            yield product.title, partial(self.tiles, product)

    def silu(self, dtype: str) -> Case:
        n, chunk = math.prod(ELEMENTS), chunk_of(dtype_of(dtype))
        made = elementwise.silu_backward(n, dtype)
        variants = {"shipped": self.plain(made, n)}
        for threads in (64, 128, 256, 512, 1024):
            source, label = self.edited(made.source, BLOCK=threads)
            op = made._replace(source=source, grid=(-(-n // (threads * chunk)),), block=(threads,))
            variants[label] = self.plain(op, n)
        return self.case(f"silu_backward {n} {dtype}", [(n,)] * 3, dtype, variants)

    def softmax(self, width: int, dtype: str) -> Case:
        rows = SOFTMAX // width
        made = softmax.softmax_backward(rows, width, dtype)
        variants = {"shipped": self.plain(made, rows, width)}
        for at in self.spreads(width, dtype):
            op = row_op(made.source, made.name, rows, width, dtype, (at,))
            variants[op.entry] = self.plain(op, rows, width)
            if at.lanes > 32 and at.chunks(dtype_of(dtype)) % 2 == 0:
                again = op.entry.replace("backward<", "backward_again<")
                variants[again] = self.plain(op._replace(entry=again), rows, width)
        title = f"softmax_backward {rows}x{width} {dtype}"
        return self.case(title, [(rows, width)] * 3, dtype, variants)

    def rms_norm(self, dtype: str) -> Case:
        (rows, width), (element, cpp) = NORM, cpp_of(dtype)
        made, _ = rms_norm.rms_norm_backward(rows, width, dtype)
        variants = {"shipped": self.normed(made, rms_norm.groups(rows, width, dtype), dtype)}
        for at in self.spreads(width, dtype):
            for threads in (512, 768, 1024):
                groups = min(rows, rms_norm.PROCESSORS * threads // at.lanes)
                entry = f"rms_norm_backward<{cpp}, {at.lanes}, {at.chunks(element)}>"
                grid = (-(-groups // at.rows),)
                op = made._replace(entry=entry, grid=grid, block=(at.threads,))
                variants[f"{entry} groups {groups}"] = self.normed(op, groups, dtype)
        title = f"rms_norm_backward {rows}x{width} {dtype}"
        return self.case(title, [(rows, width)] * 3, dtype, variants)

    def normed(self, op: Op, groups: int, dtype: str) -> Variant:
        """Both launches of the gradient."""
        gpu, (rows, width) = self.bench.gpu, NORM
        gamma = torch.ones(width, device=self.bench.place, dtype=getattr(torch, dtype))
        g_gamma, room = gamma.clone(), torch.empty(groups, width, device=self.bench.place)
        second = rms_norm._gamma(groups, width, cpp_of(dtype)[1])

        def do(gy: Any, x: Any, gx: Any) -> None:
            op.launch(gpu, gy, x, gamma, gx, room, EPS, rows, width, groups)
            second.launch(gpu, room, g_gamma, groups, width)

        return Variant(op, do)

    def tiles(self, product: Product) -> Case:
        """The tiles of one of LoRA's products, in float32."""
        with watching() as seen:
            operands = [self.bench.random(*shape, dtype="float32") for shape in product.shapes]
            product.ours(self.bench.ops, *operands)
        (made,), sizes = seen, dict(seen[0].dims)
        make = getattr(gemm, made.name)
        ops = {f"tile {side}": make(**sizes, dtype="float32", tile=side) for side in gemm.TILES}
        variants = {
            name: self.plain(op, *sizes.values(), product.add)
            for name, op in {"shipped": made, **ops}.items()
        }
        return self.case(f"{product.title} float32", product.shapes, "float32", variants)

    def spreads(self, width: int, dtype: str) -> Iterator[Spread]:
        """All that hold a row in up to 64 elements a thread, none of them idle."""
        for lanes in (32, 64, 128, 256, 512, 1024):
            elements = -(-width // lanes)
            if chunk_of(dtype_of(dtype)) <= elements <= 64:
                yield Spread(lanes, elements)

    def edited(self, source: Path, **constants: int) -> tuple[Path, str]:
        """A copy of a source with other constants, and what to call it."""
        text = source.read_text()
        for name, value in constants.items():
            text, count = re.subn(rf"\b{name} = \d+", f"{name} = {value}", text, count=1)
            assert count == 1, name
        copy = self.place / f"{source.stem}_{'_'.join(map(str, constants.values()))}.cu"
        copy.write_text(text)
        return copy, " ".join(f"{name}={value}" for name, value in constants.items())

    def plain(self, op: Op, *sizes: int) -> Variant:
        return Variant(op, lambda *operands: op.launch(self.bench.gpu, *operands, *sizes))

    def case(
        self, title: str, shapes: Sequence[tuple[int, ...]], dtype: str, variants: dict[str, Variant]
    ) -> Case:
        """Variants on operands of these shapes, the result last, compared with what is shipped."""
        prepare(self.bench.gpu, (variant.op for variant in variants.values()))
        sets = self.bench.sets(*shapes, dtype=dtype)
        *_, result = sets[0]
        before = result.clone()

        def outcome(variant: Variant) -> Any:
            result.copy_(before)
            variant.do(*sets[0])
            return result.double()

        def error() -> float:
            wanted = outcome(variants["shipped"])
            return max(off(outcome(variant), wanted, dtype) for variant in variants.values())

        work = sum(map(math.prod, shapes)) * dtype_of(dtype).size
        return Case(
            title, work, {name: at_turns(sets, each.do) for name, each in variants.items()}, error
        )


def tune(bench: Bench, place: Path) -> None:
    copy = bench.compete(copy_case(bench)).rate(COPY)
    for name, make in Tuner(bench, place).cases():
        if not re.search(bench.args.only, name):
            continue
        found = bench.compete(make())
        rows = []
        for variant in sorted(found.rounds, key=found.seconds):
            pace = found.rate(variant)
            rows.append((variant, shown(found.seconds(variant)), rate(pace, "TB/s"), share(pace, copy)))
        head = ("", "time", "rate", "of the copy")
        report("tune_kernels", f"Variants: {found.title}", head, rows, into=bench.args.json)


def main() -> None:
    args = arguments(__doc__)
    with started(args) as bench, tempfile.TemporaryDirectory(prefix="preheat-tune-") as place:
        tune(bench, Path(place))


if __name__ == "__main__":
    main()
