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
from tests.tools.plugin import run_pytest

ROOT = Path(__file__).parents[2]

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
    assert preheat.device() is preheat.device("auto") is preheat_device
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
    assert "needs a GPU: the NVIDIA driver (libcuda.so.1) was not found" in ran.stdout
    assert "preheat: device emulator (auto: no GPU)" in ran.stdout


@pytest.mark.parametrize("words", [(), ("-n1",)], ids=["one process", "xdist"])
def test_a_run_without_the_fixture_says_nothing_about_devices(
    words: tuple[str, ...], suite: Path
) -> None:
    (suite / "test_kernels.py").write_text("import preheat\ndef test_nothing():\n    pass\n")
    ran = run_pytest(suite, *words)
    assert outcomes(ran) == {"passed": 1}
    assert "preheat:" not in ran.stdout


def test_the_header_says_what_has_chosen_the_device(suite: Path) -> None:
    (suite / "test_kernels.py").write_text("def test_nothing():\n    pass\n")
    ran = run_pytest(suite, PREHEAT_DEVICE="emulator:3")
    assert "preheat: device emulator:3 (PREHEAT_DEVICE)\n" in ran.stdout
    (suite / "pytest.ini").write_text("[pytest]\npreheat_device = emulator[sm_80] cuda\n")
    ran = run_pytest(suite)
    assert "preheat: devices emulator[sm_80], cuda (preheat_device)\n" in ran.stdout
    ran = run_pytest(suite, "--preheat-device=emulator")
    assert "preheat: device emulator\n" in ran.stdout


def test_the_help_shows_settings_of_the_emulator(suite: Path) -> None:
    shown = " ".join(run_pytest(suite, "--help").stdout.split())
    assert "'emulator[sm_100,sanitize]'" in shown


@without_gpu
def test_all_runs_each_test_on_each_device(suite: Path) -> None:
    ran = run_pytest(suite, "-rs", "-v", "--preheat-device=all")
    assert "test_a_kernel[emulator] PASSED" in ran.stdout
    assert "test_a_kernel[cuda] SKIPPED" in ran.stdout
    assert "test_of_hardware[emulator]" not in ran.stdout
    assert "test_a_fault[cuda]" not in ran.stdout
    assert "no GPU: the NVIDIA driver (libcuda.so.1) was not found" in ran.stdout


@without_gpu
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error(suite: Path) -> None:
    """A run on a machine for GPU tests must not pass because it has skipped everything."""
    ran = run_pytest(suite, "--preheat-device=cuda", "-k", "a_fault or after")
    assert outcomes(ran) == {"skipped": 1, "deselected": 4, "error": 1}
    wrong = "the device cuda cannot be opened: no GPU: the NVIDIA driver"
    assert ran.stdout.partition("short test summary")[0].count(wrong) == 1
    assert "During handling" not in ran.stdout


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


ONLY_MARKED = """
import pytest

@pytest.mark.preheat_emulator
def test_marked():
    pass
"""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("emulater", "did you mean 'emulator'?"),
        ("emulator:9", "they are numbered 0 to 7"),
        ("emulator[sanitise]", "the settings of an emulator are sanitize, host_arrays"),
        ("al", "did you mean 'all'?"),
    ],
)
def test_a_wrong_name_of_a_device_ends_the_run_at_its_start(name: str, hint: str, suite: Path) -> None:
    """Tests with a marker would be skipped otherwise, and the run would succeed."""
    (suite / "test_kernels.py").write_text(ONLY_MARKED)
    ran = run_pytest(suite, f"--preheat-device={name}")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert ran.stdout == ""
    first, second = ran.stderr.strip().splitlines()
    assert first.startswith("ERROR: --preheat-device: ")
    assert name in first
    assert second.startswith(f"hint: {hint}")


def test_a_wrong_scope_ends_the_run_at_its_start(suite: Path) -> None:
    ran = run_pytest(suite, "-o", "preheat_device_scope=sesion")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert ran.stderr.startswith("ERROR: preheat_device_scope: 'sesion' is not one of function, class")


def test_a_wrong_name_in_the_environment_is_an_error_of_the_tests_that_need_a_device(
    suite: Path,
) -> None:
    (suite / "test_kernels.py").write_text(
        f"{ONLY_MARKED}\ndef test_fixture(preheat_device): pass\ndef test_other(): pass\n"
    )
    ran = run_pytest(suite, PREHEAT_DEVICE="emulater")
    assert outcomes(ran) == {"passed": 1, "errors": 2}
    assert ran.stdout.count("hint: did you mean 'emulator'?") == 2
    assert "During handling" not in ran.stdout


