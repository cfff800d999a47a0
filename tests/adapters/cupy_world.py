"""Processes that run CuPy's compiler up to the load of a module, with a stand-in for the device.

CuPy does not run on the CPU driver, because it contains NVIDIA's CUDA runtime.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import SOURCE, start_process, wait_for_exit

__all__ = ["STANDIN", "CupyWorld", "Ran"]

#: A module of the application: it stands for the device, and prints in the end what was loaded.
STANDIN = """\
import atexit, hashlib, json, os
from cupy._core import core
from cupy.cuda import compiler, device, function

loaded = []
capability = os.environ["STANDIN_CC"]


class Module(function.Module):
    def load(self, code):
        loaded.append([hashlib.sha256(code).hexdigest(), len(code), code[:4].hex()])


class Functions:
    Module = Module


class Device:
    compute_capability = capability


compiler.function = Functions
device.Device = Device
compiler._get_arch = lambda: capability
stock = compiler._get_arch_for_options_for_nvrtc
compiler._get_arch_for_options_for_nvrtc = getattr(stock, "__wrapped__", stock)
if hasattr(compiler, "_is_function_enum_supported"):  # CuPy 14.1 asks the driver.
    compiler._is_function_enum_supported = lambda: True


def compile(source, *options, **more):
    return core.compile_with_cache(source, options, prepend_cupy_headers=False, **more)


def report():
    import preheat

    maps = open("/proc/self/maps").read()
    stats = preheat.default_builder().stats()["process"]
    print(json.dumps({"stats": stats, "loaded": loaded, "nvrtc": "libnvrtc.so" in maps}))


atexit.register(report)
"""


class Ran(NamedTuple):
    """What a process came to."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """What the stand-in printed: counters, the code that was loaded, whether NVRTC was."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def compiles(self) -> float:
        number: float = self.report["stats"].get("compiles", 0)
        return number

    def ok(self) -> Ran:
        """Return this, and fail unless the process exited with status 0."""
        assert self.code == 0, self.err + self.out
        return self


class CupyWorld:
    """Directories of one test, and the processes in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        root.mkdir(exist_ok=True)
        (root / "standin.py").write_text(STANDIN)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process."""
        found = importlib.util.find_spec("cupy")
        assert found is not None
        assert found.origin is not None
        path = [str(SOURCE), str(self.root), str(Path(found.origin).parents[1])]
        return {
            "PREHEAT_CACHE_DIR": str(self.cache),
            "PREHEAT_LOCK_DIR": str(self.root / "locks"),
            "CUPY_CACHE_DIR": str(self.root / "cupy-cache"),
            "STANDIN_CC": "90",
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
            **env,
        }

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start Python with these arguments."""
        return start_process([sys.executable, *words], env=self.environment(env), cwd=self.root)

    def python(self, *words: str, **env: str) -> Ran:
        """Run Python with these arguments."""
        return self.ended(self.start(*words, **env))

    def ended(self, process: subprocess.Popen[str]) -> Ran:
        """Wait until a process ends."""
        out, err = wait_for_exit(process)
        return Ran(process.returncode, out, err)

    def program(self, code: str, *, adapter: bool = True) -> Path:
        """Write an application, which uses the adapter by itself or where a command installs it."""
        install = 'import preheat.adapters\npreheat.adapters.install("cupy")\n' if adapter else ""
        file = self.root / "program.py"
        file.write_text(f"{install}import cupy\nfrom standin import *\n{code}")
        return file

    def attempt(self, code: str, **env: str) -> Ran:
        """Run an application with the adapter."""
        return self.python(str(self.program(code)), **env)

    def run(self, code: str, **env: str) -> Ran:
        """Run an application with the adapter, and expect success."""
        return self.attempt(code, **env).ok()

    def preheat(self, *words: str, **env: str) -> Ran:
        """Run a command of preheat."""
        return self.python("-m", "preheat", *words, **env)
