"""Shows what a commit does on a machine with a GPU, in parts that can be run one by one.

    python -m tests.prove_gpu DIRECTORY [--part NAME …] [--list]

Each part takes less than ten minutes. It writes NAME.log, and NAME.json with the commit, the date, the
version of the driver and the outcome. Without `--part`, those run that have not succeeded for this
commit. The exit status is 0 if every part that ran succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from preheat.driver.library import driver_environment
from tests.driver.statuses import differences
from tests.processes import import_path

__all__ = ["PARTS", "Part", "main", "missing"]

ROOT = Path(__file__).parents[1]
_SECONDS = 600.0  # of each part
_SUITES = {
    "tests-devices": ("tests/devices",),
    "tests-graph": ("tests/graph",),
    "tests-build": ("tests/toolchain", "tests/linking", "tests/build"),
    "tests-interop": ("tests/interop",),
    "tests-adapters": ("tests/adapters", "tests/ahead", "tests/tools", "tests/audit"),
    "tests-corpus": ("tests/corpus", "tests/programs", "tests/test_docs.py"),
    "tests-kernels": ("tests/kernels", "tests/lora"),
}
_BENCHMARKS = ("launch", "replay", "coldstart", "together", "kernels", "ops", "pool", "audit")
_STATUS_TESTS = ("tests/devices", "tests/graph")


class Part(NamedTuple):
    """One part: the arguments of Python, and changes of the environment."""

    arguments: tuple[str, ...]
    env: Mapping[str, str] = {}
    on_cpu_driver: bool = False


def _suite(*paths: str) -> Part:
    return Part(("-m", "pytest", "-q", "-m", "gpu or torch", *paths))


def _statuses(file: str, *, on_cpu_driver: bool) -> Part:
    options = ("-q", "-m", "gpu", "-p", "tests.driver.statuses", "--statuses", file)
    return Part(("-m", "pytest", *options, *_STATUS_TESTS), {"PREHEAT_NATIVE": "0"}, on_cpu_driver)


#: The parts in the order in which they run. OUT in an argument is the directory of the results.
PARTS: dict[str, Part] = {
    **{name: _suite(*paths) for name, paths in _SUITES.items()},
    "statuses-gpu": _statuses("OUT/statuses-gpu-calls.json", on_cpu_driver=False),
    "statuses-cpu": _statuses("OUT/statuses-cpu-calls.json", on_cpu_driver=True),
    "audit": Part(("-m", "tests.audit.prove", "OUT/audit")),
    **{
        f"bench-{name}": Part((f"benchmarks/bench_{name}.py", "--json", f"OUT/bench-{name}-rows.json"))
        for name in _BENCHMARKS
    },
}
COMPARISON = "statuses"  # the last part, which runs nothing


def facts() -> dict[str, str]:
    """Return what a result was made with."""
    from preheat.devices.cuda.device import driver_version, visible
    from preheat.errors import NoGpuError

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    try:
        gpu, version = visible()[0].model, driver_version()
    except (NoGpuError, IndexError):
        gpu, version = "none", "none"
    return {
        "commit": commit.stdout.strip() or os.environ.get("PREHEAT_COMMIT", "unknown"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "driver": version,
    }


def run_part(name: str, part: Part, out: Path, known: Mapping[str, str]) -> bool:
    """Run a part, write its files, and return whether it succeeded."""
    arguments = [argument.replace("OUT", str(out)) for argument in part.arguments]
    env = {**os.environ, "PYTHONPATH": import_path(), **part.env}
    if part.on_cpu_driver:
        env = driver_environment(env, beside_gpu=1)
    started = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
                timeout=_SECONDS,
            )
            outcome = "succeeded" if not done.returncode else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"longer than {_SECONDS:g} seconds"
    return _write(name, out, known, outcome, seconds=round(time.monotonic() - started, 1))


def compare(out: Path, known: Mapping[str, str]) -> bool:
    """Compare the statuses of the GPU with those of the CPU driver, and write the differences."""
    files = [out / f"statuses-{which}-calls.json" for which in ("gpu", "cpu")]
    if not all(file.is_file() for file in files):
        return _write(COMPARISON, out, known, "statuses-gpu and statuses-cpu have to run before it")
    lines = differences(*(json.loads(file.read_text()) for file in files))
    (out / f"{COMPARISON}.log").write_text("".join(f"{line}\n" for line in lines))
    outcome = f"{len(lines)} differences" if lines else "succeeded"
    return _write(COMPARISON, out, known, outcome)


def _write(name: str, out: Path, known: Mapping[str, str], outcome: str, **more: Any) -> bool:
    result = {**known, "outcome": outcome, **more}
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(f"{name}: {outcome}\n")
    sys.stdout.flush()
    return outcome == "succeeded"


def missing(out: Path, names: Sequence[str], commit: str) -> list[str]:
    """Return the parts that have not succeeded for a commit."""

    def succeeded(name: str) -> bool:
        file = out / f"{name}.json"
        if not file.is_file():
            return False
        result = json.loads(file.read_text())
        return (result["outcome"], result["commit"]) == ("succeeded", commit)

    return [name for name in names if not succeeded(name)]


def main(words: Sequence[str] | None = None, know: Callable[[], dict[str, str]] = facts) -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove_gpu", description=__doc__)
    names = [*PARTS, COMPARISON]
    parser.add_argument("directory", type=Path, help="where the results are written")
    parser.add_argument("--part", action="append", choices=names, help="run this part alone")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    args = parser.parse_args(words)
    if args.list:
        sys.stdout.write("\n".join(names) + "\n")
        return 0
    out = args.directory.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = know()
    chosen = args.part or missing(out, names, known["commit"])
    succeeded = [
        compare(out, known) if name == COMPARISON else run_part(name, PARTS[name], out, known)
        for name in chosen
    ]
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
