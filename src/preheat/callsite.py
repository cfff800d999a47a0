"""Who called: the line of the program that is outside this package."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["Place", "caller", "place", "shown", "warn_caller"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep  # the standard library; installed packages are below it
_INSIDE = (_HERE, _PYTHON, "<frozen ")

Place = tuple[str, int]  # a line of a program; of none, where a thread began inside


def place() -> Place:
    """The line of the program that called preheat."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) or ("-packages" in name and not name.startswith(_HERE)):
            return (name, frame.f_lineno)
        frame = frame.f_back
    return ("?", 0)


def shown(where: Place) -> str:
    """A line as `file:line`, no line as `?`."""
    return f"{os.path.basename(where[0])}:{where[1]}" if where[1] else where[0]


def warn_caller(warning: Warning) -> None:
    """Issue a warning at the line of the program that called preheat; filters may make it an error."""
    import warnings

    file, line = place()
    warnings.warn_explicit(warning, type(warning), file, line)


def caller() -> str:
    """The line of the program that called preheat, as `file:line`."""
    return shown(place())
