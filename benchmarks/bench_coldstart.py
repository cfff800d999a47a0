"""Measure a new process that launches 50 kernels, all of which are in its cache.

Contenders take turns, one fresh Python each. Before that each ran twice, to fill its cache and to find
everything there, and the sum of all 50 kernels was checked. Import + context is the time from the
script's first line until arrays are on the device; a kernel is what follows, up to the end of the last
launch, divided by 50; "to last launch" counts from the start of the interpreter, and the process ends
when Python has ended. Times are medians, spreads the interquartile range as a share of the median.

"raw" reads cubin files and knows the names of the kernels: what is left is the driver's share.
"preheat, sealed" has an empty cache, a bundle and a seal. "preheat, nothing cached" compiles, which is
what the others need not do.
A second table has the parts of preheat's own process, from processes of their own. "Load by the driver"
is loading the cubin and resolving the kernel in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import preheat
from common import options, report, spread, us
from preheat.ahead.manifest import ManifestProgram

COUNT, N = 50, 1000
SOURCE = """
extern "C" __global__ void k_NUMBER(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i] + NUMBER;
}
"""
TRITON_HEAD = """
import triton
import triton.language as tl
"""
TRITON_KERNEL = """
@triton.jit
def k_NUMBER(a, x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(y + i, a * tl.load(x + i, mask) + tl.load(y + i, mask) + NUMBER, mask)
"""

HEAD = """
import sys, time
first = time.monotonic()
def source(i):
    return SOURCE.replace("NUMBER", str(i))
"""
TAIL = """
print(first, ready, time.monotonic(), flush=True)
if sys.argv[1:]:
    right = 0.25 + COUNT * 3 + sum(range(COUNT))
    wrong = [value for value in values() if value != right]
    if wrong:
        sys.exit(f"{len(wrong)} values are wrong, the first is {wrong[0]}, not {right}")
"""
RAW = """
import ctypes
from cuda.bindings import driver as cu
def check(result):
    if result[0]:
        sys.exit(f"the driver says {result[0]!r}")
    return result[1] if len(result) == 2 else None
check(cu.cuInit(0))
check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(0))))))
stream = check(cu.cuStreamCreate(1))
x, y = check(cu.cuMemAlloc(4 * N)), check(cu.cuMemAlloc(4 * N))
check(cu.cuMemsetD32Async(x, 0x3FC00000, N, stream))
check(cu.cuMemsetD32Async(y, 0x3E800000, N, stream))
cells = ctypes.c_float(2.0), ctypes.c_uint64(int(x)), ctypes.c_uint64(int(y)), ctypes.c_int(N)
pointers = (ctypes.c_void_p * 4)(*map(ctypes.addressof, cells))
args = ctypes.addressof(pointers)
ready = time.monotonic()
for i in range(COUNT):
    with open(f"{CACHE}/{i}.cubin", "rb") as file:
        module = check(cu.cuModuleLoadData(file.read()))
    function = check(cu.cuModuleGetFunction(module, b"k_%d" % i))
    check(cu.cuLaunchKernel(function, 4, 1, 1, 256, 1, 1, 0, stream, args, 0))
check(cu.cuStreamSynchronize(stream))
def values():
    host = (ctypes.c_float * N)()
    check(cu.cuMemcpyDtoH(ctypes.addressof(host), y, 4 * N))
    return host
"""
PREHEAT = """
import preheat
gpu = preheat.device("cuda")
x, y = gpu.empty(N).fill(1.5), gpu.empty(N).fill(0.25)
ready = time.monotonic()
for i in range(COUNT):
    gpu.kernel(source(i), f"k_{i}")[4, 256](2.0, x, y, N)
gpu.synchronize()
def values():
    return y.numpy()
"""
PARTS = """
from time import monotonic
import preheat.gpu
imported = monotonic()
gpu = preheat.device("cuda")
opened = monotonic()
from preheat.devices.cuda.module import CudaModule
spent = {"lookup": 0.0, "load": 0.0, "function": 0.0}
def timed(function):
    def call(*args, **named):
        started = monotonic()
        try:
            return function(*args, **named)
        finally:
            spent[function.__name__] += monotonic() - started
    return call
gpu.builder.lookup = timed(gpu.builder.lookup)
gpu._device.load = timed(gpu._device.load)
CudaModule.function = timed(CudaModule.function)
patched = monotonic()
x, y = gpu.empty(N).fill(1.5), gpu.empty(N).fill(0.25)
ready = monotonic()
found = launched = 0.0
for i in range(COUNT):
    started = monotonic()
    kernel = gpu.kernel(source(i), f"k_{i}")
    after = monotonic()
    kernel[4, 256](2.0, x, y, N)
    found += after - started
    launched += monotonic() - after
