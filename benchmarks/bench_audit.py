"""Measure what an audit costs: the same programs with and without it, in turns. Needs a GPU.

Each round runs every contender once, in processes of their own. "process" is the time from the start of
the program to its end as its parent sees it, with warm caches. "launch" is the median time of a launch
inside the program, which an audit does not touch.

    PYTHONPATH=src:.carry python3 benchmarks/bench_audit.py [--rounds 5] [--seconds 300]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import options, report, spread

SOURCE = Path(__file__).parents[1] / "src"
TIMED = """
import json, statistics, time
def timed(act, wait, repeat=15, number=2000):
    for _ in range(200):
        act()
    wait()
    runs = []
    for _ in range(repeat):
        started = time.perf_counter()
        for _ in range(number):
            act()
        runs.append((time.perf_counter() - started) / number * 1e6)
        wait()
    print(json.dumps({"launch_us": statistics.median(runs)}))
"""
PROGRAMS = {
    "torch": """
import torch
x = torch.randn(1024, 1024, device="cuda")
for _ in range(300):
    y = torch.relu(x @ x)
torch.cuda.synchronize()
timed(lambda: x.add_(1), torch.cuda.synchronize)
""",
    "preheat": """
import preheat
gpu = preheat.device()
k = gpu.kernel('extern "C" __global__ void k(float* x, float v) { x[threadIdx.x] += v; }', "k")
x = gpu.zeros(32)
launch = k[1, 32]
timed(lambda: launch(x, 1.0), gpu.synchronize)
""",
    "triton": """
import torch, triton, triton.language as tl
from audit_kernel import scale
x = torch.zeros(1024, device="cuda")
timed(lambda: scale[(4,)](x, 2.0, BLOCK=256), torch.cuda.synchronize, number=500)
""",
}
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x_ptr, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * factor)
"""
WAYS: dict[str, tuple[str, ...]] = {
    "alone": (),
    "audit": ("audit", "--report", "report.json", "--"),
    "audit, no CUPTI": ("audit", "--no-cupti", "--report", "report.json", "--"),
    "run, with its command line": ("run", "--"),
}


def main() -> None:
    """Run all programs in all ways, and print the medians."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="no round is started after that")
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    given = parser.parse_args()
    until, longest = time.monotonic() + given.seconds, 0.0
    seconds: dict[tuple[str, str], list[float]] = {}
    launches: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "audit_kernel.py").write_text(KERNEL)
        for program in given.programs:
            (place / f"app_{program}.py").write_text(TIMED + PROGRAMS[program])
            _run(place, program, ())  # The caches are warm from now on.
        for number in range(given.rounds):
            started = time.monotonic()
            if number and started + longest > until:
                print(f"{number} of {given.rounds} rounds, because the time is over")
                break
            for program in given.programs:
                for way, words in WAYS.items():
                    took, launch = _run(place, program, words)
                    seconds.setdefault((program, way), []).append(took)
                    launches.setdefault((program, way), []).append(launch)
            longest = max(longest, time.monotonic() - started)
    rows = []
    for (program, way), times in seconds.items():
        base = statistics.median(seconds[program, "alone"])
        median, micros = statistics.median(times), launches[program, way]
        rows.append(
            [
                program, way, f"{median:.2f} s", spread(times),
                f"{(median / base - 1) * 100:+.1f} %",
                f"{statistics.median(micros):.2f} µs", spread(micros),
            ]
        )  # fmt: skip
    head = ["program", "way", "process", "spread", "against alone", "launch", "spread"]
    report("bench_audit", "The cost of an audit", head, rows, into=given.json)


def _run(place: Path, program: str, words: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of the audited program and the microseconds of its launches.

    The command line of preheat itself and its report are not a part of the time: the report has the
    time of the command, and the same command is timed here where there is no report.
    """
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join([str(SOURCE), str(place), *map(os.path.abspath, more)])
    before = [sys.executable, "-m", "preheat", *words] if words else []
    command = [*before, sys.executable, str(place / f"app_{program}.py")]
    started = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, "HOME": str(place)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}")
    took = time.perf_counter() - started
    written = place / "report.json"
    if "audit" in words:
        took = json.loads(written.read_text())["seconds"]
        written.unlink()
    return took, json.loads(done.stdout.splitlines()[-1])["launch_us"]


if __name__ == "__main__":
    main()
