"""Measure complete lookups beside cuda.core: in one process, in a new process, in many processes.

The kernel is the same text in both. Cold compiles bypass the compiler's own cache. In a running process
the contenders take turns, and "stats alone" asks for the status of each header and does nothing else.
The process rows include starting Python, importing the library, making the key and reading the entry;
neither touches a GPU. Not like for like: cuda.core's cache has no verification, no header tracking and
no single flight.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from common import ratio, report, spread, us
from preheat.build.builder import Builder
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.store import MemoryStore

SOURCE = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
CUB = """
#include <cub/block/block_reduce.cuh>
extern "C" __global__ void total(int* x) {
    using Reduce = cub::BlockReduce<int, 128>;
    __shared__ typename Reduce::TempStorage storage;
    int sum = Reduce(storage).Sum(x[threadIdx.x]);
    if (threadIdx.x == 0) x[0] = sum;
}
"""
PROCESSES, KERNELS = 8, 20
ROUNDS, CALLS = 15, 50
SETTLED = 2.1  # seconds after which the stamp of a header file is trusted

OURS = """
import sys
import preheat
for i in range(int(sys.argv[1])):
    preheat.compile(SOURCE.replace("saxpy", f"k{i}"), "sm_90", options=["--no-cache"])
if len(sys.argv) > 2:
    print(int(preheat.default_builder().stats()["process"].get("compiles", 0)))
"""
THEIRS = """
import sys
from cuda.core import Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
cache = FileStreamProgramCache(CACHE)
options = ProgramOptions(arch="sm_90", no_cache=True)
compiles = 0
for i in range(int(sys.argv[1])):
    source = SOURCE.replace("saxpy", f"k{i}")
    key = make_program_cache_key(code=source, code_type="c++", options=options, target_type="cubin")
    if cache.get(key) is None:
        cache[key] = Program(source, "c++", options).compile("cubin")
        compiles += 1
if len(sys.argv) > 2:
    print(compiles)
"""


def script(body: str, root: Path) -> str:
    return f"SOURCE = {SOURCE!r}\nCACHE = {str(root / 'theirs')!r}\n{body}"


def environment(root: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**env, "PREHEAT_CACHE_DIR": str(root / "ours"), "PREHEAT_LOCK_DIR": str(root / "locks")}


def run(body: str, root: Path, *args: str) -> str:
    command = [sys.executable, "-c", script(body, root), *args]
    return subprocess.run(
        command, env=environment(root), check=True, capture_output=True, text=True
    ).stdout


def timed_run(body: str, root: Path) -> float:
    started = time.perf_counter()
    run(body, root, "1")
    return (time.perf_counter() - started) * 1e6


def scripts() -> dict[str, str]:
    """Return the scripts of the contenders that are installed, by name."""
    core = {"cuda.core": THEIRS} if find_spec("cuda.core") is not None else {}
    return {"preheat": OURS, **core}


def bench_in_process(root: Path) -> None:
    config = Config(cache_dirs=(root / "ours",), lock_dir=root / "locks")
    builder = Builder.open(config, events=Events())
    memory = builder.cache.tiers[0]
    assert isinstance(memory, MemoryStore)
    rows = []
    for name, source in (("saxpy", SOURCE), ("cub block reduce", CUB)):
        held = builder.build(Program.of(source, label="k.cu"), "sm_90")
        time.sleep(SETTLED)  # From then on, the stamps of the headers are trusted.
        builder.build(Program.of(source, label="k.cu"), "sm_90")
        files = header_files(builder, held)
        contenders = {
            "preheat memory": partial(build, builder, source),
            "preheat disk": partial(build, builder, source, memory),
            "stats alone": partial(stat_all, files),
            "cuda.core file": core_lookup(root, source, held.cubin),
        }
        del held  # No one holds the artifact any more, so every hit decodes it.
        times = in_turns({name: act for name, act in contenders.items() if act is not None})
        median = {title: statistics.median(each) for title, each in times.items()}
        cells = [f"{us(median[c])} ± {spread(times[c])}" if c in times else "-" for c in contenders]
        theirs = median.get("cuda.core file")
        ours = median["preheat disk"]
        rows.append((name, len(files), *cells, "-" if theirs is None else ratio(theirs, ours)))
    builder.close()
    head = ("program", "headers checked", *contenders, "disk ratio")
    report("bench_hit", "Key and hit in a running process, in turns, ± interquartile range", head, rows)


def build(builder: Builder, source: str, memory: MemoryStore | None = None) -> None:
    """Make the program and its key, and find it: on the disk, if `memory` is emptied first."""
    if memory is not None:
        memory.clear()
    builder.build(Program.of(source, label="k.cu"), "sm_90")


def header_files(builder: Builder, artifact: Artifact) -> list[str]:
    """Return the paths of the header files that a lookup of `artifact` compares."""
    roots = builder.toolchain.located.roots
    return [f"{roots[header.root]}/{header.name}" for header in artifact.headers]


def stat_all(files: list[str]) -> None:
    """Ask the system for the status of each file, which no check of headers can do without."""
    for file in files:
        os.stat(file)


def core_lookup(root: Path, source: str, cubin: bytes) -> Callable[[], None] | None:
    """Return the same lookup in cuda.core's cache; None where cuda.core is not installed."""
    try:
        from cuda.core import ProgramOptions
        from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
    except ImportError:
        return None
    cache = FileStreamProgramCache(root / "theirs")
    options = ProgramOptions(arch="sm_90")
    more = {"extra_digest": b"headers"} if "#include" in source else {}

    def lookup() -> None:
        key = make_program_cache_key(
            code=source, code_type="c++", options=options, target_type="cubin", **more
        )
        if cache.get(key) is None:
            cache[key] = cubin

    return lookup