ARCHITECTURE = """
import pytest

def test_arch(preheat_device):
    print("arch:", preheat_device.arch)

@pytest.mark.preheat_gpu
def test_gpu(preheat_device):
    pass

@pytest.mark.preheat_emulator
def test_emulator(preheat_device):
    pass
"""


@pytest.mark.parametrize("scope", ["function", "session"])
def test_each_test_runs_on_each_device_of_a_repeated_option(scope: str, suite: Path) -> None:
    (suite / "test_kernels.py").write_text(ARCHITECTURE)
    (suite / "pytest.ini").write_text(f"[pytest]\npreheat_device_scope = {scope}\n")
    names = ("emulator[sm_80]", "emulator[sm_120]", "emulator[sm_80]")
    ran = run_pytest(suite, "-vs", "-rs", *(f"--preheat-device={name}" for name in names))
    assert outcomes(ran) == {"passed": 4, "skipped": 1}, ran.stdout
    assert "preheat: devices emulator[sm_80], emulator[sm_120]\n" in ran.stdout
    assert "test_arch[emulator-sm_80] arch: sm_80" in ran.stdout
    assert "test_arch[emulator-sm_120] arch: sm_120" in ran.stdout
    assert "needs a GPU: this run uses emulator[sm_80]" in ran.stdout


def test_a_test_may_choose_its_own_devices(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('preheat_device', ['emulator[sm_75]'], indirect=True)\n"
        "def test_own(preheat_device):\n    assert preheat_device.name == 'emulator:0[sm_75]'\n"
    )
    for words in (("--preheat-device=emulator",), ("--preheat-device=all",)):
        assert outcomes(run_pytest(suite, *words)) == {"passed": 1}


