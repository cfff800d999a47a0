"""`preheat emulate -- COMMAND`: commands on the CPU driver, and what is said about them."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.audit.library import LIBRARY as AUDIT
from preheat.driver import settings
from preheat.driver.library import LIBRARY
from tests.command import Cli
from tests.processes import TIMEOUT_SECONDS, import_path, read_line, start_process, wait_for_exit

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

ROOT = Path(__file__).parents[2]
#: A program of cuda.bindings: it adds 1 to as many numbers as its argument says, of 8.
PROGRAM = '''
import ctypes, os, sys
import numpy as np
from cuda.bindings import driver as cu, nvrtc

SOURCE = b"""
extern "C" __global__ void add(int* x) {
    x[threadIdx.x] += 1;
}
"""

def ok(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else None

made = ok(nvrtc.nvrtcCreateProgram(SOURCE, b"add.cu", 0, [], []))
ok(nvrtc.nvrtcCompileProgram(made, 2, [os.environ.get("FOR", "-arch=sm_90").encode(), b"-lineinfo"]))
code = b" " * ok(nvrtc.nvrtcGetCUBINSize(made))
ok(nvrtc.nvrtcGetCUBIN(made, code))
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
add = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(code)), b"add"))
memory = ok(cu.cuMemAlloc(32))
ok(cu.cuMemsetD8(memory, 0, 32))
threads = int(sys.argv[1])
ok(cu.cuLaunchKernel(add, 1, 1, 1, threads, 1, 1, 0, 0, ((int(memory),), (ctypes.c_void_p,)), 0))
x = np.zeros(8, "int32")
status = cu.cuMemcpyDtoH(x.ctypes.data, memory, x.nbytes)[0]
print(int(status), x.sum(), ok(cu.cuDeviceGetCount()))
'''


@pytest.fixture
def emulate(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `preheat emulate` with a program, and with an empty home."""
    (tmp_path / "program.py").write_text(PROGRAM)
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)  # A fixture of all tests may have made it.

    def run(*words: str, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PYTHONPATH": import_path(),
            "HOME": str(home),
            "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
            "NO_COLOR": "1",
            **more,
        }
        words = tuple(sys.executable if word == "python" else word for word in words)
        done = subprocess.run(
            [sys.executable, "-m", "preheat", *words],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


Emulate = Callable[..., subprocess.CompletedProcess[str]]


def test_an_unmodified_program_runs_and_one_line_says_what_it_did(emulate: Emulate) -> None:
    done = emulate("emulate", "--devices", "2", "--", "python", "program.py", "8")
    assert done.stdout == "0 8 2\n"
    assert done.stderr == "preheat: 1 launch, 0 faults\n"


def test_a_fault_names_thread_buffer_argument_and_line_and_the_program_sees_its_status(
    emulate: Emulate, tmp_path: Path
) -> None:
    done = emulate("emulate", "--report", "report.json", "--", "python", "program.py", "9")
    assert done.stdout == "700 0 1\n"
    fault, instruction, summary = done.stderr.splitlines()
    assert fault.startswith(f"preheat: add, {tmp_path}/add.cu:3, PTX line ")
    assert "thread (8, 0, 0)): reads 4 bytes" in fault
    assert "0 bytes past the end of the 32-byte buffer" in fault
    assert "(argument 0)" in fault
    assert instruction.strip().startswith("ld.global")
    assert summary == "preheat: 1 launch, 1 fault"
    report = json.loads((tmp_path / "report.json").read_text())
    (found,) = report["faults"]
    assert (found["status"], found["kernel"], found["thread"]) == (700, "add", [8, 0, 0])
    assert found["source"] == [f"{tmp_path}/add.cu:3"]
    assert (report["launches"], report["processes"], report["killed"]) == (1, 1, 0)


def test_the_devices_have_the_architecture_that_was_chosen(emulate: Emulate) -> None:
    words = ("emulate", "--arch", "sm_100", "--", "python", "program.py", "8")
    assert emulate(*words, FOR="-arch=sm_100").stdout == "0 8 1\n"
    refused = emulate(*words, status=1)
    assert "a cubin for sm_90 does not run on sm_100" in refused.stderr


def test_caches_of_other_libraries_are_not_those_of_a_gpu(emulate: Emulate, tmp_path: Path) -> None:
    names = "CUDA_CACHE_PATH CUPY_CACHE_DIR NUMBA_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR"
    code = f"import os; print(*map(os.environ.__getitem__, {names.split()}), sep='\\n')"
    places = emulate("emulate", "--", "python", "-c", code).stdout.split()
    assert len(set(places)) == 5
    assert all(place.startswith(str(tmp_path)) or "driver" in place for place in places)
    assert not any((tmp_path / "home").glob("*/cache"))


def test_functions_that_are_not_supported_are_named_once_for_all_processes(emulate: Emulate) -> None:
    call = "from cuda.bindings.driver import *; cuInit(0); cuCheckpointProcessGetRestoreThreadId(1)"
    code = f"import subprocess, sys\n{call}\nsubprocess.run([sys.executable, '-c', {call!r}])"
    done = emulate("emulate", "--", "python", "-c", code)
    named = "1 function not supported (cuCheckpointProcessGetRestoreThreadId)"
    assert done.stderr == f"preheat: 0 launches, 0 faults, {named}\n"


def test_the_cuda_runtime_is_explained_once_with_what_works(emulate: Emulate) -> None:
    code = "from cuda.bindings import runtime; print(int(runtime.cudaMalloc(4)[0]))"
    done = emulate("emulate", "--", "python", "-c", code)
    assert done.stdout == "500\n"
    assert done.stderr.count("this program contains NVIDIA's CUDA runtime") == 1
    assert "programs that use the driver API are executed: cuda.bindings.driver" in done.stderr


def test_a_process_that_ends_suddenly_is_not_counted_but_its_faults_are(emulate: Emulate) -> None:
    code = "import os, sys; sys.argv = ['', '9']; exec(open('program.py').read()); os._exit(5)"
    done = emulate("emulate", "--", "python", "-c", code, status=5)
    assert done.stderr.splitlines()[-1] == (
        "preheat: 0 launches, 1 fault, 1 process ended too suddenly to be counted"
    )


def test_a_command_without_the_driver_is_named_as_one(emulate: Emulate) -> None:
    assert (
        emulate("emulate", "--", "true").stderr
        == "preheat: no Python process of the command called the CUDA driver\n"
    )
    emulate("emulate", "--", "sh", "-c", "exit 7", status=7)
    assert "cannot run nowhere" in emulate("emulate", "--", "nowhere", status=127).stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_program_without_python_gets_an_error_that_says_so(emulate: Emulate, tmp_path: Path) -> None:
    (tmp_path / "plain.c").write_text("int cuInit(unsigned); int main(void) { return cuInit(0); }")
    subprocess.run(["cc", "plain.c", "-o", "plain", str(LIBRARY)], cwd=tmp_path, check=True)
    complaint, summary = emulate("emulate", "--", "./plain", status=100).stderr.splitlines()
    assert "it executes kernels in processes of Python, and this is none" in complaint
    assert summary == "preheat: no Python process of the command called the CUDA driver"


def test_with_json_the_report_is_the_only_output(emulate: Emulate) -> None:
    done = emulate("emulate", "--json", "--", "python", "program.py", "8")
    assert json.loads(done.stdout)["launches"] == 1
    assert done.stderr == "0 8 1\n"


def test_a_signal_reaches_the_command(tmp_path: Path) -> None:
    code = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print("up", flush=True)
signal.pause()
"""
    process = start_process(
        [sys.executable, "-m", "preheat", "emulate", "--", sys.executable, "-c", code],
        env={"HOME": str(tmp_path)},
    )
    assert read_line(process) == "up"
    process.send_signal(signal.SIGTERM)
    wait_for_exit(process)
    assert process.returncode == 9


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "there is no COMMAND to run"),
        (("--coverage", "k.ptx", "--", "true"), "--coverage and a COMMAND exclude each other"),
        (("--coverage", "k.ptx", "--report", "r"), "--coverage and --report exclude each other"),
        (("--schedule", "early", "--", "true"), "'early' is neither a whole number nor 'off'"),
        (("--devices", "9", "--", "true"), "9 is not in the range"),
        (("--arch", "hopper", "--", "true"), "'hopper' is not a GPU architecture"),
        (("--report", "nowhere/r.json", "--", "true"), "nowhere is not a directory"),
    ],
)
def test_bad_usage_is_a_usage_error(cli: Cli, words: tuple[str, ...], why: str) -> None:
    ran = cli("emulate", *words)
    assert ran.code == 2
    assert why in ran.err


def test_it_does_not_start_beside_a_gpu_unless_it_is_told_to(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_GPU_DRIVER", tmp_path)
    refused = cli("emulate", "--", "true")
    assert refused.code == 2
    assert "this machine has a GPU" in refused.err
    assert cli("emulate", "--beside-gpu", "--", "true").code == 0


#: Commands of preheat around a program, by name.
AROUND: dict[str, tuple[str, ...]] = {
    "emulate": ("emulate",),
    "audit": ("audit", "--report", "audit.json"),
    "record": ("record", "-o", "kernels.toml"),
    "run": ("run", "--sealed", "--verdict", "verdict.json"),
}
#: A program that compiles nothing: the PTX is there.
LOADS = """
import ctypes
from cuda.bindings import driver as cu
PTX = b'''
.version 8.0
.target sm_90
.address_size 64
.visible .entry nothing() { ret; }
'''
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
status, module = cu.cuModuleLoadData(PTX)
kernel = cu.cuModuleGetFunction(module, b"nothing")[1]
print(int(status), int(cu.cuLaunchKernel(kernel, *[1] * 6, 0, 0, 0, 0)[0]))
cu.cuCtxSynchronize()
"""


COMMANDS = ("emulate", "audit", "record")
ROTATIONS = [COMMANDS[turn:] + COMMANDS[:turn] for turn in range(len(COMMANDS))]
#: In three orders of the commands each one is around each other one. The other three are long tests.
ORDERS = [
    pytest.param(order, id="-".join(order), marks=() if order in ROTATIONS else pytest.mark.long)
    for order in itertools.permutations(COMMANDS)
]


@pytest.mark.skipif(not AUDIT.is_file(), reason="the audit library was not built")
@pytest.mark.parametrize("order", ORDERS)
def test_commands_nest_in_any_order(emulate: Emulate, order: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "loads.py").write_text(LOADS)
    words = [*AROUND[order[0]]]
    for name in order[1:]:
        words += ["--", sys.executable, "-m", "preheat", *AROUND[name]]
    done = emulate(*words, "--", "python", "loads.py")
    assert done.stdout == "0 0\n", shlex.join(words)
    assert "preheat: 1 launch, 0 faults\n" in done.stderr
    report = json.loads((tmp_path / "audit.json").read_text())
    (module,) = report["modules"]
    assert (module["line"], module["kind"]) == ("loads.py:12", "PTX")
    assert report["unseen"] == []  # The driver reports all modules, without CUPTI.


@pytest.mark.skipif(not AUDIT.is_file(), reason="the audit library was not built")
@pytest.mark.parametrize(
    "order", list(itertools.permutations(["emulate", "audit", "run"])), ids="-".join
)
def test_a_sealed_run_on_the_cpu_driver_refuses_what_it_refuses_on_a_gpu(
    emulate: Emulate, order: tuple[str, ...], tmp_path: Path
) -> None:
    words = [*AROUND[order[0]]]
    for name in order[1:]:
        words += ["--", sys.executable, "-m", "preheat", *AROUND[name]]
    done = emulate(*words, "--", "python", "program.py", "8", status=1)
    assert "sealed" in done.stderr
    verdict: dict[str, Any] = json.loads((tmp_path / "verdict.json").read_text())
    assert not verdict["accounted"]
    assert verdict["unseen"] == []
    report = json.loads((tmp_path / "audit.json").read_text())
    assert (len(report["refused"]), report["modules"]) == (1, [])


@pytest.mark.skipif(not AUDIT.is_file(), reason="the audit library was not built")
def test_a_verdict_says_that_the_cpu_driver_reports_modules(emulate: Emulate, tmp_path: Path) -> None:
    """NVIDIA's driver reports them by CUPTI alone, without which the verdict has them as unseen."""
    (tmp_path / "loads.py").write_text(LOADS)
    (run, *words) = AROUND["run"]
    words = [run, *words, "--", sys.executable, "-m", "preheat", "emulate", "--"]
    emulate(*words, "python", "loads.py", status=4)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["unseen"]) == ("not accounted", [])
    assert verdict["modules"]["seen_by"] == "the CPU driver"
    assert len(verdict["refused"]) == 1


def test_an_outer_command_counts_what_an_inner_one_runs(emulate: Emulate) -> None:
    words = ("emulate", "--devices", "2", "--", sys.executable, "-m", "preheat", "emulate")
    done = emulate(*words, "--", "python", "program.py", "8")
    assert done.stdout == "0 8 2\n"
    assert done.stderr == "preheat: 1 launch, 0 faults\n" * 2
