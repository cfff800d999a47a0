"""The LoRA backward plan: it is what a real step does, and a real step's gradients are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from bisect import bisect
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import preheat
from preheat import Builder, Gpu, InputError, Manifest
from preheat.kernels import elementwise
from preheat.kernels import softmax as softmax_family
from preheat.kernels.blas import Blas, Found, find
from preheat.kernels.nf4 import Nf4, dequantize, quantize
from preheat.kernels.op import Op, watching
from preheat.lora import MODELS, LoraBlock, Plan, Shape, backward_plan
from tests.conftest import Recorder
from tests.kernels.conftest import Exact, exact, gradient
from tests.kernels.cublas import Cublas

EPS = 1e-5
GQA = Shape(hidden=10, q_dim=12, kv_dim=6, max_seq=5, lora_rank=2, intermediate=9, heads=4)
MHA = replace(GQA, q_dim=6, heads=2, max_seq=3)


def planned(shape: Shape, blas: bool | Literal["auto"] = "auto") -> Plan:
    return backward_plan(**asdict(shape), blas=blas)


# The block in float64


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
    """All that the block computes; `w` are its weights and its input `x`."""
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
        self.shape, self.quantised = shape, dict[str, Nf4]()
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
        """The gradients that the device finds."""
        gx = self.block.step(self.g)
        return {"x": exact(gx)} | {name: exact(g) for name, g in self.block.gradients.items()}

    def slopes(self, name: str) -> Exact:
        """The gradient of one weight, or the input, by finite differences."""

        def result(value: Exact) -> Exact:
            return forward(self.shape, self.weights | {name: value})["y"]

        return gradient(result, self.weights[name], self.gy)


# Gradients


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
    with device.capture() as graph, watching() as seen:
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
    case, plan = Case(gpu, GQA, blas=fake(gpu)), planned(GQA, blas=True)
    case.step()
    with gpu.capture() as graph, watching() as seen:
        case.block.step(case.g)
    assert tuple(seen) == plan.operations
    assert len(graph.nodes) == len(plan.launches)  # cuBLAS adds its own on a GPU


# The plan is what runs


def fake(gpu: Gpu) -> Blas:
    return Blas(gpu, found=Found(Cublas(), "13.0.0"))


def small(model: str) -> dict[str, Any]:
    """A model in miniature: its proportions, with as many heads to one of keys and values."""
    real = MODELS[model]
    share, head = real.q_dim // real.kv_dim, 4
    heads = max(2, share)
    sizes = {"q_dim": heads * head, "kv_dim": real.kv_dim * heads * head // real.q_dim, "heads": heads}
    scale = real.q_dim / sizes["q_dim"]
    return sizes | {"hidden": int(real.hidden / scale), "intermediate": int(real.intermediate / scale)}


every_model = pytest.mark.parametrize("model", MODELS)
every_kind = pytest.mark.parametrize(
    ("rank", "base"),
    [(0, {}), (0, {"nf4": True}), (3, {}), (3, {"frozen": True}), (3, {"nf4": True})],
    ids=lambda v: "-".join(v) or "trained" if isinstance(v, dict) else str(v),
)


@every_model
@every_kind
def test_the_plan_is_what_a_step_launches(
    open_device: Callable[..., Gpu], model: str, rank: int, base: dict[str, Any]
) -> None:
    gpu = open_device("emulator")
    shape = Shape(**small(model), max_seq=3, lora_rank=rank, **base)
    case = Case(gpu, shape)
    plan = planned(shape)
    with watching() as seen:
        case.block.step(case.g)
    assert tuple(seen) == plan.launches == plan.operations == plan.on(gpu).launches
    with_blas, of_blas = Case(gpu, shape, blas=fake(gpu)), planned(shape, blas=True)
    with watching() as together:
        with_blas.block.step(with_blas.g)
    assert tuple(together) == of_blas.operations
    assert tuple(op._replace(by=None) for op in together) == plan.operations


def step_at_real_size(gpu: Gpu, plan: Plan, **more: Any) -> tuple[Op, ...]:
    """What a step with arrays of ones launches."""
    shape = plan.shape
    arrays: dict[str, Any] = {
        name: gpu.zeros(size, shape.dtype).fill(0.01) for name, size in shape.given.items()
    }
    for name, (rows, columns) in shape.base.items() if shape.nf4 else ():
        codes, scales = gpu.zeros(rows * columns // 2, "uint8").fill(0x99), rows * columns // 64
        arrays[name] = Nf4(codes, gpu.zeros(scales).fill(0.1), (rows, columns))
    block = LoraBlock(gpu, shape, arrays, **more)
    gy = gpu.zeros((shape.max_seq, shape.hidden), shape.dtype).fill(0.5)
    with watching() as seen:
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
    gpu, sizes = open_device("cuda"), MODELS["qwen2-0.5b"].sizes
    plan = backward_plan(**sizes, max_seq=333, lora_rank=8, dtype=dtype).on(gpu)
    assert step_at_real_size(gpu, plan) == plan.operations


# Warming


@pytest.fixture
def fresh(open_device: Callable[..., Gpu], builder: Builder) -> Gpu:
    """An emulator with a cache of its own."""
    return open_device("emulator", builder=builder)


def test_after_warming_a_sealed_step_compiles_nothing_and_uses_all(
    fresh: Gpu, recorder: Recorder
) -> None:
    case, plan = Case(fresh, GQA), planned(GQA)
    report = plan.warm(fresh)
    assert report.programs == report.entries == report.compiles == len(plan.requests)
    compiled, loaded = len(recorder.named("compile")), len(recorder.named("load"))
    with preheat.sealed(), watching() as seen:
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
    plan, brief = planned(shape), Case(fresh, replace(shape, max_seq=7))
    plan.warm(fresh)
    with preheat.sealed(), pytest.raises(preheat.SealedError, match="softmax_backward<float, 8, 1>"):
        brief.step()
    assert plan.warm(fresh, shorter=True).compiles == 1
    for length in (1, 7, 33):
        case = Case(fresh, replace(shape, max_seq=length))
        with preheat.sealed(), watching() as seen:
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

    monkeypatch.setattr("preheat.lora.plan.softmax.softmax_backward", spread)
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


# What is in it


def names(plan: Plan) -> list[str]:
    return [str(op) for op in plan.operations]


def llama(rank: int = 16, **more: Any) -> Plan:
    return backward_plan(**MODELS["llama-3-8b"].sizes, max_seq=2048, lora_rank=rank, **more)


def without(whole: list[str], part: list[str]) -> list[str]:
    """What is left of `whole`, in order, when all of `part` is taken out."""
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
    gpu, plan = open_device("emulator"), llama()
    assert plan.requests == llama(blas=False).requests
    assert plan.on(gpu) == llama(blas=False)
    monkeypatch.setattr("preheat.lora.plan.find", lambda _: Found(None, "13.0.0"))
    assert plan.on(gpu) == llama(blas=True)
    assert llama(blas=False).on(gpu) == llama(blas=False)


@pytest.mark.parametrize("blas", [None, "no", "Auto", 1, 0, np.arange(2)], ids=repr)
def test_every_other_blas_is_refused_by_plan_and_step(
    given: tuple[Gpu, dict[str, Any]], blas: Any
) -> None:
    gpu, arrays = given
    with pytest.raises(InputError, match=rf"^blas {re.escape(repr(blas))} is neither .*'auto'"):
        planned(GQA, blas)
    with pytest.raises(InputError, match=rf"^blas {re.escape(repr(blas))} is "):
        LoraBlock(gpu, GQA, arrays, blas=blas)


def test_cublas_is_planned_without_a_device_and_missed_in_a_step(
    given: tuple[Gpu, dict[str, Any]],
) -> None:
    gpu, arrays = given
    assert {op.by for op in planned(GQA, blas=True).operations} == {None, "cuBLAS"}
    with pytest.raises(preheat.PreheatError, match="emulator:0 is no GPU"):
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
    page = (Path(__file__).parents[1] / "docs" / "lora.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| (.*?) \|", page.partition("| name | shape | what it is |")[2], re.M
    )
    sizes = {**asdict(GQA), "head": GQA.head, "kv_heads": GQA.kv_heads}
    told = {
        name: eval(shape.strip("`"), sizes)
        for names, shape in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == GQA.given


# What cannot be


LARGE = 2**30
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"{name} 0 is outside 1 to") for name in ("hidden", "heads", "max_seq")),
    *(({name: -4}, f"{name} -4 is outside 1 to") for name in ("q_dim", "kv_dim", "intermediate")),
    *(({name: 2**31}, f"{name} 2147483648 is outside") for name in ("hidden", "q_dim", "max_seq")),
    ({"hidden": 1.5}, "hidden 1.5 is not an integer"),
    ({"lora_rank": -1}, "lora_rank -1 is outside 0 to 6"),
    ({"lora_rank": 7}, "lora_rank 7 is outside 0 to 6"),
    *(
        ({"lora_rank": rank}, f"lora_rank {rank!r} is not an integer")
        for rank in ("x", 0.0, False, np.zeros(2))
    ),
    *(
        ({name: flag}, f"{name} {flag!r} is neither True nor False")
        for name in ("frozen", "nf4")
        for flag in ("no", 2, 0, None)
    ),
    ({"heads": 5}, "heads 5 does not divide q_dim 12"),
    ({"kv_dim": 4}, "kv_dim 4 is not a multiple of the size of a head, 3"),
    ({"kv_dim": 9}, "kv_dim 9 is that of 3 heads, which heads 4 cannot share evenly"),
    ({"kv_dim": 24}, "kv_dim 24 is that of 8 heads, which heads 4 cannot share"),
    ({"max_seq": LARGE}, f"heads 4 by max_seq {LARGE} is {4 * LARGE}, which is more than"),
    ({"max_seq": 2**20}, f"heads 4 by max_seq {2**20} by max_seq {2**20} is"),
    ({"hidden": LARGE, "max_seq": 1025}, f"max_seq 1025 by hidden {LARGE} is"),
    ({"intermediate": LARGE, "hidden": 1025}, f"hidden 1025 by intermediate {LARGE} is"),
    (
        {"intermediate": LARGE, "max_seq": 1024},
        f"max_seq 1024 by intermediate {LARGE} is {2**40}, which is more than {elementwise.MOST}",
    ),
    ({"dtype": "float64"}, "do not take float64"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_dimensions_that_cannot_be_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        backward_plan(**asdict(GQA) | change)
    assert "lora_rank" not in change or "0 is no LoRA" in (caught.value.hint or "")


def test_numbers_and_types_of_numpy_make_the_same_plan() -> None:
    sizes = {name: np.int32(size) for name, size in MODELS["llama-3-8b"].sizes.items()}
    more: dict[str, Any] = {"max_seq": np.int32(2**17), "lora_rank": np.int8(0)}
    plan = backward_plan(**sizes, **more, nf4=np.True_, dtype=np.float16)  # type: ignore[arg-type]
    real: dict[str, Any] = MODELS["llama-3-8b"].sizes
    wanted = backward_plan(**real, max_seq=2**17, lora_rank=0, nf4=True, dtype="float16")
    assert plan == wanted
    assert plan.operations == wanted.operations
    assert json.dumps(asdict(plan.shape)) == json.dumps(asdict(wanted.shape))


def test_what_is_just_possible_is_planned() -> None:
    plan = backward_plan(**asdict(GQA) | {"max_seq": 2**19 - 1, "hidden": 2**21, "lora_rank": 6})
    assert f"softmax_backward(rows={2**21 - 4}, width={2**19 - 1})" in names(plan)


def test_the_largest_activation_is_one_that_its_kernel_takes() -> None:
    seq = 1031
    inner = elementwise.MOST // seq
    assert seq * (inner + 1) > elementwise.MOST
    plan = backward_plan(**asdict(GQA) | {"max_seq": seq, "intermediate": inner})
    assert f"swiglu_backward(n={seq * inner})" in names(plan)
    with pytest.raises(InputError, match=f"max_seq {seq} by intermediate {inner + 1} is"):
        backward_plan(**asdict(GQA) | {"max_seq": seq, "intermediate": inner + 1})


@pytest.fixture
def given(open_device: Callable[..., Gpu]) -> tuple[Gpu, dict[str, Any]]:
    gpu = open_device("emulator")
    return gpu, {name: gpu.zeros(size) for name, size in GQA.given.items()}


def test_arrays_that_do_not_fit_are_named(
    given: tuple[Gpu, dict[str, Any]], open_device: Callable[..., Gpu]
) -> None:
    gpu, arrays = given
    far, freed, gaps = open_device("emulator:1"), gpu.zeros((10, 12)), np.zeros((10, 24), "float32")
    freed.close()
    for change, message in (
        ({"q": gpu.zeros((10, 11))}, "q is float32 of shape (10, 11), not float32 of shape (10, 12)"),
        ({"x": gpu.zeros((5, 10), "float16")}, "x is float16 of shape (5, 10), not float32"),
        ({"x": gpu.zeros((5, 10), "int32")}, "x: the shipped kernels do not take int32"),
        ({"o": quantize(np.ones((12, 10)))}, "o is Nf4 of shape (12, 10), not float32"),
        ({"x": [1.0, 2.0]}, "x is list, not an array"),
        ({"q": gaps[:, ::2]}, "q is not contiguous"),
        ({"q": far.zeros((10, 12))}, "q is <Array float32[10, 12] on emulator:1>, which kernels on"),
        ({"q": freed}, "q: <Array float32[10, 12] on emulator:0, freed>: "),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            LoraBlock(gpu, GQA, arrays | change)
    for eps in (-1e-6, np.nan, np.inf, "1e-6", None):
        with pytest.raises(InputError, match=f"^eps {re.escape(repr(eps))} is not a number from 0 up"):
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
    q, far = base["q"], open_device("emulator:1")
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
