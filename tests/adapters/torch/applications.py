"""Processes that compile kernels by `torch.cuda._compile_kernel`, without a GPU.

Code for a GPU cannot be loaded there, so the function that loads it prints it instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import start_process, wait_for_exit

__all__ = ["APPLICATION", "Application", "Ran", "import_path"]

#: Compiles a plain kernel and an instance of a template that includes a header of CUDA.
APPLICATION = """\
import hashlib, json, os, sys
import torch
from torch.cuda import _utils

def load(code, names):
    digest = hashlib.sha256(code).hexdigest()
    print(json.dumps({"name": names[0], "code": digest, "is": code[:4].hex()}))
    return dict.fromkeys(names, "kernel")

_utils._cuda_load_module = load
capability = os.environ["CAPABILITY"]
SCALE = r'''
extern "C" __global__ void scale(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}
'''
ONE = r'''
#include <cuda_fp16.h>
template <class T> __global__ void one(T* x) { x[threadIdx.x] = __float2half(1.0f); }
'''
if __name__ == "__main__":
    torch.cuda._compile_kernel(SCALE, "scale", compute_capability=capability)
    torch.cuda._compile_kernel(ONE, "one<__half>", capability, nvcc_options=["-lineinfo"])
    if "preheat" in sys.modules:
        import preheat
        print(json.dumps(preheat.default_builder().stats()["process"]))
"""


class Ran(NamedTuple):
    """The end of a process: its status, its output, and its errors."""

    code: int
    out: str
    err: str

    @property
    def kernels(self) -> list[dict[str, str]]:
        """What was given to the driver, in the order of the calls."""
        return [json.loads(line) for line in self.out.splitlines()[:-1]]

    @property
    def stats(self) -> dict[str, float]:
        """The counters of the process."""
        found: dict[str, float] = json.loads(self.out.splitlines()[-1])
        return found

    def ok(self) -> Ran:
        """Return this, and fail unless the process exited with status 0."""
        assert self.code == 0, self.err + self.out
        return self


class Application:
    """The application in a directory of its own, with a cache of its own."""

    def __init__(self, root: Path, cache: str = "cache") -> None:
        self.root = root
        self.cache = root / cache
        root.mkdir(exist_ok=True)
        (root / "app.py").write_text(APPLICATION)

    def start(self, *words: str, capability: int = 90, **env: str) -> subprocess.Popen[str]:
        """Start Python with these arguments."""
        values = {
            "PYTHONPATH": import_path(),
            "PREHEAT_CACHE_DIR": str(self.cache),
            "PREHEAT_LOCK_DIR": str(self.root / "locks"),
            "CAPABILITY": str(capability),
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "NO_COLOR": "1",
        }
        return start_process([sys.executable, *words], env={**values, **env}, cwd=self.root)

    def python(self, *words: str, **more: Any) -> Ran:
        """Run Python with these arguments."""
        return end(self.start(*words, **more))

    def preheat(self, *words: str, **more: Any) -> Ran:
        """Run a command of preheat."""
        return self.python("-m", "preheat", *words, **more)

    def other_cache(self, name: str) -> Application:
        """Return the application with a cache that is empty."""
        return Application(self.root, name)


def import_path() -> str:
    """Return the path by which another process finds preheat and torch as this one does."""
    return os.pathsep.join(os.path.abspath(place) for place in sys.path if place)


def end(process: subprocess.Popen[str]) -> Ran:
    """Wait for a process, and return its end."""
    out, err = wait_for_exit(process)
    return Ran(process.returncode, out, err)
