"""Baking 200 equal kernels, and 200 small with 5 header-heavy ones: one at a time, and on all cores.

Every row is `preheat bake` as a process of its own, start and all, with the page cache warm. Cold rows
begin with an empty cache, and the compiler's own cache is bypassed; they are done several times, in
turn, and all times are shown: the ratio is that of the shortest, which other work on the machine
disturbed least. "Longest" is the duration of the longest compile while many run, the least that a bake
can take.
The mixed set is also baked again, and killed: the bake is ended with SIGKILL when about half of the
programs are done, and the one after it must compile only the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from common import options, ratio, report
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.model.arch import Arch
from preheat.model.program import Program

SMALL = 200
HEAVY = {
    "fp16": """
#include <cuda_fp16.h>
extern "C" __global__ void scale(__half2* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __hmul2(x[i], x[i]);
}
""",
    "bf16": """
#include <cuda_bf16.h>
extern "C" __global__ void add(__nv_bfloat162* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __hadd2(x[i], x[i]);
}
""",
    "reduce": """
#include <cub/block/block_reduce.cuh>
extern "C" __global__ void total(float* x) {
    using Reduce = cub::BlockReduce<float, 128>;
    __shared__ typename Reduce::TempStorage storage;
    float sum = Reduce(storage).Sum(x[threadIdx.x]);
    if (threadIdx.x == 0) x[0] = sum;
}
""",
    "sort": """
#include <cub/block/block_radix_sort.cuh>
extern "C" __global__ void sort(int* x) {
    using Sort = cub::BlockRadixSort<int, 128, 4>;
    __shared__ typename Sort::TempStorage storage;
    int mine[4];
    for (int i = 0; i < 4; ++i) mine[i] = x[threadIdx.x * 4 + i];
    Sort(storage).Sort(mine);
    for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] = mine[i];
}
""",
    "groups": """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
