"""Shared code of the benchmarks: timing, a description of the machine, tables and result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from preheat import __version__

RESULTS = Path(__file__).with_name("results")
_PACKAGES = (
    *("preheat", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nvjitlink", "xxhash"),
    *("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "triton"),
)


_tables: dict[str, Any] = {}
#: Processes that ran or waited to run in the minute before the benchmark, on average.
_LOAD = os.getloadavg()[0]


def median_us(
    act: Callable[[], object],
    *,
    repeat: int = 7,
    number: int = 500,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the microseconds of a call: the median of `repeat` runs, after a warm-up."""
    for _ in range(min(number, 50)):
        act()
    runs = []
    for _ in range(repeat):
        started = clock()
        for _ in range(number):
            act()
        runs.append((clock() - started) / number * 1e6)
    return statistics.median(runs)


def machine() -> dict[str, Any]:
    """Return CPU, cores, how busy they were, Python and the versions of the compared libraries."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "-"
    packages["preheat"] = (
        __version__  # On the GPU machine it runs from source, without being installed.
    )
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load before": round(_LOAD, 1),
        "gpu": gpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": packages,
    }


def commit() -> str:
    """Return the measured commit, with a `+` if its source was changed, or `-` if it is unknown.

    On a machine without the repository, it is what `make carry` has written to `.carry/COMMIT`.
    """
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=8", "HEAD"], text=True)
    except (OSError, subprocess.CalledProcessError):
        carried = root / ".carry" / "COMMIT"
        return carried.read_text().strip() if carried.is_file() else "-"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src"], check=False).returncode
    return head.strip() + ("+" if changed else "")


def gpu() -> str:
    """Return the GPU and its driver, or `-`."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "-"
    return ", driver ".join(found.splitlines()[0].split(", "))


def options(about: str | None) -> argparse.ArgumentParser:
    """Return the arguments that every benchmark takes."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=style)
    parser.add_argument("--json", type=Path, help="where the results go, instead of results/")
    return parser


def report(
    name: str,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    into: Path | None = None,
) -> None:
    """Print a table and store it, with the machine, in the file `into` or under `results/`."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print(f"\n{title}")
    for row in cells:
        print(
            "  ".join(
                c.rjust(w) if i else c.ljust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        )
    path = into or RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    _tables[title] = {"head": list(head), "rows": [list(row) for row in rows]}
    kept = {"machine": machine(), "tables": _tables}  # Of this run only.
    text = json.dumps(kept, indent=2, ensure_ascii=False)
    path.write_text(text + "\n")


def us(value: float) -> str:
    """Return microseconds with three significant digits."""
    return f"{value:.3g} µs" if value < 1000 else f"{value / 1000:.3g} ms"


def spread(values: Sequence[float]) -> str:
    """Return the interquartile range of the values as a share of their median, if there are several."""
    if len(values) < 2:
        return "-"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{(high - low) / middle:.0%}"


def ratio(theirs: float, ours: float) -> str:
    """Return how many times faster preheat is."""
    return f"{theirs / ours:.2f} x"


def program_cache() -> Any:
    """Return cuda.core's file cache, or exit with an explanation if it is not installed."""
    try:
        from cuda.core.utils import FileStreamProgramCache
    except ImportError:
        sys.exit("cuda.core is not installed: pip install 'preheat[bench]'")
    return FileStreamProgramCache
