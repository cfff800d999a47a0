"""Shows what audits do on a machine with a GPU, in a few files that can be kept.

    python -m tests.audit.prove DIRECTORY [--seconds 480] [--only reports,tests,cost]

It has three steps, each of which runs whether or not the others succeed:

  reports  audits the applications of the tests: reports.txt, as users see them, and reports.json
  tests    runs the tests of audits that need a GPU: tests.log, and the verdict of the mixed application
  cost     measures what an audit costs, as long as there is time: cost.log and bench_audit.json

The exit status is 0 if all steps succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from preheat.audit.library import require_library
from tests.processes import import_path

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
APPLICATIONS = Path(__file__).parent / "applications"
PYTHON = Path(sys.executable)
#: The applications in the order in which they run. The caches of the second run of one are warm.
RUNS = (
    "torch_app.py",
    "triton_app.py",
    "triton_app.py",
    "ptx_app.py",
    "cupy_app.py",
    "cupy_app.py",
    "preheat_app.py",
)
_STEPS = ("reports", "tests", "cost")
_PACKAGES = ("torch", "triton", "cupy-cuda13x", "cuda-core", "cuda-bindings", "nvidia-cuda-cupti")
_ONE_REPORT = 90.0  # seconds
_ALL_TESTS = 300.0
_LEAST_COST = 60.0  # seconds that are left to the last step


class Proof:
    """Runs the steps, and writes their files to a directory. No step takes more time than is left."""

    def __init__(self, directory: Path, seconds: float, env: Mapping[str, str]) -> None:
        self.directory = directory
        self._until = time.monotonic() + seconds
        self._env = {**env, "PYTHONPATH": import_path(), "PREHEAT_PROOF": str(directory)}

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(1.0, self._until - time.monotonic())

    def reports(self, names: Sequence[str] = RUNS) -> bool:
        """Audit each application, and seal the one of preheat."""
        texts, kept, good = [], [], True
        with tempfile.TemporaryDirectory() as place:
            root = Path(place)
            for number, name in enumerate(names):
                shutil.copy(APPLICATIONS / name, root)
                events = root / f"events-{number}"
                words = ["--report", "r.json", "--keep", events.name, "--", PYTHON.name, name]
                ran = self._preheat(root, "audit", *words)
                report, log = _take(root / "r.json"), events / "debug.log"
                good = good and ran.returncode == 0 and bool(report.get("cupti"))
                texts.append(f"$ preheat audit -- {PYTHON.name} {name}\n{ran.stdout}{ran.stderr}")
                row = {"command": f"audit {name}", "status": ran.returncode, "report": report}
                kept.append({**row, "debug": log.read_text() if log.exists() else ""})
            if "preheat_app.py" in names:
                ran = self._sealed(root)
                verdict = _take(root / "v.json")
                good = good and ran.returncode == 0 and bool(verdict.get("accounted"))
                texts.append(f"$ preheat run --sealed --verdict v.json …\n{ran.stdout}{ran.stderr}")
                kept.append({"command": "run --sealed", "status": ran.returncode, "verdict": verdict})
        (self.directory / "reports.txt").write_text("\n".join(texts))
        rows = {"packages": _packages(), "runs": kept}
        (self.directory / "reports.json").write_text(json.dumps(rows, indent=1))
        return good

    def tests(self) -> bool:
        """Run the tests of audits on the GPU."""
        files = ["tests/audit/test_hardware.py", "tests/audit/test_layouts.py"]
        words = ["-m", "pytest", "-p", "no:cacheprovider", "--durations=10", *files]
        return self._logged(words, "tests.log", min(_ALL_TESTS, self.left() - _LEAST_COST))

    def cost(self) -> bool:
        """Measure the time of programs and launches, with and without an audit."""
        seconds, result = self.left() - 20, self.directory / "bench_audit.json"
        words = ["benchmarks/bench_audit.py", "--seconds", f"{seconds:.0f}", "--json", str(result)]
        return self._logged(words, "cost.log", self.left())

    def _logged(self, words: Sequence[str], log: str, seconds: float) -> bool:
        """Run Python, with its output in a file. At the time limit, all of its processes are ended."""
        with open(self.directory / log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=self._env, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(timeout=max(1.0, seconds)) == 0
            except subprocess.TimeoutExpired:
                file.write(b"\nthe time limit is over\n")
                return False
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _sealed(self, root: Path) -> subprocess.CompletedProcess[str]:
        app = [PYTHON.name, "preheat_app.py"]
        self._preheat(root, "record", "--", *app)
        self._preheat(root, "bake", "kernels.toml")
        words = ["run", "--bundle", "kernels.heat", "--sealed", "--empty-cache", "--verdict", "v.json"]
        return self._preheat(root, *words, "--", *app)

    def _preheat(self, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of preheat whose caches are in a directory of their own."""
        env = {
            **self._env,
            "HOME": str(root),
            "PREHEAT_CACHE_DIR": str(root / "preheat"),
            "TRITON_CACHE_DIR": str(root / "triton"),
            "CUPY_CACHE_DIR": str(root / "cupy"),
            "CUDA_CACHE_DISABLE": "1",
            "PREHEAT_AUDIT_DEBUG": "1",
            "PATH": f"{PYTHON.parent}{os.pathsep}{self._env['PATH']}",
        }
        command = [sys.executable, "-m", "preheat", *words]
        limit = min(_ONE_REPORT, self.left())
        try:
            return subprocess.run(
                command, cwd=root, env=env, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", "the time limit is over\n")


def _take(path: Path) -> dict[str, Any]:
    """Read and remove a file of JSON; return nothing if the command has not written it."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found


def _packages() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps, and print how each one ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--only", default=",".join(_STEPS))
    given = parser.parse_args(words)
    require_library()
    given.directory.mkdir(parents=True, exist_ok=True)
    proof = Proof(given.directory.resolve(), given.seconds, os.environ)
    failed = 0
    for step in given.only.split(","):
        started = time.monotonic()
        good = getattr(proof, step)()
        failed += not good
        took = f"{time.monotonic() - started:.0f} s"
        print(f"{step}: {'succeeded' if good else 'FAILED'} after {took}", flush=True)
    for name in ("reports.txt", "tests.log", "cost.log"):
        if (given.directory / name).exists():
            print(f"\n== {name}\n{(given.directory / name).read_text()[-3500:]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
