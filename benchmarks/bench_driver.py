"""What calls of the CPU driver cost: its start, small calls, launches and copies.

The calls are measured in a process of their own, which has the CPU driver in the place of a GPU's.
A launch is measured alone, as it returns, and with the wait for its kernel. The times are CPU times of
that process, in which the driver does all of its work.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common import median_us, options, report, us
from preheat.driver.library import driver_environment

SOURCE = b"""
extern "C" __global__ void nothing() {}
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
SIZES = (1_000, 100_000, 1_000_000, 10_000_000)
COPIED = 10_000_000  # floats


def ok(result: Any) -> Any:
    """Return what a call returned, without its status."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


def compiled() -> bytes:
    """Return the kernels as a cubin."""
    from cuda.bindings import nvrtc

    program = ok(nvrtc.nvrtcCreateProgram(SOURCE, b"s.cu", 0, [], []))
    ok(nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_90"]))
    cubin: bytes = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def measure() -> dict[str, float]:
    """Return the microseconds of each call, in a process with the CPU driver."""
    from cuda.bindings import driver as cu

    found: dict[str, float] = {}
    started = time.process_time()
    ok(cu.cuInit(0))
    found["start of the driver"] = 1e6 * (time.process_time() - started)
    started = time.process_time()
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    found["the first context"] = 1e6 * (time.process_time() - started)
    library, out = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()

    def timed(name: str, act: Callable[[], object], number: int) -> None:
        found[name] = median_us(act, number=number, clock=time.process_time)

    timed("cuCtxGetCurrent, in C", lambda: library.cuCtxGetCurrent(ctypes.byref(out)), 5000)
    timed("cuCtxGetId, in Python", lambda: library.cuCtxGetId(None, ctypes.byref(out)), 2000)
    cubin = compiled()
    timed(
        "load and unload of a module", lambda: ok(cu.cuModuleUnload(ok(cu.cuModuleLoadData(cubin)))), 20
    )
    module = ok(cu.cuModuleLoadData(cubin))
    nothing, saxpy = (ok(cu.cuModuleGetFunction(module, name)) for name in (b"nothing", b"saxpy"))

    def launch(function: Any, grid: int, block: int, given: Any) -> None:
        ok(cu.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, 0, given, 0))

    timed("launch of an empty kernel", lambda: launch(nothing, 1, 32, 0), 500)
    ok(cu.cuCtxSynchronize())
    kinds = (ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    for size in SIZES:
        x, y = (int(ok(cu.cuMemAlloc(4 * size))) for _ in range(2))
        for address in (x, y):
            ok(cu.cuMemsetD8(address, 0, 4 * size))

        def run(x: int = x, y: int = y, size: int = size) -> None:
            launch(saxpy, (size + 255) // 256, 256, ((2.0, x, y, size), kinds))
            ok(cu.cuCtxSynchronize())

        timed(f"saxpy of {size:,} floats, with the wait", run, max(2, min(50, 10_000_000 // size)))
    host = np.zeros(COPIED, np.float32)
    copied = 4 * COPIED
    timed("copy of 40 MB to the device", lambda: ok(cu.cuMemcpyHtoD(x, host.ctypes.data, copied)), 3)
    return found


def main() -> None:
    """Measure in another process, and write the table."""
    parser = options(__doc__)
    parser.add_argument("--child", action="store_true", help="measure in this process")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure()))
        return
    done = subprocess.run(
        [sys.executable, __file__, "--child"],
        env=driver_environment(os.environ, beside_gpu=1),
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [(name, us(value)) for name, value in json.loads(done.stdout).items()]
    report("bench_driver", "Calls of the CPU driver", ("", "CPU time"), rows, into=args.json)


if __name__ == "__main__":
    main()
