"""The page for people who come from Numba: what it shows runs, on the CPU driver or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is installed by `make test-adapters`")

from tests.adapters.numba.world import World
from tests.emulated import emulated, needs_driver
from tests.shown_output import compare
from tests.stories import blocks, run_page
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "guides" / "coming-from" / "numba.md"
PROGRAMS = {block.title: block for block in blocks(PAGE) if block.title}


def environment(world: World) -> dict[str, str]:
    """Return the environment of a machine with the CPU driver and the commands of preheat."""
    values = world.environment(env={})
    scripts = world.root / "bin"
    scripts.mkdir()
    for name, words in (("preheat", "-m preheat"), ("python", "")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        script.chmod(0o755)
    return {**values, "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]])}


def test_every_program_of_the_page_has_a_name() -> None:
    shown = [block for block in blocks(PAGE) if block.kind == "python"]
    assert len(shown) == len(PROGRAMS) == 6


def test_the_page_does_what_it_shows(world: World) -> None:
    place = world.root / "server"
    place.mkdir()
    assert run_page(PAGE, place, environment(world)) > len(PROGRAMS)


def test_the_program_of_numba_runs_to_its_end_on_the_cpu_driver(world: World) -> None:
    ran = world.python("-W", "ignore", "-c", PROGRAMS["with_numba.py"].text).ok()
    assert ran.launches == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["with_numba.py", "with_preheat.py", "together.py", "serve.py"])
def test_the_programs_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    for block in PROGRAMS.values():
        (tmp_path / block.title).write_text(block.text)
    env = {**os.environ, "PREHEAT_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", name], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    shown = PROGRAMS["together.py"].output or ""
    compare("served\n" if name == "serve.py" else shown, ran.stdout)


@needs_driver
def test_the_example_for_the_cpu_driver_is_right(tmp_path: Path) -> None:
    example = ROOT / "examples" / "cpu_driver" / "add_numba.py"
    assert emulated(tmp_path, example) == ("right", "1 launch, 0 faults")
