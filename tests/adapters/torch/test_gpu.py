"""Operators and `torch.cuda._compile_kernel` on a GPU: streams, captures, and a sealed process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a CPU build of torch is installed by `make test-torch`")

from preheat import Gpu
from preheat.adapters.torch import operator_kernel
from tests.adapters.torch.applications import Application
from tests.adapters.torch.operators import operators

# Warnings of torch about itself do not fail a test.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.filterwarnings(r"ignore::Warning:torch(\..*)?"),
]

APPLICATION = """\
import json, os, sys
import torch
from torch.cuda import _utils

if "SEALED" in os.environ:
    def no_compiler():
        raise OSError("there is no NVRTC")
    _utils._get_gpu_rtc_library = no_compiler
SCALE = r'''
extern "C" __global__ void scale(float* x, int a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}
'''
HALVES = r'''
#include <cuda_fp16.h>
template <class T> __global__ void halves(const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __float2half(0.5f * __half2float(x[i]));
}
'''
if __name__ == "__main__":
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    scale = torch.cuda._compile_kernel(SCALE, "scale")
    halves = torch.cuda._compile_kernel(HALVES, "halves<__half>", nvcc_options=["-lineinfo"])
    with torch.cuda.stream(torch.cuda.Stream()):
        y = x.half()
        z = torch.empty_like(y)
        halves(grid=(4, 1, 1), block=(256, 1, 1), args=[y, z, y.numel()])
        torch.cuda.synchronize()
    assert torch.equal(z, y * 0.5)
    scale(grid=(4, 1, 1), block=(256, 1, 1), args=[x, 3, x.numel()])
    assert torch.equal(x.cpu(), 3.0 * torch.arange(1000, dtype=torch.float32))
    import preheat
    print(json.dumps(preheat.default_builder().stats()["process"]))
"""


def test_kernels_of_torch_are_recorded_baked_and_sealed(tmp_path: Path) -> None:
    made = Application(tmp_path / "app")
    (made.root / "app.py").write_text(APPLICATION)
    visible = {"CUDA_VISIBLE_DEVICES": "0"}
    recorded = made.preheat(
        "record", "-o", "kernels.toml", "--", sys.executable, "app.py", **visible
    ).ok()  # fmt: skip
    assert json.loads(recorded.out.splitlines()[-1])["compiles"] == 2
    major, minor = torch.cuda.get_device_capability()
    made.cache = made.root / "empty"
    made.preheat("bake", "kernels.toml", "--arch", f"sm_{major}{minor}", "--arch", "sm_100").ok()
    made.cache = made.root / "sealed"
    ran = made.preheat(
        "run", "--bundle", "kernels.heat", "--sealed", "--", sys.executable, "app.py",
        **visible, SEALED="1",
    ).ok()  # fmt: skip
    stats = json.loads(ran.out.splitlines()[-1])
    assert stats.get("compiles", 0) == 0
    assert stats.get("workers.started", 0) == 0
    assert stats["hits.bundle"] == 2


@pytest.fixture
def gpu(open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Return the GPU on which the operators run."""
    opened = open_device("cuda")
    monkeypatch.setattr(operator_kernel, "_gpu", lambda *_: opened)
    torch.manual_seed(20261117)
    return opened


@pytest.fixture
def ops(gpu: Gpu) -> SimpleNamespace:
    """Return operators whose kernels are loaded."""
    del gpu
    made = operators()
    step(made, torch.randn(1000, device="cuda", requires_grad=True))
    torch.cuda.synchronize()
    return made


def step(ops: SimpleNamespace, x: Any) -> tuple[Any, ...]:
    """Return a result, its gradient, and a tensor that was written to."""
    y = ops.swish(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    state = x.detach() * 2
    ops.scale_inplace(state, 3.0)
    return y.detach(), gradient, state


def expected(x: Any) -> tuple[Any, ...]:
    double = x.detach().double().requires_grad_()
    y = torch.nn.functional.silu(double)
    (gradient,) = torch.autograd.grad(y.sum(), double)
    return y.detach(), gradient, 6.0 * double.detach()


def agree(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for each, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, reference.to(each.dtype), rtol=2e-6, atol=1e-6)


def test_work_goes_to_the_current_stream(ops: SimpleNamespace) -> None:
    """The operand is written late, so that work in any other stream would not see its values."""
    values = torch.randn(1000, device="cuda")
    x = torch.zeros_like(values).requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            x.copy_(values)
        found = step(ops, x)
        agree(found, expected(values))


def test_torch_captures_operators_and_replays_them_with_new_values(ops: SimpleNamespace) -> None:
    x = torch.randn(1000, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(ops, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(ops, x)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(1000, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        agree(captured, expected(x))


def test_preheat_captures_operators_and_replays_them(ops: SimpleNamespace, gpu: Gpu) -> None:
    x = torch.randn(1000, device="cuda")
    ops.scale(x, 3.0)  # A kernel is not loaded inside a capture.
    with gpu.capture() as graph:
        y = ops.scale(ops.swish(x), 3.0)
    x.copy_(torch.randn(1000, device="cuda"))
    graph.replay()
    gpu.synchronize()
    agree((y,), (3.0 * expected(x)[0],))


def test_a_compiled_step_runs_in_a_capture_of_torch(
    ops: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    compiled = torch.compile(lambda x: ops.scale(ops.swish(x + 1).cos(), 3.0) - x, fullgraph=True)
    x = torch.randn(1000, device="cuda")
    compiled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.copy_(torch.randn(1000, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    double = x.double()
    torch.testing.assert_close(
        y, (3.0 * torch.nn.functional.silu(double + 1).cos() - double).float(), rtol=1e-5, atol=1e-5
    )
