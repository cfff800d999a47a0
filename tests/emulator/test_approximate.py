"""Approximate instructions: every device stays within the bound that the table states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from preheat import Gpu
from preheat.emulator.table import VARIANTS

Floats = NDArray[np.float64]

SOURCE = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry apply(.param .u64 a, .param .u64 b, .param .u64 out, .param .u32 n)
{{
    .reg .f32 %f<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<8>;
    .reg .pred %p<2>;
    mov.u32 %r1, %tid.x;
    ld.param.u32 %r2, [n];
    setp.ge.u32 %p1, %r1, %r2;
    @%p1 ret;
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [out];
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd1, %rd4;
    add.s64 %rd6, %rd2, %rd4;
    add.s64 %rd7, %rd3, %rd4;
    ld.global.f32 %f1, [%rd5];
    ld.global.f32 %f2, [%rd6];
    {instruction};
    st.global.f32 [%rd7], %f3;
    ret;
}}
"""


class Row(NamedTuple):
    """An instruction: its inputs, its exact function, and the permitted error."""

    opcode: str
    low: float
    high: float
    meaning: Callable[[Floats, Floats], Floats]
    relative: float = 0.0
    absolute: float = 0.0
    operands: int = 1


ULP = 2.0**-23
ROWS = (
    Row("div.approx.f32", 0.01, 100, lambda a, b: a / b, 2 * ULP, operands=2),
    Row("div.full.f32", 0.01, 100, lambda a, b: a / b, 2 * ULP, operands=2),
    Row("rcp.approx.f32", 0.01, 100, lambda a, _: 1 / a, ULP),
    Row("sqrt.approx.f32", 0.01, 1e6, lambda a, _: np.sqrt(a), 2.0**-23),
    Row("rsqrt.approx.f32", 0.01, 1e6, lambda a, _: 1 / np.sqrt(a), 2.0**-22.9),
    Row("ex2.approx.f32", -60, 60, lambda a, _: np.exp2(a), 2.0**-22),
    Row("lg2.approx.f32", 2, 1e6, lambda a, _: np.log2(a), 2.0**-22),
    Row("lg2.approx.f32", 0.5, 2, lambda a, _: np.log2(a), absolute=2.0**-22),
    Row("sin.approx.f32", -6.28, 6.28, lambda a, _: np.sin(a), absolute=2.0**-20.5),
    Row("cos.approx.f32", -6.28, 6.28, lambda a, _: np.cos(a), absolute=2.0**-20.5),
    Row("tanh.approx.f32", -8, 8, lambda a, _: np.tanh(a), 2.0**-10.9),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.opcode} {row.low} to {row.high}")
def test_approximate_instruction_is_within_its_bound(device: Gpu, row: Row) -> None:
    rng = np.random.default_rng(len(row.opcode) + int(row.high))
    a, b = (rng.uniform(row.low, row.high, 1021).astype(np.float32) for _ in range(2))
    out = apply(device, row, a, b)
    exact = row.meaning(a.astype(np.float64), b.astype(np.float64))
    # Half an ulp for the rounding of the result itself.
    allowed = row.absolute + np.abs(exact) * (row.relative + ULP / 2)
    assert (np.abs(out - exact) <= allowed).all(), np.abs(out - exact).max()


def test_every_approximate_form_of_single_floats_has_a_row() -> None:
    stated = {
        variant.syntax.partition("{")[0].removesuffix(".f32") for variant in VARIANTS if variant.bound
    }
    here = {row.opcode.removesuffix(".f32") for row in ROWS}
    others = {"rcp.approx.ftz.f64", "rsqrt.approx.f64", "rsqrt.approx.ftz.f64"}
    halves = {"ex2.approx.half", "ex2.approx.ftz.bfloat16", "tanh.approx.half", "tanh.approx.bfloat16"}
    assert stated - others - halves == here


def apply(gpu: Gpu, row: Row, *inputs: NDArray[np.float32]) -> Any:
    operands = ", ".join(["%f3", "%f1", "%f2"][: row.operands + 1])
    kernel = gpu.kernel(SOURCE.format(instruction=f"{row.opcode} {operands}"), "apply")
    out = gpu.array(np.full(inputs[0].shape, np.nan, np.float32))
    kernel[1, 1024](*map(gpu.array, inputs), out, len(inputs[0]))
    return out.numpy().astype(np.float64)
