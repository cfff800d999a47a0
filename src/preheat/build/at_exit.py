"""The builders of the process, which are closed when it ends."""

from __future__ import annotations

import atexit
import time
import weakref
from typing import Protocol

from preheat.cache.base import CLOSE_SECONDS

__all__ = ["close_at_exit"]


class _Closable(Protocol):
    def close(self, seconds: float) -> None:
        """Close it, and wait at most `seconds` for writes to shared stores."""


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(builder: _Closable) -> None:
    """Close `builder` when the process ends, unless it is gone by then."""
    _open.add(builder)


def _close_all() -> None:
    """Close all builders within one time limit, even if closing one of them raises an error."""
    deadline = time.monotonic() + CLOSE_SECONDS
    errors: list[Exception] = []
    for builder in list(_open):
        try:
            builder.close(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]  # `atexit` prints it.


atexit.register(_close_all)
