"""Measure the host cost of the fast paths before and after a change.

    git archive OLD_COMMIT src | tar x -C /tmp/before
    PYTHONPATH=src python benchmarks/bench_change.py --before /tmp/before/src

The two versions take turns, a process each, for a number of rounds. A row has the median of the rounds
and their spread. Calls are those that Python makes for one launch or replay, of Python or C functions.
Bandwidths of fills are measured in the new version alone.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preheat
from common import options, report, spread, us

BATCHES, CALLS = 15, 200
FILLS = (("float32", 1 << 28), ("float64", 1 << 27), ("complex64", 1 << 27))  # Elements of 1 GiB.
SOURCE = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void use(const int* a, const int* b, float* y) { y[threadIdx.x] += *a + *b; }
"""


def contenders(gpu: preheat.Gpu) -> dict[str, Callable[[], object]]:
    """Return the measured functions by name."""
    torch: Any = importlib.import_module("torch")
    saxpy, use = (gpu.kernel(SOURCE, name) for name in ("saxpy", "use"))
    x = gpu.zeros(32)
    y = gpu.zeros(32)
    side = gpu.stream()
    sx, sy = gpu.zeros(32, stream=side), gpu.zeros(32, stream=side)
    tx, ty = (torch.zeros(32, device="cuda") for _ in range(2))
    step, other = (gpu.scalar("int32", name=name) for name in ("step", "other"))
    use[1, 32](step, other, y)
    with gpu.capture() as graph:
        for _ in range(320):
            saxpy[1, 32](2.0, x, y, 32)
    with gpu.capture() as scaled:
        use[1, 32](step, other, y)
    return {
        "kernel[…](…), arrays of preheat": lambda: saxpy[1, 32](2.0, x, y, 32),
        "bound()": saxpy.bind(2.0, x, y, 32, grid=1, block=32),
        "kernel.launch(stream=side)": lambda: saxpy.launch(
            2.0, sx, sy, 32, grid=1, block=32, stream=side
        ),
        "kernel[…](…), tensors of torch": lambda: saxpy[1, 32](2.0, tx, ty, 32),
        "replay of 320 kernels": graph.replay,
        "replay, one scalar set": lambda: scaled.replay(step=3),
        "replay, two scalars set": lambda: scaled.replay(step=3, other=4),
    }


def measure() -> dict[str, tuple[float, int]]:
    """Return the microseconds of a call in a burst, and the number of calls that it makes."""
    gpu = preheat.device("cuda")
    torch = importlib.import_module("torch")
    found = {}
    for name, act in contenders(gpu).items():
        number = CALLS // 5 if "320" in name else CALLS
        batches = []
        for _ in range(50):
            act()
        for _ in range(BATCHES):
            gpu.synchronize()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(number):
                act()
            batches.append((time.perf_counter() - started) / number * 1e6)
        found[name] = (statistics.median(batches), calls_of(act))
    return found


def calls_of(act: Callable[[], object]) -> int:
    """Return how many functions of Python and C are called."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    act()
    sys.setprofile(None)
    return calls - 1  # The last one ends the profile.


def one_round(source: str) -> dict[str, tuple[float, int]]:
    """Return the measurements of a process with this version."""
    path = os.pathsep.join([source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, __file__, "--child"], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"with {source}:\n{done.stderr}")
    found: dict[str, tuple[float, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def fill_bandwidth(dtype: str, value: float, count: int) -> float:
    """Return the GB/s of the best of some fills."""
    gpu = preheat.device("cuda")
    array = gpu.empty(count, dtype)
    best = float("inf")
    for _ in range(6):
        gpu.synchronize()
        started = time.perf_counter()
        array.fill(value)
        gpu.synchronize()
        best = min(best, time.perf_counter() - started)
    nbytes = array.nbytes
    array.close()
    return nbytes / best / 1e9


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--before", help="the directory `src` of the version before the change")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--child", action="store_true", help="measure one round and print it as JSON")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure()))
        return
    if args.before is None:
        parser.error("--before is needed")
    after = str(Path(preheat.__file__).parents[1])
    rounds: dict[str, list[dict[str, tuple[float, int]]]] = {args.before: [], after: []}
    for turn in range(args.rounds):
        for source in (args.before, after) if turn % 2 else (after, args.before):
            rounds[source].append(one_round(source))
    rows = []
    for name in rounds[after][0]:
        old, new = ([each[name][0] for each in rounds[source]] for source in (args.before, after))
        a, b = statistics.median(old), statistics.median(new)
        calls = (rounds[source][0][name][1] for source in (args.before, after))
        rows.append((name, us(a), us(b), f"{b / a:.3f}", spread(old), spread(new), *calls))
    head = ("short path", "before", "after", "ratio", "spread before", "after", "calls before", "after")
    title = f"host cost, medians of {args.rounds} rounds in turn"
    report("bench_change", title, head, rows, into=args.json)
    sizes = ((dtype, fill_bandwidth(dtype, 1.1, count)) for dtype, count in FILLS)
    plain = fill_bandwidth("float32", 1.5, 1 << 28)
    fills = [(dtype, f"{rate:.0f} GB/s", f"{rate / plain:.2f}") for dtype, rate in sizes]
    report(
        "bench_change", "fills of 1 GiB", ("element", "bandwidth", "of float32"), fills, into=args.json
    )


if __name__ == "__main__":
    main()
