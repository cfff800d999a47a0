"""The native core, `preheat.native._core`: a C extension for loads, launches and replays.

`core` is that module, or None if it is not used, and then `reason` says why. Without the native core,
Python code gives the same results and errors. A build of another source is not used either, because
what it takes for granted about the Python code may be wrong; a warning says so.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.errors import ConfigError
from preheat.model.config import VARIABLES, environ
from preheat.native.build import BUILD_AGAIN, hash_of
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.model import events
else:
    events = LazyModule("preheat.model.events")

__all__ = ["STALE", "SWITCHED_OFF", "core", "reason"]

SWITCHED_OFF = "PREHEAT_NATIVE is off"
STALE = "it was built from another source"
_SOURCE = Path(__file__).with_name("core.c")  # A wheel has none.


def _load() -> tuple[Any, str]:
    """Return the module, or None and the reason why Python code is used."""
    (switch,) = (variable for variable in VARIABLES if variable.name == "PREHEAT_NATIVE")
    with suppress(ConfigError):  # All settings are checked when a device is opened.
        if switch.read(environ()) is False:
            return None, SWITCHED_OFF
    try:
        module = importlib.import_module("preheat.native._core")
    except ImportError as error:
        return None, f"it was not built: {error}"
    with suppress(FileNotFoundError):
        if getattr(module, "SOURCES", None) != hash_of([_SOURCE]):
            events.warn(f"preheat does not use its native core, because {STALE}: {BUILD_AGAIN}")
            return None, STALE
    return module, ""


core, reason = _load()
