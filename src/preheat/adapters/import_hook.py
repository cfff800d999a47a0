"""Calls functions once the modules that they wait for have been imported.

`sitecustomize` also loads this file by its path. So it uses only the standard library, and runs in
Python 3.8.
"""

from __future__ import annotations

import importlib.util
from _thread import get_ident
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ImportHook"]


class ImportHook(MetaPathFinder):
    """Finds modules through the other finders, and calls the functions that wait for them.

    `waiting` has these functions by the names of the modules. Each is called once, with the module,
    after the module has been executed.
    """

    def __init__(self, waiting: dict[str, Callable[[ModuleType], object]]) -> None:
        self.waiting = waiting
        self._finding: set[tuple[str, int]] = set()  # modules that the other finders are searching

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
    """Executes a module by its own loader, and calls the function that waits for it.

    It has every other attribute of that loader, for programs that inspect a module before its import.
    """

    def __init__(self, loader: Loader, waiting: dict[str, Callable[[ModuleType], object]]) -> None:
        self._loader = loader
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` look for methods of their own before there is a loader.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # Restore the module's own loader, which other code may inspect.
        module.__spec__.loader = module.__loader__ = self._loader
        imported = module.__name__  # cuda.core replaces its name when it is executed.
        self._loader.exec_module(module)
        # Removed here, because a program may look up the spec of a module without importing it.
        call = self._waiting.pop(imported, None)
        if call is not None:
            call(module)
