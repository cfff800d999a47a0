"""Warmers: how the graphs of each name are captured before traffic, as the program registered it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from preheat.errors import InputError, did_you_mean

__all__ = ["Warmable", "Warmers"]


class Warmable(Protocol):
    """Graphs of a name with a registered way to capture any of their keys."""

    def require_capacity(self, keys: int) -> None:
        """Raise if the cache cannot hold graphs for so many keys."""

    def warm_key(self, key: Any) -> bool:
        """Capture a key, unless it has a graph; return whether it was captured."""


class Warmers:
    """The warmers of one device by name, each known as long as its graphs live."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[str, Warmable] = weakref.WeakValueDictionary()

    def add(self, name: str | None, graphs: Warmable) -> None:
        """Register graphs; again is fine, and a name belongs to one of them at a time."""
        if name is None:
            raise InputError(
                "graphs without a name cannot have a warmer", hint='give them one: name="decode"'
            )
        if self._known.setdefault(name, graphs) is not graphs:
            raise InputError(
                f"other graphs called {name!r} have a warmer already",
                hint="give these a name of their own: name=…",
            )

    def find(self, name: str) -> Warmable:
        """The graphs that are warmed under a name."""
        found = self._known.get(name)
        if found is None:
            hint = did_you_mean(name, self._known) or "register one: @graphs.warmer, @step.warmer"
            raise InputError("no warmer is registered under this name", hint=hint)
        return found
