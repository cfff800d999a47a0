"""Measure Triton on the store of preheat beside Triton's own cache. No GPU and no driver is needed.

Six kernels are compiled for sm_90 and looked up again by `triton.compile`, as a process does at its
first launches; loading and launching are left out. The contenders take turns. "a hit" is one lookup in
a process that has looked all kernels up before. "process" imports Triton and looks all kernels up. In
the last table, processes start together with empty caches. Triton's own cache verifies nothing.

    PYTHONPATH=.triton/3.9 .venv/bin/python benchmarks/bench_adapters.py    (after `make test-adapters`)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import options, ratio, report, spread, us

ROUNDS = 7
HITS = 30
PROCESSES = 8
STOCK, OURS, SEALED = "Triton's own cache", "preheat", "preheat, sealed, from a bundle"

MODULE = """
import triton
import triton.language as tl
""" + "".join(
    f"""

@triton.jit
def k{n}(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(y + at, tl.load(x + at, mask=mask) * {n} + tl.load(y + at, mask=mask), mask=mask)
"""
    for n in range(6)
)
SCRIPT = """
import json, os, sys, time
started = time.perf_counter()
if os.environ.get("CONTENDER") != "stock":
    import preheat.adapters
    preheat.adapters.install("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import bench_kernels_of_triton as module

target = GPUTarget("cuda", 90, 32)
compiled = 0

def listen(*, cache_hit, **_):
    global compiled
    compiled += not cache_hit

triton.knobs.compilation.listener = listen

def look_up(n):
    function = getattr(module, f"k{n}")
    signature = {"x": "*fp32", "y": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    return triton.compile(ASTSource(function, signature, {(3,): 1024}, {}), target=target)

for n in range(6):
    look_up(n)
all_of_them = time.perf_counter() - started
hits = []
for _ in range(int(sys.argv[1])):
    for n in range(6):
        begun = time.perf_counter()
        look_up(n)
        hits.append((time.perf_counter() - begun) * 1e6)
print(json.dumps({"all": all_of_them, "hits": hits, "compiled": compiled}))
"""


class Place:
    """The caches of one contender, and the module with the kernels."""

    def __init__(self, root: Path, contender: str) -> None:
        self.contender = contender
        self.root = root / contender.split()[0].strip(",").replace("'", "")
        self.root.mkdir(exist_ok=True)
        (root / "bench_kernels_of_triton.py").write_text(MODULE)
        self.path = root

    def environment(self, cache: str) -> dict[str, str]:
        """Return the environment of a process with the caches called `cache`."""
        path = [
            str(self.path),
            str(Path(__file__).parents[1] / "src"),
            os.environ.get("PYTHONPATH", ""),
        ]
        return {
            **os.environ,
            "CONTENDER": "stock" if self.contender == STOCK else "preheat",
            "TRITON_CACHE_DIR": str(self.root / f"{cache}-triton"),
            "PREHEAT_CACHE_DIR": str(self.root / f"{cache}-preheat"),
            "PREHEAT_LOCK_DIR": str(self.root / "locks"),
            "TRITON_DEFAULT_FP_FUSION": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONDONTWRITEBYTECODE": "",
        }

    def start(self, cache: str, hits: int = 0, **env: str) -> subprocess.Popen[str]:
        """Start a process that looks all kernels up."""
        command = [sys.executable, "-c", SCRIPT, str(hits)]
        values = {**self.environment(cache), **env}
        return subprocess.Popen(command, env=values, stdout=subprocess.PIPE, text=True)

    def run(self, cache: str, hits: int = 0, **env: str) -> dict[str, Any]:
        """Run a process, and return what it printed."""
        with self.start(cache, hits, **env) as process:
            out, _ = process.communicate()
        assert process.returncode == 0
        said: dict[str, Any] = json.loads(out)
        return said


def bench_warm(places: dict[str, Place], bundle: str) -> None:
    """Measure processes that find everything."""
    more = {SEALED: {"PREHEAT_BUNDLE": bundle, "PREHEAT_SEALED": "1"}}
    seconds: dict[str, list[float]] = {name: [] for name in places}
    hits: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(ROUNDS):
        for name, place in places.items():
            cache = "sealed" if name == SEALED else "warm"
            said = place.run(cache, HITS, **more.get(name, {}))
            seconds[name].append(said["all"] * 1e6)
            hits[name].append(statistics.median(said["hits"]))
            assert said["compiled"] == 0, name
    head = ("", "process, 6 kernels", "spread", "of stock", "a hit", "spread", "of stock")
    stock = statistics.median(seconds[STOCK]), statistics.median(hits[STOCK])
    rows = [
        (
            *(name, us(statistics.median(seconds[name])), spread(seconds[name])),
            ratio(statistics.median(seconds[name]), stock[0]),
            *(us(statistics.median(hits[name])), spread(hits[name])),
            ratio(statistics.median(hits[name]), stock[1]),
        )
        for name in places
    ]
    report("bench_adapters", "Triton, everything cached", head, rows)


def bench_stampede(places: dict[str, Place]) -> None:
    """Measure processes that start together with empty caches."""
    rows = []
    for name, place in places.items():
        if name == SEALED:
            continue
        begun = time.perf_counter()
        processes = [place.start("stampede") for _ in range(PROCESSES)]
        compiled = 0
        for process in processes:
            out, _ = process.communicate()
            assert process.returncode == 0
            compiled += json.loads(out)["compiled"]
        rows.append((name, compiled, f"{time.perf_counter() - begun:.2f} s"))
    title = f"Triton, {PROCESSES} processes, 6 kernels, empty caches"
    report("bench_adapters", title, ("", "compiles", "wall"), rows)


def baked(place: Place) -> str:
    """Return a bundle with the entries of a cache."""
    from preheat.build.builder import Builder
    from preheat.store.bundle import write

    builder = Builder.open(cache_dir=place.environment("warm")["PREHEAT_CACHE_DIR"])
    path = place.root / "kernels.heat"
    entries = {entry.digest: entry.encode(provenance=False) for entry in builder.foreign.all("triton")}
    write(path, entries, {"format": "preheat bundle"})
    return str(path)


def main() -> None:
    options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        places = {name: Place(Path(directory), name) for name in (STOCK, OURS, SEALED)}
        for name in (STOCK, OURS):
            places[name].run("warm")
        bench_warm(places, baked(places[OURS]))
        bench_stampede(places)


if __name__ == "__main__":
    main()