def in_turns(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the microseconds of a call of each contender, once for every round."""
    times: dict[str, list[float]] = {title: [] for title in contenders}
    for _ in range(ROUNDS + 1):
        for title, act in contenders.items():
            started = time.perf_counter()
            for _ in range(CALLS):
                act()
            times[title].append((time.perf_counter() - started) / CALLS * 1e6)
    return {title: each[1:] for title, each in times.items()}  # The first round is a warm-up.


def bench_process_start(root: Path) -> None:
    contenders = {"bare Python": "import sys", **scripts()}
    times: dict[str, list[float]] = {title: [] for title in contenders}
    for turn in range(ROUNDS + 1):
        for title, body in contenders.items():
            seconds = timed_run(body, root)
            if turn:  # The first one fills the cache.
                times[title].append(seconds)
    cells = [f"{us(statistics.median(each))} ± {spread(each)}" for each in times.values()]
    title = "A fresh process, in turns, ± interquartile range"
    report("bench_hit", title, ("", *contenders), [("process start to first hit", *cells)])


def bench_storm(root: Path) -> None:
    """Every process requests the same kernels, and nothing is cached."""
    rows = []
    for name, body in scripts().items():
        place = root / f"storm-{name}"
        place.mkdir()
        run(body, place, "0")  # Locate the compilers once, in a process of its own.
        started = time.perf_counter()
        command = [sys.executable, "-c", script(body, place), str(KERNELS), "count"]
        running = [
            subprocess.Popen(command, env=environment(place), stdout=subprocess.PIPE, text=True)
            for _ in range(PROCESSES)
        ]
        compiles = sum(int(process.communicate()[0]) for process in running)
        rows.append((name, compiles, time.perf_counter() - started))
    last = rows[-1][2]
    table = [(n, c, f"{s:.2f} s", f"{last / s:.2f} x") for n, c, s in rows]
    head = ("", "compiles", "wall", f"against {rows[-1][0]}")
    report("bench_hit", f"{PROCESSES} processes, {KERNELS} kernels, empty cache", head, table)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        root = Path(place)
        bench_in_process(root)
        bench_process_start(root)
        bench_storm(root)


if __name__ == "__main__":
    main()
