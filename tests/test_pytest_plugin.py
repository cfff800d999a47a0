"""The plugin for pytest: devices of tests, skips with reasons, and an import that costs nothing."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from preheat.devices.cuda.device import count
from preheat.errors import NoGpuError
from tests.plugin import run_pytest

ROOT = Path(__file__).parents[1]

SUITE = """
import os, subprocess, sys
import numpy as np
import preheat, pytest

SOURCE = 'extern "C" __global__ void add(int* x, int by) { x[threadIdx.x] += by; }'
seen = []

def test_a_kernel(preheat_device):
    seen.append(preheat_device)
    x = preheat_device.array(np.arange(4, dtype="int32"))
    preheat_device.kernel(SOURCE, "add")[1, 4](x, 10)
    assert x.numpy().tolist() == [10, 11, 12, 13]

def test_the_code_under_test_gets_the_same_device(preheat_device):
    assert preheat.device() is preheat_device
    assert os.environ["PREHEAT_DEVICE"] == preheat_device.name
    assert preheat_device not in seen

@pytest.mark.preheat_emulator
def test_a_fault(preheat_device):
    bad = preheat_device.kernel('extern "C" __global__ void bad(int* x) { x[1 << 20] = 1; }', "bad")
    with pytest.raises(preheat.EmulatorFault):
        bad[1, 1](preheat_device.zeros(1, "int32"))

def test_after_the_fault(preheat_device):
    assert preheat_device.zeros(3).numpy().tolist() == [0, 0, 0]

@pytest.mark.preheat_gpu
def test_of_hardware(preheat_device):
    assert preheat_device.name.startswith("cuda")

@pytest.mark.preheat_gpu
def test_of_hardware_without_the_fixture():
    pass
"""


def has_gpu() -> bool:
    try:
        return count() > 0
    except NoGpuError:
        return False


without_gpu = pytest.mark.skipif(has_gpu(), reason="there is a GPU")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache for all tests, so that each kernel is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def suite(tmp_path: Path, shared_cache: Path) -> Path:
    place = tmp_path / "suite"
    place.mkdir()
    (place / "cache").symlink_to(shared_cache)
    (place / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    (place / "test_kernels.py").write_text(SUITE)
    return place


def outcomes(ran: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return how many tests passed, failed and so on, by the last line."""
    *_, last = ran.stdout.splitlines()
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}


@without_gpu
def test_tests_run_on_the_emulator_and_those_of_hardware_are_skipped(suite: Path) -> None:
    ran = run_pytest(suite, "-rs", "--preheat-device=emulator")
    assert outcomes(ran) == {"passed": 4, "skipped": 2}, ran.stdout
    assert "preheat: device emulator" in ran.stdout
    assert "needs a GPU: this run uses emulator" in ran.stdout


@without_gpu
def test_by_default_there_is_the_emulator_without_a_gpu_and_a_skip_says_why(suite: Path) -> None:
    ran = run_pytest(suite, "-rs")
    assert outcomes(ran) == {"passed": 4, "skipped": 2}, ran.stdout
    assert "needs a GPU: the NVIDIA driver (libcuda.so.1) is not here" in ran.stdout
    assert "preheat: device" not in ran.stdout


@without_gpu
def test_all_runs_each_test_on_each_device(suite: Path) -> None:
    ran = run_pytest(suite, "-rs", "-v", "--preheat-device=all")
    assert "test_a_kernel[emulator] PASSED" in ran.stdout
    assert "test_a_kernel[cuda] SKIPPED" in ran.stdout
    assert "test_of_hardware[emulator]" not in ran.stdout
    assert "test_a_fault[cuda]" not in ran.stdout
    assert "no GPU: the NVIDIA driver (libcuda.so.1) is not here" in ran.stdout


@without_gpu
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error(suite: Path) -> None:
    """A run on a machine for GPU tests must not pass because it has skipped everything."""
    ran = run_pytest(suite, "--preheat-device=cuda", "-k", "a_fault or after")
    assert outcomes(ran) == {"skipped": 1, "deselected": 4, "error": 1}
    assert "the device cuda cannot be opened: no GPU: the NVIDIA driver" in ran.stdout


def test_the_name_of_a_device_may_have_settings(suite: Path) -> None:
    code = "def test_arch(preheat_device):\n    assert str(preheat_device.arch) == 'sm_100'\n"
    (suite / "test_kernels.py").write_text(code)
    ran = run_pytest(suite, "--preheat-device=emulator[sm_100]")
    assert outcomes(ran) == {"passed": 1}, ran.stdout


def test_a_report_ends_at_the_line_of_the_user(suite: Path) -> None:
    code = (
        "def test_fault(preheat_device):\n"
        "    kernel = preheat_device.kernel('__global__ void k(int* x) { x[1] = 7; }', 'k')\n"
        "    kernel[1, 1](preheat_device.zeros(1, 'int32'))\n"
    )
    (suite / "test_kernels.py").write_text(code)
    ran = run_pytest(suite, "--preheat-device=emulator")
    assert outcomes(ran) == {"failed": 1}
    assert "test_kernels.py:3: EmulatorFault" in ran.stdout
    assert "launch.py" not in ran.stdout
    ran = run_pytest(suite, "--preheat-device=emulator", PREHEAT_TRACEBACK="full")
    assert "launch.py" in ran.stdout


def test_an_unknown_device_is_an_error_that_names_the_others(suite: Path) -> None:
    ran = run_pytest(suite, "--preheat-device=emulater", "-k", "test_a_kernel")
    assert outcomes(ran)["error"] == 1
    assert "'emulater' is not a device" in ran.stdout


