"""`pytest --preheat-driver`: runs on the CPU driver, whose faults belong to one test each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY
from tests.tools.plugin import run_pytest

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

PROGRAM = '''
import ctypes, functools, unittest
import numpy as np
import pytest
from cuda.bindings import driver as cu, nvrtc

SOURCE = b"""
extern "C" __global__ void add(int* x, int by) { x[threadIdx.x] += by; }
extern "C" __global__ void twice(int* x) { x[threadIdx.x] *= 2; }
"""

def ok(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else None

@functools.cache
def kernel(name):
    made = ok(nvrtc.nvrtcCreateProgram(SOURCE, b"k.cu", 0, [], []))
    ok(nvrtc.nvrtcCompileProgram(made, 1, [b"-arch=sm_90"]))
    code = b" " * ok(nvrtc.nvrtcGetCUBINSize(made))
    ok(nvrtc.nvrtcGetCUBIN(made, code))
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(code)), name.encode()))

def launch(name, threads, *values, stream=0):
    types = (ctypes.c_void_p, ctypes.c_int)[:len(values)]
    ok(cu.cuLaunchKernel(kernel(name), 1, 1, 1, threads, 1, 1, 0, stream, (values, types), 0))

@functools.cache
def memory():
    kernel("add")
    return int(ok(cu.cuMemAlloc(32)))

def result():
    x = np.zeros(8, "int32")
    ok(cu.cuMemcpyDtoH(x.ctypes.data, memory(), x.nbytes))
    return x.tolist()
'''
SUITE = (
    PROGRAM
    + """
def test_right():
    address = memory()
    ok(cu.cuMemsetD8(address, 0, 32))
    launch("add", 8, memory(), 3)
    assert result() == [3] * 8

def test_noticed():
    launch("add", 9, memory(), 3)
    assert result() == [6] * 8

def test_unnoticed():
    launch("add", 9, memory(), 3)

def test_after_faults():
    ok(cu.cuMemsetD8(memory(), 0, 32))
    launch("add", 8, memory(), 4)
    assert result() == [4] * 8

@pytest.mark.preheat_faults
def test_expected():
    launch("add", 9, memory(), 3)
    assert int(cu.cuCtxSynchronize()[0]) == 700

class TestCase(unittest.TestCase):
    def test_of_unittest(self):
        launch("add", 9, memory(), 1)
"""
)
RACE = (
    PROGRAM
    + """
def test_that_forgets_to_wait():
    memory()
    one, other = (ok(cu.cuStreamCreate(1)) for _ in range(2))
    ok(cu.cuMemsetD32(memory(), 1, 8))
    ok(cu.cuCtxSynchronize())
    launch("add", 8, memory(), 1, stream=one)
    launch("twice", 8, memory(), stream=other)
    ok(cu.cuCtxSynchronize())
    assert result() == [4] * 8
"""
)


def outcomes(ran: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return how each test ended."""
    found = re.findall(r"^(?:\[gw\d\].*)?(PASSED|FAILED|ERROR) test_suite.py::(\S+)", ran.stdout, re.M)
    return {name: word for word, name in found}


@pytest.mark.parametrize("words", [(), ("-n2",)], ids=["one process", "xdist"])
def test_a_fault_fails_its_own_test_and_no_other(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    ran = run_pytest(tmp_path, "-rA", "--strict-markers", "--preheat-driver", *words)
    assert outcomes(ran) == {
        "test_right": "PASSED",
        "test_noticed": "FAILED",
        "test_unnoticed": "FAILED",
        "test_after_faults": "PASSED",
        "test_expected": "PASSED",
        "TestCase::test_of_unittest": "FAILED",
    }, ran.stdout + ran.stderr
    assert "preheat: CPU driver with 1 device of sm_90, schedule 0" in ran.stdout
    assert ran.stdout.count("a kernel of this test has a fault: add, PTX line") >= 2
    assert "0 bytes past the end of the 32-byte buffer" in ran.stdout


def test_other_schedules_find_a_missing_wait(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(RACE)
    ran = run_pytest(tmp_path, "-rA", "--preheat-driver", "--preheat-schedules", "8")
    found = outcomes(ran)
    assert {*found} == {f"test_that_forgets_to_wait[schedule{seed}]" for seed in range(8)}
    assert {*found.values()} == {"PASSED", "FAILED"}
    failed = min(name for name, word in found.items() if word == "FAILED")
    again = run_pytest(
        tmp_path, "-rA", "--preheat-driver", "--preheat-schedules=8", f"test_suite.py::{failed}"
    )
    assert outcomes(again) == {failed: "FAILED"}


def test_the_devices_come_from_the_variables_of_the_driver(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(
        PROGRAM + "def test_two(): ok(cu.cuInit(0)); assert ok(cu.cuDeviceGetCount()) == 2"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --preheat-driver\n")
    ran = run_pytest(tmp_path, "-rA", PREHEAT_EMULATE_DEVICES="2", PREHEAT_EMULATE_ARCH="sm_100")
    assert outcomes(ran) == {"test_two": "PASSED"}, ran.stdout
    assert "preheat: CPU driver with 2 devices of sm_100, schedule 0" in ran.stdout


def test_the_cuda_device_of_preheat_works_after_a_fault(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text("""
import preheat
SOURCE = 'extern "C" __global__ void add(int* x) { x[threadIdx.x] += 1; }'

def test_fault(preheat_device):
    preheat_device.kernel(SOURCE, "add")[1, 9](preheat_device.zeros(8, "int32"))

def test_next(preheat_device):
    x = preheat_device.zeros(8, "int32")
    preheat_device.kernel(SOURCE, "add")[1, 8](x)
    assert x.numpy().tolist() == [1] * 8
""")
    ran = run_pytest(tmp_path, "-rA", "--preheat-driver", "--preheat-device=cuda")
    assert outcomes(ran)["test_next"] == "PASSED", ran.stdout
    assert outcomes(ran)["test_fault"] != "PASSED"


@pytest.mark.parametrize(
    ("words", "env", "why"),
    [
        (("--preheat-schedules=2",), {}, "--preheat-schedules needs --preheat-driver"),
        (("--preheat-driver", "--preheat-schedules=0"), {}, "0 is no number of schedules"),
        (
            ("--preheat-driver", "--preheat-schedules=2"),
            {"PREHEAT_EMULATE_SCHEDULE": "off"},
            "there is one order of work",
        ),
        (("--preheat-driver",), {"PREHEAT_EMULATE_DEVICES": "many"}, "PREHEAT_EMULATE_DEVICES='many'"),
        (("--preheat-driver",), {"PREHEAT_EMULATE_ARCH": "hopper"}, "PREHEAT_EMULATE_ARCH='hopper'"),
    ],
)
def test_bad_usage_is_a_usage_error(
    words: tuple[str, ...], env: dict[str, str], why: str, tmp_path: Path
) -> None:
    ran = run_pytest(tmp_path, *words, **env)
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert why in ran.stderr
