"""Keeps objects alive as long as a graph of another library, by user objects of the driver.

The driver calls the destructor of a user object at any time, in a thread that may call neither CUDA nor
Python. The destructor is therefore `sem_post` of the C library: it increments a semaphore, and the next
call of `collect` drops the owner.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from typing import Any

from preheat.device.cuda.driver import call, library

__all__ = ["collect", "retain"]

_SEMAPHORE_BYTES = 64  # sem_t has 32 on Linux
_retained: deque[tuple[Any, object]] = deque()  # semaphores, and owners to drop once posted


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def retain(graph: Any, owner: object) -> None:
    """Keep `owner` alive as long as `graph`, which may be under capture, or an executable of it."""
    cu = library()
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    if _libc().sem_init(semaphore, 0, 0):
        raise OSError(ctypes.get_errno(), "sem_init failed")
    post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
    asynchronous = cu.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    made = call("cuUserObjectCreate", ctypes.addressof(semaphore), cu.CUhostFn(post), 1, asynchronous)
    # The driver may post it at any time from here on, even after the interpreter has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(semaphore))
    _retained.append((semaphore, owner))
    move = cu.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    call("cuGraphRetainUserObject", graph, made, 1, move)


def collect() -> None:
    """Drop the owners whose graphs are destroyed."""
    for _ in range(len(_retained)):
        semaphore, owner = _retained.popleft()
        if _libc().sem_trywait(semaphore):  # It is not posted yet.
            _retained.append((semaphore, owner))
        else:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(semaphore))
