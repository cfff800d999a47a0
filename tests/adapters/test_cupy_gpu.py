"""CuPy on a GPU: its kernels through the adapter."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import preheat
from tests.processes import SOURCE, expect_success, start_process

pytestmark = pytest.mark.gpu

PROGRAM = """
import json
import cupy as cp
import preheat

x = cp.arange(1024, dtype="float32")
raw = cp.RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
raw((1,), (1024,), (x,))
element = cp.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x * y + 1", "fused")
reduce = cp.ReductionKernel("T x", "T y", "x * x", "a + b", "y = a", "0", "squares")
y = element(x, x)
code = "template <class T> __global__ void tk(T* x) { *x = 7; }"
names = cp.RawModule(code=code, name_expressions=["tk<int>"])
z = cp.zeros(1, "int32")
names.get_function("tk<int>")((1,), (1,), (z,))
without_reductions = "libnvrtc.so" in open("/proc/self/maps").read()
results = [float(x[3]), float(y[3]), int(z[0]), float(reduce(x)), float((x + 1).sum())]
stats = preheat.default_builder().stats()["process"]
print(json.dumps({"results": results, "stats": stats, "nvrtc": without_reductions}))
"""


def run(place: Path, *words: str) -> str:
    """Run a command with caches of its own, and return what it prints."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)]),
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
        "CUPY_CACHE_DIR": str(place / "cupy"),
    }
    return expect_success(start_process([sys.executable, *words], env=env, cwd=place))


def test_all_kernels_of_cupy_run_sealed_from_a_bundle(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ("--", sys.executable, "program.py")
    recorded = json.loads(run(tmp_path, "-m", "preheat", "record", *command).splitlines()[-1])
    assert recorded["stats"]["compiles"] >= 6
    shutil.rmtree(tmp_path / "cache")
    arch = str(preheat.device("cuda:0").arch)
    manifest = next(tmp_path.glob("*.toml"))
    run(tmp_path, "-m", "preheat", "bake", manifest.name, "--arch", arch, "-o", "kernels.heat")
    shutil.rmtree(tmp_path / "cache")
    sealed = run(tmp_path, "-m", "preheat", "run", "--bundle", "kernels.heat", "--sealed", *command)
    found = json.loads(sealed.splitlines()[-1])
    assert (
        found["results"]
        == recorded["results"]
        == pytest.approx([6.0, 37.0, 7.0, 1429559296.0, 1048576.0])
    )
    assert found["stats"].get("compiles", 0) == 0
    assert found["nvrtc"] is False
