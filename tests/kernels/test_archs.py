"""The code of every shipped kernel: every architecture compiles it, and it has no atomic updates."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from preheat import Builder
from preheat.kernels import rms_norm, softmax
from tests.kernels.conftest import DTYPES, every_op

EVERY = {op.entry: op for op in every_op()}
FAMILIES = sorted({op.source.name for op in EVERY.values()})
WIDTHS = *range(1, 1100), *(2**power + more for power in range(10, 18) for more in (-1, 0, 1))
CHUNKLESS = b"gemm", b"rms_norm_gamma"  # these do not read sixteen bytes of any type at once


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_compiles_its_share_of_all_kernels(
    shared_builder: Builder, family: str
) -> None:
    """All kernels for all architectures would take ten minutes: each is compiled for one of them."""
    ops = [op for op in EVERY.values() if op.source.name == family]
    archs = shared_builder.toolchain.located.archs
    assert {75, 90, 120} <= set(archs)
    share = -(-len(ops) // len(archs))
    for at, arch in enumerate(archs):
        entries = {ops[i % len(ops)].entry for i in range(at * share, (at + 1) * share)}
        program = replace(ops[0].program, names=tuple(sorted(entries)))
        artifact = shared_builder.build(program, f"sm_{arch}")
        assert artifact.cubin
        assert {entry.title for entry in artifact.entries} == entries
        _check(artifact.ptx)


def _check(ptx: bytes) -> None:
    assert re.search(rb"\b(?:atom|red)\.", ptx) is None
    for kernel in ptx.split(b".entry")[1:]:
        without = any(name in kernel for name in CHUNKLESS)
        assert without or re.search(rb"\bld\.global(?:\.\w+)*\.v4\.", kernel)


def test_no_kernel_of_rows_is_left_out() -> None:
    for width in WIDTHS:
        for dtype in DTYPES:
            ops = (
                softmax.softmax(1, width, dtype),
                softmax.softmax_backward(1, width, dtype),
                rms_norm.rms_norm(1, width, dtype),
                *rms_norm.rms_norm_backward(1, width, dtype),
            )
            assert {op.entry for op in ops} <= set(EVERY), width
