"""Measure 50 kernels that no cache has, one after another and together, in 1 and in 16 processes.

Contenders take turns, each time with an empty cache. The processes of a contender start their clocks
together, when all have imported their libraries and opened the device. The time is that of the last one
to have all of its kernels, loaded. `compiles` is the sum over the processes; what a process finds in
the cache of its library does not count. The compiler's own cache is bypassed. Without a GPU, preheat
uses the emulator, which takes longer to load a kernel, and cuda.core only compiles.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import preheat
from common import options, report, spread

SOURCE = """
extern "C" __global__ void k_NUMBER(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i] + NUMBER;
}
"""
HEAD = """
import os, sys, time
def source(i):
    return SOURCE.replace("NUMBER", str(i))
def start():
    print("ready", flush=True)
    sys.stdin.readline()
    return time.monotonic()
"""
TAIL = """
print(started, time.monotonic(), compiles(), flush=True)
"""
PREHEAT = """
import preheat
gpu = preheat.device("cuda" if GPU else "emulator")
started = start()
ASK
def compiles():
    return int(gpu.builder.stats()["process"].get("compiles", 0))
"""
ONE_AFTER_ANOTHER = PREHEAT.replace(
    "ASK", 'kernels = [gpu.kernel(source(i), f"k_{i}") for i in range(COUNT)]'
)
TOGETHER = PREHEAT.replace(
    "ASK", 'kernels = gpu.kernels([(source(i), f"k_{i}") for i in range(COUNT)])'
)
CORE = """
from cuda.core import Device, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache
class Cache(FileStreamProgramCache):
    stored = 0
    def __setitem__(self, key, value):
        Cache.stored += 1
        super().__setitem__(key, value)
if GPU:
    Device().set_current()
options = ProgramOptions(arch=ARCH)
cache = Cache(os.environ["CORE_CACHE_DIR"])
started = start()
for i in range(COUNT):
    code = Program(source(i), "c++", options).compile("cubin", cache=cache)
    if GPU:
        code.get_kernel(f"k_{i}")
def compiles():
    return Cache.stored
"""
CUPY = """
import cupy
from cupy.cuda import compiler
count = 0
compile_using_nvrtc = compiler.compile_using_nvrtc
def counting(*args, **more):
    global count
    count += 1
    return compile_using_nvrtc(*args, **more)
compiler.compile_using_nvrtc = counting
cupy.zeros(1)
count = 0
started = start()
kernels = [cupy.RawModule(code=source(i)).get_function(f"k_{i}") for i in range(COUNT)]
def compiles():
    return count
