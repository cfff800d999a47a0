"""Warmers: the registered functions that capture graphs during a warm-up."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from preheat.errors import InputError, did_you_mean

__all__ = ["Warmable", "Warmers"]


class Warmable(Protocol):
    """A named cache of graphs with a warmer, which can capture any of their keys."""

    def require_capacity(self, keys: int) -> None:
        """Raise if the cache cannot hold graphs for so many keys."""

    def warm_key(self, key: Any) -> bool:
        """Capture a key unless it has a graph. Return True if it was captured."""


class Warmers:
    """The caches of one device that have a warmer, by name. They are referenced weakly."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[str, Warmable] = weakref.WeakValueDictionary()

    def add(self, name: str | None, graphs: Warmable) -> None:
        """Register a cache. A name belongs to one cache; registering it twice is allowed."""
        if name is None:
            raise InputError(
                "graphs without a name cannot have a warmer", hint='give them one: name="decode"'
            )
        if self._known.setdefault(name, graphs) is not graphs:
            raise InputError(
                f"other graphs called {name!r} have a warmer already",
                hint="give these another name: name=…",
            )

    def find(self, name: str) -> Warmable:
        """Return the cache that has a warmer under this name."""
        warmable = self._known.get(name)
        if warmable is None:
            hint = did_you_mean(name, self._known) or "register one: @graphs.warmer, @step.warmer"
            raise InputError("no warmer is registered under this name", hint=hint)
        return warmable
