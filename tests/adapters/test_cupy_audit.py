"""A sealed run of CuPy: the audit finds the modules that CuPy loads in the bundle.

Only the device is a stand-in. CuPy compiles the code, and the audit library sees its loads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy is a large package, which `make test-adapters` installs")

from tests.adapters.cupy_world import CupyWorld
from tests.audit.conftest import Standins, standins  # noqa: F401

LOADED = 3
PROGRAM = """
import ctypes, os

modules = []
Module.load = lambda self, code: modules.append(code)
compile('extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2; }')
compile('extern "C" __global__ void shift(float* x) { __shared__ float s; s = *x; *x = s + 1; }')
compile('template <class T> __global__ void tk(T* x) { x[0] = 1; }', name_expressions=('tk<float>',))

# NVRTC crashes in a process that has loaded the stand-in, which lacks most functions of a driver.
driver = ctypes.CDLL(os.environ["STANDIN_DRIVER"])
driver.cuInit(0)
for code in modules:
    assert driver.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), code) == 0
"""


def test_the_verdict_accounts_for_the_modules_of_cupy(
    tmp_path: Path,
    standins: Standins,  # noqa: F811
) -> None:
    world = CupyWorld(tmp_path / "world")
    env = {
        "STANDIN_DRIVER": str(standins.libraries / "libcuda.so.1"),
        "PREHEAT_AUDIT_CUPTI": str(standins.libraries / "libcupti.so.13"),
    }
    command = ["--", sys.executable, str(world.program(PROGRAM, adapter=False))]
    world.preheat("record", *command, **env).ok()
    world.preheat("bake", "kernels.toml", "--arch", "sm_90").ok()
    sealed = ["run", "--sealed", "--empty-cache", "--bundle", "kernels.heat", "--verdict", "v.json"]
    ran = world.preheat(*sealed, *command, **env)
    verdict = json.loads((world.root / "v.json").read_text())
    assert ran.code == 0, ran.err + json.dumps(verdict, indent=2)
    assert verdict["accounted"] is True
    assert verdict["modules"]["by_origin"] == {"bundle": LOADED}
    assert verdict["modules"]["seen_by"] == "CUPTI"
