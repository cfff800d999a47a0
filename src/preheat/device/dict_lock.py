"""A lock that a signal handler cannot leave locked.

`with lock:` of `threading.Lock` is not safe where a signal handler may raise: from Python 3.13 on, the
handler can run after the lock was acquired and before the block began, and then it is never released. A
`DictLock` is a dict with one entry. Deleting the entry acquires the lock and is a single bytecode
instruction, which is either executed or not; storing the entry releases it. That is also cheaper than
`threading.Lock`.

Code that cannot afford a call has the two steps inline:

    try:
        del lock[0]
    except KeyError:
        pass  # another thread holds it
    else:
        try:
            …
        finally:
            lock[0] = True
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["DictLock", "run_locked"]

T = TypeVar("T")
DictLock = dict[int, bool]  # {0: True} while it is free, empty while a thread holds it


def run_locked(lock: DictLock, do: Callable[[], T]) -> T:
    """Wait for `lock`, call `do` while holding it, and return the result.

    Waiting is polling, so `do` should be short. The lock is not reentrant.
    """
    while True:
        try:
            del lock[0]
            break
        except KeyError:
            time.sleep(20e-6)
    try:
        return do()
    finally:
        lock[0] = True
