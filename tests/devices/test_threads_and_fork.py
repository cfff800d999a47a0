"""Threads, forked children and the end of the interpreter: work continues, or the error has a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.errors import ContextLostError, StaleBufferError
from preheat.gpu import Gpu
from tests.conftest import SAXPY
from tests.devices.support import KERNELS, saxpy_case
from tests.faulty import FaultyGpu
from tests.processes import expect_success, run_in_fork, start_python, wait_for_exit
from tests.threads import run_in_thread


def test_a_device_made_in_one_thread_works_in_another(device: Gpu) -> None:
    made = saxpy_case(device)

    def work() -> None:
        made.launch(4)
        made.check(4)
        other = saxpy_case(device, 33)
        other.launch(4)
        other.check(4)
        device.synchronize()
        with device.stream() as stream:
            stream.synchronize()
        device.trim()

    run_in_thread(work)
    made.launch()
    made.check(5)


def test_the_emulator_continues_in_a_forked_child_by_itself(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    made = saxpy_case(gpu)
    made.launch(4)

    def work() -> None:
        made.check(4)
        made.launch(4)
        made.check(8)
        fresh = gpu.array([1, 2, 3], "int32")
        out = gpu.empty(3, "int32")
        gpu.kernel(KERNELS, "add")[1, 4](fresh, 5, out, 3)
        assert out.numpy().tolist() == [6, 7, 8]
        gpu.kernel(SAXPY + "// compiled by the child", "saxpy")
        gpu.trim()
        gpu.close()

    run_in_fork(work)
    made.check(4)  # the child has a copy: nothing of it is seen here
    made.launch()
    made.check(5)


def test_a_fork_in_the_middle_of_releasing_memory_leaves_no_lock_behind(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    gpu.array([1.0])
    del gpu._context._drain_lock[0]  # another thread is at it

    def work() -> None:
        assert len(gpu._context.deferred_cleanups) == 1
        held = gpu.empty(1)
        assert not gpu._context.deferred_cleanups
        held.close()

    run_in_fork(work)
    gpu._context._drain_lock[0] = True


def test_a_device_that_cannot_fork_is_lost_in_the_child(open_faulty: Callable[..., FaultyGpu]) -> None:
    faulty = open_faulty("emulator")
    faulty.device._part.survives_fork = False
    made = saxpy_case(faulty.gpu)
    made.launch(4)

    def work() -> None:
        with faulty.count_calls() as calls:
            for operation in (made.launch, lambda: faulty.gpu.empty(3), faulty.gpu.synchronize):
                with pytest.raises(
                    ContextLostError, match="forked from one that was using the GPU"
                ) as caught:
                    operation()
                assert "'spawn' or 'forkserver'" in str(caught.value.hint)
            with pytest.raises(StaleBufferError, match="forked"):
                made.x.numpy()
            made.x.close()
        assert calls == {}  # The device of the parent gets no calls.

    run_in_fork(work)
    made.launch()
    made.check(5)


AT_EXIT = """
import sys
from pathlib import Path
import numpy as np
import preheat
gpu = preheat.device(sys.argv[1])
kernel = gpu.kernel(Path(sys.argv[2]).read_text(), "saxpy")
x, y = gpu.array(np.ones(100, np.float32)), gpu.array(np.ones(100, np.float32))
stream, event, step = gpu.stream(), gpu.record(), gpu.scalar("int32", 4)
bound = kernel.bind(2.0, x, y, 100, grid=1, block=128)
for _ in range(4):
    kernel[1, 128](2.0, x, y, 100)
    kernel.launch(2.0, x, y, 100, grid=1, block=128, stream=stream)
    bound()
pool = gpu.pool(4096)
piece = pool.empty(4).fill(1)
with gpu.capture() as graph:
    piece.fill(2)
graph.replay()
symbols = gpu.module("__device__ int v; __global__ void k() { v++; }").symbol("v")
capsule = x.__dlpack__()
if sys.argv[1].startswith("emulator"):
    shared = np.from_dlpack(y)

class Cycle:
    pass

