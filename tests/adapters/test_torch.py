"""The shipped kernels in torch: values and gradients as torch has them in float64, and clear refusals.

On the emulator, tensors of the host stand in for those of a GPU.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat import Gpu, InputError
from preheat.adapters.torch import kernels
from preheat.kernels.ops import Ops

pytestmark = pytest.mark.torch

DTYPES = "float32", "float16", "bfloat16"
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # relative to the largest element
EPS = 1e-5


class Case(NamedTuple):
    """A function, what torch does for it, and operands it takes."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]  # with torch in front
    shapes: Sequence[tuple[int, ...]]


def rms_norm(_: Any, x: Any, gamma: Any) -> Any:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma


CASES = {
    "silu": Case(kernels.silu, lambda torch, x: torch.nn.functional.silu(x), [(3, 5, 33)]),
    "swiglu": Case(
        kernels.swiglu, lambda torch, a, b: torch.nn.functional.silu(a) * b, [(7, 31), (7, 31)]
    ),
    "softmax": Case(kernels.softmax, lambda torch, x: torch.softmax(x, -1), [(2, 3, 127)]),
    "rms_norm": Case(
        lambda x, gamma: kernels.rms_norm(x, gamma, eps=EPS), rms_norm, [(2, 9, 65), (65,)]
    ),
    "matmul": Case(kernels.matmul, lambda _, a, b: a @ b, [(2, 5, 17), (17, 33)]),
    "linear": Case(
        kernels.linear, lambda torch, x, w: torch.nn.functional.linear(x, w), [(7, 33), (9, 33)]
    ),
}


class Bridge(NamedTuple):
    """torch, where its tensors go, and a device that takes them."""

    torch: Any
    place: str
    gpu: Gpu

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        drawn = self.torch.randn(shape, dtype=self.torch.float32)
        return drawn.to(self.place, getattr(self.torch, dtype))

    def leaves(self, case: Case, dtype: str = "float32") -> list[Any]:
        return [self.random(shape, dtype).requires_grad_() for shape in case.shapes]


