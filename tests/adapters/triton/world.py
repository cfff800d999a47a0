"""Processes that run Triton up to the launch on a stand-in driver, or that have no driver at all."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import SOURCE, start_process, wait_for_exit

__all__ = ["STANDIN", "Ran", "World", "triton_version"]

STANDIN = Path(__file__).parent / "standin"

#: The beginning of an application that uses the adapter, and prints what it counted in the end.
PRELUDE = """\
import atexit, json, watch
import preheat, preheat.adapters
preheat.adapters.install("triton")
import triton
import kernels as k
from tensors import Tensor as T

def counted():
    stats = preheat.default_builder().stats()["process"]
    print(json.dumps({"stats": stats}))

atexit.register(counted)
x, y, o = T("fp32"), T("fp32"), T("fp32")
"""


def triton_version() -> tuple[int, int]:
    """Return the version of Triton, without importing it."""
    from importlib.metadata import version

    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


class Ran(NamedTuple):
    """What a process came to: its output, the launches that the driver got, programs it started."""

    code: int
    out: str
    err: str
    log: list[str]
    started: list[str]

    @property
    def stats(self) -> dict[str, float]:
        """The counters that `PRELUDE` prints."""
        found: dict[str, float] = json.loads(self.out.splitlines()[-1])["stats"]
        return found

    @property
    def misses(self) -> float:
        return sum(value for name, value in self.stats.items() if name.startswith("misses."))

    @property
    def compilers(self) -> list[str]:
        """The programs that it started, but for those that find a library and tell its format."""
        names = [os.path.basename(line.split()[0]) for line in self.started]
        return [name for name in names if name not in ("ldconfig", "file")]

    @property
    def launches(self) -> list[list[str]]:
        """The name and the parameters of each launch, as `SIZE:HEX`."""
        return [line.split()[2:] for line in self.log if line.split()[1] == "launch"]

    def ok(self) -> Ran:
        """Return this, and fail unless the process exited with status 0."""
        assert self.code == 0, self.err + self.out
        return self


class World:
    """Directories of one test, and the processes in them. `driver` holds the stand-in driver."""

    def __init__(self, root: Path, driver: Path) -> None:
        self.root = root
        self.driver = driver
        self.app = root / "app"
        self.cache = root / "cache"
        if not self.app.exists():
            root.mkdir(exist_ok=True)
            shutil.copytree(STANDIN / "app", self.app, ignore=shutil.ignore_patterns("__pycache__"))
        self._runs = 0

    def sibling(self, name: str) -> World:
        """Return a world with the same application and other caches."""
        other = World.__new__(World)
        other.root, other.driver, other.app = self.root / name, self.driver, self.app
        other.root.mkdir()
        other.cache, other._runs = other.root / "cache", 0
        return other

    def environment(
        self, *, cc: int | None = 90, sealed: Path | str | None = None, env: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the environment of a process, with no driver where `cc` is None."""
        self._runs += 1
        path = [str(SOURCE), str(self.app)]
        found = importlib.util.find_spec("triton")
        assert found is not None
        assert found.origin is not None
        path.append(str(Path(found.origin).parents[1]))
        values = {
            "PREHEAT_CACHE_DIR": str(self.cache),
            "PREHEAT_LOCK_DIR": str(self.root / "locks"),
            "TRITON_CACHE_DIR": str(self.root / f"triton-{self._runs}"),
            "TRITON_DEFAULT_FP_FUSION": "1",  # Triton 3.9 warns where it is not set.
            "STARTED": str(self.root / f"started-{self._runs}"),
            "STANDIN_LOG": str(self.root / f"log-{self._runs}"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
        }
        if cc is not None:
            values |= {"STANDIN_CC": str(cc), "LD_LIBRARY_PATH": str(self.driver)}
            values["TRITON_LIBCUDA_PATH"] = str(self.driver)
            if triton_version() <= (3, 7):  # It asks torch about the GPU.
                path.append(str(STANDIN / "fake_torch"))
        if sealed is not None:
            values |= {"PREHEAT_SEALED": "1", "PREHEAT_BUNDLE": str(sealed)}
        return values | {"PYTHONPATH": os.pathsep.join(path)} | dict(env)

    def start(
        self, *words: str, cc: int | None = 90, sealed: Path | str | None = None, **env: str
    ) -> Started:
        """Start Python with these arguments."""
        values = self.environment(cc=cc, sealed=sealed, env=env)
        process = start_process([sys.executable, *words], env=values, cwd=self.root)
        return Started(process, Path(values["STANDIN_LOG"]), Path(values["STARTED"]))

    def python(self, *words: str, **more: Any) -> Ran:
        """Run Python with these arguments."""
        return self.start(*words, **more).end()

    def run(self, code: str, **more: Any) -> Ran:
        """Run an application that begins with `PRELUDE`, and expect success."""
        return self.attempt(code, **more).ok()

    def attempt(self, code: str, **more: Any) -> Ran:
        """Run an application that begins with `PRELUDE`."""
        file = self.root / f"program{self._runs}.py"
        file.write_text(PRELUDE + code)
        return self.python(str(file), **more)

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
    log: Path
    started: Path

    def end(self) -> Ran:
        """Wait until it ends."""
        out, err = wait_for_exit(self.process)
        return Ran(self.process.returncode, out, err, _lines(self.log), _lines(self.started))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
