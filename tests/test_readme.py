"""The README: short, with rows in which peers lead, commands that exist, and an install line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_a_peer_leads_in_some_rows_of_the_table() -> None:
    table = README.partition("| | | preheat")[2].partition("\n\n")[0]
    for leads in (
        "by hand 0.21 s",
        "native C 3.4 µs",
        "one after another | GPU | 0.54 s; 1.85 s | -; 1.51 s",
        "native C 2.6 µs",
        "torch 798 TFLOP/s",
        "warm ones 11.6 s",
        "54 µs",
    ):
        assert leads in table


def test_it_is_short_and_its_commands_are_targets() -> None:
    assert len(README.split()) <= 850
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_it_installs_the_clone_with_an_extra_that_exists() -> None:
    """The name preheat is not registered: pip would find nothing, or a package of somebody else."""
    (extra,) = re.findall(r"pip install '\.\[(\w+)\]'", README)
    assert README.count("pip install") == 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]


def test_it_says_which_targets_make_test_leaves_out() -> None:
    """Tests of a library that `make test` does not install have a target of their own."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(test-[\w-]+):", makefile, re.M))
    (run,) = re.findall(r"^\t\$\(MAKE\) .* (types .*)$", makefile, re.M)
    said = {
        "test-gpu": "a GPU",
        "test-driver": "a GPU",
        "test-driver-without-native": "a GPU",
        "test-adapters": "Triton, torch, CuPy",
        "test-torch": "torch",
        "test-numba": "Numba",
        "test-audit-libraries": "CuTe DSL",
        "test-fleet": "Dask or Ray",
    }
    assert targets - set(run.split()) == set(said)
    (left_out,) = re.findall(r"without the tests that need (.*?):", README, re.S)
    for words in said.values():
        assert words in left_out
