"""Record, bake, move and seal an application, each step in its own process and without a compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat import Builder
from tests.processes import SOURCE, TIMEOUT_SECONDS

APP = '''
"""Scales, shifts and sums: a file with a header beside it, generated code, a template, a graph."""

import json
import sys
from pathlib import Path

import numpy as np

import preheat

which, arch, *more = sys.argv[1:]
home = Path(__file__).parent
gpu = preheat.device(which, **({"arch": arch} if which == "emulator" else {}))

SHIFT = """
#include "by.h"
extern "C" __global__ void shift(int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += BY;
}
"""
SUM = """
template <typename T> __global__ void total(const T* x, T* out, int n) {
    T sum = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    *out = sum;
}
"""
scale = gpu.kernel(home / "kernels" / "scale.cu", "scale", include=[home / "include"])
shift = gpu.kernel(SHIFT, "shift", headers={"by.h": "#define BY 7"}, options=more)
total = gpu.kernel(SUM, "total<int>", label="total.cu")

n = 331
x = np.random.default_rng(int.from_bytes(b"preheat")).integers(1, 100, n).astype(np.int32)
data, out = gpu.array(x), gpu.zeros(1, "int32")
steps = gpu.graphs(name="steps")


@steps.warmer
def step(times):
    for _ in range(times):
        shift[3, 128](data, n)


scale[3, 128](data, n)
for _ in range(3):
    steps.run(2, lambda: step(2))
total[1, 1](data, out, n)
stats = preheat.default_builder().stats()["process"]
print(json.dumps({"data": data.numpy().tolist(), "sum": int(out.numpy()[0]), "stats": stats}))
'''
SCALE = """
#include <factor.h>
extern "C" __global__ void scale(int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= FACTOR;
}
"""
#: Runs a script where no process can be started, so no compiler, and none can be loaded either.
ALONE = """
import runpy, subprocess, sys

def refuse(*_, **__):
    raise AssertionError("a process was started")

subprocess.Popen.__init__ = refuse
for module in ("cuda.bindings.nvrtc", "cuda.bindings.nvjitlink"):
    sys.modules[module] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
mapped = open("/proc/self/maps").read().lower()
assert "nvrtc" not in mapped and "nvjitlink" not in mapped
"""


@dataclass
class Place:
    """An application in a directory, with settings of its own."""

    app: Path
    env: dict[str, str]

    def preheat(self, *args: str, code: int = 0) -> str:
        return self.run("-m", "preheat", *args, code=code)

    def run(self, *args: str, code: int = 0, **env: str) -> str:
        ran = subprocess.run(
            [sys.executable, *args],
            cwd=self.app,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert ran.returncode == code, f"{ran.stdout}\n{ran.stderr}"
        return ran.stdout + ran.stderr if code else ran.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return the application and its bundle, baked for three architectures."""
    root = tmp_path_factory.mktemp("app")
    (root / "kernels").mkdir()
    (root / "include").mkdir()
    (root / "app.py").write_text(APP)
    (root / "kernels" / "scale.cu").write_text(SCALE)
    (root / "include" / "factor.h").write_text("#define FACTOR 3\n")
    path = os.pathsep.join([str(SOURCE), *filter(None, sys.path)])
    made = Place(root, {**os.environ, "PYTHONPATH": path, "PREHEAT_CACHE_DIR": str(root / "cache")})
    made.preheat(*("record", "-o", "kernels.toml", "--", sys.executable, "app.py", "emulator", "sm_90"))
    made.preheat("bake", "kernels.toml", *(f"--arch={arch}" for arch in ("sm_80", "sm_90", "sm_100")))
    return made


@pytest.fixture
def moved(place: Place, tmp_path: Path) -> Place:
    """Return the application in another directory: bundle, sources, an empty cache, no headers."""
    home = tmp_path / "far" / "away"
    (home / "kernels").mkdir(parents=True)
    shutil.copy(place.app / "app.py", home)
    shutil.copy(place.app / "kernels" / "scale.cu", home / "kernels")
    shutil.copy(place.app / "kernels.heat", home)
    env: dict[str, str] = {
        **{
            name: place.env[name]
            for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
            if name in place.env
        },
        "HOME": str(tmp_path / "home"),
        "PREHEAT_CACHE_DIR": str(tmp_path / "empty"),
        "PREHEAT_BUNDLE": str(home / "kernels.heat"),
        "PREHEAT_SEALED": "1",
        "CUDA_HOME": "/nowhere",
    }
    return Place(home, env)


