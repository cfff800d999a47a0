"""Programs with two devices on the CPU driver: copies and waits between them, and a cache for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY, driver_environment
from tests.processes import TIMEOUT_SECONDS, import_path

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

ROOT = Path(__file__).parents[2]
PEERS = """
import numpy as np
from cuda.bindings import driver as cu
from tests.driver.calls.cuda import Program, ok, status

one = Program()
contexts = [one.context, ok(cu.cuDevicePrimaryCtxRetain(1))]
source = one.memory(range(8))
ok(cu.cuCtxSynchronize())
stream, event = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0))
ok(one.launch("add", source, 8, 5, stream=stream))
ok(cu.cuEventRecord(event, stream))
ok(cu.cuCtxSetCurrent(contexts[1]))
target, other = ok(cu.cuMemAlloc(32)), ok(cu.cuStreamCreate(1))
ok(cu.cuStreamWaitEvent(other, event, 0))
ok(cu.cuMemcpyPeerAsync(target, contexts[1], source, contexts[0], 32, other))
ok(cu.cuStreamSynchronize(other))
found = np.zeros(8, np.int32)
ok(cu.cuMemcpyDtoH(found.ctypes.data, target, 32))
print(*found.tolist())
print(*(ok(cu.cuDeviceCanAccessPeer(i, 1 - i)) for i in range(2)))
print(status(cu.cuDeviceGet(2)), status(cu.cuCtxEnablePeerAccess(contexts[0], 0)))
"""
CACHES = """
import numpy as np
import preheat

SOURCE = 'extern "C" __global__ void add(int* x, int by) { x[threadIdx.x] += by; }'
gpus = [preheat.device(f"cuda:{number}") for number in range(2)]
kernels = [gpu.kernel(SOURCE, "add") for gpu in gpus]
arrays = [gpu.array(np.arange(4, dtype="int32")) for gpu in gpus]
for by, kernel, x in zip((10, 20), kernels, arrays):
    kernel[1, 4](x, by)
print(*(x.numpy().tolist() for x in arrays))
print(kernels[0] is kernels[1], gpus[0].kernel(SOURCE, "add") is kernels[0])
print(int(preheat.default_builder().stats()["process"]["compiles"]))
gpus[0].close()
kernels[1][1, 4](arrays[1], 1)
print(arrays[1].numpy().tolist())
"""


def run(code: str, place: Path, **settings: str | int) -> list[str]:
    """Run a program with two devices, and return the lines that it prints."""
    env = {**os.environ, "PYTHONPATH": import_path(), "PREHEAT_CACHE_DIR": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=driver_environment(env, beside_gpu=1, devices=2, **settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("schedule", ["off", "0", "1", "2", "3"])
def test_a_copy_between_devices_waits_for_an_event_of_the_other_one(
    schedule: str, tmp_path: Path
) -> None:
    assert run(PEERS, tmp_path, schedule=schedule) == ["5 6 7 8 9 10 11 12", "1 1", "101 0"]


def test_each_device_has_its_own_modules_and_the_compile_is_shared(tmp_path: Path) -> None:
    assert run(CACHES, tmp_path) == [
        "[10, 11, 12, 13] [20, 21, 22, 23]",
        "False True",
        "1",
        "[21, 22, 23, 24]",
    ]