extern "C" __global__ void total(int* x) {
    auto tile = cg::tiled_partition<32>(cg::this_thread_block());
    int sum = cg::reduce(tile, x[threadIdx.x], cg::plus<int>());
    if (tile.thread_rank() == 0) x[threadIdx.x / 32] = sum;
}
""",
}


def small(seed: int) -> str:
    """Return one of many kernels such as programs generate: a few operations on a vector."""
    draw = random.Random(seed)
    steps = "".join(
        f"    v = {draw.choice(['fmaf(v, v, %.4ff)', 'v * %.4ff', 'tanhf(v) + %.4ff'])};\n"
        % draw.random()
        for _ in range(draw.randint(2, 8))
    )
    return (
        f'extern "C" __global__ void k{seed}(const float* x, float* y, int n) {{\n'
        "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i >= n) return;\n"
        f"    float v = x[i];\n{steps}    y[i] = v;\n}}\n"
    )


def equal(seed: int) -> str:
    """Return one of many kernels that take the same time to compile."""
    return small(0).replace("float v = x[i];", f"float v = x[i] + {seed}.0f;")


def write_manifest(root: Path, texts: Mapping[str, str]) -> Path:
    programs = [
        ManifestProgram(
            Program.of(text, label=f"{name}.cu", options=["--no-cache"]), archs=(Arch.parse("sm_90"),)
        )
        for name, text in texts.items()
    ]
    Manifest(tuple(programs)).write(root / "kernels.toml")
    return root / "kernels.toml"


class BakeRunner:
    """Runs bakes of one manifest on caches by name."""

    def __init__(self, root: Path, texts: Mapping[str, str]) -> None:
        root.mkdir()
        self.root = root
        self.manifest = write_manifest(root, texts)
        self.longest = 0.0  # compile of the last bake

    def start(self, cache: str, bundle: str, jobs: int | None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "preheat", "bake", str(self.manifest), "--json"]
        environment = {
            **os.environ,
            "PREHEAT_CACHE_DIR": str(self.root / cache),
            "PREHEAT_LOCK_DIR": str(self.root / "locks"),
            "PREHEAT_EVENTS": str(self.root / bundle) + ".events",
        }
        return subprocess.Popen(
            [*command, "-o", str(self.root / bundle), *(() if jobs is None else ("-j", str(jobs)))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def bake(self, cache: str, bundle: str, jobs: int | None) -> float:
        """Return the seconds from start to exit."""
        started = time.perf_counter()
        process = self.start(cache, bundle, jobs)
        told = json.loads(process.communicate()[0])
        seconds = time.perf_counter() - started
        if process.returncode:
            sys.exit(f"bake failed: {told['failed']}")
        self.longest = max(row["seconds"] for row in told["baked"])
        return seconds

    def kill_half_way(self, cache: str, bundle: str, jobs: int | None) -> None:
        process = self.start(cache, bundle, jobs)
        while process.poll() is None and len(self.compiled(bundle)) < SMALL // 2:
            time.sleep(0.01)
        process.kill()
        process.communicate()

    def compiled(self, bundle: str) -> set[str]:
        """Return the programs that were compiled, stored and reported while baking `bundle`."""
        try:
            lines = (self.root / f"{bundle}.events").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return set()
        events = (json.loads(line) for line in lines if line.endswith("\n"))
        return {event["program"] for event in events if event["event"] == "compile"}


def measure(runner: BakeRunner, jobs: int | None, rounds: int, *, more: bool) -> list[tuple[str, ...]]:
    one, many, again, longest = [], [], [], []
    for index in range(rounds):
        one.append(runner.bake(f"one-{index}", f"one-{index}.heat", 1))
        many.append(runner.bake(f"many-{index}", f"many-{index}.heat", jobs))
        longest.append(runner.longest)
        if more:
            again.append(runner.bake(f"many-{index}", f"again-{index}.heat", jobs))

    def row(what: str, seconds: list[float], bundle: str, *told: str) -> tuple[str, ...]:
        blob = (runner.root / bundle).read_bytes()
        digest = hashlib.sha256(blob).hexdigest()[:12]
        number = str(len(runner.compiled(bundle)))
        times = "  ".join(f"{each:.2f}" for each in seconds)
        return what, times, number, *told, f"{len(blob):,}", digest

    together = "one for each processor" if jobs is None else f"{jobs} at a time"
    path = f"{longest[many.index(min(many))]:.2f}"
    rows = [
        row("one at a time", one, "one-0.heat", "", ""),
        row(together, many, "many-0.heat", ratio(min(one), min(many)), path),
    ]
    if more:
        runner.kill_half_way("killed", "killed.heat", jobs)
        rest = runner.bake("killed", "rest.heat", jobs)
        twice = len(runner.compiled("killed.heat") & runner.compiled("rest.heat"))
        done = len(runner.compiled("killed.heat"))
        rows += [
            row("again, everything is there", again, "again-0.heat", ratio(min(one), min(again)), ""),
            row(
                f"killed after {done}, started again",
                [rest],
                "rest.heat",
                f"{twice} compiled twice",
                "",
            ),
        ]
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("-j", "--jobs", type=int, help="instead of one for each processor")
    parser.add_argument("--rounds", type=int, default=3, help="of cold bakes")
    parser.add_argument("--quick", action="store_true", help="one round")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    head = (
        *("bake", "seconds", "compiled", "against one at a time", "longest"),
        *("bundle bytes", "sha256"),
    )
    same = {f"k{seed}": equal(seed) for seed in range(SMALL)}
    mixed = {f"k{seed}": small(seed) for seed in range(SMALL)} | HEAVY
    titles = {
        f"{SMALL} equal kernels for sm_90": (same, False),
        f"{SMALL} small and {len(HEAVY)} header-heavy kernels for sm_90": (mixed, True),
    }
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        for index, (title, (texts, more)) in enumerate(titles.items()):
            runner = BakeRunner(Path(place) / str(index), texts)
            rows = measure(runner, args.jobs, rounds, more=more)
            report("bench_bake", f"{title}, {os.cpu_count()} cores", head, rows, into=args.json)


if __name__ == "__main__":
    main()
