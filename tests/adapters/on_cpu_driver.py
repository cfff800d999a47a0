"""Applications of other libraries on the CPU driver: recorded, baked and run sealed, with results."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import SOURCE, start_process, wait_for_exit

__all__ = ["Computed", "Done"]


class Done(NamedTuple):
    """What a process printed."""

    out: str
    err: str

    @property
    def told(self) -> Any:
        """The JSON value in the last line of the output."""
        return json.loads(self.out.splitlines()[-1])


class Computed:
    """An application in a directory of a test. Every process has empty caches."""

    def __init__(self, root: Path, app: Path, paths: list[Path], env: Mapping[str, str]) -> None:
        self.root = root
        self.app = root / "app"
        self._path = os.pathsep.join(map(str, [SOURCE, self.app, *paths]))
        self._env = env
        self._runs = 0
        shutil.copytree(app, self.app, ignore=shutil.ignore_patterns("__pycache__"))

    def preheat(self, *words: str, env: Mapping[str, str] | None = None) -> Done:
        """Run a command of preheat, and expect success."""
        self._runs += 1
        place = self.root / f"caches-{self._runs}"
        values = {
            "HOME": str(place),
            "PREHEAT_LOCK_DIR": str(place / "locks"),
            "PREHEAT_EMULATE_BESIDE_GPU": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": self._path,
            "NO_COLOR": "1",
            **self._env,
            **(env or {}),
        }
        process = start_process([sys.executable, "-m", "preheat", *words], env=values, cwd=self.root)
        out, err = wait_for_exit(process)
        assert process.returncode == 0, err + out
        return Done(out, err)

    def emulate(self, *words: str, arch: str = "sm_90") -> Done:
        """Run a command of preheat on the CPU driver."""
        return self.preheat("emulate", "--arch", arch, "--", sys.executable, "-m", "preheat", *words)

    def record(self) -> Path:
        """Record the application on the CPU driver, and return the manifest."""
        manifest = self.root / "kernels.toml"
        self.emulate("record", "-o", str(manifest), "--", *self.command)
        return manifest

    def bake(self, *archs: str) -> Path:
        """Record the application on the CPU driver, and bake it as for production, without a driver."""
        manifest, bundle = self.record(), self.root / "kernels.heat"
        chosen = [word for arch in archs for word in ("--arch", arch)]
        self.preheat("bake", str(manifest), *chosen, "-o", str(bundle))
        return bundle

    def run_sealed(self, bundle: Path, arch: str) -> Done:
        """Run the application with a bundle; anything that it would have to compile is an error."""
        words = ("run", "--bundle", str(bundle), "--sealed", "error", "--", *self.command)
        return self.emulate(*words, arch=arch)

    @property
    def command(self) -> tuple[str, str]:
        """The command of the application."""
        return sys.executable, str(self.app / "app.py")
