"""`torch.compile` for the CPU: an audit, a recording and a sealed run say the same about it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a CPU build of torch is installed by `make test-torch`")

from preheat.ahead.manifest import Manifest
from preheat.audit.library import LIBRARY
from tests.processes import import_path, start_process, wait_for_exit

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not LIBRARY.is_file(), reason="it needs g++ and the audit library"
)

PROGRAM = """\
import torch
double = torch.compile(lambda x: torch.sin(x) * 2)
print(double(torch.ones(8)).shape)
"""
SAID = "preheat has no adapter for what torch compiles with g++"


def run(place: Path, *words: str) -> tuple[int, str]:
    """Run a command of preheat with empty caches. Return its exit status and its messages."""
    script = place / "app.py"
    script.write_text(PROGRAM)
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": import_path(),
        "HOME": str(place),
        "TORCHINDUCTOR_CACHE_DIR": str(place / words[0]),
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "NO_COLOR": "1",
    }
    command = [sys.executable, "-m", "preheat", *words, "--", sys.executable, str(script)]
    process = start_process(command, env=env, cwd=place)
    _, err = wait_for_exit(process)
    return process.returncode, err


def test_three_commands_say_the_same_once(tmp_path: Path) -> None:
    code, err = run(tmp_path, "audit")
    assert (code, err.count(SAID)) == (0, 1), err
    code, err = run(tmp_path, "record")
    assert (code, err.count(SAID)) == (0, 1), err
    assert "not recorded: what torch compiled with g++ (" in err
    assert "app.py:3" in err
    assert "neither preheat.device()" not in err
    (row,) = Manifest.read(tmp_path / "kernels.toml").unrecorded
    assert (row.library, row.compiler) == ("torch", "g++")
    code, err = run(tmp_path, "run", "--sealed")
    assert (code, err.count(SAID)) == (1, 1), err
    assert "SealedError: app.py:3: inductor graph of " in err
    assert "bake" not in err
