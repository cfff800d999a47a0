"""Runs of the application with several compilers: stock, recorded, baked without a GPU, and sealed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["APPLICATION", "MixedApplication"]

APPLICATION = Path(__file__).with_name("app.py")
_SOURCE = Path(__file__).parents[3] / "src"
_LIMIT = 500.0  # seconds, after which a run has failed


class MixedApplication:
    """The application, its manifest and its bundle. Each set of caches is a directory of its own."""

    def __init__(self, root: Path, *parts: str) -> None:
        self.root = root
        self.parts = parts
        self.manifest = root / "kernels.toml"
        self.bundle = root / "kernels.heat"

    def environment(self, caches: str, **more: str) -> dict[str, str]:
        """Return an environment in which every cache of every library is below one directory."""
        place = self.root / caches
        place.mkdir(parents=True, exist_ok=True)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_SOURCE), os.environ.get("PYTHONPATH")])),
            "HOME": str(place),
            "TMPDIR": str(place),
            "PREHEAT_CACHE_DIR": str(place / "preheat"),
            "TRITON_CACHE_DIR": str(place / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
            "CUPY_CACHE_DIR": str(place / "cupy"),
            "NUMBA_CACHE_DIR": str(place / "numba"),
            "CUDA_CACHE_PATH": str(place / "driver"),
            **more,
        }

    def stock(self, caches: str) -> dict[str, Any]:
        """Run the application without preheat's adapters."""
        return self._application([], self.environment(caches))

    def record(self) -> dict[str, Any]:
        """Record the application, with empty caches."""
        words = ["record", "-o", str(self.manifest), "--"]
        return self._application(_preheat(words), self.environment("recorded"))

    def bake(self, arch: str) -> str:
        """Bake the bundle with no visible GPU, and return the messages."""
        words = ["bake", str(self.manifest), "--arch", arch, "-o", str(self.bundle)]
        return self._run(_preheat(words), self.environment("recorded", CUDA_VISIBLE_DEVICES="")).stderr

    def check(self, arch: str) -> str:
        """Check the bundle against the manifest, with empty caches and no visible GPU."""
        words = ["check", str(self.manifest), "--arch", arch, "--bundle", str(self.bundle)]
        return self._run(_preheat(words), self.environment("checked", CUDA_VISIBLE_DEVICES="")).stdout

    def sealed(self, caches: str) -> dict[str, Any]:
        """Run the application sealed, from the bundle alone."""
        words = ["run", "--bundle", str(self.bundle), "--sealed", "--"]
        return self._application(_preheat(words), self.environment(caches))

    def _application(self, before: list[str], env: Mapping[str, str]) -> dict[str, Any]:
        ran = self._run([*before, sys.executable, str(APPLICATION), *self.parts], env)
        report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        report["messages"] = ran.stderr
        return report

    def _run(self, words: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_LIMIT)
        assert ran.returncode == 0, ran.stderr + ran.stdout
        return ran


def _preheat(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "preheat", *words]
