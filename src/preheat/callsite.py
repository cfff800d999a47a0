"""The call site: the line of the program, outside of this package, that called preheat."""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from typing import Any

__all__ = ["CallSite", "acting_for", "call_site", "caller", "format_site", "warn_caller"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep  # the standard library; installed packages are below it
_INSIDE = (_HERE, _PYTHON, "<frozen ")

CallSite = tuple[str, int]  # file and line; ("?", 0) where it is not known

_acting_for: dict[int, CallSite] = {}  # by thread


def call_site() -> CallSite:
    """Return the file and the line of the program that called preheat."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) or ("-packages" in name and not name.startswith(_HERE)):
            return (name, frame.f_lineno)
        frame = frame.f_back
    return _acting_for.get(get_ident(), ("?", 0))


class acting_for:  # noqa: N801 - used like a function
    """In a thread that preheat started, let `call_site` return the line that asked for the work."""

    def __init__(self, site: CallSite) -> None:
        self._site = site

    def __enter__(self) -> None:
        _acting_for[get_ident()] = self._site

    def __exit__(self, *_: object) -> None:
        _acting_for.pop(get_ident(), None)


def format_site(site: CallSite) -> str:
    """Return a call site as `file:line`, or as `?` when it is not known."""
    file, line = site
    return f"{os.path.basename(file)}:{line}" if line else file


def caller() -> str:
    """Return the call site as `file:line`."""
    return format_site(call_site())


def warn_caller(warning: Warning) -> None:
    """Issue a warning at the call site. Warning filters may turn it into an error."""
    import warnings

    file, line = call_site()
    warnings.warn_explicit(warning, type(warning), file, line)
