"""Objects of the program that graphs keep alive."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.driver import Handles
from preheat.driver.graphs.graph import graph_of
from preheat.driver.raw import put
from preheat.driver.status import INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

_MOVE = 1
_NO_DESTRUCTOR_SYNC = 1
_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


class UserObject:
    """An object with a count of references. Its destructor is called when the last one ends."""

    def __init__(self, handles: Handles, pointer: int, destructor: int, count: int) -> None:
        self.handle = handles.add(self)
        self.pointer = pointer
        self.destructor = destructor
        self.count = count
        self._handles = handles

    def release(self, count: int) -> None:
        """End references."""
        self.count -= count
        if not self.count:
            self._handles.remove(self.handle)
            _DESTRUCTOR(self.destructor)(self.pointer)


class _Reference:
    """One reference of a graph and of its executables. Queued replays keep it, too."""

    def __init__(self, user: UserObject) -> None:
        self.user = user
        weakref.finalize(self, user.release, 1).atexit = False


@entry("cuUserObjectCreate")
def _create(driver: Driver, out: int, pointer: int, destructor: int, count: int, flags: int) -> None:
    if not out or not destructor or not count or flags != _NO_DESTRUCTOR_SYNC:
        raise CallError(INVALID_VALUE)
    put(out, UserObject(driver.handles, pointer, destructor, count).handle)


def _user_object(driver: Driver, handle: int, count: int) -> UserObject:
    found = driver.handles.get(handle, UserObject)
    if not count:
        raise CallError(INVALID_VALUE)
    return found


@entry("cuUserObjectRetain")
def _retain(driver: Driver, handle: int, count: int) -> None:
    _user_object(driver, handle, count).count += count


@entry("cuUserObjectRelease")
def _release(driver: Driver, handle: int, count: int) -> None:
    found = _user_object(driver, handle, count)
    if count > found.count:
        raise CallError(INVALID_VALUE)
    found.release(count)


@entry("cuGraphRetainUserObject")
def _retain_for_graph(driver: Driver, graph: int, handle: int, count: int, flags: int) -> None:
    holder, found = graph_of(driver, graph), _user_object(driver, handle, count)
    if flags & ~_MOVE:
        raise CallError(INVALID_VALUE)
    if not flags & _MOVE:
        found.count += count
    holder.holders += [_Reference(found) for _ in range(count)]


@entry("cuGraphReleaseUserObject")
def _release_for_graph(driver: Driver, graph: int, handle: int, count: int) -> None:
    holder, found = graph_of(driver, graph), _user_object(driver, handle, count)
    held = [each for each in holder.holders if isinstance(each, _Reference) and each.user is found]
    if count > len(held):
        raise CallError(INVALID_VALUE)
    for each in held[:count]:
        holder.holders.remove(each)