def connected(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    torch = pytest.importorskip("torch")
    torch.manual_seed(20261115)
    on_gpu = gpu.name.startswith("cuda")
    monkeypatch.setitem(kernels._known, 0 if on_gpu else -1, Ops(gpu))
    if not on_gpu:
        monkeypatch.setattr(kernels, "_on_gpu", torch.is_tensor)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Bridge(torch, "cuda" if on_gpu else "cpu", gpu)


@pytest.fixture
def bridge(kind: str, open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch) -> Bridge:
    return connected(open_device(kind, host_arrays=kind == "emulator"), monkeypatch)


@pytest.fixture
def on_gpu(open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch) -> Bridge:
    return connected(open_device("cuda"), monkeypatch)


def agree(found: Any, wanted: Any, tolerance: float) -> None:
    assert found.shape == wanted.shape
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert float(error) <= tolerance


def compare(bridge: Bridge, case: Case, leaves: Sequence[Any], tolerance: float) -> None:
    """Return values and gradients of `leaves`, of preheat and of torch in float64."""
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = case.ours(*leaves)
    wanted = case.theirs(bridge.torch, *doubles)
    assert y.dtype == leaves[0].dtype
    agree(y.detach(), wanted.detach(), tolerance)
    gy = bridge.random(tuple(y.shape), "float32").to(y.dtype)
    gradients = bridge.torch.autograd.grad(y, leaves, gy)
    expected = bridge.torch.autograd.grad(wanted, doubles, gy.double())
    for found, gradient in zip(gradients, expected, strict=True):
        assert found.dtype == y.dtype
        agree(found, gradient, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch_in_float64(
    bridge: Bridge, name: str, dtype: str
) -> None:
    case = CASES[name]
    compare(bridge, case, bridge.leaves(case, dtype), TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_they_are_at_the_sizes_of_models(on_gpu: Bridge, name: str, dtype: str) -> None:
    shapes = {"matmul": [(777, 1000), (1000, 513)], "linear": [(777, 1000), (513, 1000)]}
    wide: list[tuple[int, ...]] = [(1001, 4096)] * len(CASES[name].shapes)
    if name == "rms_norm":
        wide[1] = (4096,)
    case = CASES[name]._replace(shapes=shapes.get(name, wide))
    compare(on_gpu, case, on_gpu.leaves(case, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_operands_and_gradients_need_not_be_contiguous(bridge: Bridge, name: str) -> None:
    case = CASES[name]
    wide = [bridge.random((*shape[:-1], 2 * shape[-1]), "float32") for shape in case.shapes]
    leaves = [each[..., ::2].requires_grad_() for each in wide]
    compare(bridge, case, leaves, TOLERANCE["float32"])
    case.ours(*leaves).sum().backward()  # torch expands a single 1
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    case.theirs(bridge.torch, *doubles).sum().backward()
    for leaf, double in zip(leaves, doubles, strict=True):
        error = (leaf.grad.double() - double.grad).abs().max()
        assert float(error) <= TOLERANCE["float32"] * len(leaf.flatten())


@pytest.mark.parametrize("name", ["matmul", "linear"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_gets_no_gradient(bridge: Bridge, name: str, frozen: int) -> None:
    leaves = bridge.leaves(CASES[name])
    leaves[frozen].requires_grad_(False)
    CASES[name].ours(*leaves).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [frozen == 0, frozen == 1]


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_cannot_be_differentiated_again(bridge: Bridge, name: str) -> None:
    leaves = bridge.leaves(CASES[name])
    y = CASES[name].ours(*leaves)
    first = bridge.torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first[0].sum().backward()


def test_an_operand_that_was_changed_is_noticed(bridge: Bridge) -> None:
    x = bridge.random((5, 7), "float32").requires_grad_()
    middle = x * 1
    y = kernels.silu(middle)
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_types_and_shapes_are_refused_by_name(bridge: Bridge) -> None:
    x, gamma = bridge.random((3, 8), "float32"), bridge.random((8,), "float32")
    with pytest.raises(InputError, match=r"gamma is torch\.float16, not torch\.float32 as x"):
        kernels.rms_norm(x, gamma.half(), eps=EPS)
    with pytest.raises(InputError, match="x: the shipped kernels do not take float64"):
        kernels.silu(x.double())
    with pytest.raises(InputError, match=r"up is float32 of shape \(8,\), not .* as gate"):
        kernels.swiglu(x, gamma)
    with pytest.raises(InputError, match=r"x of shape \(3, 8\) and weight of shape \(8, 3\) cannot"):
        kernels.linear(x, x.T)
    with pytest.raises(InputError, match=r"a of shape \(3, 8\) and b of shape \(8,\) cannot"):
        kernels.matmul(x, gamma)


OPS = "preheat.Ops(gpu) has these kernels for arrays of preheat, also on the emulator"


@pytest.mark.parametrize("installed", [True, False])
def test_a_value_that_is_no_tensor_is_refused_by_name(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed and name == "torch")
    missing = "" if installed else ", and torch is not installed"
    refused: dict[str, Callable[[], object]] = {
        "x is ndarray": lambda: kernels.silu(np.ones(3, "float32")),
        "gate is list": lambda: kernels.swiglu([1.0], [2.0]),
    }
    for name, do in refused.items():
        with pytest.raises(InputError) as caught:
            do()
        assert str(caught.value) == f"{name}, not a tensor of torch{missing}"
        assert caught.value.hint == OPS


@pytest.mark.parametrize(
    ("available", "hint"), [(True, "move it: x.cuda()"), (False, f"torch sees no GPU; {OPS}")]
)
def test_a_tensor_of_the_host_is_moved_where_torch_has_a_gpu(
    available: bool, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = types.SimpleNamespace(is_available=lambda: available)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    tensor = type("Tensor", (), {"__module__": "torch", "device": "cpu", "is_cuda": False})
    with pytest.raises(InputError, match="x is a tensor on cpu, not on a GPU") as caught:
        kernels.silu(tensor())
    assert caught.value.hint == hint


class Stand:
    """A tensor on a GPU, as far as it is looked at before a kernel is."""

    is_cuda, device = True, "cuda:0"

    def __init__(self, dtype: str, *shape: int) -> None:
        self.dtype = f"torch.{dtype}"
        self.shape = shape


@pytest.mark.parametrize("name", CASES)
def test_types_no_kernel_takes_and_empty_tensors_are_refused_by_the_names_of_the_arguments(
    name: str,
) -> None:
    first, *others = inspect.signature(getattr(kernels, name)).parameters
    case = CASES[name]
    for dtype in ("float64", "int32"):
        tensors = [Stand(dtype, *shape) for shape in case.shapes]
        with pytest.raises(InputError, match=f"^{first}: the shipped kernels do not take {dtype}"):
            case.ours(*tensors)
    tensors = [Stand("float32", *shape) for shape in case.shapes]
    tensors[0] = Stand("float32", 0, *case.shapes[0][1:])
    with pytest.raises(InputError, match=rf"^{first} is empty: its shape is \(0, "):
        case.ours(*tensors)
    if len(tensors) > 1:
        tensors = [Stand("float32", *shape) for shape in case.shapes]
        tensors[1] = Stand("float32", *case.shapes[1][:-1], 0)
        with pytest.raises(InputError, match=f"^{others[0]} is empty"):
            case.ours(*tensors)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, preheat.adapters.torch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_tensors_of_the_host_are_refused_by_name(on_gpu: Bridge) -> None:
    x = on_gpu.random((4, 4), "float32")
    with pytest.raises(InputError, match="b is a tensor on cpu, not on a GPU"):
        kernels.matmul(x, x.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_work_goes_to_the_current_stream_of_torch(on_gpu: Bridge, name: str) -> None:
    """What makes the operands is late, so that work in any other stream would not see them."""
    torch = on_gpu.torch
    case = CASES[name]
    made = [on_gpu.random(shape, "float32") for shape in case.shapes]
    case.ours(*made)  # compiled and loaded
    leaves = [torch.zeros_like(each).requires_grad_() for each in made]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for leaf, value in zip(leaves, made, strict=True):
                leaf.copy_(value)
        compare(on_gpu, case, leaves, TOLERANCE["float32"])


def step(torch: Any, case: Case, leaves: Sequence[Any], gy: Any) -> tuple[Any, ...]:
    y = case.ours(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, gy))  # a graph kept alive keeps its stream


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["silu", "swiglu", "softmax", "rms_norm"])
def test_torch_captures_a_step_and_replays_it_with_new_values(on_gpu: Bridge, name: str) -> None:
    torch = on_gpu.torch
    case = CASES[name]
    leaves = on_gpu.leaves(case)
    gy = on_gpu.random(case.shapes[0], "float32")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(torch, case, leaves, gy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(torch, case, leaves, gy)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(on_gpu.random(tuple(leaf.shape), "float32"))
    graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(captured, step(torch, case, leaves, gy), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_preheat_captures_values_and_replays_them(on_gpu: Bridge, name: str) -> None:
    torch = on_gpu.torch
    case = CASES[name]
    operands = [on_gpu.random(shape, "float32") for shape in case.shapes]
    case.ours(*operands)
    torch.cuda.synchronize()
    with on_gpu.gpu.capture() as graph:
        y = case.ours(*operands)
    for each in operands:
        each.copy_(on_gpu.random(tuple(each.shape), "float32"))
    graph.replay()
    on_gpu.gpu.synchronize()
    assert torch.equal(y, case.ours(*operands))


@pytest.mark.gpu
def test_a_product_in_a_capture_of_torch_is_part_of_it(on_gpu: Bridge) -> None:
    torch = on_gpu.torch
    case = CASES["matmul"]
    operands = [on_gpu.random(shape, "float32") for shape in case.shapes]
    case.ours(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.ours(*operands)
    for _ in range(3):
        operands[0].copy_(on_gpu.random(tuple(operands[0].shape), "float32"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, case.ours(*operands))