def test_the_environment_chooses_the_device_and_the_option_counts_more(suite: Path) -> None:
    code = "def test_name(preheat_device):\n    assert preheat_device.name == 'emulator:3'\n"
    (suite / "test_kernels.py").write_text(code)
    ran = run_pytest(suite, PREHEAT_DEVICE="emulator:3")
    assert outcomes(ran) == {"passed": 1}
    ran = run_pytest(suite, "--preheat-device=emulator:3", PREHEAT_DEVICE="emulator:2")
    assert outcomes(ran) == {"passed": 1}


def test_the_option_holds_for_processes_that_tests_start_too(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(
        "import subprocess, sys\n"
        "def test_child():\n"
        "    code = 'import preheat; print(preheat.device().name)'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code]) == b'emulator:0\\n'\n"
    )
    ran = run_pytest(suite, "--preheat-device=emulator")
    assert outcomes(ran) == {"passed": 1}, ran.stdout


def test_a_second_run_compiles_nothing(suite: Path) -> None:
    (suite / "cache").unlink()
    (suite / "conftest.py").write_text(
        "import preheat\n"
        "def pytest_sessionfinish():\n"
        "    stats = preheat.default_builder().stats()['process']\n"
        "    print('compiles:', stats.get('compiles', 0))\n"
    )
    shown = [run_pytest(suite, "-s", "--preheat-device=emulator").stdout for _ in range(2)]
    compiles = [float(*re.findall(r"compiles: (\S+)", text)) for text in shown]
    assert compiles[0] > 0
    assert compiles[1] == 0


def test_workers_of_xdist_share_the_cache(suite: Path) -> None:
    ran = run_pytest(suite, "-n2", "--preheat-device=all", "-k", "kernel or fault")
    assert "failed" not in outcomes(ran), ran.stdout
    assert outcomes(ran)["passed"] >= 4


def test_code_that_keeps_its_kernels_is_tested_with_one_device_for_the_session(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(
        "import functools, preheat\n"
        "@functools.cache\n"
        "def kernel(gpu_name):\n"
        '    return preheat.device().kernel("__global__ void k(int* x) { *x = 7; }", "k")\n'
        "def check(gpu):\n"
        "    x = gpu.zeros(1, 'int32')\n"
        "    kernel(gpu.name)[1, 1](x)\n"
        "    assert x.numpy()[0] == 7\n"
        "def test_one(preheat_device):\n    check(preheat_device)\n"
        "def test_two(preheat_device):\n    check(preheat_device)\n"
    )
    ran = run_pytest(suite, "--preheat-device=emulator")
    assert outcomes(ran) == {"failed": 1, "passed": 1}
    assert "emulator:0: it was closed" in ran.stdout
    (suite / "pytest.ini").write_text("[pytest]\npreheat_device_scope = session\n")
    assert outcomes(run_pytest(suite, "--preheat-device=emulator")) == {"passed": 2}


def test_a_device_of_the_code_under_test_is_shared_and_reset_after_a_fault(suite: Path) -> None:
    (suite / "application.py").write_text("import preheat\ngpu = preheat.device('emulator')\n")
    body = SUITE.replace(
        "import preheat, pytest", "import preheat, pytest\nfrom application import gpu"
    )
    body = body.replace("assert preheat_device not in seen", "assert preheat_device is gpu")
    (suite / "test_kernels.py").write_text(body)
    ran = run_pytest(suite, "--preheat-device=emulator")
    assert outcomes(ran) == {"passed": 4, "skipped": 2}, ran.stdout


LOADED = """
import json, sys
def test_nothing(): pass
def pytest_sessionfinish():
    packages = ("preheat", "cuda", "numpy")
    names = sorted(name for name in sys.modules if name.partition(".")[0] in packages)
    maps = open("/proc/self/maps").read()
    print("\\nloaded:", json.dumps([names, "libcuda" in maps or "libnvrtc" in maps]))
"""


def test_pytest_starts_without_cuda_and_with_next_to_nothing_of_preheat(suite: Path) -> None:
    (suite / "conftest.py").write_text(LOADED)
    (suite / "test_kernels.py").write_text("def test_nothing():\n    pass\n")
    for words in ((), ("--preheat-device=emulator",), ("--preheat-device=all",)):
        ran = run_pytest(suite, "-s", *words)
        assert outcomes(ran) == {"passed": 1}
        (shown,) = re.findall(r"loaded: (.*)", ran.stdout)
        names, cuda = json.loads(shown)
        assert set(names) <= {
            "preheat",
            "preheat._version",
            "preheat.fork",
            "preheat.locks",
            "preheat.pytest_plugin",
        }
        assert cuda is False


def test_the_fixtures_and_markers_have_names_of_their_own() -> None:
    """A plugin is loaded everywhere, so nothing of it may be called like something of a user."""
    text = (ROOT / "src" / "preheat" / "pytest_plugin.py").read_text()
    fixtures = re.findall(r"@pytest\.fixture.*\ndef (\w+)", text)
    assert fixtures
    assert all(name.lstrip("_").startswith("preheat_") for name in fixtures)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"preheat": "preheat.pytest_plugin"}


@pytest.mark.gpu
def test_tests_run_on_a_gpu(suite: Path) -> None:
    ran = run_pytest(suite, "-v", "--preheat-device=cuda")
    assert outcomes(ran) == {"passed": 5, "skipped": 1}, ran.stdout
    ran = run_pytest(suite, "-v", "--preheat-device=all")
    assert "test_a_kernel[emulator] PASSED" in ran.stdout
    assert "test_a_kernel[cuda] PASSED" in ran.stdout
    assert "failed" not in outcomes(ran)