"""
SCRIPTS = {
    "preheat, gpu.kernels": TOGETHER,
    "preheat, one after another": ONE_AFTER_ANOTHER,
    "cuda.core, compile(cache=)": CORE,
    "CuPy RawModule": CUPY,
}


class Run(NamedTuple):
    """The seconds until the last process had everything, and the compiles of all processes."""

    seconds: float
    compiles: int


@dataclass
class Contender:
    """A script, the number of processes that run it at the same time, and the results."""

    title: str
    script: str
    processes: int
    runs: list[Run] = field(default_factory=list)


class Stage:
    """Where the contenders run, each time with an empty cache."""

    def __init__(self, place: Path, kernels: int, gpu: preheat.Gpu) -> None:
        self._cache = place / "caches"
        arch, found = str(gpu.arch), gpu.name.startswith("cuda")
        self._names = f"COUNT, SOURCE, ARCH, GPU = {kernels}, {SOURCE!r}, {arch!r}, {found}\n"

    def run(self, contender: Contender) -> Run:
        """Run all processes, or raise `RuntimeError` with the last line of an error."""
        shutil.rmtree(self._cache, ignore_errors=True)
        self._cache.mkdir()
        own = ("PREHEAT_CACHE_DIR", "PREHEAT_LOCK_DIR", "CORE_CACHE_DIR", "CUPY_CACHE_DIR")
        env = {**os.environ, **{name: str(self._cache / name.lower()) for name in own}}
        env["CUDA_CACHE_DISABLE"] = "1"
        command = [sys.executable, "-c", self._names + HEAD + contender.script + TAIL]
        running = [
            subprocess.Popen(
                command, env=env, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for _ in range(contender.processes)
        ]  # fmt: skip
        try:
            for process in running:
                _, stdout = _pipes(process)
                if stdout.readline() != "ready\n":
                    raise RuntimeError(_last_error(process))
            for process in running:
                stdin, _ = _pipes(process)
                stdin.write("\n")
                stdin.flush()
            rows = [self._row(process) for process in running]
        finally:
            for process in running:
                process.kill()
                process.communicate()
        first = min(started for started, _, _ in rows)
        return Run(max(ended for _, ended, _ in rows) - first, sum(int(row[2]) for row in rows))

    @staticmethod
    def _row(process: subprocess.Popen[str]) -> tuple[float, float, float]:
        _, stdout = _pipes(process)
        told = stdout.readline().split()
        if len(told) != 3:
            raise RuntimeError(_last_error(process))
        started, ended, compiles = map(float, told)
        return started, ended, compiles


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _last_error(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate()
    return (err.strip() or f"exit status {process.returncode}").splitlines()[-1]


def compete(stage: Stage, contenders: Sequence[Contender], rounds: int) -> list[Contender]:
    able = []
    for contender in contenders:
        try:
            stage.run(contender)  # This also brings everything into the page cache.
            able.append(contender)
        except RuntimeError as why:
            print(f"{contender.title}: left out: {why}", flush=True)
    for _ in range(rounds):
        for contender in able:
            contender.runs.append(stage.run(contender))
    return able


def table(contenders: Sequence[Contender], kernels: int) -> list[tuple[str, ...]]:
    middle = {each.title: statistics.median(run.seconds for run in each.runs) for each in contenders}
    first = next(iter(middle.values()))
    rows: list[tuple[str, ...]] = []
    for each in contenders:
        seconds = [run.seconds for run in each.runs]
        compiles = sorted({run.compiles for run in each.runs})
        rows.append(
            (
                each.title,
                f"{middle[each.title]:.3f} s",
                spread(seconds) if len(seconds) > 1 else "-",
                f"{middle[each.title] / kernels * 1e3:.1f} ms",
                " to ".join(map(str, dict.fromkeys((compiles[0], compiles[-1]))))
                if compiles[-1]
                else "-",
                f"{middle[each.title] / first:.2f} x",
                str(len(seconds)),
            )
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--kernels", type=int, default=50)
    parser.add_argument("--processes", type=int, default=16, help="that start at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="of each contender")
    parser.add_argument("--quick", action="store_true", help="8 kernels, 3 processes, 2 rounds")
    args = parser.parse_args()
    if args.quick:
        args.kernels, args.processes, args.rounds = 8, 3, 2
    return args


def main() -> None:
    args = arguments()
    head = ("", "all kernels", "spread", "a kernel", "compiles", "against gpu.kernels", "runs")
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        os.environ |= {"PREHEAT_CACHE_DIR": f"{place}/cache", "PREHEAT_LOCK_DIR": f"{place}/locks"}
        gpu = preheat.device("auto")  # Kept open: a driver without any user starts again.
        stage = Stage(Path(place), args.kernels, gpu)
        for processes in (1, args.processes):
            contenders = [Contender(title, text, processes) for title, text in SCRIPTS.items()]
            done = compete(stage, contenders, args.rounds)
            crowd = "one process" if processes == 1 else f"{processes} processes at once"
            title = (
                f"{args.kernels} kernels, nothing cached, {crowd}, {os.cpu_count()} cores, {gpu.name}"
            )
            report("bench_together", title, head, table(done, args.kernels), into=args.json)
        gpu.close()


if __name__ == "__main__":
    main()
