"""The builders of the process, which are closed when it ends."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from typing import Protocol

from preheat import fork
from preheat.cache.base import CLOSE_SECONDS

__all__ = ["close_at_exit"]


class _Closable(Protocol):
    def close(self, seconds: float) -> None:
        """Close it, and wait at most `seconds` for writes to shared stores."""


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(builder: _Closable) -> None:
    """Close `builder` when the process ends, unless it is gone by then."""
    _open.add(builder)
    _finalizer.register()


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


class _Finalizer:
    """Closes the builders of a child of multiprocessing, which does not run `atexit` at its end."""

    def __init__(self) -> None:
        self._registered_in = 0  # the id of a process
        fork.register(self)

    def register(self) -> None:
        """Register with multiprocessing, once, if this process is a child of it.

        The builders are closed after the process has waited for its own children.
        """
        process = sys.modules.get("multiprocessing.process")
        if process is None or process.parent_process() is None or self._registered_in == os.getpid():
            return
        self._registered_in = os.getpid()
        sys.modules["multiprocessing.util"].Finalize(None, _close_all, exitpriority=-1)

    def after_fork(self) -> None:
        """Register in a forked child, once multiprocessing has forgotten what its parent registered."""
        if util := sys.modules.get("multiprocessing.util"):
            util.register_after_fork(self, _Finalizer.register)


_finalizer = _Finalizer()
atexit.register(_close_all)