def test_the_settings_of_a_project_reach_workers_and_the_option_counts_more(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(
        "import preheat\n"
        "def test_arch(preheat_device):\n    assert preheat.device() is preheat_device\n"
        "def test_default():\n    assert preheat.device().name.startswith('emulator')\n"
    )
    settings = "[pytest]\npreheat_device = emulator[sm_80] emulator[sm_120]\n"
    (suite / "pytest.ini").write_text(settings)
    ran = run_pytest(suite, "-n2")
    assert outcomes(ran) == {"passed": 3}, ran.stdout
    assert "0 compiled (emulator:0[sm_120], emulator:0[sm_80])" in ran.stdout
    assert outcomes(run_pytest(suite, "--preheat-device=emulator")) == {"passed": 2}


FAULTS = """
import preheat, pytest

SOURCE = 'extern "C" __global__ void add(int* x, int at) { x[at] += 1; }'

def check(gpu):
    x = gpu.zeros(3, "int32")
    gpu.kernel(SOURCE, "add")[1, 1](x, 2)
    assert x.numpy().tolist() == [0, 0, 1]

def fault(gpu):
    gpu.kernel(SOURCE, "add")[1, 1](gpu.zeros(3, "int32"), 1 << 20)

def test_fault(preheat_device):
    fault(preheat_device)

def test_after(preheat_device):
    check(preheat_device)

def test_expected_fault(preheat_device):
    with pytest.raises(preheat.EmulatorFault):
        fault(preheat_device)
        preheat_device.synchronize()

def test_after_an_expected_fault(preheat_device):
    check(preheat_device)

@pytest.fixture
def fails_at_setup(preheat_device):
    fault(preheat_device)
    preheat_device.synchronize()

def test_setup(fails_at_setup):
    pass

def test_after_setup(preheat_device):
    check(preheat_device)

@pytest.fixture
def fails_at_teardown(preheat_device):
    yield
    fault(preheat_device)
    preheat_device.synchronize()

def test_teardown(fails_at_teardown):
    pass

def test_after_teardown(preheat_device):
    check(preheat_device)
"""


@pytest.mark.parametrize(
    ("scope", "device"),
    [
        ("function", "emulator"),
        ("module", "emulator"),
        ("session", "emulator"),
        ("function", "emulator[schedule=3]"),
        ("session", "emulator[schedule=3]"),
    ],
)
def test_a_fault_affects_no_later_test(scope: str, device: str, suite: Path) -> None:
    (suite / "test_kernels.py").write_text(FAULTS)
    (suite / "pytest.ini").write_text(f"[pytest]\npreheat_device_scope = {scope}\n")
    ran = run_pytest(suite, f"--preheat-device={device}")
    assert outcomes(ran) == {"failed": 1, "passed": 6, "errors": 2}, ran.stdout
    assert "FAILED test_kernels.py::test_fault" in ran.stdout
    assert "ContextLostError" not in ran.stdout
    late = "a kernel failed after the test function had ended: add, program.cu:1"
    assert (late in ran.stdout) is ("schedule" in device)


KEPT = """
import functools
import preheat, pytest

SOURCE = 'extern "C" __global__ void add(int* x, int at) { x[at] += 1; }'

@functools.cache
def kernel():
    return preheat.device().kernel(SOURCE, "add")

@pytest.fixture(scope="session")
def kept(preheat_device):
    return preheat_device.zeros(3, "int32")

def test_fault(kept):
    kernel()[1, 1](kept, 1)
    with pytest.raises(preheat.EmulatorFault):
        kernel()[1, 1](kept, 1 << 20)
        preheat.device().synchronize()

def test_after(kept):
    kernel()[1, 1](kept, 1)
    assert kept.numpy().tolist() == [0, 2, 0]
"""


def test_kernels_and_arrays_that_are_kept_survive_a_fault(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(KEPT)
    (suite / "pytest.ini").write_text("[pytest]\npreheat_device_scope = session\n")
    ran = run_pytest(suite, "--preheat-device=emulator")
    assert outcomes(ran) == {"passed": 2}, ran.stdout


def test_with_a_schedule_a_kept_kernel_says_that_the_device_was_reset(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(KEPT)
    (suite / "pytest.ini").write_text("[pytest]\npreheat_device_scope = session\n")
    ran = run_pytest(suite, "--preheat-device=emulator[schedule=3]")
    assert outcomes(ran) == {"failed": 1, "passed": 1}, ran.stdout
    assert "it was reset, and everything on it was lost" in ran.stdout
    assert "the device was reset already: ask for the kernel again: gpu.kernel(…)" in ran.stdout


RANDOM = """
import functools
import preheat
from hypothesis import given, settings, strategies as st

SOURCE = '''
extern "C" __global__ void copy(const int* x, int* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = i < 41 ? x[i] : x[i + 1];
}
'''

@functools.cache
def kernel():
    return preheat.device().kernel(SOURCE, "copy")

@settings(deadline=None, database=None)
@given(n=st.integers(1, 300))
def test_random(preheat_device, n):
    x, y = preheat_device.zeros(n, "int32"), preheat_device.zeros(n, "int32")
    kernel()[-(-n // 64), 64](x, y, n)

def test_after(preheat_device):
    x = preheat_device.zeros(3, "int32")
    kernel()[1, 64](x, x, 3)
"""


@pytest.mark.parametrize("device", ["emulator", "emulator[schedule=1]"])
def test_hypothesis_shrinks_a_fault(device: str, suite: Path) -> None:
    """A deferred stream reports a fault when the example waits for its work."""
    text = RANDOM if device == "emulator" else RANDOM.replace("@functools.cache\n", "")
    (suite / "test_kernels.py").write_text(text)
    (suite / "pytest.ini").write_text("[pytest]\npreheat_device_scope = session\n")
    ran = run_pytest(suite, f"--preheat-device={device}")
    assert outcomes(ran) == {"failed": 1, "passed": 1}, ran.stdout
    assert "n=42," in ran.stdout
    assert "Flaky" not in ran.stdout
    assert "ContextLostError" not in ran.stdout


TWO = """
import preheat, pytest

SOURCE = 'extern "C" __global__ void add(int* x, int at) { x[at] += 1; }'

def check(one, two):
    print("names:", one.name, two.name)
    x = two.array(one.zeros(3, "int32").numpy())
    two.kernel(SOURCE, "add")[1, 1](x, 1)
    assert x.numpy().tolist() == [0, 1, 0]

def test_two(preheat_device, preheat_second_device):
    check(preheat_device, preheat_second_device)

def test_fault_of_the_second(preheat_second_device):
    x = preheat_second_device.zeros(3, "int32")
    preheat_second_device.kernel(SOURCE, "add")[1, 1](x, 1 << 20)

def test_again(preheat_device, preheat_second_device):
    check(preheat_device, preheat_second_device)

def test_fault_of_a_device_that_the_test_opens(preheat_device):
    other = preheat.device("emulator:5")
    other.kernel(SOURCE, "add")[1, 1](other.zeros(3, "int32"), 1 << 20)

def test_again_with_it(preheat_device):
    check(preheat_device, preheat.device("emulator:5"))
"""


@pytest.mark.parametrize("scope", ["function", "session"])
def test_a_fault_of_a_second_device_affects_no_later_test(scope: str, suite: Path) -> None:
    (suite / "test_kernels.py").write_text(TWO)
    (suite / "pytest.ini").write_text(f"[pytest]\npreheat_device_scope = {scope}\n")
    ran = run_pytest(suite, "-s", "--preheat-device=emulator[sm_100]")
    assert outcomes(ran) == {"failed": 2, "passed": 3}, ran.stdout
    assert "names: emulator:0[sm_100] emulator:1[sm_100]" in ran.stdout


@pytest.mark.gpu
def test_a_second_gpu_that_is_not_there_skips_the_test(suite: Path) -> None:
    if count() > 1:
        pytest.skip("there are two GPUs")
    (suite / "test_kernels.py").write_text("def test_two(preheat_second_device):\n    pass\n")
    ran = run_pytest(suite, "-rs", "--preheat-device=cuda")
    assert outcomes(ran) == {"skipped": 1}
    assert "needs a second GPU" in ran.stdout


def test_an_endless_loop_names_the_option_of_pytest(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(
        "def test_loop(preheat_device):\n"
        "    source = '__global__ void k(int* x) { while (*(volatile int*)x == 0); }'\n"
        "    preheat_device.kernel(source, 'k')[1, 1](preheat_device.zeros(1, 'int32'))\n"
    )
    ran = run_pytest(suite, "--preheat-device=emulator[patience=1000]")
    assert outcomes(ran) == {"failed": 1}
    assert "hint: for pytest, --preheat-device='emulator[patience=50000000]'" in ran.stdout


def test_a_test_that_passes_host_arrays_names_the_option_of_pytest(suite: Path) -> None:
    (suite / "test_kernels.py").write_text(
        "import numpy as np\n"
        "import preheat\n"
        "def test_twice(preheat_device):\n"
        "    source = 'extern \"C\" __global__ void twice(int* x) { x[threadIdx.x] *= 2; }'\n"
        "    x = np.arange(4, dtype='int32')\n"
        "    preheat.device().kernel(source, 'twice')[1, 4](x)\n"
        "    assert x.tolist() == [0, 2, 4, 6]\n"
    )
    ran = run_pytest(suite, "--preheat-device=emulator")
    assert outcomes(ran) == {"failed": 1}
    assert "twice, argument 0: ndarray is in host memory, the kernel is on emulator:0" in ran.stdout
    assert "hint: for pytest, --preheat-device='emulator[host_arrays]'" in ran.stdout
    ran = run_pytest(suite, "--preheat-device=emulator[host_arrays]")
    assert outcomes(ran) == {"passed": 1}


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_says_how_many_programs_it_has_found_and_compiled(workers: int, suite: Path) -> None:
    (suite / "cache").unlink()
    (suite / "library.py").write_text(
        "import preheat\n"
        "KERNEL = preheat.device('emulator:1').kernel('__global__ void early() {}', 'early')\n"
    )
    (suite / "test_kernels.py").write_text(f"import library\n{SUITE}")
    words = ["--preheat-device=emulator", *([f"-n{workers}"] if workers else [])]
    runs = [run_pytest(suite, *words).stdout for _ in range(2)]
    shown = [
        re.findall(r"^preheat: (\d+) programs? found, (\d+) compiled \(.*\)$", run, re.M)
        for run in runs
    ]
    # The kernel of the fault is compiled twice, the second time with its lines. Every process imports
    # the library: one of them compiles its kernel, and the others find it.
    others = max(workers - 1, 0)
    assert shown == [[(f"{others}", "4")], [(f"{4 + others}", "0")]]
    if not workers:
        assert "preheat:" not in run_pytest(suite, "-q", *words).stdout


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
            "preheat.model",
            "preheat.model.misspelled",
            "preheat.process",
            "preheat.process.fork",
            "preheat.process.lazy",
            "preheat.process.locks",
            "preheat.pytest_plugin",
            "preheat.tools",
            "preheat.tools.testing",
            "preheat.tools.testing.run",
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
