"""The builders of the process, which are closed when it ends."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]


class _Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(builder: _Closable) -> None:
    """Close `builder` when the process ends, unless it is gone by then."""
    _open.add(builder)


def _close_all() -> None:
    for builder in list(_open):
        builder.close()


atexit.register(_close_all)
