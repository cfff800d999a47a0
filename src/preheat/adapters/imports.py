"""Adapters that are installed when their library is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from _thread import get_ident
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["VARIABLE", "activate", "child_environment"]

VARIABLE = "PREHEAT_ADAPTERS"
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
# The module of the library of each adapter: the adapter is installed when it is imported.
_MODULES = {
    "triton": "triton",
    "inductor": "torch._inductor.compile_fx",
    "torch": "torch",
    "cupy": "cupy",
    "cuda_core": "cuda.core",
    "numba": "numba.cuda",
}


def activate(value: str | None = None) -> None:
    """Install the adapters that `PREHEAT_ADAPTERS` names when their libraries are imported.

    `auto` names all of them. A library that is imported already is connected at once. This function
    imports nothing else of preheat, because every Python of a recorded command runs it.
    """
    text = os.environ.get(VARIABLE, "") if value is None else value
    wanted = {word.strip() for word in text.split(",") if word.strip()}
    if "auto" in wanted:
        wanted = set(_MODULES)
    wanted -= {"off", "none", "0"}
    if unknown := sorted(wanted - set(_MODULES)):
        _warn(f"{VARIABLE} names {unknown[0]!r}, which has no adapter; there are {', '.join(_MODULES)}")
    waiting = {_MODULES[name]: name for name in wanted if name in _MODULES}
    for module in [module for module in waiting if module in sys.modules]:
        _install(waiting.pop(module))
    known = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if known is not None:
        known.waiting |= waiting
    elif waiting:
        sys.meta_path.insert(0, _Finder(waiting))


def child_environment(env: Mapping[str, str], adapters: str = "auto") -> dict[str, str]:
    """Return an environment in which every Python installs `adapters`, unless it names others.

    An empty variable names none. Without `adapters` it stays empty, and a command of preheat inside of
    the command may still choose.
    """
    path = os.pathsep.join(filter(None, (_SITE, env.get("PYTHONPATH"))))
    return {**env, VARIABLE: env.get(VARIABLE) or adapters, "PYTHONPATH": path}


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do, and installs the adapters of their libraries."""

    def __init__(self, waiting: dict[str, str]) -> None:
        self.waiting = waiting  # the name of the adapter by the name of the module
        self._finding: set[tuple[str, int]] = set()  # modules that the other finders are asked for

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        call = (fullname, get_ident())
        if fullname not in self.waiting or call in self._finding:
            return None
        self._finding.add(call)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(call)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.waiting)
        return spec


class _Loader(Loader):
    """Executes a module by its own loader, and installs an adapter."""

    def __init__(self, loader: Loader, waiting: dict[str, str]) -> None:
        self._loader = loader
        self._waiting = waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # Restore the module's own loader, which other code may inspect.
        module.__spec__.loader = module.__loader__ = self._loader
        imported = module.__name__  # cuda.core replaces its name when it is executed.
        self._loader.exec_module(module)
        # Only now: a program may ask for the spec of a module without importing it.
        name = self._waiting.pop(imported, None)
        if name is not None:
            _install(name)


def _install(name: str) -> None:
    """Install an adapter. In a process that is not sealed, a failure leaves the library as it is."""
    from preheat import adapters
    from preheat.config import SealMode
    from preheat.default import default_builder

    try:
        adapters.install(name)
    except Exception as error:  # The library may be a build or a stub that the adapter cannot read.
        if default_builder().sealed is SealMode.ERROR:
            raise
        _warn(f"the adapter for {name} is not installed: {error}")


def _warn(text: str) -> None:
    from preheat.events import warn

    warn(text)
