"""Kernels as operators of torch: values, gradients, `torch.compile` without a break, and refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a CPU build of torch is installed by `make test-torch`")

from preheat import Gpu
from preheat.adapters.torch import op, operator_kernel
from preheat.build.builder import Builder
from preheat.errors import InputError, LaunchError, SealedError
from preheat.model.config import Config, SealMode
from tests.adapters.torch.applications import import_path
from tests.adapters.torch.operators import EMULATOR, SOURCE, blocks, operators

# Warnings of torch about itself do not fail a test.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(r"ignore::Warning:torch(\..*)?")]

SCALE = "my::scale(Tensor x, float a) -> Tensor"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(
    request: pytest.FixtureRequest, open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Return a device of torch. Its tensors are computed by a device of the test's own."""
    on_host = request.param == "cpu"
    gpu = open_device("emulator" if on_host else "cuda", host_arrays=on_host)
    monkeypatch.setattr(operator_kernel, "_gpu", lambda *_: gpu)
    torch.manual_seed(20261117)
    yield request.param
    torch._dynamo.reset()


@pytest.fixture
def ops() -> SimpleNamespace:
    return operators()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=2e-6, atol=1e-6)


def checked(operator: Any, *given: Any, **named: Any) -> None:
    """Fail unless schema, gradients and fake implementation of an operator agree with what it does."""
    results = torch.library.opcheck(operator, given, named)
    assert set(results.values()) == {"SUCCESS"}


# Values


def test_a_result_is_allocated_and_computed(place: str, ops: SimpleNamespace) -> None:
    x = torch.randn(3, 50, device=place)
    y = ops.scale(x, 3.0)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    close(y, 3.0 * x)
    close(torch.ops.preheat_test.scale(x), 2.0 * x)  # the default of the schema
    checked(ops.scale, x, 3.0)


def test_an_argument_is_written_to(place: str, ops: SimpleNamespace) -> None:
    x = torch.randn(100, device=place)
    y = x.clone()
    assert ops.scale_inplace(y, 3.0) is None
    close(y, 3.0 * x)
    checked(ops.scale_inplace, y, 3.0)


def test_several_results_of_several_types(place: str, ops: SimpleNamespace) -> None:
    x = torch.randn(100, device=place)
    magnitude, sign = ops.split(x)
    assert sign.dtype == torch.int32
    close(magnitude, x.abs())
    assert torch.equal(sign, x.sign().int())
    checked(ops.split, x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("negate", [False, True])
def test_numbers_and_an_optional_tensor(
    place: str, ops: SimpleNamespace, bias: bool, negate: bool
) -> None:
    x = torch.randn(32, device=place)
    b = torch.randn(32, device=place) if bias else None
    expected = (1.5 * x + 4 + (b if b is not None else 0)) * (-1 if negate else 1)
    close(ops.mix(x, b, 4, 1.5, negate=negate), expected)
    checked(ops.mix, x, b, 4, 1.5, negate=negate)
    close(ops.mix(x, None, -3), x - 3)


def test_the_arguments_choose_the_kernel(place: str, ops: SimpleNamespace) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(70, device=place, dtype=dtype)
        assert torch.equal(ops.twice(x), x + x)


def test_an_empty_tensor_launches_nothing(place: str, ops: SimpleNamespace) -> None:
    assert ops.scale(torch.empty(0, 4, device=place)).shape == (0, 4)
    checked(ops.scale, torch.empty(0, 4, device=place))


def test_a_tensor_that_is_not_contiguous_is_refused(place: str, ops: SimpleNamespace) -> None:
    x = torch.randn(10, 10, device=place).T
    with pytest.raises(LaunchError, match="is not contiguous"):
        ops.scale_inplace(x, 2.0)


def test_a_loaded_kernel_is_an_operator(place: str, open_device: Callable[..., Gpu]) -> None:
    on_host = place == "cpu"
    gpu = open_device("emulator" if on_host else "cuda", host_arrays=on_host)
    kernel = gpu.kernel(SOURCE, "scale_inplace")
    made = op(
        f"preheat_test::loaded_{place}(Tensor(a!) x, float a, int n) -> ()", kernel, grid=1, block=64
    )
    x = torch.ones(64, device=place)
    made(x, 3.0, 32)
    assert x.tolist() == [3.0] * 32 + [1.0] * 32
    with pytest.raises(InputError, match="has its device, label, options and headers"):
        op("preheat_test::again(Tensor(a!) x) -> ()", kernel, grid=1, block=1, options=["-G"])


# Gradients


def test_gradients_are_those_of_float64(place: str, ops: SimpleNamespace) -> None:
    x = torch.randn(7, 31, device=place, requires_grad=True)
    gy = torch.randn(7, 31, device=place)
    (gradient,) = torch.autograd.grad(ops.swish(x), x, gy)
    double = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(double), double, gy.double())
    close(gradient, expected)
    checked(ops.swish, x)
    checked(ops.scale, x, 3.0)


