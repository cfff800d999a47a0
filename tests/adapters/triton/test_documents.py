"""The pages on Triton: what they show runs on the stand-in driver."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from preheat.tools.cli.demo import bare_python
from tests.adapters.triton.world import STANDIN, World, triton_version
from tests.emulated import emulated, needs_driver
from tests.stories import run_page
from tests.test_docs import ROOT, TRITON_PAGES
from tests.test_guides import instructions

pytest.importorskip("triton", reason="Triton is installed by `make test-adapters`")


def environment(world: World, python: str = sys.executable) -> dict[str, str]:
    """Return the environment of a machine with the stand-in driver and the commands of preheat."""
    values = world.environment(env={})
    scripts = world.root / "bin"
    scripts.mkdir(exist_ok=True)
    for name, words in (("preheat", "-m preheat"), ("python", "")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n')
        script.chmod(0o755)
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    modules = os.pathsep.join([values["PYTHONPATH"], str(STANDIN / "fake_torch")])
    return {**os.environ, **values, "PATH": path, "PYTHONPATH": modules}


@pytest.mark.parametrize("page", TRITON_PAGES, ids=lambda page: page.parent.name)
def test_a_page_does_what_it_shows(page: Path, world: World) -> None:
    place = world.root / "server"
    place.mkdir()
    assert run_page(page, place, environment(world)) >= 3
    if (place / "Dockerfile").exists():
        assert run_image(place, world) == ["", "served 4096\n"]


def run_image(place: Path, world: World) -> list[str]:
    """Run what an image runs of preheat, where NVRTC is not installed; return what follows the bake."""
    another = world.sibling("image")
    python = bare_python(another.root / "python")
    (packages,) = another.root.glob("python/lib/python*/site-packages")
    (packages / "click").symlink_to(Path(click.__file__).parent)  # The command line needs it.
    env = environment(another, python)
    outputs = []
    for verb, rest in instructions((place / "Dockerfile").read_text()):
        words = json.loads(rest) if verb == "CMD" else shlex.split(rest)
        if verb == "ENV":
            env |= dict(word.split("=", 1) for word in words)
            env["TRITON_CACHE_DIR"] = str(another.root / "triton")
        elif words[0] == "preheat":
            path = shutil.which("preheat", path=env["PATH"])
            ran = subprocess.run(
                [str(path), *words[1:]], cwd=place, env=env, capture_output=True, text=True
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            outputs.append(ran.stdout)
    assert env["PREHEAT_CACHE"] == "off"
    return outputs[1:]


def test_the_example_of_a_server_does_what_its_script_says(world: World) -> None:
    """The stand-in for the driver takes the launches, so that no GPU is needed."""
    place = world.root / "server"
    shutil.copytree(ROOT / "examples" / "triton_server", place)
    env = environment(world)
    ran = subprocess.run(["sh", "run.sh"], cwd=place, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[0] == "served 4096 1000"
    assert ran.stdout.splitlines()[-1] == "served 4096 1000 1 33 8191"


@needs_driver
@pytest.mark.skipif(triton_version() < (3, 9), reason="this version of Triton asks torch for a GPU")
def test_the_example_for_the_cpu_driver_is_right(tmp_path: Path) -> None:
    example = ROOT / "examples" / "cpu_driver" / "softmax_triton.py"
    assert emulated(tmp_path, example) == ("right", "1 launch, 0 faults")
