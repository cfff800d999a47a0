"""Programs with the CPU driver: their threads, forks, faults and ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY, driver_environment
from tests.processes import TIMEOUT_SECONDS, import_path

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

ROOT = Path(__file__).parents[2]
IMPORTS = """
import ctypes, os, sys, threading
from tests.driver.calls.cuda import Program, compiled, cu, ok, status
"""
START = IMPORTS + "program = Program()\n"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def run(code: str, *args: str, start: str = START, **settings: str) -> tuple[list[str], str]:
    """Run a program and return the lines that it prints, and what it writes to standard error."""
    more = {name: value for name, value in settings.items() if name.isupper()}
    for name in more:
        del settings[name]
    env = {**os.environ, "PYTHONPATH": import_path(), **more}
    done = subprocess.run(
        [sys.executable, "-c", start + code, *args],
        env=driver_environment(env, beside_gpu=1, **settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a library that calls the driver by itself."""
    path = tmp_path_factory.mktemp("foreign") / "foreign.so"
    source = Path(__file__).with_name("foreign.c")
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-w",
        "-std=gnu11",
        str(source),
        "-o",
        str(path),
        "-lpthread",
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return str(path)


FOREIGN = """
class Work(ctypes.Structure):
    _fields_ = [("pointers", ctypes.c_void_p * 2), ("statuses", ctypes.c_int * 8)]
work = Work((int(program.context), int(program.function("add"))))
"""


@needs_compiler
def test_a_thread_that_python_did_not_start_keeps_its_context_and_its_stream(foreign: str) -> None:
    code = "ctypes.CDLL(sys.argv[1]).run_launches(ctypes.byref(work)); print(*work.statuses)"
    assert run(FOREIGN + code, foreign)[0] == ["0 0 0 0 0 6 0 0"]


@needs_compiler
def test_calls_of_the_current_context_need_no_interpreter_lock(foreign: str) -> None:
    code = (
        FOREIGN
        + "ctypes.PyDLL(sys.argv[1]).run_without_lock(ctypes.byref(work)); print(*work.statuses)"
    )
    assert run(code, foreign)[0] == ["0 0 0 0 0 0 0 0"]


@needs_compiler
def test_a_library_may_release_memory_after_the_end_of_the_interpreter(foreign: str) -> None:
    code = """
library = ctypes.CDLL(sys.argv[1])
library.keep(ctypes.c_uint64(int(program.memory([1]))))
"""
    message = run(code, foreign)[1]
    assert "freed at exit: 0, allocated: 4" in message
    assert "an error at exit: CUDA_ERROR_ILLEGAL_ADDRESS" in message


@needs_compiler
def test_a_destructor_may_release_memory_while_an_exception_is_raised(foreign: str) -> None:
    code = """
library = ctypes.PyDLL(sys.argv[1])
before = ok(cu.cuMemGetInfo())
try:
    library.release_while_raising(ctypes.c_uint64(int(program.memory([1]))))
except KeyError as error:
    released = ctypes.c_int.in_dll(library, "status_of_release").value
    print(error, released, ok(cu.cuMemGetInfo()) == before)
"""
    assert run(code, foreign) == (["'raised before' 0 True"], "")


def test_a_forked_child_cannot_use_the_driver() -> None:
    code = """
child = os.fork()
if not child:
    os._exit(int(status(cu.cuMemAlloc(4))) + int(status(cu.cuCtxGetCurrent())))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), status(cu.cuMemAlloc(4)))
"""
    assert run(code)[0] == ["6 0"]


def test_a_program_may_clear_its_environment_and_forget_preheat() -> None:
    code = """
os.environ.clear()
for name in [name for name in sys.modules if name.split(".")[0] == "preheat"]:
    del sys.modules[name]
address = program.memory([1])
print(status(program.launch("add", address, 1, 1)), program.values(address, 1))
"""
    assert run(code)[0] == ["0 [2]"]


def test_a_program_may_forget_preheat_before_it_loads_its_first_module() -> None:
    code = """
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
for name in [name for name in sys.modules if name.split(".")[0] == "preheat"]:
    del sys.modules[name]
print(status(cu.cuModuleLoadData(b".version 8.0 garbage")))
program = Program()
program.launch("add", 4096, 1, 1)
print(status(cu.cuCtxSynchronize()))
"""
    assert run(code, start=IMPORTS)[0] == ["218", "700"]


def test_calls_leave_no_objects_behind_in_the_program() -> None:
    code = """
import gc
stream = ok(cu.cuStreamCreate(1))
def work():
    for _ in range(50):
        address, event = program.memory([1]), ok(cu.cuEventCreate(0))
        ok(program.launch("add", address, 1, 1, stream=stream))
        ok(cu.cuEventRecord(event, stream))
        ok(cu.cuStreamSynchronize(stream))
        ok(cu.cuMemFree(address))
        ok(cu.cuEventDestroy(event))
    gc.collect()
    kinds = [type(each).__name__ for each in gc.get_objects()]
    # Freed memory is remembered, by its address: 64 places at most.
    assert kinds.count("Buffer") < 100
    return len(kinds) - kinds.count("Buffer")
work()
print(work() == work())
"""
    assert run(code)[0] == ["True"]


FAULT = """
address = program.memory([1])
launched = status(program.launch("add", address, 32, 1))
waited = status(cu.cuCtxSynchronize())
other = []
def elsewhere():
    ok(cu.cuCtxSetCurrent(program.context))
    other.append(status(cu.cuMemAlloc(4)))
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
print(launched, waited, *other, status(cu.cuMemFree(address)), status(cu.cuDeviceGetCount()))
"""


