"""Processes that run Numba-CUDA on the CPU driver, or that have no driver."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preheat.driver.library import LIBRARY
from preheat.driver.reports import read_report
from tests.processes import SOURCE, start_process, wait_for_exit

__all__ = ["HERE", "PRELUDE", "Ran", "Started", "World"]

HERE = Path(__file__).parent

#: The beginning of an application that uses the adapter, and prints what it counted in the end. The
#: calls of NVVM are counted as well, because each compile needs one.
PRELUDE = """\
import atexit, json, os, warnings
warnings.simplefilter("ignore")  # The grids are small, about which Numba warns.
import preheat, preheat.adapters
preheat.adapters.install("numba")
import numpy as np
from numba import cuda
from numba.cuda.cudadrv import nvvm
nvvm_calls = []
def counted_compile(*arguments, stock=nvvm.compile_ir, **options):
    nvvm_calls.append(None)
    return stock(*arguments, **options)
nvvm.compile_ir = counted_compile
uncached = []
events = preheat.default_builder().events
events.subscribe(lambda _, fields: uncached.append(fields["reason"]), "uncached")
damaged = []
events.subscribe(lambda _, fields: damaged.append(fields["reason"]), "damaged")
import kernels as k

def report():
    stats = preheat.default_builder().stats()["process"]
    told = {"stats": stats, "nvvm": len(nvvm_calls), "uncached": uncached, "damaged": damaged}
    told["x"] = x.copy_to_host().tolist()
    print(json.dumps(told))

atexit.register(report)
x = cuda.to_device(np.ones(32, np.float32))
"""


class Ran(NamedTuple):
    """What a process came to: its output, and how many kernels the driver has executed."""

    code: int
    out: str
    err: str
    launches: int

    @property
    def told(self) -> dict[str, Any]:
        """What `PRELUDE` prints in the end."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def stats(self) -> dict[str, float]:
        """The counters of preheat."""
        found: dict[str, float] = self.told["stats"]
        return found

    @property
    def compiles(self) -> float:
        """How many kernels were compiled; the calls of NVVM must agree."""
        counted = self.stats.get("compiles", 0)
        # Debug builds and link-time optimization call NVVM more than once for a kernel.
        assert bool(self.told["nvvm"]) == bool(counted or self.told["uncached"])
        return counted

    @property
    def hits(self) -> float:
        return sum(value for name, value in self.stats.items() if name.startswith("hits."))

    @property
    def result(self) -> list[float]:
        """The array of `PRELUDE` in the end."""
        found: list[float] = self.told["x"]
        return found

    def ok(self) -> Ran:
        """Return this, and fail unless the process exited with status 0."""
        assert self.code == 0, self.err + self.out
        return self


class World:
    """Directories of one test, and the processes in them."""

    def __init__(self, root: Path, app: Path | None = None) -> None:
        self.root = root
        self.app = app or root / "app"
        self.cache = root / "cache"
        root.mkdir()
        if app is None:
            shutil.copytree(HERE / "app", self.app, ignore=shutil.ignore_patterns("__pycache__"))
        self._runs = 0

    def sibling(self, name: str) -> World:
        """Return a world with the same application and other caches."""
        return World(self.root / name, self.app)

    def edit(self, old: str, new: str) -> None:
        """Replace a text in the module of kernels."""
        file = self.app / "kernels.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def environment(
        self, *, cc: int | None = 90, sealed: Path | str | None = None, env: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the environment of a process, with no driver where `cc` is None."""
        self._runs += 1
        found = importlib.util.find_spec("numba")
        assert found is not None
        assert found.origin is not None
        path = [str(SOURCE), str(self.app), str(Path(found.origin).parents[1])]
        values = {
            "PREHEAT_CACHE_DIR": str(self.cache),
            "PREHEAT_LOCK_DIR": str(self.root / "locks"),
            "PREHEAT_EMULATE_REPORT": str(self.root / f"report-{self._runs}"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
        }
        Path(values["PREHEAT_EMULATE_REPORT"]).mkdir()
        if cc is not None:
            values |= {"LD_PRELOAD": str(LIBRARY), "PREHEAT_EMULATE_ARCH": f"sm_{cc}"}
            values["PREHEAT_EMULATE_BESIDE_GPU"] = "1"
            # The driver counts what was executed: here at once, and otherwise when a program waits.
            values["PREHEAT_EMULATE_SCHEDULE"] = "off"
        if sealed is not None:
            values |= {"PREHEAT_SEALED": "1", "PREHEAT_BUNDLE": str(sealed)}
        return values | {"PYTHONPATH": os.pathsep.join(path)} | dict(env)

    def start(self, *words: str, **more: Any) -> Started:
        """Start Python with these arguments."""
        env = {name: more.pop(name) for name in list(more) if name.isupper()}
        values = self.environment(env=env, **more)
        process = start_process([sys.executable, *words], env=values, cwd=self.root)
        return Started(process, Path(values["PREHEAT_EMULATE_REPORT"]))

    def python(self, *words: str, **more: Any) -> Ran:
        """Run Python with these arguments."""
        return self.start(*words, **more).end()

    def start_app(self, code: str, **more: Any) -> Started:
        """Start an application that begins with `PRELUDE`."""
        file = self.root / f"program_{zlib.crc32(code.encode())}.py"
        if not file.exists():  # Another process may be reading it.
            file.write_text(PRELUDE + code)
        return self.start(str(file), **more)

    def attempt(self, code: str, **more: Any) -> Ran:
        """Run an application that begins with `PRELUDE`."""
        return self.start_app(code, **more).end()

    def run(self, code: str, **more: Any) -> Ran:
        """Run an application that begins with `PRELUDE`, and expect success."""
        return self.attempt(code, **more).ok()

    def preheat(self, *words: str, cc: int | None = None, **more: Any) -> Ran:
        """Run a command of preheat, by default without a driver."""
        return self.python("-m", "preheat", *words, cc=cc, **more)

    def record(self, *words: str, cc: int = 90, **more: Any) -> Path:
        """Record the application, or Python with these arguments; return the manifest."""
        manifest = self.root / "kernels.toml"
        command = [sys.executable, *(words or (str(self.app / "app.py"),))]
        self.preheat("record", "-o", str(manifest), "--", *command, cc=cc, **more).ok()
        return manifest


class Started(NamedTuple):
    """A process that runs."""

    process: subprocess.Popen[str]
    report: Path

    def end(self) -> Ran:
        """Wait until it ends."""
        out, err = wait_for_exit(self.process)
        return Ran(self.process.returncode, out, err, read_report(self.report).launches)
