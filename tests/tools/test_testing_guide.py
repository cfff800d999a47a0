"""The guide to tests: its tolerances hold, its workflow is safe, and its list of gaps is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.errors import EmulatorFault
from preheat.gpu import Gpu
from preheat.model.dtypes import dtype_of
from tests.stories import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "testing.md"

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KERNEL(name, type, expression) \\
    extern "C" __global__ void name(const float* x, type* y, int n) { \\
        int i = blockIdx.x * blockDim.x + threadIdx.x; \\
        float v = i < n ? x[i] : 0; \\
        if (i < n) y[i] = expression; \\
    }
KERNEL(eight, float, ((((v * v + v) * v + 1.1f) * v + v) * v) / 7)
KERNEL(to_half, __half, __float2half(v / 3))
KERNEL(to_bfloat, __nv_bfloat16, __float2bfloat16(v / 3))
KERNEL(exp_, float, expf(v))
KERNEL(log_, float, logf(v))
KERNEL(sin_, float, sinf(v))
KERNEL(fast_exp, float, __expf(v))
KERNEL(fast_sin, float, __sinf(v))
KERNEL(fast_cos, float, __cosf(v))
"""


def polynomial(v: Any) -> Any:
    return ((((v * v + v) * v + np.float64(np.float32(1.1))) * v + v) * v) / 7


#: A kernel, its type, the range of its arguments, the exact function, and the tolerances of the page.
ROWS: list[tuple[str, str, tuple[float, float], Callable[[Any], Any], dict[str, Any]]] = [
    ("eight", "float32", (0.0, 10.0), polynomial, {"rtol": 1e-6}),
    ("to_half", "float16", (-1e4, 1e4), lambda v: v / 3, {"rtol": 1e-3, "atol": 1e-7}),
    ("to_half", "float16", (-1e-4, 1e-4), lambda v: v / 3, {"rtol": 1e-3, "atol": 1e-7}),
    ("to_bfloat", "bfloat16", (-1e4, 1e4), lambda v: v / 3, {"rtol": 8e-3}),
    ("exp_", "float32", (-60.0, 60.0), np.exp, {"rtol": 1e-6}),
    ("log_", "float32", (1e-3, 1e3), np.log, {"rtol": 1e-6}),
    ("sin_", "float32", (-50.0, 50.0), np.sin, {"rtol": 1e-6}),
    ("fast_exp", "float32", (-60.0, 60.0), np.exp, {"rtol": 1e-5}),
    ("fast_sin", "float32", (-np.pi, np.pi), np.sin, {"rtol": 0, "atol": 1e-6}),
    ("fast_cos", "float32", (-np.pi, np.pi), np.cos, {"rtol": 0, "atol": 1e-6}),
]


@pytest.mark.parametrize(
    ("name", "kind", "places", "exact", "tolerance"),
    ROWS,
    ids=[f"{row[0]} {row[2][1]:g}" for row in ROWS],
)
def test_the_tolerances_of_the_page_hold(
    device: Gpu,
    name: str,
    kind: str,
    places: tuple[float, float],
    exact: Callable[[Any], Any],
    tolerance: dict[str, Any],
) -> None:
    n = 20_001
    x = np.linspace(*places, n, dtype="float32")
    x[-1] = places[1] / 3
    y = device.zeros(n, dtype_of(kind))
    device.kernel(SOURCE, name)[-(-n // 256), 256](device.array(x), y, n)
    got = y.numpy()
    if kind == "bfloat16":
        got = (got.view("uint16").astype("uint32") << 16).view("float32")
    np.testing.assert_allclose(got.astype("float64"), exact(x.astype("float64")), **tolerance)
    text = PAGE.read_text()
    for setting, value in tolerance.items():
        shown = f"{value:.0e}".replace("e-0", "e-") if value else "0"
        assert f"{setting}={shown}" in text


@pytest.mark.parametrize("n", [10, 1000, 30_000])
def test_the_tolerance_of_a_sum_holds_where_the_terms_cancel(device: Gpu, n: int) -> None:
    (source,) = re.findall(
        r'SOURCE = """(.*?)"""',
        next(b.text for b in blocks(PAGE) if b.title == "test_tolerances.py"),
        re.S,
    )
    x = np.random.default_rng(n).standard_normal(n).astype("float32") * np.float32(1e3)
    x = np.concatenate([x, -x, np.full(1, 1e-3, "float32")])
    out = device.zeros(1)
    device.kernel(source, "total")[1, 256](device.array(x), out, x.size)
    error = abs(float(out.numpy()[0]) - x.astype("float64").sum())
    assert error <= x.size * 2**-24 * np.abs(x).sum()
    assert "atol=n * 2**-24 * sum(abs(terms))" in PAGE.read_text()


@pytest.fixture
def jobs() -> dict[str, Any]:
    """Return the jobs of the workflow of the page."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (workflow,) = (yaml.safe_load(block.text) for block in blocks(PAGE) if block.kind == "yaml")
    found: dict[str, Any] = workflow["jobs"]
    return found


def test_pull_requests_restore_the_cache_and_save_nothing(jobs: dict[str, Any]) -> None:
    writers = []
    for job in jobs.values():
        for step in job["steps"]:
            uses = step.get("uses", "")
            assert not uses.startswith("actions/cache@"), "it saves at the end of every job"
            if uses.startswith("actions/cache/save@"):
                writers.append(step)
    assert [step["if"] for step in writers] == ["github.event_name == 'push'"]
    assert jobs["gpu"]["if"] == "github.event_name == 'push'"


def test_the_workflow_compiles_for_every_architecture_that_it_tests(jobs: dict[str, Any]) -> None:
    tested = jobs["emulator"]["strategy"]["matrix"]["arch"]
    commands = [step.get("run", "") for step in jobs["compile"]["steps"]]
    (bake,) = (command for command in commands if command.startswith("preheat bake"))
    assert re.findall(r"--arch (\w+)", bake) == tested


VIEWS = """
extern "C" __global__ void past(const float* x, float* y, int at) { *y = x[at]; }
extern "C" __global__ void next(float* y, int at) {
    __shared__ float a[32], b[32];
    a[threadIdx.x] = 1;
    b[threadIdx.x] = 2;
    __syncthreads();
    y[threadIdx.x] = a[threadIdx.x + at] + b[threadIdx.x];
}
"""


def test_the_gaps_that_the_pages_list_are_gaps(open_device: Callable[..., Gpu]) -> None:
    """A check that finds one of these makes the lists of both pages wrong."""
    gpu = open_device("emulator")
    x, y = gpu.array(np.arange(8, dtype="float32")), gpu.zeros(32)
    past = gpu.kernel(VIEWS, "past")
    past[1, 1](x[:4], y, 5)
    assert y.numpy()[0] == 5
    gpu.kernel(VIEWS, "next")[1, 32](y, 16)
    assert set(y.numpy().tolist()) == {3.0, 4.0}
    with pytest.raises(EmulatorFault):
        past[1, 1](x, y, 8)
    for page in (PAGE, ROOT / "docs" / "emulator.md"):
        assert "**An access behind a view, but inside its array.**" in page.read_text()
        assert "**An index of one `__shared__` array that lands in the next one.**" in page.read_text()


def test_every_page_says_that_a_gpu_does_not_recover_from_a_fault() -> None:
    errors = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for name in ("DeviceError", "DriverError", "ContextLostError"):
        (section,) = re.findall(rf"^### {name}\n(.*?)^```", errors, re.M | re.S)
        assert re.search(r"start a new\s+process", section)
    events = (ROOT / "docs" / "reference" / "events.md").read_text()
    assert "On a GPU, start a new process." in events
