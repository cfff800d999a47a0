"""The builders of the process and their shared stores, which are closed when it ends."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from preheat.process import fork
from preheat.store.base import CLOSE_SECONDS

__all__ = ["close_at_exit"]


class _Closable(Protocol):
    def close(self, seconds: float) -> None:
        """Close it, and wait at most `seconds` for writes to shared stores."""


#: The builders, each with its shared stores, which it closes.
_builders: weakref.WeakKeyDictionary[_Closable, Sequence[_Closable]] = weakref.WeakKeyDictionary()
#: The stores of all builders. The threads that write to a store keep it alive when its builder is gone.
_stores: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(builder: _Closable, stores: Sequence[_Closable]) -> None:
    """Close `builder` when the process ends, or the `stores` that still write if it is gone by then."""
    _builders[builder] = stores
    _stores.update(stores)
    _finalizer.register()


def _close_all() -> None:
    """Close everything within one time limit, even if closing one of them raises an error."""
    deadline = time.monotonic() + CLOSE_SECONDS
    errors: list[Exception] = []
    builders = dict(_builders)
    owned = [store for stores in builders.values() for store in stores]
    for each in (*builders, *(store for store in _stores if store not in owned)):
        try:
            each.close(max(0.0, deadline - time.monotonic()))
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
