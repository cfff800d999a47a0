"""The page for people who come from Numba: what it shows runs, on the stand-in driver or on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is installed by `make test-adapters`")

from tests.adapters.numba.world import World
from tests.shown_output import compare
from tests.test_docs import ALL, ROOT

PAGE = ROOT / "docs" / "guides" / "coming-from" / "numba.md"
PROGRAMS = {
    name[1]: snippet
    for snippet in ALL
    if snippet.page == PAGE and (name := re.match(r"# (\w+\.py)\n", snippet.text))
}


def write_modules(place: Path) -> None:
    """Write the programs of the page to files with their names."""
    for name, snippet in PROGRAMS.items():
        (place / name).write_text(snippet.text)


def environment(world: World) -> dict[str, str]:
    """Return the environment of a machine with the stand-in driver and the commands of preheat."""
    values = world.environment(env={})
    scripts = world.root / "bin"
    scripts.mkdir()
    for name, words in (("preheat", "-m preheat"), ("python", "")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        script.chmod(0o755)
    return {**os.environ, **values, "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]])}


def test_every_program_of_the_page_has_a_name() -> None:
    shown = [snippet for snippet in ALL if snippet.page == PAGE and snippet.kind == "python"]
    assert len(shown) == len(PROGRAMS) == 6


def test_the_commands_do_what_the_page_shows(world: World) -> None:
    env = environment(world)
    place = world.root / "server"
    place.mkdir()
    write_modules(place)
    for snippet in (each for each in ALL if each.page == PAGE and each.kind == "console"):
        for part in re.split(r"^\$ ", snippet.text, flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            ran = subprocess.run(
                ["bash", "-c", command], cwd=place, env=env, capture_output=True, text=True
            )
            assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
            compare(shown, ran.stdout)


def test_the_program_that_connects_the_adapter_runs(world: World) -> None:
    assert world.python("-c", PROGRAMS["connect.py"].text).ok().out == "('numba',)\n"


def test_the_program_of_numba_runs_to_its_end_on_the_stand_in(world: World) -> None:
    ran = world.python("-W", "ignore", "-c", PROGRAMS["with_numba.py"].text).ok()
    assert len(ran.launches) == 1


def test_the_program_of_preheat_computes_what_the_page_shows(world: World) -> None:
    ran = world.python("-c", PROGRAMS["with_preheat.py"].text, cc=None, PREHEAT_DEVICE="emulator").ok()
    compare(PROGRAMS["with_preheat.py"].output or "", ran.out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["with_numba.py", "with_preheat.py", "together.py", "serve.py"])
def test_the_programs_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    write_modules(tmp_path)
    env = {**os.environ, "PREHEAT_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", name], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    shown = PROGRAMS["together.py"].output or ""
    compare("served\n" if name == "serve.py" else shown, ran.stdout)
