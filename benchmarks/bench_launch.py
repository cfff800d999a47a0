"""Measure the host cost of one launch of saxpy(float, const float*, float*, int) on 1000 elements.

All contenders take turns for several rounds in one process, in an order that is drawn anew for every
round, each launching a batch before it waits for the device; the wait does not count. Native C is a
loop in a shared library, which launches the kernel of the cuda.bindings contender with its arguments in
its stream: in a process of its own it would run on another core with other command buffers. The
statement shown is the one that was timed, no function around it. Every contender's result is checked
first. Not like for like: torch's is an operator that picks its kernel, Triton's kernel is its own; both
are marked with *.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import preheat
from common import options, report, spread

SOURCE = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
TRITON = """
import triton
import triton.language as tl

@triton.jit
def saxpy(a, x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(y + i, a * tl.load(x + i, mask) + tl.load(y + i, mask), mask)
"""
N, A = 1000, 2.0
BYTES = 4 * N
NATIVE = "native C, cuLaunchKernel"
PREPACKED = "cuda.bindings, prepacked"


@dataclass
class Contender:
    """One way to launch: a statement, the names in it, and its operands."""

    title: str
    statement: str
    names: dict[str, Any]
    x: int
    y: int
    loop: Callable[[int], float] | None = None  # Native C: the microseconds of one of many launches.
    launches: list[float] = field(default_factory=list)  # Microseconds, one entry per round.
    # The delay of the device after the host, per launch.
    waits: list[float] = field(default_factory=list)


class Driver:
    """The driver calls of the benchmark itself, in the context that all contenders share."""

    def __init__(self) -> None:
        self.api = importlib.import_module("cuda.bindings.driver")
        self.check(self.api.cuInit(0))
        self.context = self.check(
            self.api.cuDevicePrimaryCtxRetain(self.check(self.api.cuDeviceGet(0)))
        )
        self.check(self.api.cuCtxSetCurrent(self.context))

    def check(self, result: tuple[Any, ...]) -> Any:
        """Return the results of a call without its status."""
        if result[0] != 0:
            raise RuntimeError(f"the driver says {result[0]!r}")
        return result[1] if len(result) == 2 else None

    def wait(self) -> None:
        self.check(self.api.cuCtxSynchronize())

    def allocate(self) -> int:
        return int(self.check(self.api.cuMemAlloc(BYTES)))

    def write(self, address: int, values: Any) -> None:
        self.check(self.api.cuMemcpyHtoD(address, values.ctypes.data, BYTES))
        self.wait()

    def read(self, address: int) -> Any:
        values = np.empty(N, np.float32)
        self.wait()
        self.check(self.api.cuMemcpyDtoH(values.ctypes.data, address, BYTES))
        return values


def names(**given: Any) -> dict[str, Any]:
    """Return the values of the names in a statement."""
    return given


# The contenders. Each imports what it needs, so that a missing library does not affect the others.


def with_bindings(driver: Driver, cubin: bytes, loops: ctypes.CDLL | None) -> Iterator[Contender]:
    """Return the driver's own call, from C or with arguments packed once or at every launch."""
    cu, check = driver.api, driver.check
    function = check(cu.cuModuleGetFunction(check(cu.cuModuleLoadData(cubin)), b"saxpy"))
    stream = check(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
    x, y = driver.allocate(), driver.allocate()
    layout = struct.Struct("<f4xQQi")
    block = ctypes.create_string_buffer(layout.size)
    layout.pack_into(block, 0, A, x, y, N)
    offsets = (ctypes.addressof(block) + offset for offset in (0, 8, 16, 24))
    pointers = (ctypes.c_void_p * 4)(*offsets)
    given = names(launch=cu.cuLaunchKernel, f=function, stream=stream, p=ctypes.addressof(pointers))
    given |= names(pack=layout.pack_into, block=block, x=x, y=y, n=N, keep=pointers)
    call = "launch(f, 4, 1, 1, 256, 1, 1, 0, stream, p, 0)"
    if loops is not None:
        launch = loops.launches
        launch.restype = ctypes.c_double
        launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        loop = partial(launch, int(function), int(stream), ctypes.addressof(pointers))
        yield Contender(NATIVE, "cuLaunchKernel(…)", given, x, y, loop=loop)
    yield Contender(PREPACKED, call, given, x, y)
    packed = f"pack(block, 0, 2.0, x, y, n); {call}"
    yield Contender("cuda.bindings, Struct.pack_into", packed, given, x, y)


def with_preheat(gpu: preheat.Gpu) -> Iterator[Contender]:
    kernel = gpu.kernel(SOURCE, "saxpy")
    x, y = gpu.empty(N), gpu.empty(N)
    bound = kernel.bind(A, x, y, N, grid=4, block=256)
    given = names(kernel=kernel, run=kernel[4, 256], bound=bound, x=x, y=y, n=N)
    for title, statement in (
        ("preheat, kernel[grid, block](…)", "kernel[4, 256](2.0, x, y, n)"),
        ("preheat, kernel[…] hoisted", "run(2.0, x, y, n)"),
        ("preheat, kernel.launch(…)", "kernel.launch(2.0, x, y, n, grid=4, block=256)"),
        ("preheat, kernel.bind(…)()", "bound()"),
    ):
        yield Contender(title, statement, given, x.address, y.address)


def with_preheat_and_torch(gpu: preheat.Gpu) -> Iterator[Contender]:
    torch = importlib.import_module("torch")
    x, y = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
    given = names(kernel=gpu.kernel(SOURCE, "saxpy"), x=x, y=y, n=N)
    statement = "kernel[4, 256](2.0, x, y, n)"
    yield Contender("preheat, torch tensors", statement, given, x.data_ptr(), y.data_ptr())


def with_preheat_and_cupy(gpu: preheat.Gpu) -> Iterator[Contender]:
    cupy = importlib.import_module("cupy")
    x, y = cupy.empty(N, "f4"), cupy.empty(N, "f4")
    given = names(kernel=gpu.kernel(SOURCE, "saxpy"), x=x, y=y, n=N)
    statement = "kernel[4, 256](2.0, x, y, n)"
    yield Contender("preheat, CuPy arrays", statement, given, x.data.ptr, y.data.ptr)


def with_core(cubin: bytes) -> Iterator[Contender]:
    core = importlib.import_module("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    x, y = (device.memory_resource.allocate(BYTES, stream=stream) for _ in "xy")
    stream.sync()
    px, py = int(x.handle), int(y.handle)
    kernel = core.ObjectCode.from_cubin(cubin).get_kernel("saxpy")
    config = core.LaunchConfig(grid=4, block=256)
    given = names(launch=core.launch, stream=stream, config=config, k=kernel)
    given |= names(a32=np.float32(A), n32=np.int32(N), np=np, n=N, x=x, y=y, px=px, py=py)
    for title, args in (
        ("cuda.core, scalars made before, addresses", "a32, px, py, n32"),
        ("cuda.core, scalars made before, Buffers", "a32, x, y, n32"),
        ("cuda.core, scalars made at each call", "np.float32(2.0), x, y, np.int32(n)"),
    ):
        yield Contender(title, f"launch(stream, config, k, {args})", given, px, py)


def with_cupy() -> Iterator[Contender]:
    cupy = importlib.import_module("cupy")
    x, y = cupy.empty(N, "f4"), cupy.empty(N, "f4")
    kernel = cupy.RawKernel(SOURCE, "saxpy")
    given = names(k=kernel, a32=np.float32(A), x=x, y=y, n32=np.int32(N))
    statement = "k((4,), (256,), (a32, x, y, n32))"
    yield Contender("CuPy RawKernel", statement, given, x.data.ptr, y.data.ptr)


def with_torch() -> Iterator[Contender]:
    torch = importlib.import_module("torch")
    x, y = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
    given = names(add=torch.add, x=x, y=y)
    statement = "add(y, x, alpha=2.0, out=y)"
    yield Contender("torch.add *", statement, given, x.data_ptr(), y.data_ptr())


def with_triton(place: Path) -> Iterator[Contender]:
    torch = importlib.import_module("torch")
    importlib.import_module("triton")
    (place / "triton_saxpy.py").write_text(TRITON)  # Triton reads a kernel's source from its file.
    sys.path.insert(0, str(place))
    kernel = importlib.import_module("triton_saxpy").saxpy
    x, y = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
    given = names(kernel=kernel, x=x, y=y, n=N)
    statement = "kernel[4,](2.0, x, y, n, BLOCK=256)"
    yield Contender("Triton *", statement, given, x.data_ptr(), y.data_ptr())


def gathered(driver: Driver, gpu: preheat.Gpu, place: Path) -> list[Contender]:
    """Return every contender that works on this machine, and why the others do not."""
    cubin = preheat.compile(SOURCE, gpu.arch).cubin
    makers: list[tuple[str, Callable[[], Iterator[Contender]]]] = [
        ("cuda.bindings", lambda: with_bindings(driver, cubin, native_loops(place))),
        ("preheat", lambda: with_preheat(gpu)),
        ("preheat, torch tensors", lambda: with_preheat_and_torch(gpu)),
        ("preheat, CuPy arrays", lambda: with_preheat_and_cupy(gpu)),
        ("cuda.core", lambda: with_core(cubin)),
        ("CuPy", with_cupy),
        ("torch", with_torch),
        ("Triton", lambda: with_triton(place)),
    ]
    found = []
    for title, make in makers:
        try:
            made = list(make())
            for contender in made:
                prove(driver, contender)
            found += made
        except Exception as why:  # A library may be missing or broken in any way. The others continue.
            print(f"{title}: left out: {type(why).__name__}: {why}", flush=True)
    return found


def prove(driver: Driver, contender: Contender) -> None:
    """Run the statement three times, because repeated launches take another path, and check each."""
    rng = np.random.default_rng(1)
    native = contender.loop is not None
    code = compile("" if native else contender.statement, contender.title, "exec")
    for _ in range(3):
        x, y = (rng.standard_normal(N, dtype=np.float32) for _ in "xy")
        driver.write(contender.x, x)
        driver.write(contender.y, y)
        if contender.loop is not None:
            contender.loop(1)
        else:
            exec(code, contender.names)
        expected = A * x.astype(np.float64) + y
        if not np.allclose(driver.read(contender.y), expected, rtol=1e-6, atol=1e-6):
            raise RuntimeError("a wrong result")


def native_loops(place: Path) -> ctypes.CDLL | None:
    """Compile the loops in C. Return None if there is no compiler."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    source, library = Path(__file__).with_name("native") / "burst.c", place / "burst.so"
    if nvcc is None:
        print(f"{NATIVE}: left out: there is no nvcc", flush=True)
        return None
    command = [nvcc, "-O2", "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(source), "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        print(f"{NATIVE}: left out: {made.stderr.strip() or made.stdout.strip()}", flush=True)
        return None
    return ctypes.CDLL(str(library))


def run_round(driver: Driver, contender: Contender, batch: int) -> None:
    if contender.loop is not None:
        contender.launches.append(contender.loop(batch))
    else:
        timer = timeit.Timer(contender.statement, globals=contender.names)
        contender.launches.append(timer.timeit(batch) / batch * 1e6)
    contender.waits.append(timeit.timeit(driver.wait, number=1) / batch * 1e6)


def compete(driver: Driver, gpu: preheat.Gpu, place: Path, rounds: int, batch: int) -> list[Contender]:
    contenders = gathered(driver, gpu, place)
    for contender in contenders:
        run_round(driver, contender, batch)
        contender.launches.clear()
        contender.waits.clear()
    for _ in range(rounds):
        for contender in random.sample(contenders, len(contenders)):
            run_round(driver, contender, batch)
    return contenders


def table(contenders: list[Contender]) -> list[tuple[str, ...]]:
    middle = {each.title: statistics.median(each.launches) for each in contenders}

    def against(title: str, other: str) -> str:
        return f"{middle[title] / middle[other]:.2f} x" if other in middle else "-"

    return [
        (
            each.title,
            f"{middle[each.title]:.2f} µs",
            spread(each.launches),
            f"{statistics.median(each.waits):.2f} µs",
            against(each.title, NATIVE),
            against(each.title, PREPACKED),
            each.statement,
        )
        for each in contenders
    ]


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    parser.add_argument("--batch", type=int, default=3000, help="launches in each turn")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as name:
        place = Path(name)
        for variable in ("PREHEAT_CACHE_DIR", "PREHEAT_LOCK_DIR", "CUPY_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[variable] = str(place / variable)
        try:
            gpu = preheat.device("cuda")
        except preheat.NoGpuError as why:
            sys.exit(str(why))
        contenders = compete(Driver(), gpu, place, args.rounds, args.batch)
    head = ("", "a launch", "spread", "behind", "of native C", "of prepacked", "statement")
    title = f"Host cost of one launch ({args.rounds} rounds of {args.batch:,})"
    report("bench_launch", title, head, table(contenders), into=args.json)
    print("behind: how long the device was still busy after a batch, per launch; near zero: it kept up")
    print("*: not like for like")


if __name__ == "__main__":
    main()
