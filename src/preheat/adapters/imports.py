"""Adapters that are installed when their library is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial

from preheat.adapters.import_hook import ImportHook

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
_HOOK = ImportHook({})


def activate(value: str | None = None) -> None:
    """Install the adapters that `PREHEAT_ADAPTERS` names when their libraries are imported.

    `auto` names all of them. A library that is imported already is connected at once. This function
    imports no other module of preheat, because every Python of a recorded command runs it.
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
    for module, name in waiting.items():
        _HOOK.waiting[module] = partial(_install, name)
    if waiting and _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)


def child_environment(env: Mapping[str, str], adapters: str = "auto") -> dict[str, str]:
    """Return an environment in which every Python installs `adapters`, unless it already names others.

    An empty variable names no adapter. If `adapters` is empty as well, the variable stays empty, so
    that a preheat command inside the command can still set it. Raises `InputError` if preheat is
    installed in a path with a colon, whose parts would be other directories of modules.
    """
    if os.pathsep in _SITE:
        from preheat.errors import InputError

        raise InputError(
            f"preheat is installed in {_SITE}, and PYTHONPATH cannot hold a path with a colon",
            hint="install preheat in another directory",
        )
    path = os.pathsep.join(filter(None, (_SITE, env.get("PYTHONPATH"))))
    return {**env, VARIABLE: env.get(VARIABLE) or adapters, "PYTHONPATH": path}


def _install(name: str, _: object = None) -> None:
    """Install an adapter. In a process that is not sealed, a failure leaves the library as it is."""
    from preheat import adapters
    from preheat.build.default import default_builder
    from preheat.model.config import SealMode

    try:
        adapters.install(name)
    except Exception as error:  # The library may be a stub that the adapter does not support.
        if default_builder().sealed is SealMode.ERROR:
            raise
        _warn(f"the adapter for {name} is not installed: {error}")


def _warn(text: str) -> None:
    from preheat.model.events import warn

    warn(text)
