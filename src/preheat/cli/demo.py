"""`preheat demo`: the same kernels cold and hot, side by side."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from preheat.builder import Builder
from preheat.cli.output import columns, data, duration, emit_json, progress, say
from preheat.config import Config, environ
from preheat.errors import PreheatError
from preheat.program import Program

__all__ = ["KERNELS", "command"]

KERNELS = Path(__file__).with_name("demo_kernels")

# What the fresh process runs: the public API, and a look at which libraries that loaded.
_AGAIN = """\
import hashlib, json, pathlib, sys, time
import preheat

builder, rows = preheat.default_builder(), {}
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.cu")):
    started = time.perf_counter()
    artifact = builder.build(preheat.Program.from_file(file), sys.argv[2])
    seconds = time.perf_counter() - started
    rows[file.name] = {"seconds": seconds, "cubin": hashlib.sha256(artifact.cubin).hexdigest()}
compiles = builder.stats()["process"].get("compiles", 0)
libraries = open("/proc/self/maps").read()
print(json.dumps({"kernels": rows, "compiles": compiles, "nvrtc": "libnvrtc" in libraries}))
"""


@click.command()
@click.option("--arch", default="sm_90", show_default=True, help="Architecture to compile for.")
@click.option("--json", "as_json", is_flag=True, help="Print the times as JSON.")
def command(arch: str, as_json: bool) -> None:
    """Compile a dozen kernels into an empty cache, then find them again in a fresh process.

    Needs no GPU, uses a cache of its own and leaves yours alone.
    """
    with tempfile.TemporaryDirectory(prefix="preheat-demo-") as place:
        cache = Path(place)
        cold_started = time.perf_counter()
        cold = _compile_all(cache, arch)
        cold_total = time.perf_counter() - cold_started
        say(f"Compiled {len(cold)} programs in {duration(cold_total)}; now again in a fresh process")
        hot_started = time.perf_counter()
        hot = _again(cache, arch)
        hot_total = time.perf_counter() - hot_started
    for name, row in cold.items():
        if hot["kernels"][name]["cubin"] != row["cubin"]:
            raise PreheatError(f"{name}: the cached code differs from the compiled one")
    result = {
        "arch": arch,
        "cold_seconds": cold_total,
        "hot_seconds": hot_total,
        "hot_lookup_seconds": sum(row["seconds"] for row in hot["kernels"].values()),
        "hot_compiles": hot["compiles"],
        "hot_loaded_compiler": hot["nvrtc"],
        "kernels": {
            name: {"cold_seconds": row["seconds"], "hot_seconds": hot["kernels"][name]["seconds"]}
            for name, row in cold.items()
        },
    }
    if as_json:
        emit_json(result)
    else:
        for line in _table(result):
            data(line)


def _compile_all(cache: Path, arch: str) -> dict[str, dict[str, Any]]:
    files = sorted(KERNELS.glob("*.cu"))
    builder = Builder.open(Config.from_env(_settings(cache)))
    rows: dict[str, dict[str, Any]] = {}
    threads = ThreadPoolExecutor(os.cpu_count())
    with progress(f"compiling for {arch}", len(files)) as bar:
        jobs = [threads.submit(_timed, builder, file, arch) for file in files]
        for file, job in zip(files, jobs, strict=True):
            rows[file.name] = job.result()
            bar.step(file.name)
    builder.close()
    return rows


def _timed(builder: Builder, file: Path, arch: str) -> dict[str, Any]:
    started = time.perf_counter()
    artifact = builder.build(Program.from_file(file), arch)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cubin": hashlib.sha256(artifact.cubin).hexdigest()}


def _again(cache: Path, arch: str) -> dict[str, Any]:
    path = os.pathsep.join(place for place in sys.path if place)
    env = {**environ(), **_settings(cache), "PYTHONPATH": path}
    command = [sys.executable, "-c", _AGAIN, str(KERNELS), arch]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    if ran.returncode:
        raise PreheatError(f"the second process failed\n{ran.stderr.strip()}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _table(result: dict[str, Any]) -> Iterator[str]:
    rows = [("PROGRAM", "COLD", "HOT", "")]
    for name, row in result["kernels"].items():
        cold, hot = row["cold_seconds"], row["hot_seconds"]
        rows.append((name, duration(cold), duration(hot), f"{cold / hot:,.0f} x"))
    cold, hot = result["cold_seconds"], result["hot_seconds"]
    rows.append(("all, process included", duration(cold), duration(hot), f"{cold / hot:,.0f} x"))
    yield from columns(rows, right=(1, 2, 3))
    if not result["hot_compiles"] and not result["hot_loaded_compiler"]:
        yield "\nThe fresh process loaded no compiler; every cubin is byte for byte the compiled one."


def _settings(cache: Path) -> dict[str, str]:
    return {"PREHEAT_CACHE_DIR": str(cache / "cache"), "PREHEAT_LOCK_DIR": str(cache / "locks")}
