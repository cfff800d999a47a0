"""The page for those who come from CuPy: what it shows runs on the emulator, and on a GPU with CuPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import SOURCE
from tests.stories import blocks, run_page
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "guides" / "coming-from" / "cupy.md"
PROGRAMS = {block.title: block.text for block in blocks(PAGE) if block.kind == "python"}
# Arrays of NumPy take the place of CuPy's where there is no GPU. The emulator uses them as memory.
STANDIN = "from numpy import arange, float32, ones, zeros\n"


def environment(tmp_path: Path, *modules: Path) -> dict[str, str]:
    """Return an environment with a cache of its own, and with the commands of the page."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name, words in (("preheat", "-m preheat"), ("python", "")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        script.chmod(0o755)
    return {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, [*modules, SOURCE, *filter(None, sys.path)])),
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
    }


def test_the_page_does_what_it_shows_on_the_emulator(tmp_path: Path) -> None:
    standin, place = tmp_path / "standin", tmp_path / "work"
    standin.mkdir()
    place.mkdir()
    (standin / "cupy.py").write_text(STANDIN)
    env = environment(tmp_path, standin)
    env |= {
        "PREHEAT_DEVICE": "emulator[host_arrays]",
        "PREHEAT_ADAPTERS": "off",
        "PYTHONWARNINGS": "error",
    }
    assert run_page(PAGE, place, env) > len(PROGRAMS)


@pytest.mark.gpu
def test_the_page_does_what_it_shows_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    place = tmp_path / "work"
    place.mkdir()
    env = environment(tmp_path)
    run_page(PAGE, place, env)
    env = {**os.environ, **env}
    for name in ("before", "before_module"):
        before, after = (
            subprocess.run([sys.executable, each], cwd=place, env=env, capture_output=True, text=True)
            for each in (f"{name}.py", f"{name.replace('before', 'after')}.py")
        )
        assert before.returncode == 0, before.stderr
        assert before.stdout == after.stdout
