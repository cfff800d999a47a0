"""Repeat calls of a filesystem that may succeed a moment later.

A network filesystem returns ESTALE after another node has replaced a file or directory, EBUSY while
another node has it open, and EIO or ETIMEDOUT while its server restarts. The same call by path often
succeeds a moment later. An error that stays is raised after less than a quarter of a second of pauses.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["TRANSIENT", "is_transient", "retried"]

P = ParamSpec("P")
T = TypeVar("T")

#: The errors after which the same call may succeed a moment later.
TRANSIENT = frozenset({errno.ESTALE, errno.EBUSY, errno.EIO, errno.ETIMEDOUT})
_PAUSES = (0.01, 0.04, 0.16)  # seconds before the second attempt, the third and the fourth
_MAX_SECONDS = 2.0  # seconds after which no attempt begins: each may have waited for a dead server


def is_transient(fault: OSError) -> bool:
    """Return whether the same call may succeed a moment later."""
    return fault.errno in TRANSIENT


def retried(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `call(*args, **kwargs)`, repeated a few times while its `OSError` is a transient one.

    The call must open its files itself, because a stale descriptor stays stale.
    """
    deadline = time.monotonic() + _MAX_SECONDS
    for pause in _PAUSES:
        try:
            return call(*args, **kwargs)
        except OSError as fault:
            if fault.errno not in TRANSIENT or time.monotonic() > deadline:
                raise
        # Randomized, so that nodes do not retry together. The import of `random` takes milliseconds.
        time.sleep(pause * (0.5 + os.urandom(1)[0] / 512))
    return call(*args, **kwargs)
