"""The plan of a LoRA step: it matches a real step, warms exactly that, and prints a table."""

from __future__ import annotations

import re
import subprocess
import sys
from bisect import bisect
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import preheat
from preheat import Builder, Gpu, InputError, Manifest
from preheat.kernels import softmax as softmax_family
from preheat.kernels.blas import Found, find
from preheat.kernels.nf4 import Nf4
from preheat.kernels.op import Op, trace_ops
from preheat.lora import MODELS, LoraBlock, Plan, Shape, backward_plan
from tests.conftest import Recorder
from tests.kernels.conftest import exact
from tests.lora.block import GQA, MHA, Case, fake, names, planned

# The plan is what runs


def small(model: str) -> dict[str, Any]:
    """Return a small model with the same proportions and the same heads per key-value head."""
    real = MODELS[model]
    share, head = real.q_dim // real.kv_dim, 4
    heads = max(2, share)
    sizes = {"q_dim": heads * head, "kv_dim": real.kv_dim * heads * head // real.q_dim, "heads": heads}
    scale = real.q_dim / sizes["q_dim"]
    return sizes | {"hidden": int(real.hidden / scale), "intermediate": int(real.intermediate / scale)}


every_model = pytest.mark.parametrize("model", MODELS)
KINDS: list[tuple[int, dict[str, Any]]] = [
    (0, {}), (0, {"nf4": True}), (3, {}), (3, {"frozen": True}), (3, {"nf4": True}),
]  # fmt: skip


def name_of(value: Any) -> str:
    """Return the part of a test's name for a rank or a base."""
    return "-".join(value) or "trained" if isinstance(value, dict) else str(value)


every_kind = pytest.mark.parametrize(("rank", "base"), KINDS, ids=name_of)
#: Every model, and every kind, once. The other pairs are long tests.
PAIRS = [
    pytest.param(
        model, *kind, id=f"{model}-{name_of(kind[0])}-{name_of(kind[1])}",
        marks=() if turn % len(KINDS) == number else pytest.mark.long,
    )
    for turn, model in enumerate(MODELS)
    for number, kind in enumerate(KINDS)
]  # fmt: skip


@pytest.mark.parametrize(("model", "rank", "base"), PAIRS)
def test_the_plan_is_what_a_step_launches(
    open_device: Callable[..., Gpu], model: str, rank: int, base: dict[str, Any]
) -> None:
    gpu = open_device("emulator")
    shape = Shape(**small(model), max_seq=3, lora_rank=rank, **base)
    case = Case(gpu, shape)
    plan = planned(shape)
    with trace_ops() as seen:
        case.block.step(case.g)
    assert tuple(seen) == plan.launches == plan.operations == plan.on(gpu).launches
    with_blas = Case(gpu, shape, blas=fake(gpu))
    of_blas = planned(shape, blas=True)
    with trace_ops() as together:
        with_blas.block.step(with_blas.g)
    assert tuple(together) == of_blas.operations
    assert tuple(op._replace(by=None) for op in together) == plan.operations


def step_at_real_size(gpu: Gpu, plan: Plan, **more: Any) -> tuple[Op, ...]:
    """Return the ops that a step with arrays of ones launches."""
    shape = plan.shape
    arrays: dict[str, Any] = {
        name: gpu.zeros(size, shape.dtype).fill(0.01) for name, size in shape.input_shapes.items()
    }
    for name, (rows, columns) in shape.base.items() if shape.nf4 else ():
        codes = gpu.zeros(rows * columns // 2, "uint8").fill(0x99)
        scales = rows * columns // 64
        arrays[name] = Nf4(codes, gpu.zeros(scales).fill(0.1), (rows, columns))
    block = LoraBlock(gpu, shape, arrays, **more)
    gy = gpu.zeros((shape.max_seq, shape.hidden), shape.dtype).fill(0.5)
    with trace_ops() as seen:
        gx = block.step(gy)
    assert np.isfinite(exact(gx)).all()
    return tuple(seen)


@pytest.mark.gpu
@every_model
@every_kind
@pytest.mark.parametrize("blas", [False, True])
def test_the_plan_is_what_a_sealed_step_launches_at_real_size(
    open_device: Callable[..., Gpu], model: str, rank: int, base: dict[str, Any], blas: bool
) -> None:
    gpu = open_device("cuda")
    if blas and isinstance(found := find(gpu), str):
        pytest.skip(found)
    plan = backward_plan(
        **MODELS[model].sizes, max_seq=512, lora_rank=16 if rank else 0, blas=blas, **base
    )
    plan.warm(gpu)
    with preheat.sealed():
        seen = step_at_real_size(gpu, plan, blas=blas)
    assert seen == plan.operations
    assert {(op.program, op.entry) for op in seen if op.by is None} == set(plan.requests)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shorter_types_have_a_plan_of_their_own(open_device: Callable[..., Gpu], dtype: str) -> None:
    gpu = open_device("cuda")
    sizes = MODELS["qwen2-0.5b"].sizes
    plan = backward_plan(**sizes, max_seq=333, lora_rank=8, dtype=dtype).on(gpu)
    assert step_at_real_size(gpu, plan) == plan.operations


# Warming


@pytest.fixture
def fresh(open_device: Callable[..., Gpu], builder: Builder) -> Gpu:
    """Return an emulator with a cache of its own."""
    return open_device("emulator", builder=builder)


def test_after_warming_a_sealed_step_compiles_nothing_and_uses_all(
    fresh: Gpu, recorder: Recorder
) -> None:
    case = Case(fresh, GQA)
    plan = planned(GQA)
    report = plan.warm(fresh)
    assert report.programs == report.entries == report.compiles == len(plan.requests)
    compiled, loaded = len(recorder.named("compile")), len(recorder.named("load"))
    with preheat.sealed(), trace_ops() as seen:
        case.block.step(case.g)
    assert len(recorder.named("compile")) == compiled
    assert len(recorder.named("load")) == loaded
    assert {(op.program, op.entry) for op in seen} == set(plan.requests)
    assert plan.warm(fresh).compiles == 0


def test_unwarmed_a_sealed_step_is_refused(fresh: Gpu) -> None:
    case = Case(fresh, MHA)
    with preheat.sealed(), pytest.raises(preheat.SealedError, match=r"gemm\.cu"):
        case.block.step(case.g)


def test_a_plan_warms_its_own_length_unless_shorter_ones_are_asked_for(fresh: Gpu) -> None:
    shape = replace(MHA, max_seq=33)
    plan = planned(shape)
    brief = Case(fresh, replace(shape, max_seq=7))
    plan.warm(fresh)
    with (
        preheat.sealed(),
        pytest.raises(preheat.SealedError, match="softmax_backward<float, 4, 2, true>"),
    ):
        brief.step()
    shorter = len(plan.requests_up_to_max_seq) - len(plan.requests)
    assert plan.warm(fresh, shorter=True).compiles == shorter > 0
    for length in (1, 7, 33):
        case = Case(fresh, replace(shape, max_seq=length))
        with preheat.sealed(), trace_ops() as seen:
            case.step()
        assert {(op.program, op.entry) for op in seen} <= set(plan.requests_up_to_max_seq)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blas", [False, True])
@every_kind
def test_the_kernels_of_every_length_are_found(
    rank: int, base: dict[str, Any], blas: bool, dtype: str
) -> None:
    sizes = Shape(
        hidden=1536, q_dim=64, kv_dim=32, max_seq=300, lora_rank=rank, intermediate=4864, heads=4,
        dtype=dtype, **base,
    )  # fmt: skip
    plan = planned(sizes, blas)
    by_length = [set(planned(replace(sizes, max_seq=n), blas).requests) for n in range(1, 301)]
    found = plan.requests_up_to_max_seq
    assert set(found) == set().union(*by_length) > by_length[0] | by_length[-1]
    assert len(found) == len(set(found))
    wanted = plan.manifest(shorter=True).programs
    assert sorted(name for each in wanted for name in each.entries) == sorted(r.entry for r in found)


@pytest.mark.parametrize("turns", [(2, 3, 4), (17, 18, 150), (199, 200), (5, 90, 91, 92, 160, 199), ()])
def test_a_kernel_for_one_length_alone_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, turns: tuple[int, ...]
) -> None:
    real = softmax_family.softmax_backward

    def spread(rows: int, width: int, dtype: object) -> Op:
        return real(rows, width, dtype)._replace(entry=f"softmax_backward<{bisect(turns, width)}>")

    monkeypatch.setattr("preheat.kernels.lora.plan.softmax.softmax_backward", spread)
    found = planned(replace(MHA, max_seq=200), blas=True).requests_up_to_max_seq
    entries = [entry for _, entry in found if entry.startswith("softmax")]
    assert entries == [f"softmax_backward<{turn}>" for turn in range(len(turns) + 1)]


@every_model
def test_no_shorter_sequence_of_a_real_model_needs_another_kernel(model: str) -> None:
    plan = backward_plan(**MODELS[model].sizes, max_seq=4096, lora_rank=16)
    found = set(plan.requests_up_to_max_seq)
    for length in np.random.default_rng(20261115).integers(1, 4096, 100):
        assert set(planned(replace(plan.shape, max_seq=length)).requests) <= found, length


def test_with_one_position_there_is_none_shorter() -> None:
    plan = planned(replace(GQA, max_seq=1))
    assert plan.requests_up_to_max_seq == plan.requests
    assert plan.manifest(shorter=True) == plan.manifest()


def test_the_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    plan = planned(GQA)
    plan.manifest().write(tmp_path / "kernels.toml")
    again = Manifest.read(tmp_path / "kernels.toml")
    wanted = {(each.program, each.entries) for each in again.programs}
    assert wanted == {(request.program, (request.entry,)) for request in plan.requests}


# Content


def llama(rank: int = 16, **more: Any) -> Plan:
    return backward_plan(**MODELS["llama-3-8b"].sizes, max_seq=2048, lora_rank=rank, **more)


def without(whole: list[str], part: list[str]) -> list[str]:
    """Return `whole` without the items of `part`, in order."""
    left = list(whole)
    for each in part:
        left.remove(each)
    return left


LORA = [
    f"gemm_backward_{form}(m=2048, n={n}, k={k})"
    for out in (4096, 1024, 1024)
    for form, n, k in (("b", out, 16), ("a", out, 16), ("b", 16, 4096), ("a", 16, 4096))
]
BASE = [
    f"gemm_backward_b(m=2048, n={n}, k={k})"
    for n, k in (
        (4096, 14336), (14336, 4096), (14336, 4096), (4096, 4096), (4096, 4096), (1024, 4096),
        (1024, 4096),
    )
]  # fmt: skip


def test_rank_0_leaves_out_what_lora_adds_and_nothing_else() -> None:
    assert sorted(without(names(llama()), LORA)) == sorted(names(llama(rank=0)))


@pytest.mark.parametrize("rank", [0, 16])
def test_a_frozen_base_leaves_out_the_gradients_of_its_weights_and_nothing_else(rank: int) -> None:
    assert names(llama(rank, frozen=True)) == without(names(llama(rank)), BASE)


def test_nf4_is_a_frozen_base_with_other_kernels_for_its_inputs() -> None:
    frozen, quantised = names(llama(frozen=True)), names(llama(nf4=True))
    assert [name.replace("_nf4", "") for name in quantised] == frozen
    changed = [name for name in quantised if "_nf4" in name]
    assert changed == [weight.replace("_b(", "_a_nf4(") for weight in BASE]
    assert llama(nf4=True) == llama(nf4=True, frozen=True)


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("base", [{}, {"frozen": True}, {"nf4": True}], ids=str)
@pytest.mark.parametrize("blas", [False, True])
def test_activations_and_norms_are_always_there(rank: int, base: dict[str, Any], blas: bool) -> None:
    launches = [str(op) for op in llama(rank, blas=blas, **base).launches]
    assert launches.count(f"swiglu_backward(n={2048 * 14336})") == 1
    assert launches.count(f"softmax_backward(rows={32 * 2048}, width=2048)") == 1
    assert launches.count("rms_norm_backward(rows=2048, width=4096)") == 2


def test_with_cublas_no_product_is_compiled_but_the_quantised_one() -> None:
    assert not any("gemm" in entry for _, entry in llama(blas=True).requests)
    products = [entry for _, entry in llama(nf4=True, blas=True).requests if "gemm" in entry]
    assert products
    assert all(entry.startswith("gemm_backward_a_nf4<") for entry in products)


def test_undecided_it_plans_for_the_kernels_until_a_device_decides(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = open_device("emulator")
    plan = llama()
    assert plan.requests == llama(blas=False).requests
    assert plan.on(gpu) == llama(blas=False)
    monkeypatch.setattr("preheat.kernels.lora.plan.find", lambda _: Found(None, "13.0.0"))
    assert plan.on(gpu) == llama(blas=True)
    assert llama(blas=False).on(gpu) == llama(blas=False)


@pytest.mark.parametrize("blas", [None, "no", "Auto", 1, 0, np.arange(2)], ids=repr)
def test_every_other_blas_is_refused_by_plan_and_step(
    given: tuple[Gpu, dict[str, Any]], blas: Any
) -> None:
    gpu, arrays = given
    with pytest.raises(InputError, match=rf"^blas {re.escape(repr(blas))} is not 'auto'"):
        planned(GQA, blas)
    with pytest.raises(InputError, match=rf"^blas {re.escape(repr(blas))} is "):
        LoraBlock(gpu, GQA, arrays, blas=blas)


def test_cublas_is_planned_without_a_device_and_missed_in_a_step(
    given: tuple[Gpu, dict[str, Any]],
) -> None:
    gpu, arrays = given
    assert {op.by for op in planned(GQA, blas=True).operations} == {None, "cuBLAS"}
    with pytest.raises(preheat.PreheatError, match="emulator:0 is not a GPU"):
        LoraBlock(gpu, GQA, arrays, blas=True)


def test_every_request_is_there_once() -> None:
    requests = llama().requests
    assert len(requests) == len(set(requests)) < 20
    assert {request.entry for request in requests} == {op.entry for op in llama().launches}


def test_it_reads_as_a_table() -> None:
    head, first, *_ = str(llama()).splitlines()
    assert head.split() == ["operation", "dimensions", "times", "kernel"]
    assert re.split(r"  +", first) == [
        "gemm_backward_a", "m=2048 n=4096 k=14336", "1", "gemm_backward_a<float, 128>",
    ]  # fmt: skip
    assert re.search(r"^gemm_backward_a +m=2048 n=128 k=2048 +32  ", str(llama()), re.M)
    assert "cuBLAS" not in str(llama())
    assert re.search(
        r"^gemm_backward_a +m=2048 n=4096 k=14336 +1 +cuBLAS$", str(llama(blas=True)), re.M
    )


def test_it_is_there_when_preheat_is_imported() -> None:
    assert "lora" in dir(preheat)
    code = "import preheat; print(preheat.lora.backward_plan.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "backward_plan\n"


def test_the_page_on_lora_says_what_every_array_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| (.*?) \|", page.partition("| name | shape | what it is |")[2], re.M
    )
    sizes = {**asdict(GQA), "head": GQA.head, "kv_heads": GQA.kv_heads}
    reported = {
        name: eval(shape.strip("`"), sizes)
        for names, shape in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert reported == GQA.input_shapes
