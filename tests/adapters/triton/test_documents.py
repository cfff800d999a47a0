"""The pages on Triton: what they show runs on the stand-in driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.triton.world import STANDIN, World
from tests.shown_output import compare
from tests.test_docs import ALL, TRITON_PAGES

pytest.importorskip("triton", reason="Triton is installed by `make test-adapters`")

ADAPTERS, GUIDE = TRITON_PAGES


def environment(world: World) -> dict[str, str]:
    """Return the environment of a machine with the stand-in driver and the commands of preheat."""
    values = world.environment(env={})
    scripts = world.root / "bin"
    scripts.mkdir(exist_ok=True)
    for name, words in (("preheat", "-m preheat"), ("python", "")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        script.chmod(0o755)
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    modules = os.pathsep.join([values["PYTHONPATH"], str(STANDIN / "fake_torch")])
    return {**os.environ, **values, "PATH": path, "PYTHONPATH": modules}


def write_modules(page: Path, place: Path) -> None:
    """Write the Python snippets of a page that begin with the name of a file."""
    for snippet in ALL:
        if snippet.page == page and snippet.kind == "python":
            name = re.match(r"# (\w+\.py)\n", snippet.text)
            assert name is not None, snippet
            (place / name[1]).write_text(snippet.text)


def run_commands(page: Path, place: Path, env: dict[str, str]) -> None:
    """Run the commands of a page in order, and compare what they print."""
    for snippet in ALL:
        if snippet.page != page or snippet.kind != "console":
            continue
        for part in re.split(r"^\$ ", snippet.text, flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            ran = subprocess.run(
                ["bash", "-c", command], cwd=place, env=env, capture_output=True, text=True
            )
            assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
            if shown:
                compare(shown, ran.stdout)


def test_the_guide_does_what_it_shows(world: World) -> None:
    place = world.root / "server"
    place.mkdir()
    write_modules(GUIDE, place)
    run_commands(GUIDE, place, environment(world))


def test_the_commands_of_the_page_on_adapters_run(world: World) -> None:
    place = world.root / "server"
    place.mkdir()
    write_modules(GUIDE, place)
    run_commands(ADAPTERS, place, environment(world))


def test_the_program_of_the_page_on_adapters_runs(world: World) -> None:
    (snippet,) = (s for s in ALL if s.page == ADAPTERS and s.kind == "python")
    ran = world.python("-c", snippet.text).ok()
    assert ran.out == "('triton',)\n"