def test_after_a_fault_every_call_of_the_context_fails_in_every_thread() -> None:
    printed, message = run(FAULT)
    assert printed == ["0 700 700 700 0"]
    assert message.count("reads 4 bytes") == 1
    assert "0 bytes past the end of the 4-byte buffer" in message
    assert "add, PTX line" in message


@pytest.mark.parametrize(
    ("statement", "status"),
    [
        ("x[2] = 1", 700),
        ("*(int*)((char*)x + 1) = 1", 716),
        ('__assertfail("no", "k.cu", 1, "f", 1)', 710),
    ],
)
def test_the_status_of_a_fault_does_not_depend_on_the_name_of_the_kernel(
    statement: str, status: int
) -> None:
    code = f"""
source = b'''extern "C" __device__
void __assertfail(const char*, const char*, unsigned, const char*, size_t);
extern "C" __global__ void assert_aligned(int* x) {{ {statement}; }}'''
module = ok(cu.cuModuleLoadData(compiled(source=source)))
function = ok(cu.cuModuleGetFunction(module, b"assert_aligned"))
address = int(program.memory([1, 1]))
ok(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((address,), (ctypes.c_void_p,)), 0))
print(status(cu.cuCtxSynchronize()))
"""
    assert run(code)[0] == [str(status)]


def test_a_launch_that_executes_at_once_succeeds_as_well_unless_launches_block() -> None:
    assert run(FAULT, schedule="off")[0] == ["0 700 700 700 0"]
    assert run(FAULT, schedule="off", CUDA_LAUNCH_BLOCKING="1")[0] == ["700 700 700 700 0"]
    assert run(FAULT, CUDA_LAUNCH_BLOCKING="1")[0] == ["700 700 700 700 0"]


def test_a_reset_ends_a_fault_and_the_same_one_may_happen_again() -> None:
    code = (
        FAULT
        + """
ok(cu.cuDevicePrimaryCtxReset(program.device))
ok(cu.cuMemFree(ok(cu.cuMemAlloc(4))))
program.module = ok(cu.cuModuleLoadData(compiled()))
address = program.memory([1])
ok(program.launch("add", address, 32, 1))
print(status(cu.cuCtxSynchronize()), status(cu.cuMemAlloc(4)))
"""
    )
    printed, message = run(code)
    assert printed[-1] == "700 700"
    assert message.count("reads 4 bytes") == 2


def test_calls_that_are_not_supported_are_named_once_at_the_end() -> None:
    code = "print([status(cu.cuCheckpointProcessGetRestoreThreadId(1)) for _ in range(3)])"
    printed, message = run(code)
    assert printed == ["[801, 801, 801]"]
    assert message == "preheat: the CPU driver does not support cuCheckpointProcessGetRestoreThreadId\n"


def test_a_program_that_contains_the_cuda_runtime_is_told_why_it_cannot_run() -> None:
    code = """
out = ctypes.c_void_p()
print(ctypes.CDLL(None).cuGetExportTable(ctypes.byref(out), bytes(16)), out.value)
"""
    printed, message = run(code)
    assert printed == ["500 None"]
    assert message.count("this program contains NVIDIA's CUDA runtime") == 1


@needs_compiler
def test_a_program_without_python_gets_an_error(tmp_path: Path) -> None:
    source = tmp_path / "plain.c"
    source.write_text("extern int cuInit(unsigned); int main(void) { return cuInit(0); }")
    program = tmp_path / "plain"
    subprocess.run(["cc", str(source), "-o", str(program), str(LIBRARY)], check=True)
    env = driver_environment(os.environ)
    done = subprocess.run([program], env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 100
    assert "executes kernels in processes of Python" in done.stderr


def test_a_name_means_the_function_of_the_version_that_is_asked_for() -> None:
    code = """
from cuda.bindings.driver import cuGetProcAddress
addresses = {}
for version in (2000, 12090, 13000):
    addresses[version] = int(ok(cuGetProcAddress(b"cuCtxGetDevice", version, 0))[0])
out = ctypes.c_int(7)
old = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(addresses[12090])
new = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(addresses[13000])
print(addresses[2000] == addresses[12090] != addresses[13000])
print(old(ctypes.byref(out)), out.value)
print(new(ctypes.byref(out), int(program.context)), new(ctypes.byref(out), 1))
plain, per_thread = (int(ok(cuGetProcAddress(b"cuLaunchKernel", 12000, flag))[0]) for flag in (1, 2))
print(plain != per_thread)
"""
    assert run(code)[0] == ["True", "0 0", "0 201", "True"]


def test_seeds_are_other_legal_schedules() -> None:
    """A program that forgets to wait has other results with other seeds, and the same ones with one."""
    code = """
streams = [ok(cu.cuStreamCreate(1)) for _ in range(2)]
address = program.memory([1])
for stream, name, more in zip(streams, ("add", "twice"), ((1, 1), (1,))):
    ok(program.launch(name, address, *more, stream=stream))
ok(cu.cuCtxSynchronize())
print(program.values(address, 1)[0])
"""
    found = [run(code, schedule=str(seed))[0][0] for seed in (0, 0, 1, 2, 3, 4, 5)]
    assert found[0] == found[1]
    assert set(found) == {"3", "4"}