cycle = Cycle()
cycle.itself, cycle.holds = cycle, (x[1:], kernel, stream)
{more}
"""

AGAIN = """
gpu.reset()
kernel = gpu.kernel(Path(sys.argv[2]).read_text(), "saxpy")
x, y = gpu.array(np.full(100, 3, np.float32)), gpu.array(np.full(100, 5, np.float32))
kernel[1, 128](2.0, x, y, 100)
assert y.numpy().tolist() == [11.0] * 100, y.numpy()
"""


# An object that a module of the standard library keeps is collected after the modules of preheat were
# emptied, which happens to those that something still refers to.
KEPT = """
import builtins, json, os
from preheat.process.files import open_fd
held = open_fd(os.devnull, os.O_RDONLY)
everything = (x, y, kernel, stream, event, step, bound, symbols, pool, piece, graph, held, gpu)
json.kept, builtins.json = (everything, dict(sys.modules)), json
del x, y, kernel, stream, event, step, bound, symbols, pool, piece, graph, held, gpu, everything
"""


@pytest.mark.parametrize(
    "more",
    ["", "del x, y, kernel, stream, event", "sys.exit(0)", "gpu.close()", "gpu.reset()", AGAIN, KEPT],
    ids=["live", "dropped", "exit", "closed", "reset", "again", "kept"],
)  # fmt: skip
def test_the_end_of_the_interpreter_is_silent(more: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "saxpy.txt"
    file.write_text(SAXPY)
    env = {"PREHEAT_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "error::ResourceWarning"}
    child = start_python(AT_EXIT.replace("{more}", more), kind, str(file), env=env)
    out, err = wait_for_exit(child)
    assert (child.returncode, out, err) == (0, "", "")


UNCAUGHT = """
import preheat
gpu = preheat.device("emulator")
kernel = gpu.kernel('extern "C" __global__ void over(int* x) { x[9] = 1; }', "over")
kernel[1, 1](gpu.zeros(3, "int32"))
"""


def test_an_uncaught_fault_ends_the_program_with_its_own_message_only(tmp_path: Path) -> None:
    child = start_python(UNCAUGHT, env={"PREHEAT_CACHE_DIR": str(tmp_path / "cache")})
    out, err = wait_for_exit(child)
    assert (child.returncode, out) == (1, "")
    *_, fault, source, instruction = err.splitlines()
    assert fault.startswith("preheat.errors.EmulatorFault: over, program.cu:1, PTX line")
    assert source == '    extern "C" __global__ void over(int* x) { x[9] = 1; }'
    assert instruction.startswith("    st.global")
    assert err.count("Traceback") == 1


SECOND = """
import json
import sys
from pathlib import Path
import numpy as np
import preheat
gpu = preheat.device("emulator")
kernel = gpu.kernel(Path(sys.argv[1]).read_text(), "saxpy")
x, y = gpu.array(np.arange(3, dtype=np.float32)), gpu.zeros(3)
kernel[1, 4](2.0, x, y, 3)
maps = Path("/proc/self/maps").read_text()
print(json.dumps({"y": y.numpy().tolist(), "nvrtc": "libnvrtc" in maps, "cuda": "libcuda" in maps}))
"""


def test_a_second_process_runs_a_kernel_without_loading_compiler_or_driver(tmp_path: Path) -> None:
    file = tmp_path / "saxpy.txt"
    file.write_text(SAXPY)
    env = {"PREHEAT_CACHE_DIR": str(tmp_path / "cache"), "PREHEAT_DEVICE": "emulator"}
    expected = '{"y": [0.0, 2.0, 4.0], "nvrtc": false, "cuda": false}\n'
    for _ in range(2):
        assert expect_success(start_python(SECOND, str(file), env=env)) == expected


def test_a_builder_of_ones_own_is_left_open_by_the_device(
    open_builder: Callable[..., Builder], open_device: Callable[..., Gpu]
) -> None:
    builder = open_builder()
    with open_device("emulator", builder=builder) as gpu:
        gpu.kernel(SAXPY, "saxpy")
    again = saxpy_case(open_device("emulator", builder=builder))
    again.launch()
    again.check(1)
    assert np.isfinite(again.y.numpy()).all()


HELD = """
import os, signal, threading, time
import preheat
from preheat import gpu as module

gpu = preheat.device("emulator")
device, held, done = gpu._device, threading.Event(), threading.Event()

def hold():
    with device.lock, module._opening, gpu._context.resolve_lock:
        held.set()
        done.wait()

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(240)  # less than the patience of the test
    x = gpu.zeros(4)
    preheat.device("emulator:1").zeros(1)
    gpu.kernel('extern "C" __global__ void k(float* x) { *x = 3; }', "k")[1, 1](x)
    os._exit(0 if x.numpy()[0] == 3 else 1)
done.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_does_not_wait_for_locks_of_its_parent() -> None:
    assert expect_success(start_python(HELD)).split() == ["0"]
