"""Docstrings of public names: complete, with examples that run on the emulator."""

from __future__ import annotations

import builtins
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import preheat
from tests.public_names import MODULES, PublicName, examples_of, internal_names, public_names

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = [module for module, library in MODULES.items() if library is None]
NAMES = [name for module in WITHOUT_TORCH for name in public_names(module)]


def run_examples(place: Path, *modules: str) -> Any:
    """Run the examples of modules in a process with an empty home and cache; see docstring_examples."""
    place.mkdir()
    env = {
        **os.environ,
        "HOME": str(place),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in [*sys.path, str(ROOT)] if path),
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
        "PREHEAT_DEVICE": "emulator",
    }
    command = [sys.executable, "-m", "tests.docstring_examples", *modules]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_examples_do_what_they_show(tmp_path: Path) -> None:
    found = run_examples(tmp_path / "place", *WITHOUT_TORCH)
    assert "\n".join(text for row in found.values() for text in row["failures"]) == ""
    assert sum(row["examples"] for row in found.values()) > 200


@pytest.mark.torch
def test_the_examples_for_torch_do_what_they_show(tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("a CPU build of torch is installed by `make test-torch`")
    found = run_examples(tmp_path / "place", "preheat.adapters.torch")
    assert "\n".join(found["preheat.adapters.torch"]["failures"]) == ""
    assert found["preheat.adapters.torch"]["examples"] > 0


#: Names that need no example, beside errors, properties and methods that the reference leaves out.
WITHOUT_EXAMPLE = {
    "preheat.Bound.invalidate": "other modules call it; `GraphCache.invalidate` is public"
}
#: Errors that docstrings name, and that are not part of the public interface.
OTHER_ERRORS = {"DamagedEntryError": "of `Bundle.get`, which tools use"}


def test_docstrings_are_complete() -> None:
    assert [f"{name.name}: {text}" for name in NAMES for text in problems(name)] == []


def problems(name: PublicName) -> Iterator[str]:
    """Yield what is wrong with a docstring."""
    first, _, rest = name.docstring.partition("\n")
    if not first.endswith((".", ":")) or not (rest == "" or rest.startswith("\n")):
        yield "the first line is not a sentence"
    # A property has no arguments, and the page on errors has an example of each error.
    needs_none = name.kind == "property" or is_error(name) or name.name in WITHOUT_EXAMPLE
    if not needs_none and not examples_of(name):
        yield "there is no example"
    if name.kind in ("function", "method") and (listed := listed_in(name, "Args")):
        parameters = inspect.signature(name.value).parameters
        if listed != [each for each in parameters if each not in ("self", "cls")]:
            yield f"the arguments are {', '.join(parameters)}"
    for error in listed_in(name, "Raises"):
        if (
            not any(hasattr(place, error) for place in (preheat, builtins))
            and error not in OTHER_ERRORS
        ):
            yield f"there is no {error}"


def is_error(name: PublicName) -> bool:
    return name.kind == "class" and issubclass(name.value, preheat.PreheatError | Warning)


def listed_in(name: PublicName, section: str) -> list[str]:
    """Return the names that a section of a docstring lists."""
    text = re.search(rf"^{section}:\n((?:(?: {{4}}.*)?\n)+)", f"{name.docstring}\n", re.M)
    return re.findall(r"^ {4}(\w+): ", text[1], re.M) if text else []


def members_of(path: str) -> Iterator[str]:
    """Yield the names of all members that classes of preheat define, also the internal ones."""
    for kind in (getattr(preheat, name) for name in preheat.__all__):
        if inspect.isclass(kind):
            for each in kind.__mro__:
                if each.__module__.startswith(path):
                    yield from vars(each)


def test_names_that_the_reference_leaves_out_exist() -> None:
    assert internal_names() - set(members_of("preheat")) == set()
