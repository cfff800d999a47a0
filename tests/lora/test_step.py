"""A LoRA step: its gradients are correct, and operands that do not fit are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from preheat import Gpu, InputError
from preheat.kernels.nf4 import quantize
from preheat.kernels.op import trace_ops
from preheat.lora import LoraBlock, Plan, Shape
from tests.kernels.conftest import exact
from tests.lora.block import GQA, MHA, Case, fake, planned


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(GQA, id="GQA"),
        pytest.param(MHA, id="MHA"),
        pytest.param(replace(GQA, lora_rank=0, kv_dim=3), id="one head of keys, no LoRA"),
        pytest.param(replace(GQA, frozen=True), id="frozen"),
        pytest.param(replace(GQA, nf4=True), id="NF4"),
        pytest.param(replace(MHA, nf4=True, lora_rank=0, max_seq=1), id="norms alone"),
    ],
)
def test_gradients_are_those_of_finite_differences(device: Gpu, shape: Shape) -> None:
    case = Case(device, shape)
    found = case.step()
    assert set(found) == {"x", *shape.trained}
    for name, value in found.items():
        wanted = case.slopes(name)
        assert np.abs(wanted).max() > 1e-3 or shape.max_seq == 1, name
        assert np.abs(value - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max()), name


def test_a_frozen_base_changes_no_bit_of_the_other_gradients(device: Gpu) -> None:
    whole = Case(device, GQA).step()
    frozen = Case(device, replace(GQA, frozen=True)).step()
    assert set(whole) - set(frozen) == set(GQA.base)
    assert {"x", "norm1", "norm2", "q_a", "v_b"} <= set(frozen)
    assert all(np.array_equal(value, whole[name]) for name, value in frozen.items())


@pytest.mark.parametrize("shape", [GQA, replace(GQA, nf4=True)], ids=["whole", "NF4"])
def test_cublas_finds_the_same_gradients(open_device: Callable[..., Gpu], shape: Shape) -> None:
    gpu = open_device("emulator")
    ours = Case(gpu, shape).step()
    theirs = Case(gpu, shape, blas=fake(gpu)).step()
    for name, value in ours.items():
        assert np.allclose(value, theirs[name], rtol=1e-5, atol=1e-5), name


def test_a_step_can_be_captured_and_gives_the_same_bits(device: Gpu) -> None:
    case = Case(device, GQA, blas=False)
    before = case.step()
    with device.capture() as graph, trace_ops() as seen:
        gx = case.block.step(case.g)
    for array in (gx, *case.block.gradients.values()):
        array.fill(0)
    graph.replay()
    assert len(graph.nodes) == len(seen)
    assert tuple(seen) == planned(GQA).operations
    after = {"x": exact(gx)} | {name: exact(g) for name, g in case.block.gradients.items()}
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_step_with_cublas_can_be_captured(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    case = Case(gpu, GQA, blas=fake(gpu))
    plan = planned(GQA, blas=True)
    case.step()
    with gpu.capture() as graph, trace_ops() as seen:
        case.block.step(case.g)
    assert tuple(seen) == plan.operations
    assert len(graph.nodes) == len(plan.launches)  # cuBLAS adds its own on a GPU


# What does not fit


def test_arrays_that_do_not_fit_are_named(
    given: tuple[Gpu, dict[str, Any]], open_device: Callable[..., Gpu]
) -> None:
    gpu, arrays = given
    far = open_device("emulator:1")
    freed = gpu.zeros((10, 12))
    on_host = np.zeros((10, 24), "float32")
    freed.close()
    for change, message in (
        ({"q": gpu.zeros((10, 11))}, "q is float32 of shape (10, 11), not float32 of shape (10, 12)"),
        ({"x": gpu.zeros((5, 10), "float16")}, "x is float16 of shape (5, 10), not float32"),
        ({"x": gpu.zeros((5, 10), "int32")}, "x: the shipped kernels do not take int32"),
        ({"o": quantize(np.ones((12, 10)))}, "o is Nf4 of shape (12, 10), not float32"),
        ({"x": [1.0, 2.0]}, "x is list, not an array"),
        ({"q": on_host[:, ::2]}, "q is not contiguous"),
        ({"q": on_host[:, :12].copy()}, "q is in host memory, which kernels on emulator:0 cannot use"),
        ({"q": far.zeros((10, 12))}, "q is <Array float32[10, 12] on emulator:1>, which kernels on"),
        ({"q": freed}, "q: <Array float32[10, 12] on emulator:0, freed>: "),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            LoraBlock(gpu, GQA, arrays | change)
    for eps in (-1e-6, np.nan, np.inf, "1e-6", None):
        with pytest.raises(
            InputError, match=f"^eps {re.escape(repr(eps))} is not a non-negative number"
        ):
            LoraBlock(gpu, GQA, arrays, eps=eps)  # type: ignore[arg-type]
    block = LoraBlock(gpu, GQA, arrays)
    for gy, message in (
        (gpu.zeros((4, 10)), "gy is float32 of shape (4, 10), not float32 of shape (5, 10)"),
        (far.zeros((5, 10)), "gy is <Array float32[5, 10] on emulator:1>, which kernels on emulator:0"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            block.step(gy)


def test_a_quantised_base_that_does_not_fit_is_named(
    given: tuple[Gpu, dict[str, Any]], open_device: Callable[..., Gpu]
) -> None:
    gpu, arrays = given
    frozen = replace(GQA, nf4=True)
    base = {name: quantize(np.ones(size)).on(gpu) for name, size in GQA.base.items()}
    LoraBlock(gpu, frozen, arrays | base)
    q = base["q"]
    far = open_device("emulator:1")
    for bad, message in (
        (arrays["q"], "q is Array, not Nf4"),
        (base["o"], "q is Nf4 of shape (12, 10), not of (10, 12)"),
        (base["o"]._replace(shape=(10, 13)), "q is Nf4 of shape (10, 13), not of (10, 12)"),
        (q._replace(codes=gpu.zeros(61, "uint8")), "q: codes of a (10, 12) matrix are uint8 of shape"),
        (q._replace(scales=gpu.zeros(3)), "q: scales of a (10, 12) matrix are float32 of shape (2,)"),
        (q._replace(codes=[1, 2]), "q.codes is list, not an array"),
        (q._replace(codes=np.zeros(120, "uint8")[::2]), "q.codes is not contiguous"),
        (q._replace(scales=far.zeros(2)), "q.scales is <Array float32[2] on emulator:1>, which"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            LoraBlock(gpu, frozen, arrays | base | {"q": bad})


def test_a_missing_array_is_suggested_only_by_one_that_is_not_needed(
    given: tuple[Gpu, dict[str, Any]],
) -> None:
    gpu, arrays = given

    def hint(*left_out: str, **more: Any) -> str | None:
        kept = {name: array for name, array in arrays.items() if name not in left_out}
        with pytest.raises(InputError, match=f"there is no array '{left_out[0]}'") as caught:
            LoraBlock(gpu, GQA, kept | more)
        return caught.value.hint

    assert hint("q_a") == "missing: q_a"
    assert hint("q_a", "v_low") == "missing: q_a, v_low"
    assert hint("q_a", q_A=arrays["q_a"]) == "did you mean 'q_A'?"


def test_arguments_of_another_kind_are_named(given: tuple[Gpu, dict[str, Any]]) -> None:
    gpu, arrays = given
    for call, message in (
        (lambda: Plan({"hidden": 10}), "shape is dict, not a Shape"),  # type: ignore[arg-type]
        (lambda: planned(GQA).warm(None), "None is not a device"),  # type: ignore[arg-type]
        (lambda: planned(GQA, blas=True).warm(None), "None is not a device"),  # type: ignore[arg-type]
        (lambda: LoraBlock(None, GQA, arrays), "None is not a device"),  # type: ignore[arg-type]
        (lambda: LoraBlock(gpu, asdict(GQA), arrays), "shape is dict, not a Shape"),  # type: ignore[arg-type]
        (lambda: LoraBlock(gpu, GQA, None), "arrays must be a mapping"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            call()
