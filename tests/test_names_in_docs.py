"""Names in the documentation: what a page mentions exists."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import preheat
from preheat.graph.graphed import Graphed
from preheat.model.config import VARIABLES
from preheat.tools.cli import _preheat
from preheat.tools.metrics.metrics import METRICS, OTHER

ROOT = Path(__file__).parents[1]
#: All pages but the history of changes, which mentions what no longer exists.
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"})
SUFFIXES = ("py", "ptx", "cu", "toml", "svg")  # `gpu.py` is a file
#: What looks like a name of Python and is one of OpenTelemetry, or a file.
OTHER_NAMES = {
    *(metric.name for metric in (*METRICS, OTHER)),
    *("preheat.program", "preheat.arch", "preheat.key"),  # attributes of spans
    *("preheat.prom", "preheat.prom.new"),
}
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
#: The classes of objects that pages call by these names.
OBJECTS: dict[str, tuple[type, ...]] = {
    "gpu": (preheat.Gpu,),
    "graph": (preheat.Graph,),
    "graphs": (preheat.GraphCache,),
    "pool": (preheat.Pool,),
    "builder": (preheat.Builder,),
    "kernel": (preheat.Kernel,),
    "state": (preheat.DecodeState,),
    "ops": (preheat.Ops,),
}
OBJECTS |= {kinds[0].__name__: kinds for kinds in OBJECTS.values()} | {"Graphed": (Graphed,)}


def spans(page: Path) -> Iterator[str]:
    yield from SPAN.findall(FENCED.sub("", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_mentions_exists(page: Path) -> None:
    assert [f"{span}: {text}" for span in spans(page) for text in problems(span)] == []


def problems(span: str) -> Iterator[str]:
    """Yield what does not exist of the names in a code span."""
    for dotted in re.findall(r"(?<![\w./-])preheat(?:\.[A-Za-z_]\w*)+", span):
        if dotted in OTHER_NAMES or dotted.endswith((".py", ".md")):
            continue
        if not exists(dotted):
            yield f"there is no {dotted}"
    for name, member in re.findall(r"(?<![\w.])(\w+)\.([a-z]\w*)", span):
        kinds = OBJECTS.get(name, ())
        if kinds and member not in SUFFIXES and not any(has_member(kind, member) for kind in kinds):
            yield f"{kinds[0].__name__} has no {member}"
    for variable in re.findall(r"\bPREHEAT_[A-Z_]+\b", span):
        if variable not in known_variables():
            yield f"there is no variable {variable}"
    if re.match(r"preheat [a-z]", span):
        yield from command_problems(span)


def exists(dotted: str) -> bool:
    """Return True if a dotted name is a module of preheat, or something in one."""
    parts = dotted.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            continue
        for name in parts[number:]:
            if inspect.isclass(found):
                return has_member(found, name)
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def has_member(kind: type, name: str) -> bool:
    """Return True if a class, or its instances, have an attribute."""
    return hasattr(kind, name) or any(
        name in getattr(each, "__annotations__", ()) or name in attributes_of(each)
        for each in kind.__mro__
        if each.__module__.startswith("preheat")
    )


@functools.cache
def attributes_of(kind: type) -> frozenset[str]:
    """Return the attributes that methods of a class assign to `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return frozenset(
        node.attr
        for node in nodes
        if isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


@functools.cache
def known_variables() -> frozenset[str]:
    """Return the variables of the interface, and those that tests and tools of preheat read."""
    found = {variable.name for variable in VARIABLES}
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("src/**/*.c"), *ROOT.glob("tests/**/*.py")]:
        found |= set(re.findall(r"""["'\s(](PREHEAT_[A-Z_]+)\b""", path.read_text()))
    return frozenset(found)


def command_problems(span: str) -> Iterator[str]:
    """Yield the commands and options of a command line that do not exist."""
    try:
        words = shlex.split(span.replace("…", "").replace("[", " ").replace("]", " "))[1:]
    except ValueError:  # an apostrophe
        return
    command: click.Command = _preheat
    for word in words:
        if word == "--":
            return
        if isinstance(command, click.Group) and not word.startswith("-"):
            found = command.get_command(click.Context(command), word)
            if found is None:
                yield f"there is no command {word}"
                return
            command = found
        elif re.fullmatch(r"--[a-z][\w=-]*|-[a-z]", word):
            option = word.partition("=")[0]
            known = [name for each in command.params for name in (*each.opts, *each.secondary_opts)]
            if option not in (*known, "--help", "-h"):
                yield f"{command.name} has no option {option}"


def test_the_test_notices_names_that_do_not_exist() -> None:
    for span in (
        "preheat.nonsense",
        "preheat.Gpu.nonsense",
        "preheat.devices.nonsense",
        "gpu.nonsense()",
        "Pool.nonsense",
        "PREHEAT_" + "NONSENSE",  # This file is searched, too.
        "preheat nonsense",
        "preheat cache nonsense",
        "preheat bake --nonsense",
    ):
        assert [*problems(span)] != [], span
    for span in (
        "preheat.lora.Shape.heads",
        "preheat.Artifact.cubin",
        "gpu.capture()",
        "preheat bake -o F",
    ):
        assert [*problems(span)] == [], span
