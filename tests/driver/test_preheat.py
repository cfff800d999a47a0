"""preheat's own CUDA device on the CPU driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY, driver_environment
from tests.processes import TIMEOUT_SECONDS, import_path

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

BUILD = """
import hashlib, sys
import preheat
source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }'
builder = preheat.default_builder()
artifact = builder.build(preheat.Program.of(source), "sm_90")
if "cuda" in sys.argv:
    gpu = preheat.device("cuda")
    x = gpu.zeros(4)
    gpu.kernel(source, "k")[1, 4](x)
    assert x.numpy().tolist() == [1, 1, 1, 1]
print(artifact.digest, *(hashlib.sha256(code).hexdigest() for code in (artifact.cubin, artifact.ptx)))
"""
WRONG = """
import preheat
source = '''
extern "C" __global__ void k(float* x, int n) {
    x[threadIdx.x] += n;
}
'''
gpu = preheat.device("cuda")
x = gpu.zeros(4)
gpu.kernel(source, "k", options=["-lineinfo"])[1, 8](x, 3)
try:
    gpu.synchronize()
except preheat.DriverError as error:
    print(error.code)
"""


def run(code: str, place: Path, *args: str, driver: bool, **more: str) -> tuple[str, str]:
    """Run a program with a cache of its own, and return what it prints and writes to standard error."""
    env = {**os.environ, "PYTHONPATH": import_path(), "PREHEAT_CACHE_DIR": str(place), **more}
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env=driver_environment(env, beside_gpu=1) if driver else env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_entries_are_the_same_with_and_without_the_driver(tmp_path: Path) -> None:
    plain, _ = run(BUILD, tmp_path / "plain", driver=False)
    executed, _ = run(BUILD, tmp_path / "driver", "cuda", driver=True)
    assert plain == executed


def test_entries_of_a_process_without_the_driver_are_executed(tmp_path: Path) -> None:
    """So that a bundle for production can be tested."""
    run(BUILD, tmp_path / "cache", driver=False)
    layer = str(tmp_path / "cache")
    run(BUILD, tmp_path, "cuda", driver=True, PREHEAT_SEALED="1", PREHEAT_LAYERS=layer)


def test_a_fault_names_the_argument_and_the_line_of_the_source(tmp_path: Path) -> None:
    printed, message = run(WRONG, tmp_path, driver=True)
    assert printed == "700"
    assert "reads 4 bytes" in message
    assert "argument 0, float*" in message
    assert "x[threadIdx.x] += n;" in message
