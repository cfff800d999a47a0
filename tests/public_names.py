"""The public names of preheat, and the examples in their docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from preheat.process.lazy import lazy

__all__ = ["MODULES", "PublicName", "examples_of", "internal_names", "public_names"]

ROOT = Path(__file__).parents[1]
#: Public modules, and the library without which a module cannot be imported.
MODULES = {
    "preheat": None,
    "preheat.adapters": None,
    "preheat.adapters.cuda_core": None,
    "preheat.adapters.torch": "torch",
    "preheat.lora": None,
}
#: Classes that public methods return and that programs do not make themselves.
RETURNED = ("preheat.graph.graphed.Graphed", "preheat.kernels.nf4.Nf4")


class PublicName(NamedTuple):
    """A public name. `kind` is "function", "class", "method" or "property"."""

    name: str  # as a program writes it: preheat.Gpu.kernel
    kind: str
    value: Any

    @property
    def docstring(self) -> str:
        return inspect.getdoc(self.value) or ""

    @property
    def module(self) -> str:
        """The module that has the docstring."""
        return str(inspect.unwrap(self.value).__module__)


def internal_names() -> frozenset[str]:
    """Return the names of methods for other modules of preheat, which the reference leaves out."""
    listed = re.search(r'filters: \["!\^_", "!\^\((.*)\)\$"\]', (ROOT / "mkdocs.yml").read_text())
    assert listed is not None
    return frozenset(listed[1].split("|"))


def public_names(module: str) -> Iterator[PublicName]:
    """Yield the public names of a module, and the public members of its classes."""
    found = importlib.import_module(module)
    for name in found.__all__:
        value = getattr(found, name)
        if inspect.isclass(value):
            yield PublicName(f"{module}.{name}", "class", value)
            yield from _members(f"{module}.{name}", value)
        elif callable(value):
            yield PublicName(f"{module}.{name}", "function", value)
    if module == "preheat":
        for path in RETURNED:
            place, _, name = path.rpartition(".")
            value = getattr(importlib.import_module(place), name)
            yield PublicName(path, "class", value)
            yield from _members(path, value)


def _members(owner: str, kind: type) -> Iterator[PublicName]:
    internal = internal_names()
    for name, found in inspect.getmembers_static(kind):
        if name.startswith("_") or name in internal or not _is_ours(kind, name):
            continue
        value = getattr(found, "__func__", found)  # of a class method
        if isinstance(value, property | lazy):
            yield PublicName(f"{owner}.{name}", "property", value)
        elif inspect.isfunction(value):
            yield PublicName(f"{owner}.{name}", "method", value)


def _is_ours(kind: type, name: str) -> bool:
    """Return True if a class of preheat, and not of the standard library, defines the member."""
    return any(name in vars(each) for each in kind.__mro__ if each.__module__.startswith("preheat"))


def examples_of(name: PublicName) -> list[doctest.Example]:
    """Return the statements of the section `Examples:` of a docstring."""
    return doctest.DocTestParser().get_examples(name.docstring.partition("Examples:\n")[2], name.name)
