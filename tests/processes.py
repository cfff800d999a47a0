"""Real processes for the tests that need them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def start(code: str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A Python process running `code` in a session of its own, output piped."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120.0) -> str:
    """Its output, once it ended well; its errors when it did not."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out
