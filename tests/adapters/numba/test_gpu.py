"""Kernels of Numba from the store, on a GPU: right results, and nothing is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is not installed")

from importlib.metadata import version

from tests.adapters.numba.world import HERE
from tests.processes import SOURCE, TIMEOUT_SECONDS

OLD = tuple(map(int, version("numba-cuda").split(".")[:2])) < (0, 22)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OLD, reason="this Numba-CUDA is too old")]

MAIN = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from numba import cuda
import kernels as k, more as m

def main():
    x = np.linspace(0, 1, 32, dtype=np.float32)
    d, y = cuda.to_device(x), cuda.to_device(np.ones(32, np.float32))
    k.add[1, 32](d, y, 32)
    k.add.forall(32)(d, y, np.int32(32))
    table = np.array([1, 2, 4], np.float32)[np.arange(32) % 3]
    right = np.allclose(y.copy_to_host(), 1 + 2 * (np.sin(x) * 3 + table), atol=1e-5)
    k.halve[1, 32](d)
    right &= np.allclose(d.copy_to_host(), x[::-1] / 2)
    m.made(3)[1, 32](d)
    right &= np.allclose(d.copy_to_host(), 3 * x[::-1] / 2)
    e = cuda.to_device(np.ones(1, np.float32))
    m.eager[1, 1](e)
    right &= np.allclose(e.copy_to_host(), 1 + np.tanh(1))
    right &= np.allclose(m.product(x, x), x * x)
    right &= np.isclose(m.total(np.ones(1000)), 1000)
    try:
        m.checked[1, 1](e, 0)
        message = "nothing"
    except ValueError as error:
        message = str(error)
    right &= "n is zero" in message
    if len(sys.argv) > 1:
        import preheat
        stats = preheat.default_builder().stats()["process"]
        print(json.dumps({"right": bool(right), **stats}))

if __name__ == "__main__":
    main()
"""


def run(place: Path, *words: str, cache: str, **env: str) -> dict[str, Any]:
    """Run Python in the directory of the application, and return what it prints last."""
    values = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *(os.path.abspath(p) for p in sys.path if p)]),
        "PREHEAT_CACHE_DIR": str(place / cache),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
        **env,
    }
    ran = subprocess.run(
        [sys.executable, *words], cwd=place, env=values, capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr + ran.stdout
    lines = ran.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return found


@pytest.fixture
def app(tmp_path: Path) -> Path:
    for name in ("kernels.py", "more.py"):
        (tmp_path / name).write_text((HERE / "app" / name).read_text())
    (tmp_path / "main.py").write_text(MAIN)
    return tmp_path


def test_a_second_process_computes_the_same_and_compiles_nothing(app: Path) -> None:
    command = ("-m", "preheat", "run", "--", sys.executable, "main.py", "report")
    cold, hot = (run(app, *command, cache="cache") for _ in range(2))
    assert (cold["right"], hot["right"]) == (True, True)
    assert cold["compiles"] > 5
    assert hot.get("compiles", 0) == 0


def test_an_application_is_recorded_baked_without_a_gpu_and_run_sealed(app: Path) -> None:
    record = ("-m", "preheat", "record", "-o", "k.toml", "--", sys.executable)
    run(app, *record, "main.py", cache="recorded")
    bake = ("-m", "preheat", "bake", "k.toml", "-o", "k.heat")
    run(app, *bake, cache="recorded", CUDA_VISIBLE_DEVICES="")
    sealed = ("-m", "preheat", "run", "--bundle", "k.heat", "--sealed", "--", sys.executable)
    ran = run(app, *sealed, "main.py", "report", cache="sealed")
    assert ran["right"]
    assert (ran.get("compiles", 0), ran["hits.bundle"] > 5) == (0, True)


def test_code_that_is_baked_without_a_gpu_is_what_the_gpu_runs(app: Path) -> None:
    """The cache of the recording is not there, so everything that can be imported is made again."""
    (app / "small.py").write_text(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import json, numpy as np, kernels as k\n"
        "from numba import cuda\n"
        "if __name__ == '__main__':\n"
        "    x = cuda.to_device(np.arange(32, dtype=np.float32))\n"
        "    k.halve[1, 32](x)\n"
        "    right = np.allclose(x.copy_to_host(), np.arange(32)[::-1] / 2)\n"
        "    print(json.dumps({'right': bool(right)}))\n"
    )
    run(app, "-m", "preheat", "record", "-o", "k.toml", "--", sys.executable, "small.py", cache="one")
    bake = ("-m", "preheat", "bake", "k.toml", "-o", "k.heat")
    run(app, *bake, cache="two", CUDA_VISIBLE_DEVICES="")
    sealed = ("-m", "preheat", "run", "--bundle", "k.heat", "--sealed", "--", sys.executable)
    assert run(app, *sealed, "small.py", cache="three")["right"]
