"""Hosts for tests: processes with caches and locks of their own, which share one store.

`python -m tests.store.remote.hosts URL FOLDER PROCESSES KERNELS LEASE [doomed]` runs four hosts until
all of their processes have all kernels, and prints the counters of each process as a line of JSON. The
file `compiles` in FOLDER gets a line at the start of each compile. With `doomed`, one process is the
first to compile, and kills itself in that compile. The compiler is replaced: it takes a moment, and
returns what the real one made of the first kernel. Everything else is what a user's process runs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from preheat.build.batch import build_all
from preheat.build.builder import Builder
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.program import Program
from preheat.store.remote import lease
from preheat.toolchain import translate
from preheat.toolchain.translate import Compiled

HOSTS = 4
ARCH = Arch.parse("sm_90")
COMPILE_SECONDS = 0.05


def programs(count: int) -> list[Program]:
    """Return different kernels."""
    source = 'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] += {}; }}'
    return [Program.of(source.format(number), label=f"k{number}.cu") for number in range(count)]


def stand_in(compiled: Compiled, log: Path, *, doomed: bool) -> Callable[..., Compiled]:
    """Return what takes the place of the compiler."""

    def compile_cuda(_: object, __: str, program: Program, *___: object) -> Compiled:
        with log.open("a") as file:
            file.write(f"{program.label}\n")
        if doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(COMPILE_SECONDS)
        return replace(compiled, log=program.label)

    return compile_cuda


def start_together(gate: Path, count: int) -> None:
    """Wait until `count` processes are here."""
    (gate / str(os.getpid())).touch()
    while len(list(gate.iterdir())) < count:
        time.sleep(0.005)


def run(builder: Builder, wanted: list[Program], *, together: bool) -> dict[str, Any]:
    """Build all programs, in an order of this process's own, and return the counters."""
    random.shuffle(wanted)
    if together:
        artifacts = build_all(builder, [(program, ARCH) for program in wanted])
    else:
        artifacts = [builder.build(program, ARCH) for program in wanted]
    assert [artifact.log for artifact in artifacts] == [program.label for program in wanted]
    builder.close()
    return builder.stats()["process"]


def main(url: str, folder: Path, processes: int, kernels: int, *, doomed: bool) -> int:
    """Run the processes of all hosts, and return how many failed."""
    first = Builder.open(Config(cache_dirs=(folder / "first",), lock_dir=folder / "locks"))
    compiled = first.toolchain.compile(programs(1)[0], ARCH)
    located = first.toolchain.located
    first.close()
    gate = folder / "gate"
    gate.mkdir()

    def process(host: int, number: int) -> None:
        os.environ |= {
            "PREHEAT_REMOTE": url,
            "PREHEAT_REMOTE_UNSIGNED": "1",
            "PREHEAT_REMOTE_TIMEOUT": "60",
            "PREHEAT_CACHE_DIR": str(folder / f"cache-{host}"),
            "PREHEAT_LOCK_DIR": str(folder / f"locks-{host}"),
        }
        builder = Builder.open()
        builder.toolchain._located = located
        dies = doomed and host == number == 0
        translate.compile_cuda = stand_in(compiled, folder / "compiles", doomed=dies)
        start_together(gate, HOSTS * processes)
        while doomed and not dies and not (folder / "compiles").exists():
            time.sleep(0.005)  # The process that dies is the first to compile.
        # The one that dies has one compile at a time, so that one is lost.
        stats = run(builder, programs(kernels), together=number % 2 == 0 and not dies)
        os.write(1, json.dumps({"host": host, **stats}).encode() + b"\n")

    children = []
    for host in range(HOSTS):
        for number in range(processes):
            if (child := os.fork()) == 0:
                try:
                    process(host, number)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
                os._exit(0)
            children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    lease.LEASE_SECONDS = float(sys.argv[5])
    dying = "doomed" in sys.argv
    failed = main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), doomed=dying)
    sys.exit(failed != dying)