def test_a_gradient_of_a_gradient_goes_through_the_same_operator(
    place: str, ops: SimpleNamespace
) -> None:
    x = torch.randn(20, device=place, requires_grad=True)
    (first,) = torch.autograd.grad(ops.scale(x, 3.0).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    close(second, torch.full_like(x, 18.0))


def test_an_operator_without_backward_has_no_gradient(place: str, ops: SimpleNamespace) -> None:
    x = torch.randn(20, device=place, requires_grad=True)
    magnitude, _ = ops.split(x)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        magnitude.sum().backward()


def test_a_tensor_that_was_written_to_is_noticed_by_backward(place: str, ops: SimpleNamespace) -> None:
    x = torch.randn(20, device=place, requires_grad=True)
    middle = x * 1
    y = middle.square()
    ops.scale_inplace(middle.detach(), 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# torch.compile


def model(ops: SimpleNamespace, x: Any) -> Any:
    """Return a value that depends on results, on mutation, and on torch's own operators around them."""
    y = ops.swish(x + 1).cos()
    z = ops.scale(y, 0.5)
    state = z.detach() * 2
    ops.scale_inplace(state, 4.0)
    magnitude, sign = ops.split(z.detach())
    return (z * state).sum() + (magnitude * sign).sum() + ops.mix(x.detach()[0], None, 2).sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_model_is_one_graph_with_the_same_values_and_gradients(
    place: str, ops: SimpleNamespace, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # One thread: a pool of processes takes longer to start than it saves.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    x = torch.randn(8, 32, device=place, requires_grad=True)
    expected = model(ops, x)
    (wanted,) = torch.autograd.grad(expected, x)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        found = compiled(ops, x)
        (gradient,) = torch.autograd.grad(found, x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_a_written_argument_of_a_compiled_function_is_written_to(
    place: str, ops: SimpleNamespace
) -> None:
    def step(x: Any) -> Any:
        view = x[:50]
        ops.scale_inplace(view, 3.0)
        return x + 1

    x = torch.ones(100, device=place)
    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert x.tolist() == [3.0] * 50 + [1.0] * 50
    assert torch.equal(y, x + 1)


def test_shapes_may_be_dynamic(place: str, ops: SimpleNamespace) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda x: ops.scale(x + 1, 3.0) * x.shape[0], fullgraph=True, dynamic=True, backend=backend
    )
    for n in (5, 70, 200):
        x = torch.randn(n, device=place)
        close(compiled(x), 3.0 * (x + 1) * n)
    assert len(graphs) == 1


def test_a_graph_with_a_break_does_not_trace_the_launch(place: str) -> None:
    made = op(
        f"preheat_test::broken_{place}(Tensor x, float a) -> Tensor", (SOURCE, "scale"),
        out=empty, args=lambda x, a, y: (x, a, y, x.numel()), grid=blocks, block=64, device=EMULATOR,
    )  # fmt: skip
    traced: list[str] = []

    def backend(graph: Any, _: object) -> Any:
        traced.append(graph.code)
        return graph

    torch._dynamo.disallow_in_graph(made)
    x = torch.randn(40, device=place)
    close(torch.compile(lambda x: made(x + 1, 3.0) - 1, backend=backend)(x), 3.0 * (x + 1) - 1)
    assert len(traced) == 2  # before and after the break
    assert not any("empty_like" in code for code in traced)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_memory_have_results_without_memory(ops: SimpleNamespace, kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if kind == "meta":
        made = ops.split(torch.empty(3, 4, device="meta"))
    else:
        with FakeTensorMode():
            made = ops.split(torch.empty(3, 4))
    assert [(each.shape, each.dtype) for each in made] == [
        ((3, 4), torch.float32),
        ((3, 4), torch.int32),
    ]


# What is refused


def test_an_operator_is_registered_once(ops: SimpleNamespace) -> None:
    del ops
    with pytest.raises(InputError, match="preheat_test::scale: there is an operator of this name"):
        op("preheat_test::scale(Tensor(a!) x) -> ()", SOURCE, grid=1, block=1)
    with pytest.raises(InputError, match="aten::relu: there is an operator of this name"):
        op("aten::relu(Tensor(a!) x) -> ()", SOURCE, grid=1, block=1)


def empty(*given: Any) -> Any:
    return torch.empty_like(given[0])


@pytest.mark.parametrize(
    ("schema", "more", "problem"),
    [
        (SCALE, {}, "it returns 1 tensor, and there is no out="),
        (
            "my::f(Tensor(a!) x) -> ()",
            {"out": empty},
            "it returns nothing, and out= makes tensors",
        ),
        ("my::f(Tensor x, int[] n) -> Tensor", {"out": empty}, "argument n is List[int]"),
        (
            "my::f(Tensor(a!) x) -> ()",
            {"backward": empty},
            "it writes to x, so torch cannot differentiate it",
        ),
        (
            SCALE,
            {"out": empty, "setup_context": empty},
            "setup_context= is given, and backward= is not",
        ),
        (SCALE, {"out": 3}, "out is a function, not 3"),
        (SCALE, {"out": empty, "device": "cuda:1"}, "device='cuda:1' is not an emulator"),
        (SCALE, {"out": empty, "kernel": (SOURCE, 3)}, "the name of a kernel is text"),
        (SCALE, {"out": empty, "kernel": (SOURCE,)}, "the kernel is not (Posix"),
        ("my::f(Tensor x -> ()", {}, "is not a schema"),
    ],
)
def test_a_wrong_registration_is_refused_and_registers_nothing(
    schema: str, more: dict[str, Any], problem: str
) -> None:
    given: dict[str, Any] = {"kernel": SOURCE, "grid": 1, "block": 1, **more}
    with pytest.raises(InputError) as refused:
        op(schema, given.pop("kernel"), **given)
    assert problem in str(refused.value)
    assert not hasattr(torch.ops.my, "f")
    assert not hasattr(torch.ops.my, "scale")


def test_a_source_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="cannot read"):
        op(SCALE, "nowhere.cu", out=empty, grid=1, block=1)


def test_a_count_of_arguments_that_cannot_fit_is_refused(open_device: Callable[..., Gpu]) -> None:
    kernel = open_device("emulator", host_arrays=True).kernel(SOURCE, "scale")
    with pytest.raises(
        InputError, match=r"the kernel scale takes 4 arguments, and the schema has 2 and 1 result"
    ) as no:
        op("my::g(Tensor x, float a) -> Tensor", kernel, out=empty, grid=1, block=1)
    assert no.value.hint is not None
    assert "args=" in no.value.hint
    assert not hasattr(torch.ops.my, "g")


def test_a_count_that_is_known_later_is_refused_at_the_first_call(place: str) -> None:
    made = op(
        f"preheat_test::short_{place}(Tensor x, float a) -> Tensor", (SOURCE, "scale"),
        out=empty, grid=1, block=64, device=EMULATOR,
    )  # fmt: skip
    with pytest.raises(InputError, match="the kernel scale takes 4 arguments, and the schema has 2"):
        made(torch.ones(3, device=place), 1.0)


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        (lambda x: (x.new_empty(2), x.new_empty(2)), "out= made 2 tensors, and the schema returns 1"),
        (lambda _: [None], "out= made None, and the schema returns 1 tensor"),
        (lambda x: x, "out= returned the memory of an argument"),
        (lambda x: x.view(-1), "out= returned the memory of an argument"),
    ],
    ids=["count", "none", "argument", "view"],
)
def test_results_that_do_not_fit_the_schema_are_refused(
    place: str, request: pytest.FixtureRequest, out: Any, problem: str
) -> None:
    name = f"preheat_test::wrong_{request.node.callspec.id.replace('-', '_')}"
    made = op(f"{name}(Tensor x) -> Tensor", SOURCE, out=out, grid=1, block=1, device=EMULATOR)
    with pytest.raises(InputError) as refused:
        made(torch.ones(3, device=place))
    assert problem in str(refused.value)


def test_tensors_of_the_host_need_an_emulator_that_accepts_them(
    monkeypatch: pytest.MonkeyPatch, open_device: Callable[..., Gpu]
) -> None:
    given: dict[str, Any] = {"out": empty, "grid": blocks, "block": 64}
    alone = op("preheat_test::gpu_alone(Tensor x) -> Tensor", SOURCE, **given)
    with pytest.raises(NotImplementedError, match="CPU"):
        alone(torch.ones(3))
    opened = {
        "emulator": open_device("emulator"), EMULATOR: open_device("emulator", host_arrays=True)
    }  # fmt: skip
    monkeypatch.setattr(operator_kernel, "device", opened.get)
    given["args"] = lambda x, y: (x, 2.0, y, x.numel())
    monkeypatch.setenv("PREHEAT_DEVICE", "emulator")
    refused = op("preheat_test::refused(Tensor x) -> Tensor", (SOURCE, "scale"), **given)
    with pytest.raises(LaunchError, match="scale, argument 0: Tensor is in host memory") as caught:
        refused(torch.ones(3))
    assert EMULATOR in str(caught.value.hint)
    monkeypatch.setenv("PREHEAT_DEVICE", EMULATOR)
    made = op("preheat_test::on_emulator(Tensor x) -> Tensor", (SOURCE, "scale"), **given)
    assert made(torch.ones(3)).tolist() == [2.0] * 3


# Sealed processes, and start-up


def test_a_sealed_process_names_the_kernel_and_the_line(
    config: Config, open_builder: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.emulator.device import EmulatorDevice

    made = op(
        "preheat_test::unbaked(Tensor x) -> Tensor",
        ('extern "C" __global__ void unbaked(float* x, float* y) { *y = *x; }', "unbaked"),
        out=empty, grid=1, block=1, device=EMULATOR,
    )  # fmt: skip
    builder = open_builder(replace(config, sealed=SealMode.ERROR))
    with Gpu(EmulatorDevice(0, "sm_90"), builder) as gpu:
        monkeypatch.setattr(operator_kernel, "_gpu", lambda *_: gpu)
        line = sys._getframe().f_lineno + 2
        with pytest.raises(SealedError) as refused:
            made(torch.ones(3))
        compiled = torch.compile(lambda x: made(x), backend="aot_eager", fullgraph=True)
        with pytest.raises(SealedError) as again:
            compiled(torch.ones(3))
    assert (refused.value.entry, refused.value.caller) == (
        "unbaked",
        f"tests/adapters/torch/test_operator.py:{line}",
    )
    assert again.value.caller == f"tests/adapters/torch/test_operator.py:{line + 1}"


STARTS = """
import sys, torch
from preheat.adapters.torch import op
made = op("my::one(Tensor(a!) x) -> ()", 'extern "C" __global__ void one(float* x) { *x = 1; }',
          grid=1, block=1, device="emulator[host_arrays]")
assert "preheat.emulator.device" not in sys.modules  # Nothing is compiled so far.
x = torch.zeros(2)
made(x)
assert x.tolist() == [1, 0]
assert "torch._dynamo" not in sys.modules  # Its import takes as long as that of torch.
"""


def test_an_operator_starts_no_more_than_it_needs(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STARTS],
        env={
            "PYTHONPATH": import_path(), "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
            "HOME": str(tmp_path),
        },
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
