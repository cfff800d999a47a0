"""A block in float64 and on a device, for the tests of plan and step."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from preheat import Gpu
from preheat.kernels.blas import Blas, Found
from preheat.kernels.nf4 import Nf4, dequantize, quantize
from preheat.lora import LoraBlock, Plan, Shape, backward_plan
from tests.kernels.conftest import Exact, exact, gradient
from tests.kernels.cublas import Cublas

EPS = 1e-5
GQA = Shape(hidden=10, q_dim=12, kv_dim=6, max_seq=5, lora_rank=2, intermediate=9, heads=4)
MHA = replace(GQA, q_dim=6, heads=2, max_seq=3)


def planned(shape: Shape, blas: bool | Literal["auto"] = "auto") -> Plan:
    return backward_plan(**asdict(shape), blas=blas)


def names(plan: Plan) -> list[str]:
    return [str(op) for op in plan.operations]


def fake(gpu: Gpu) -> Blas:
    return Blas(gpu, found=Found(Cublas(), "13.0.0"))


def normed(x: Exact, gamma: Exact) -> Exact:
    result: Exact = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * gamma
    return result


def softmax(scores: Exact) -> Exact:
    """Over rows, where no position sees later ones."""
    seen = np.where(np.tri(scores.shape[-1]) > 0, scores, -np.inf)
    powers = np.exp(seen - seen.max(axis=-1, keepdims=True))
    weights: Exact = powers / powers.sum(axis=-1, keepdims=True)
    return weights


def forward(s: Shape, w: dict[str, Exact]) -> dict[str, Exact]:
    """Return all that the block computes; `w` are its weights and its input `x`."""
    kept = {"normed1": normed(w["x"], w["norm1"])}
    for name in "qkv":
        kept[name] = kept["normed1"] @ w[name]
        if s.lora_rank:
            kept[f"{name}_low"] = kept["normed1"] @ w[f"{name}_a"]
            kept[name] = kept[name] + kept[f"{name}_low"] @ w[f"{name}_b"]
    for name, whole in (("queries", "q"), ("keys", "k"), ("values", "v")):
        kept[name] = kept.pop(whole).reshape(s.max_seq, -1, s.head).transpose(1, 0, 2)
    keys, values = (kept[name].repeat(s.heads // s.kv_heads, axis=0) for name in ("keys", "values"))
    kept["probabilities"] = softmax(kept["queries"] @ keys.transpose(0, 2, 1) / np.sqrt(s.head))
    attended = (kept["probabilities"] @ values).transpose(1, 0, 2)
    kept["attended"] = attended.reshape(s.max_seq, s.q_dim)
    kept["middle"] = w["x"] + kept["attended"] @ w["o"]
    kept["normed2"] = normed(kept["middle"], w["norm2"])
    kept["gated"], kept["lifted"] = kept["normed2"] @ w["gate"], kept["normed2"] @ w["up"]
    kept["activated"] = kept["gated"] / (1 + np.exp(-kept["gated"])) * kept["lifted"]
    kept["y"] = kept["middle"] + kept["activated"] @ w["down"]
    return kept


class Case:
    """A block with random weights and input, in float64 and on a device."""

    def __init__(self, gpu: Gpu, shape: Shape, **more: Any) -> None:
        rng = np.random.default_rng(20261115)
        sizes = {**shape.trained, **shape.base, "x": (shape.max_seq, shape.hidden)}
        self.shape = shape
        self.quantised = dict[str, Nf4]()
        self.weights = {name: self._stored(rng.standard_normal(sizes[name])) for name in sorted(sizes)}
        for name in shape.base if shape.nf4 else ():
            self.quantised[name] = quantize(self.weights[name])
            self.weights[name] = dequantize(self.quantised[name]).astype("float64")
        kept = forward(shape, self.weights)
        self.gy = self._stored(rng.standard_normal(kept["y"].shape))
        self.g = gpu.array(self.gy.astype("float32"))
        arrays = {
            name: gpu.array(value.astype("float32")) for name, value in (kept | self.weights).items()
        } | {name: value.on(gpu) for name, value in self.quantised.items()}
        self.block = LoraBlock(gpu, shape, arrays, eps=EPS, **more)

    def _stored(self, values: Any) -> Exact:
        kept: Exact = (values / np.sqrt(max(len(values), 3) / 3)).astype("float32").astype("float64")
        return kept

    def step(self) -> dict[str, Exact]:
        """Return the gradients that the device finds."""
        gx = self.block.step(self.g)
        return {"x": exact(gx)} | {name: exact(g) for name, g in self.block.gradients.items()}

    def slopes(self, name: str) -> Exact:
        """Return the gradient of one weight, or the input, by finite differences."""

        def result(value: Exact) -> Exact:
            return forward(self.shape, self.weights | {name: value})["y"]

        return gradient(result, self.weights[name], self.gy)
