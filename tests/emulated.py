"""Runs a program as `preheat emulate` does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY
from tests.processes import TIMEOUT_SECONDS

__all__ = ["emulated", "needs_driver"]

needs_driver = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")


def emulated(home: Path, program: Path, *options: str) -> tuple[str, str]:
    """Run a program with an empty home; return its output, and what preheat says of it in the end."""
    env = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
    }
    words = [sys.executable, "-m", "preheat", "emulate", "--beside-gpu", *options]
    done = subprocess.run(
        [*words, "--", sys.executable, str(program)],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip(), done.stderr.splitlines()[-1].removeprefix("preheat: ")
