"""What a graph of another library keeps alive: user objects of the driver.

The driver calls the destructor of a user object on a thread of its own, at a time of its own, where
neither CUDA nor Python may be called. So the destructor is `sem_post` of the C library: it counts a
semaphore up, and the owner is dropped at the next call of `collect`.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from typing import Any

from preheat.devices.cuda.driver import call, library

__all__ = ["collect", "retain"]

_SEMAPHORE_BYTES = 64  # sem_t has 32 on Linux
_retained: deque[tuple[Any, object]] = deque()  # semaphores, and what to drop once they were posted


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def retain(graph: Any, owner: object) -> None:
    """Keep `owner` as long as `graph`, which may be under capture, and what is instantiated from it."""
    cu, semaphore = library(), ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    if _libc().sem_init(semaphore, 0, 0):
        raise OSError(ctypes.get_errno(), "sem_init failed")
    post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
    asynchronous = cu.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    made = call("cuUserObjectCreate", ctypes.addressof(semaphore), cu.CUhostFn(post), 1, asynchronous)
    # The driver may post it at any time from here on, also after the interpreter has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(semaphore))
    _retained.append((semaphore, owner))
    move = cu.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    call("cuGraphRetainUserObject", graph, made, 1, move)


def collect() -> None:
    """Drop the owners whose graphs are gone."""
    for _ in range(len(_retained)):
        semaphore, owner = _retained.popleft()
        if _libc().sem_trywait(semaphore):  # It was not posted yet.
            _retained.append((semaphore, owner))
        else:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(semaphore))
