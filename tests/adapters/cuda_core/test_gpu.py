"""A GPU: recorded, baked without it, and run sealed from the bundle, with right numbers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="cuda.core is not installed")

from tests.processes import SOURCE, start_process, wait_for_exit

pytestmark = pytest.mark.gpu

APP = """\
import json
import numpy as np
import preheat
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = '''
template<class T> __global__ void scale(T *x, T by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
'''
N = 1000

def address(array):
    return array.__cuda_array_interface__["data"][0]

def main():
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    gpu = preheat.device("cuda:0")
    options = ProgramOptions(std="c++17")  # for the GPU that there is
    code = Program(SOURCE, "c++", options).compile("cubin", name_expressions=("scale<float>",))
    x = gpu.array(np.arange(N, dtype=np.float32))
    gpu.synchronize()
    config = LaunchConfig(grid=8, block=128)
    launch(stream, config, code.get_kernel("scale<float>"), address(x), np.float32(3), np.int32(N))
    stream.sync()
    gpu.module(code)["scale<float>"][8, 128](x, 2.0, N)
    np.testing.assert_array_equal(x.numpy(), np.arange(N, dtype=np.float32) * 6)
    print(json.dumps({"stats": preheat.default_builder().stats()["process"], "arch": str(gpu.arch)}))

if __name__ == "__main__":
    main()
"""


def run(place: Path, *words: str, cache: str, **env: str) -> str:
    """Run Python, and return what it printed."""
    base = {
        "HOME": str(place / "home"),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)]),
        "PREHEAT_CACHE_DIR": str(place / cache),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
        "CUDA_CACHE_DISABLE": "1",
    }
    process = start_process([sys.executable, *words], env={**base, **env}, cwd=place)
    out, err = wait_for_exit(process)
    assert process.returncode == 0, out + err
    return out


def test_a_program_is_recorded_baked_without_the_gpu_and_run_sealed(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    words = ("-m", "preheat", "record", "-o", "kernels.toml", "--", sys.executable, "app.py")
    recorded = json.loads(run(tmp_path, *words, cache="recording").splitlines()[-1])
    assert recorded["stats"]["compiles"] == 1
    arch = recorded["arch"]
    baking = {"CUDA_VISIBLE_DEVICES": ""}
    run(tmp_path, "-m", "preheat", "bake", "kernels.toml", "--arch", arch, cache="bake", **baking)
    words = ("-m", "preheat", "check", "kernels.toml", "--arch", arch, "--bundle", "kernels.heat")
    run(tmp_path, *words, cache="none")
    words = ("-m", "preheat", "run", "--bundle", "kernels.heat", "--sealed", "--", sys.executable)
    sealed = json.loads(run(tmp_path, *words, "app.py", cache="empty").splitlines()[-1])
    assert sealed["stats"]["hits.bundle"] == 1
    assert "compiles" not in sealed["stats"]
