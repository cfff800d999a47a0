"""The native core, `preheat._native`: a C extension for loads, launches and replays, if it was built.

`core` is that module, or None, and then `reason` says why. Without the native core, Python code gives
the same results and errors.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from preheat.config import VARIABLES, environ
from preheat.errors import ConfigError

__all__ = ["SWITCHED_OFF", "core", "reason"]

SWITCHED_OFF = "PREHEAT_NATIVE is off"
_INTERFACE = 4  # the constant of the same name in `_native.c`


def _load() -> tuple[Any, str]:
    """Return the module, or None and the reason why Python code is used."""
    (switch,) = (variable for variable in VARIABLES if variable.name == "PREHEAT_NATIVE")
    with suppress(ConfigError):  # All settings are checked when a device is opened.
        if switch.read(environ()) is False:
            return None, SWITCHED_OFF
    try:
        module = importlib.import_module("preheat._native")
    except ImportError as error:
        return None, f"it was not built: {error}"
    if module.INTERFACE != _INTERFACE:
        return None, "it was built from another version of preheat"
    return module, ""


core, reason = _load()
