"""The page for those who come from CuPy: what it shows runs on the emulator, and on a GPU with CuPy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import SOURCE
from tests.shown_output import compare
from tests.test_docs import ALL, ROOT, Snippet

PAGE = ROOT / "docs" / "guides" / "coming-from" / "cupy.md"
SNIPPETS = [snippet for snippet in ALL if snippet.page == PAGE]
PROGRAMS = [snippet for snippet in SNIPPETS if snippet.kind == "python"]
# Arrays of NumPy take the place of CuPy's where there is no GPU. The emulator uses them as memory.
STANDIN = "from numpy import arange, float32, ones, zeros\n"


def name_of(snippet: Snippet) -> str:
    """Return the name of the file in the first line of a program."""
    match = re.match(r"# (\w+\.py)\n", snippet.text)
    assert match is not None
    return match[1]


def run(command: list[str], place: Path, path: list[Path], **more: str) -> str:
    """Return what a command prints in an environment with a cache of its own."""
    modules = os.pathsep.join(map(str, [*path, SOURCE, *filter(None, sys.path)]))
    scripts = place / "bin"
    env = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": modules,
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
        **more,
    }
    ran = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with the programs of the page, and with the commands that it uses."""
    for snippet in PROGRAMS:
        (tmp_path / name_of(snippet)).write_text(snippet.text)
    (tmp_path / "bin").mkdir()
    for name, words in (("preheat", "-m preheat"), ("python", "")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        script.chmod(0o755)
    return tmp_path


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """Return a directory with a module that stands for CuPy."""
    directory = tmp_path / "standin"
    directory.mkdir()
    (directory / "cupy.py").write_text(STANDIN)
    return directory


def test_the_page_has_each_program_before_and_after() -> None:
    names = [name_of(snippet) for snippet in PROGRAMS]
    assert names == ["before.py", "after.py", "before_module.py", "after_module.py"]
    before, after = (PROGRAMS[at].text.splitlines()[1:] for at in (0, 1))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    line = ("from cupy import RawKernel", "from preheat.adapters.cupy import RawKernel")
    assert changed == [line]


@pytest.mark.parametrize("name", ["after.py", "after_module.py"])
def test_a_program_after_the_change_runs_on_the_emulator(name: str, place: Path, standin: Path) -> None:
    shown = next(snippet.output for snippet in PROGRAMS if name_of(snippet) == name)
    assert shown is not None
    out = run([sys.executable, "-W", "error", name], place, [standin], PREHEAT_DEVICE="emulator")
    compare(shown, out)


def test_the_commands_of_the_page_do_what_they_show(place: Path, standin: Path) -> None:
    for snippet in SNIPPETS:
        if snippet.kind == "console":
            for part in re.split(r"^\$ ", snippet.text, flags=re.M)[1:]:
                command, _, shown = part.partition("\n")
                env = {"PREHEAT_DEVICE": "emulator", "PREHEAT_ADAPTERS": "off"}
                compare(shown, run(["bash", "-c", command], place, [standin], **env))


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", PROGRAMS, ids=name_of)
def test_a_program_runs_on_a_gpu_before_and_after(snippet: Snippet, place: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    out = run([sys.executable, name_of(snippet)], place, [])
    if snippet.output is not None:
        compare(snippet.output, out)
    elif name_of(snippet) == "before.py":
        assert out == "2497.5 True\n"