gpu.synchronize()
ended = monotonic()
lookup = spent["lookup"]
load = spent["load"] + spent["function"]
kernel = (lookup / COUNT, load / COUNT, (found - lookup - load) / COUNT, launched / COUNT)
print(imported - first, opened - imported, ready - patched, *kernel, ended)
"""
CORE = """
import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
from cuda.core.utils import FileStreamProgramCache
device = Device()
device.set_current()
stream = device.create_stream()
x, y = (device.memory_resource.allocate(4 * N, stream=stream) for _ in "xy")
x.fill(np.float32(1.5).tobytes(), stream=stream)
y.fill(np.float32(0.25).tobytes(), stream=stream)
options = ProgramOptions(arch=f"sm_{device.arch}")
cache = FileStreamProgramCache(CACHE)
config, a, n = LaunchConfig(grid=4, block=256), np.float32(2.0), np.int32(N)
ready = time.monotonic()
for i in range(COUNT):
    code = Program(source(i), "c++", options).compile("cubin", cache=cache)
    launch(stream, config, code.get_kernel(f"k_{i}"), a, x, y, n)
stream.sync()
def values():
    from cuda.bindings import driver
    host = np.empty(N, np.float32)
    driver.cuMemcpyDtoH(host.ctypes.data, int(y.handle), 4 * N)
    return host
"""
CUPY = """
import cupy
import numpy as np
x, y = cupy.empty(N, "f4"), cupy.empty(N, "f4")
x.set(np.full(N, 1.5, "f4"))
y.set(np.full(N, 0.25, "f4"))
a, n = np.float32(2.0), np.int32(N)
ready = time.monotonic()
for i in range(COUNT):
    cupy.RawKernel(source(i), f"k_{i}")((4,), (256,), (a, x, y, n))
cupy.cuda.Device().synchronize()
def values():
    return y.get()
"""
TRITON = """
import torch
sys.path.insert(0, CACHE)
import triton_kernels
x, y = torch.full((N,), 1.5).cuda(), torch.full((N,), 0.25).cuda()
ready = time.monotonic()
for i in range(COUNT):
    getattr(triton_kernels, f"k_{i}")[4,](2.0, x, y, N, BLOCK=256)
torch.cuda.synchronize()
def values():
    return y.tolist()
"""


class Run(NamedTuple):
    """Seconds of one process: from start to end, to its last launch, and the two parts."""

    process: float
    last: float
    ready: float
    kernels: float


@dataclass
class Contender:
    """A script, how often it runs, and its results. The cache of a `cold` one is empty."""

    title: str
    script: str
    rounds: int
    cold: bool = False
    sealed: bool = False
    runs: list[Run] = field(default_factory=list)


class Stage:
    """Where the contenders run: a directory with a cache for each."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def cache(self, contender: Contender) -> Path:
        return self.place / contender.title.replace(" ", "-")

    def environment(self, cache: Path) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        own = ("PREHEAT_CACHE_DIR", "PREHEAT_LOCK_DIR", "CUPY_CACHE_DIR", "TRITON_CACHE_DIR")
        return {**env, **{name: str(cache / name.lower()) for name in own}}

    def bake(self, contender: Contender, arch: preheat.Arch) -> None:
        """Return the bundle of a sealed contender."""
        programs = (preheat.Program.of(SOURCE.replace("NUMBER", str(i))) for i in range(COUNT))
        manifest = preheat.Manifest(tuple(ManifestProgram(program) for program in programs))
        preheat.bake(manifest, [arch], output=self.cache(contender) / "kernels.heat")

    def run(self, contender: Contender, *args: str) -> Run:
        """Run one fresh process, or raise `CalledProcessError` with its output."""
        cache = self.cache(contender)
        env = self.environment(cache)
        if contender.cold:
            shutil.rmtree(cache)
            cache.mkdir()
        if contender.sealed:
            env |= {"PREHEAT_BUNDLE": str(cache / "kernels.heat"), "PREHEAT_SEALED": "1"}
        names = f"COUNT, N, SOURCE, CACHE = {COUNT}, {N}, {SOURCE!r}, {str(cache)!r}\n"
        script = names + HEAD + contender.script + TAIL
        command = [sys.executable, "-c", script, *args]
        started = time.monotonic()
        output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        ended = time.monotonic()
        first, ready, last = map(float, output.split()[-3:])
        return Run(ended - started, last - started, ready - first, last - ready)

    def parts(self, contender: Contender) -> list[float]:
        """Return the seconds of each part of one fresh process of preheat, and of its end."""
        cache = self.cache(contender)
        names = f"COUNT, N, SOURCE = {COUNT}, {N}, {SOURCE!r}\n"
        command = [sys.executable, "-c", names + HEAD + PARTS]
        env = self.environment(cache)
        output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        *seconds, last = map(float, output.split())
        return [*seconds, time.monotonic() - last]

    def prime(self, contender: Contender, arch: preheat.Arch) -> bool:
        """Fill the cache and check that it is used. Return False and print the reason otherwise."""
        cache = self.cache(contender)
        cache.mkdir()
        if contender.script == RAW:
            for i in range(COUNT):
                made = preheat.compile(SOURCE.replace("NUMBER", str(i)), arch)
                (cache / f"{i}.cubin").write_bytes(made.cubin)
        if contender.sealed:
            self.bake(contender, arch)
        if contender.script == TRITON:
            kernels = (TRITON_KERNEL.replace("NUMBER", str(i)) for i in range(COUNT))
            (cache / "triton_kernels.py").write_text(TRITON_HEAD + "".join(kernels))
        try:
            self.run(contender, "check")
            self.run(contender, "check")
        except subprocess.CalledProcessError as failed:
            why = (failed.stderr.strip() or str(failed)).splitlines()[-1]
            print(f"{contender.title}: left out: {why}", flush=True)
            return False
        return True


