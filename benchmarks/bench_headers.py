"""Measure the cost of header files: hits with 1, 31 and 421 headers, sealed starts, scanning a text.

    git archive OLD_COMMIT src | tar x -C /tmp/before
    PYTHONPATH=src python benchmarks/bench_headers.py --before /tmp/before/src

The two versions take turns, a process each, for a number of rounds; each row has the median of the
rounds. "New builder" is a lookup as a new process does it, with the stamps on disk; "same builder" the
next one in that process. Without --before the new version is measured alone. A sealed start is the
first request of a builder with a bundle and without a cache, for headers of the program's own; with
PREHEAT_SEALED_HEADERS=error and ignore, in turns, a process each. The text is a megabyte of the headers
that come with CUDA; the program is made, checked for clocks and read for its kernels.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import preheat
from common import options, ratio, report, us
from preheat.model.config import SealMode
from preheat.model.program import Program
from preheat.store.bundle import write

ROUNDS, SETTLED = 5, 2.1  # Seconds after which a time stamp is trusted.
KERNEL = 'extern "C" __global__ void k(int* x) { *x = 1; }\n'
CUB = "#include <cub/block/block_reduce.cuh>\n"


def programs(root: Path) -> list[Program]:
    """Return programs that open 1, 31 and 421 headers."""
    for nth in range(31):
        (root / f"h{nth}.h").write_text(f"int v{nth};\n".replace("int", "__device__ int"))
    many = "".join(f'#include "h{nth}.h"\n' for nth in range(31))
    return [
        Program.of('#include "h0.h"\n' + KERNEL, include=[root]),
        Program.of(many + KERNEL, include=[root]),
        Program.of(CUB + KERNEL),
    ]


def median_of_calls(act: Callable[[], object], number: int) -> float:
    """Return the microseconds of a call: the median of single calls, after a warm-up."""
    act()
    runs = []
    for _ in range(number):
        started = time.perf_counter()
        act()
        runs.append((time.perf_counter() - started) * 1e6)
    return statistics.median(runs)


def measure() -> dict[str, float]:
    """Return the microseconds of a hit by kind of lookup and number of headers, of one version."""
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        os.environ |= {"PREHEAT_CACHE_DIR": f"{root}/cache", "PREHEAT_LOCK_DIR": f"{root}/locks"}
        wanted = programs(root)
        for _ in range(2):
            for program in wanted:
                preheat.Builder.open().build(program, "sm_90")
            time.sleep(SETTLED)
        for program in wanted:
            headers = len(preheat.Builder.open().build(program, "sm_90").headers)
            same = preheat.Builder.open()
            fresh = median_of_calls(lambda: preheat.Builder.open().build(program, "sm_90"), 60)  # noqa: B023
            again = median_of_calls(partial(same.build, program, "sm_90"), 200)
            rows[f"{headers} headers, new builder"] = fresh
            rows[f"{headers} headers, same builder"] = again
    return rows


def own_programs(root: Path) -> dict[int, Program]:
    """Return programs that open 1, 31 and 421 headers of their own, of 4 KiB each."""
    filler = f"// {'x' * 76}\n" * 51
    for nth in range(421):
        (root / f"own{nth}.h").write_text(f"{filler}__device__ int v{nth};\n")
    return {
        count: Program.of(
            "".join(f'#include "own{nth}.h"\n' for nth in range(count)) + KERNEL,
            label=f"{count}.cu",
            include=[root],
        )
        for count in (1, 31, 421)
    }


def sealed_starts(root: Path, policy: str) -> dict[str, float]:
    """Return the microseconds of the first and of a later request in a sealed process."""
    config = replace(
        preheat.Config.from_env({"PREHEAT_CACHE": "off", "HOME": str(root)}),
        bundles=(root / "own.heat",),
        sealed=SealMode.ERROR,
        sealed_headers=policy,
    )
    rows = {}
    for count, program in own_programs(root).items():
        first: list[float] = []
        again: list[float] = []
        for _ in range(30):
            builder = preheat.Builder.open(config)
            for into in (first, again):
                started = time.perf_counter()
                builder.build(program, "sm_90")
                into.append((time.perf_counter() - started) * 1e6)
        rows[f"{count} headers, first request"] = statistics.median(first)
        rows[f"{count} headers, next request"] = statistics.median(again)
    return rows


def sealed_table() -> list[tuple[str, str, str, str]]:
    """Return the cost of both policies, which take turns."""
    seen: dict[str, list[dict[str, float]]] = {"error": [], "ignore": []}
    with tempfile.TemporaryDirectory() as place:
        builder = preheat.Builder.open(cache_dir=f"{place}/cache")
        entries: dict[str, bytes] = {}
        for program in own_programs(Path(place)).values():
            entries |= builder.bundle_entry(program, "sm_90")[0].encode()
        write(Path(place, "own.heat"), entries, {})
        for _ in range(ROUNDS):
            for policy, results in seen.items():
                command = [sys.executable, __file__, "--sealed", place, policy]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.append(json.loads(done.stdout))
    rows = []
    for row in seen["error"][0]:
        error, ignore = (statistics.median(ran[row] for ran in seen[name]) for name in seen)
        rows.append((row, us(error), us(ignore), us(error - ignore)))
    return rows


def version(source: str) -> dict[str, float]:
    """Return the results of `measure` in a process that imports preheat from `source`."""
    env = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, __file__, "--one"], env=env, check=True, capture_output=True, text=True
    )
    rows: dict[str, float] = json.loads(done.stdout)
    return rows


def megabyte() -> str:
    """Return real CUDA source: headers of the toolkit, concatenated."""
    roots = preheat.default_builder().toolchain.located.roots
    parts: list[str] = []
    for file in sorted(Path(roots["cccl"]).rglob("*.h"), key=lambda file: file.name):
        parts.append(file.read_text(errors="replace"))
        if sum(map(len, parts)) > 1 << 20:
            break
    return "".join(parts)[: 1 << 20]


def reading() -> list[tuple[str, str, str]]:
    """Return how long it takes to read a text, and to read half of it."""
    from preheat.toolchain.signature import probes

    text = megabyte() + '\nextern "C" __global__ void k() {}\n'
    half = text[len(text) // 2 :]
    acts: dict[str, Callable[[str], object]] = {
        "Program.of": lambda t: Program.of(t, language=None),
        "clock macros": lambda t: Program.of(t, language="cuda").uncacheable,
        "names of kernels": lambda t: probes(Program.of(t, language="cuda")),
    }
    rows = []
    for name, act in acts.items():
        short, whole = (median_of_calls(partial(act, given), 9) for given in (half, text))
        rows.append((name, us(short), us(whole)))
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--before", help="the source directory of another version")
    parser.add_argument("--one", action="store_true", help="measure this version, as JSON")
    parser.add_argument(
        "--sealed", nargs=2, metavar=("PLACE", "POLICY"), help="measure sealed starts, as JSON"
    )
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure()))
        return
    if given.sealed:
        print(json.dumps(sealed_starts(Path(given.sealed[0]), given.sealed[1])))
        return
    sources = {"before": given.before, "after": str(Path(__file__).parents[1] / "src")}
    seen: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for _ in range(ROUNDS):
        for name, source in sources.items():
            if source is not None:
                seen[name].append(version(source))
    after = {row: statistics.median(r[row] for r in seen["after"]) for row in seen["after"][0]}
    if seen["before"]:
        before = {row: statistics.median(r[row] for r in seen["before"]) for row in seen["before"][0]}
        rows = [
            (row, us(before[row]), us(cost), ratio(before[row], cost)) for row, cost in after.items()
        ]
        report("bench_headers", "A hit", ("lookup", "before", "after", "ratio"), rows, into=given.json)
    else:
        plain = [(row, us(cost)) for row, cost in after.items()]
        report("bench_headers", "A hit", ("lookup", "after"), plain, into=given.json)
    policies = ("a sealed request", "error", "ignore", "difference")
    report("bench_headers", "A sealed start", policies, sealed_table(), into=given.json)
    sizes = ("reading", "half a megabyte", "a megabyte")
    report("bench_headers", "A megabyte of CUDA source", sizes, reading(), into=given.json)


if __name__ == "__main__":
    main()