def check(reported: str) -> dict[str, Any]:
    """Compare the answer of the application with NumPy, and return its counters."""
    row: dict[str, Any] = json.loads(reported)
    x = np.random.default_rng(int.from_bytes(b"preheat")).integers(1, 100, 331)
    expected = x * 3 + 7 * 2 * 3
    assert row["data"] == expected.tolist()
    assert row["sum"] == expected.sum()
    stats: dict[str, Any] = row["stats"]
    return stats


def test_the_manifest_says_what_the_application_needs(place: Place) -> None:
    reported = (place.app / "kernels.toml").read_text()
    for line in ('file = "kernels/scale.cu"', '"total<int>"', '"by.h"', '"include"', '"app.py:', '"2"'):
        assert line in reported, reported


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_sealed_it_runs_on_the_emulator_with_nothing_to_compile_with(moved: Place, arch: str) -> None:
    alone = without_compilers(moved)
    stats = check(alone.run("-S", "-c", ALONE, "app.py", "emulator", arch))
    assert stats["hits.bundle"] == 3
    assert "compiles" not in stats
    assert not [name for name in stats if name.startswith(("workers", "faults", "misses", "sealed"))]


def without_compilers(place: Place) -> Place:
    """Return a Python environment with every package except those of NVIDIA."""
    links = place.app.parent / "packages"
    links.mkdir()
    for root in filter(os.path.isdir, place.env["PYTHONPATH"].split(os.pathsep)):
        for found in Path(root).iterdir() if root.endswith("-packages") or root == str(SOURCE) else ():
            if not found.name.startswith(("nvidia", "cuda")) and not (links / found.name).exists():
                (links / found.name).symlink_to(found)
    return Place(place.app, place.env | {"PYTHONPATH": str(links)})


@pytest.mark.hardware("cuda.pathfinder starts a process to find a driver that is preloaded")
@pytest.mark.gpu
def test_sealed_it_runs_on_a_gpu_with_nothing_to_compile_with(moved: Place) -> None:
    stats = check(moved.run("-c", ALONE, "app.py", "cuda", ""))
    assert stats["hits.bundle"] == 3
    assert "compiles" not in stats


def test_sealed_it_says_what_was_not_baked(moved: Place) -> None:
    reported = moved.run("app.py", "emulator", "sm_90", "-lineinfo", code=1)
    assert "preheat.errors.SealedError: app.py:" in reported
    assert "shift (program.cu, sm_90) cannot be compiled in this sealed process" in reported
    assert "option[0]: '-lineinfo' is new" in reported
    reported = moved.run("app.py", "emulator", "sm_70", code=1)
    assert "arch: 'sm_80' became 'sm_70'" in reported


def test_check_passes_as_baked_and_names_a_header_that_changed(place: Place, tmp_path: Path) -> None:
    here = Place(tmp_path / "here", place.env | {"PREHEAT_CACHE_DIR": str(tmp_path / "empty")})
    shutil.copytree(place.app, here.app, ignore=shutil.ignore_patterns("cache"))
    asked = ("check", "kernels.toml", "--arch=sm_90", "--arch=sm_100", "--bundle=kernels.heat")
    here.preheat(*asked)
    (here.app / "include" / "factor.h").write_text("#define FACTOR 4\n")
    assert "header factor.h changed" in here.preheat(*asked, code=1)


def test_bakes_on_different_days_and_places_are_the_same_bytes(
    place: Place, tmp_path: Path, shared_builder: Builder
) -> None:
    version = shared_builder.toolchain.version("cuda")
    if re.match(r"NVRTC 13\.[0-3]\.", version):
        pytest.skip(f"{version} makes other code for sm_100 in each process")
    other = Place(tmp_path / "other", place.env | {"PREHEAT_CACHE_DIR": str(tmp_path / "cache")})
    shutil.copytree(place.app, other.app, ignore=shutil.ignore_patterns("cache", "*.heat"))
    other.env["TZ"] = "Pacific/Kiritimati"
    archs = [f"--arch={arch}" for arch in ("sm_100", "sm_80", "sm_90")]
    other.preheat("bake", "kernels.toml", "-j1", *archs, "-o", "again.heat")
    assert (other.app / "again.heat").read_bytes() == (place.app / "kernels.heat").read_bytes()
