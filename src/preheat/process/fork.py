"""The registry of objects that a forked child must renew.

A child process has a copy of everything and only the thread that forked. A `threading.Lock` that
another thread held stays held, worker processes and locked files belong to the parent, and a GPU
context cannot be used. An object with such a part registers itself once, and its `after_fork` runs in
every child. A `Lock` of `preheat.process.locks` needs no renewal; that module has a table of
all kinds of locks.
"""

from __future__ import annotations

import os
import weakref
from itertools import count

TYPE_CHECKING = False  # `typing` costs more than the rest
if TYPE_CHECKING:
    from typing import Protocol

    class Renewable(Protocol):
        """An object with a part that a forked child cannot use."""

        def after_fork(self) -> None:
            """Renew that part, in the only thread of the child."""


__all__ = ["register"]

_registered: weakref.WeakValueDictionary[int, Renewable] = weakref.WeakValueDictionary()  # by number
_numbers = count()


def register(renewable: Renewable) -> None:
    """Call `renewable.after_fork()` in every forked child, for as long as the object lives."""
    _registered[next(_numbers)] = renewable


def _renew_all() -> None:
    for renewable in list(_registered.values()):
        renewable.after_fork()


os.register_at_fork(after_in_child=_renew_all)
