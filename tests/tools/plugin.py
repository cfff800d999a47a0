"""Runs pytest with the plugin of preheat in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

__all__ = ["load_plugin", "run_pytest"]


def load_plugin() -> dict[str, str]:
    """Return what the environment needs so that pytest loads the plugin.

    An installation that is older than the entry point does not load it.
    """
    found = any(each.value == "preheat.pytest_plugin" for each in entry_points(group="pytest11"))
    return {} if found else {"PYTEST_ADDOPTS": "-p preheat.pytest_plugin"}


def run_pytest(place: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a directory, with its own settings and a cache that all runs of a test share.

    Plugins of other packages take as long to load as the rest of a short run. That of xdist is loaded
    for its option `-n`, and the others never.
    """
    values = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    values |= {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **env,
    }
    plugins = ["-p", "preheat.pytest_plugin"]
    if any(word.startswith("-n") for word in words):
        plugins += ["-p", "xdist"]
    own = ("-p", "no:cacheprovider", f"--rootdir={place}")
    command = [sys.executable, "-m", "pytest", *own, *plugins, *words]
    return subprocess.run(command, cwd=place, env=values, capture_output=True, text=True)
