"""Operators of torch for the tests, which are registered once in a process.

They run on the emulator for tensors of the host, and on a GPU for its tensors.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from preheat.adapters.torch import op

__all__ = ["EMULATOR", "SOURCE", "blocks", "operators"]

SOURCE = Path(__file__).parent / "kernels.cu"
BLOCK = 64
EMULATOR = "emulator[host_arrays]"  # It computes tensors of the host.


def blocks(x: Any, *_: object) -> int:
    """Return the grid for the elements of the first argument."""
    return -(-int(x.numel()) // BLOCK)


@cache
def operators() -> SimpleNamespace:
    """Register the operators, and return them."""
    import torch

    common: dict[str, Any] = {"grid": blocks, "block": BLOCK, "device": EMULATOR}
    like = torch.empty_like

    def keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.factor = inputs[1]

    def keep_input(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.save_for_backward(inputs[0])

    made = SimpleNamespace()
    made.scale = op(
        "preheat_test::scale(Tensor x, float a=2.0) -> Tensor", SOURCE,
        out=lambda x, _: like(x), args=lambda x, a, y: (x, a, y, x.numel()),
        backward=lambda ctx, gy: (made.scale(gy.contiguous(), ctx.factor), None),
        setup_context=keep_factor, **common,
    )  # fmt: skip
    made.scale_inplace = op(
        "preheat_test::scale_inplace(Tensor(a!) x, float a) -> ()", SOURCE,
        args=lambda x, a: (x, a, x.numel()), **common,
    )  # fmt: skip
    made.split = op(
        "preheat_test::split(Tensor x) -> (Tensor magnitude, Tensor sign)", SOURCE,
        out=lambda x: (like(x), like(x, dtype=torch.int32)),
        args=lambda x, magnitude, sign: (x, magnitude, sign, x.numel()), **common,
    )  # fmt: skip
    made.mix = op(
        "preheat_test::mix(Tensor x, Tensor? bias, int shift, float a=1.0, *, bool negate=False)"
        " -> Tensor",
        SOURCE, out=lambda x, *_: like(x), grid=1, block=lambda x, *_: x.numel(), device=EMULATOR,
    )  # fmt: skip
    made.twice = op(
        "preheat_test::twice(Tensor x) -> Tensor",
        (SOURCE, lambda x, _: "twice<double>" if x.dtype == torch.float64 else "twice<float>"),
        out=lambda x: like(x), args=lambda x, y: (x, y, x.numel()), **common,
    )  # fmt: skip
    swish_backward = op(
        "preheat_test::swish_backward(Tensor gy, Tensor x) -> Tensor", SOURCE,
        out=lambda _, x: like(x), args=lambda gy, x, gx: (gy, x, gx, x.numel()), **common,
    )  # fmt: skip
    made.swish = op(
        "preheat_test::swish(Tensor x) -> Tensor", SOURCE,
        out=lambda x: like(x), args=lambda x, y: (x, y, x.numel()),
        backward=lambda ctx, gy: swish_backward(gy.contiguous(), ctx.saved_tensors[0]),
        setup_context=keep_input, **common,
    )  # fmt: skip
    return made
