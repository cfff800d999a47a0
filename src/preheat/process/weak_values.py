"""A table of objects that it does not keep alive."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

__all__ = ["WeakValues"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _remove(
    references: dict[Any, Any],
    key: object,
    _: object,
    remove: Any = weakref._remove_dead_weakref,  # type: ignore[attr-defined]
) -> None:
    """Remove a reference to an object that is gone, unless another one has replaced it.

    This is one step in C. It uses no global names, which Python may have set to None at exit.
    """
    remove(references, key)


class WeakValues(Generic[K, V]):
    """Objects by key, for as long as something else holds them. Safe from any thread.

    `weakref.WeakValueDictionary` needs three Python calls to add an object, and this class needs one.
    Every program that is found in a cache or loaded is added to such a table.
    """

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[K, weakref.ref[V]] = {}

    def get(self, key: K) -> V | None:
        """Return the object, or None when it no longer exists."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def __setitem__(self, key: K, value: V) -> None:
        self._references[key] = weakref.ref(value, partial(_remove, self._references, key))

    def pop(self, key: K) -> None:
        """Remove an object, if it is there."""
        self._references.pop(key, None)

    def clear(self) -> None:
        """Remove all objects."""
        self._references.clear()

    def values(self) -> Iterator[V]:
        """Yield the objects that still exist."""
        for reference in list(self._references.values()):
            if (value := reference()) is not None:
                yield value

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return sum(1 for _ in self.values())