def compete(stage: Stage, contenders: Sequence[Contender], arch: preheat.Arch) -> list[Contender]:
    able = [contender for contender in contenders if stage.prime(contender, arch)]
    for turn in range(max(contender.rounds for contender in contenders)):
        for contender in able:
            if turn < contender.rounds:
                contender.runs.append(stage.run(contender))
    return able


def table(contenders: Sequence[Contender]) -> list[tuple[str, ...]]:
    middle = {
        each.title: Run(*(statistics.median(part) for part in zip(*each.runs, strict=True)))
        for each in contenders
    }
    raw = middle.get("raw")
    rows: list[tuple[str, ...]] = []
    for each in contenders:
        mine = middle[each.title]
        per_kernel = [run.kernels / COUNT * 1e6 for run in each.runs]
        processes = [run.process for run in each.runs]
        rows.append(
            (
                each.title,
                f"{mine.process:.3f} s",
                spread(processes) if len(processes) > 1 else "-",
                f"{mine.process / raw.process:.2f} x" if raw else "-",
                f"{mine.last:.3f} s",
                f"{(mine.process - mine.last) * 1e3:.0f} ms",
                f"{mine.ready:.3f} s",
                f"{mine.kernels / COUNT * 1e6:.0f} µs",
                spread(per_kernel) if len(per_kernel) > 1 else "-",
                f"{mine.kernels / raw.kernels:.2f} x" if raw else "-",
                f"{mine.last / raw.last:.2f} x" if raw else "-",
                str(len(each.runs)),
            )
        )
    return rows


def part_rows(parts: Sequence[Sequence[float]]) -> list[tuple[str, ...]]:
    """Return a row for each part of a process, with its median over several processes."""
    names = (
        *("import", "device", "two arrays"),
        *("a kernel: lookup", "its load by the driver", "the rest of gpu.kernel", "its first launch"),
        "end of Python",
    )
    columns = zip(names, zip(*parts, strict=True), strict=True)
    return [(name, us(statistics.median(each) * 1e6), spread(each)) for name, each in columns]


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="processes of each contender")
    parser.add_argument("--triton-rounds", type=int, default=2, help="of Triton, which takes long")
    parser.add_argument("--no-triton", action="store_true", help="leave Triton out")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    scripts = {
        "raw": RAW,
        "preheat": PREHEAT,
        "cuda.core, compile(cache=)": CORE,
        "CuPy RawKernel": CUPY,
    }
    contenders = [Contender(title, script, args.rounds) for title, script in scripts.items()]
    contenders.append(Contender("preheat, sealed", PREHEAT, args.rounds, sealed=True))
    contenders.append(Contender("preheat, nothing cached", PREHEAT, 2, cold=True))
    if not args.no_triton:
        contenders.append(Contender("Triton", TRITON, args.triton_rounds))
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        os.environ |= {"PREHEAT_CACHE_DIR": f"{place}/cache", "PREHEAT_LOCK_DIR": f"{place}/locks"}
        try:
            gpu = preheat.device("cuda")  # Kept open: a driver without any user starts again.
        except preheat.NoGpuError as why:
            sys.exit(str(why))
        stage = Stage(Path(place))
        done = compete(stage, contenders, gpu.arch)
        ours = next((each for each in done if each.title == "preheat"), None)
        parts = [] if ours is None else [stage.parts(ours) for _ in range(args.rounds)]
        gpu.close()
    head = (
        *("", "process", "spread", "process, of raw", "to last launch", "end of Python"),
        "import + context",
        *("a kernel", "spread"),
        *("kernel, of raw", "last launch, of raw", "runs"),
    )
    title = f"A new process, {COUNT} cached kernels, first launch of each"
    report("bench_coldstart", title, head, table(done), into=args.json)
    if len(parts) > 1:
        title = "Parts of preheat's process"
        rows = part_rows(parts)
        report("bench_coldstart", title, ("part", "median", "spread"), rows, into=args.json)


if __name__ == "__main__":
    main()
