"""The code of every shipped kernel: every architecture compiles it, and it has no atomic updates."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from preheat import Builder, Gpu
from preheat.kernels import axes, gemm, rms_norm, softmax
from preheat.kernels.op import Op
from tests.kernels.conftest import DTYPES, every_op, exact

EVERY = {op.entry: op for op in every_op()}
FAMILIES = sorted({op.source.name for op in EVERY.values()})
WHOLE = os.environ.get("PREHEAT_TEST_ALL") == "1"
#: An architecture for each way in which the source of the kernels depends on it. The tests that launch
#: kernels compile all of them for sm_90, and sm_100 has the same source.
EACH_WAY = 75, 80, 100, 120
WIDTHS = *range(1, 1100), *(2**power + more for power in range(10, 18) for more in (-1, 0, 1))
# These do not load 16 bytes at once. The last one marks kernels of single elements.
CHUNKLESS = b"gemm", b"rms_norm_gamma", b"ELb1EE"


def type_of(op: Op) -> str:
    """Return the element type of a kernel in C++."""
    return re.split("[<,>]", op.entry)[1]


def templates(entries: Iterable[str]) -> set[str]:
    """Return the names of kernels without the element type."""
    return {re.sub("<[^,>]*", "<T", entry) for entry in entries}


def share(family: str, at: int, archs: int) -> list[Op]:
    """Return the kernels of a family for architecture number `at`: some of one type, others of each.

    Together the architectures have every other one of float32 and the others of float16. They have a
    few of bfloat16, whose code differs from that of float16 in no more than how numbers are rounded.
    """
    kinds = sorted({type_of(op) for op in EVERY.values()})
    kind = kinds[at % 3]
    turn = at // 3
    turns = max(1, archs // 3)
    ops = [op for op in EVERY.values() if (op.source.name, type_of(op)) == (family, kind)]
    half = ops[kind == "float" :: 2] or ops
    chosen = half[turn % turns :: turns] or [half[turn % len(half)]]
    return chosen[:1] if kind == "__nv_bfloat16" else chosen


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(EACH_WAY, id="each way"), pytest.param(None, marks=pytest.mark.long, id="all")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_compiles_its_share_of_all_kernels(
    shared_builder: Builder, family: str, chosen: tuple[int, ...] | None
) -> None:
    """All kernels for all architectures would take ten minutes: PREHEAT_TEST_ALL=1 does that."""
    ops = [op for op in EVERY.values() if op.source.name == family]
    archs = shared_builder.toolchain.located.archs
    assert {90, *EACH_WAY} <= set(archs)
    for at, arch in enumerate(archs):
        if chosen and arch not in chosen and not WHOLE:
            continue
        entries = {op.entry for op in (ops if WHOLE else share(family, at, len(archs)))}
        program = replace(ops[0].program, names=tuple(sorted(entries)))
        artifact = shared_builder.build(program, f"sm_{arch}")
        assert artifact.cubin
        assert {entry.title for entry in artifact.entries} == entries
        _check(artifact.ptx)


@pytest.mark.parametrize("archs", [3, 13, 40])
def test_shares_have_every_family_and_together_most_kernels_and_every_type(archs: int) -> None:
    shares = [[op for name in FAMILIES for op in share(name, at, archs)] for at in range(archs)]
    assert all({op.source.name for op in each} == set(FAMILIES) for each in shares)
    every = [op for each in shares for op in each]
    assert len({(op.source.name, type_of(op)) for op in every}) == len(FAMILIES) * len(DTYPES)
    assert len(templates(op.entry for op in every)) > 0.8 * len(templates(EVERY))


@pytest.mark.parametrize(
    ("dtype", "digits", "smallest", "largest"), [("float16", 11, -13, 16), ("bfloat16", 8, -125, 128)]
)
def test_the_oldest_architecture_rounds_as_later_ones_do(
    open_device: Callable[..., Gpu], dtype: str, digits: int, smallest: int, largest: int
) -> None:
    """Every value of 16 bits, times 1.5. Before sm_80 no instruction rounds pairs."""
    bits = np.arange(2**16, dtype="uint16").view("uint16" if dtype == "bfloat16" else dtype)
    found = []
    for arch in ("sm_75", "sm_90"):
        gpu = open_device("emulator", arch=arch)
        x = gpu.array(bits, dtype)
        y = gpu.empty(bits.shape, dtype)
        axes.add(1, x.size, dtype).launch(gpu, x, y, 1.5, 1, 1, x.size, False)
        found.append(y)
    with np.errstate(invalid="ignore"):  # Signalling NaN are among them.
        product, *results = 1.5 * exact(x), *map(exact, found)
    same = np.equal(*(y.numpy().view("uint16") for y in found))
    assert same[~np.isnan(product)].all()
    assert same.all() or dtype == "float16"  # The emulator does not change the payloads of its NaN.
    unit = np.maximum(np.frexp(product)[1], smallest) - digits
    steps = np.ldexp(product, -unit)
    assert (np.abs(np.modf(steps)[0]) == 0.5).sum() > 10_000  # Ties, which go to even.
    nearest = np.ldexp(np.rint(steps), unit)
    nearest[np.abs(nearest) >= 2.0**largest] *= np.inf
    assert all(np.array_equal(result, nearest, equal_nan=True) for result in results)


def _check(ptx: bytes) -> None:
    assert re.search(rb"\b(?:atom|red)\.", ptx) is None
    for kernel in ptx.split(b".entry")[1:]:
        without = any(name in kernel for name in CHUNKLESS)
        assert without or re.search(rb"\bld\.global(?:\.\w+)*\.v4\.", kernel)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_products_of_halves_use_tensor_cores_where_they_exist(
    shared_builder: Builder, arch: str
) -> None:
    for dtype, kind in (("float16", "f16"), ("bfloat16", "bf16")):
        op = gemm.gemm(1, 1, 1, dtype)
        ptx = shared_builder.build(op.program, arch).ptx.decode()
        wanted = arch != "sm_75"
        found = set(re.findall(r"\bmma\.sync\.\S+", ptx))
        assert found == (
            {f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"} if wanted else set()
        )
        assert wanted == ("ldmatrix.sync" in ptx) == ("cp.async.cg.shared.global" in ptx)


def test_no_kernel_of_rows_is_left_out() -> None:
    for width in WIDTHS:
        for dtype, rows in itertools.product(DTYPES, (1, 9, 100)):
            ops = (
                softmax.softmax(rows, width, dtype),
                softmax.softmax_backward(rows, width, dtype),
                rms_norm.rms_norm(rows, width, dtype),
                *rms_norm.rms_norm_backward(rows, width, dtype),
            )
            assert {op.entry for op in ops} <= set(EVERY), (rows, width)
