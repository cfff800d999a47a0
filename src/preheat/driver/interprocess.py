"""Memory and events that processes of one user share.

A handle names a file of Linux that only lives in memory, by the process that has it open and the number
there. Nothing is left behind when processes end, however they do.

Memory has no file until its handle is asked for. Its contents are moved to the file then, which is
mapped in its place: the address stays. Events are shared by name alone. Work before a shared event is
executed when it is recorded, so that other processes never have to wait for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.driver.allocations import Allocation, Kind
from preheat.driver.calls import CallError, entry
from preheat.driver.contexts import Context
from preheat.driver.events import INTERPROCESS, NO_TIMING, Event, add_event
from preheat.driver.raw import put, write
from preheat.driver.status import INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, MAP_FAILED

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

_HANDLE = struct.Struct("<8sIIQQ")
_SIZE = 64  # of a handle, the rest of which is 0
_MEMORY, _EVENT = b"preheatM", b"preheatE"
_LAZY_PEER_ACCESS = 1  # the only flag, which a program has to give


class _Handle(NamedTuple):
    """What a handle says.

    Attributes:
        number: The file descriptor of the file in the process.
        inode: The file's inode: the process may have closed it, and use the number for another one.
        size: The bytes of the allocation.
    """

    kind: bytes
    process: int
    number: int
    inode: int
    size: int


class _File:
    """A file in memory alone, by which other processes of this user find something of this one."""

    def __init__(self) -> None:
        self.number = os.memfd_create("preheat-shared")
        os.fchmod(self.number, 0o600)
        weakref.finalize(self, os.close, self.number)

    def handle(self, kind: bytes, size: int = 0) -> bytes:
        """Return the handle for it."""
        handle = _Handle(kind, os.getpid(), self.number, os.fstat(self.number).st_ino, size)
        return _HANDLE.pack(*handle).ljust(_SIZE, b"\0")


class _Imported:
    """Memory of another process.

    Attributes:
        opened: How often it was opened in this context, and not closed.
    """

    def __init__(self, file: int, handle: _Handle) -> None:
        self.handle = handle
        self.opened = 0
        self._mapped: np.ndarray[Any, Any] = np.frombuffer(mmap.mmap(file, 0), np.uint8)

    @property
    def start(self) -> int:
        """Its address in this process."""
        return self._mapped.ctypes.data


@contextmanager
def _open(packed: ctypes.Structure, kind: bytes) -> Iterator[tuple[int, _Handle]]:
    """Open the file that a handle names, which the process that made it must still have open.

    Linux lets a process open the files of another one if it may inspect it. Files of other users are
    refused to root as well.
    """
    handle = _Handle(*_HANDLE.unpack_from(bytes(packed)))
    if handle.kind != kind:
        raise CallError(INVALID_VALUE)
    if handle.process == os.getpid():
        raise CallError(INVALID_CONTEXT)
    try:
        file = os.open(f"/proc/{handle.process}/fd/{handle.number}", os.O_RDWR)
    except OSError:
        raise CallError(MAP_FAILED) from None
    try:
        found = os.fstat(file)
        if (found.st_ino, found.st_uid) != (handle.inode, os.geteuid()) or found.st_size < handle.size:
            raise CallError(MAP_FAILED)
        yield file, handle
    finally:
        os.close(file)


# Memory


@entry("cuIpcGetMemHandle")
def _get_memory(driver: Driver, out: int, address: int) -> None:
    context = driver.current()
    context.gpu.emulator.captures.reject("share memory", watched=True)
    found = driver.memory.at(address)
    if not out or found is None or not found.can_be_shared:
        raise CallError(INVALID_VALUE)
    if not isinstance(found.owner, _File):
        file = _File()
        found.context.gpu.emulator.allocator.move_to_file(address, file.number)
        found.owner = file
    write(out, found.owner.handle(_MEMORY, found.size))


@entry("cuIpcOpenMemHandle")
def _open_memory(driver: Driver, out: int, packed: ctypes.Structure, flags: int) -> None:
    context = driver.current()
    context.gpu.emulator.captures.reject("share memory", watched=True)
    if not out or flags != _LAZY_PEER_ACCESS:
        raise CallError(INVALID_VALUE)
    with _open(packed, _MEMORY) as (file, handle):
        memory = _find_open(driver, context, handle)
        if memory is None:
            memory = _Imported(file, handle)
            _add(driver, context, memory)
    memory.opened += 1
    put(out, memory.start)


def _find_open(driver: Driver, context: Context, handle: _Handle) -> _Imported | None:
    """Return the memory if it is open in this context."""
    owners = (each.owner for each in driver.memory.of_context(context))
    return next((own for own in owners if isinstance(own, _Imported) and own.handle == handle), None)


def _add(driver: Driver, context: Context, memory: _Imported) -> None:
    host, size = context.gpu.emulator.host_memory, memory.handle.size
    lent = host.lend(memory.start, size)
    made = Allocation(memory.start, size, Kind.IMPORTED, context, owner=memory)
    made.release = lambda: host.take_back(lent)
    driver.memory.add(made)


@entry("cuIpcCloseMemHandle")
def _close_memory(driver: Driver, address: int) -> None:
    driver.current().gpu.emulator.captures.reject("share memory", watched=True)
    found = driver.memory.at(address)
    if found is None or not isinstance(found.owner, _Imported):
        raise CallError(INVALID_VALUE)
    found.owner.opened -= 1
    if not found.owner.opened:
        driver.forget(found)


# Events


@entry("cuIpcGetEventHandle")
def _get_event(driver: Driver, out: int, handle: int) -> None:
    event = driver.handles.get(handle, Event)
    if not out:
        raise CallError(INVALID_VALUE)
    if not event.flags & INTERPROCESS:
        raise CallError(INVALID_HANDLE)
    if not isinstance(event.file, _File):
        event.file = _File()
    write(out, event.file.handle(_EVENT))


@entry("cuIpcOpenEventHandle")
def _open_event(driver: Driver, out: int, packed: ctypes.Structure) -> None:
    if not out:
        raise CallError(INVALID_VALUE)
    with _open(packed, _EVENT):
        put(out, add_event(driver, INTERPROCESS | NO_TIMING))
