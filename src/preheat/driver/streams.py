"""Streams, and the functions of the host that work calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.devices.base import DEFAULT_STREAMS, LEGACY_STREAMS
from preheat.driver.calls import CallError, entry
from preheat.driver.contexts import GREATEST_PRIORITY, Context
from preheat.driver.raw import I32, U32, U64, put
from preheat.driver.status import CAPTURE_UNSUPPORTED, INVALID_VALUE, NOT_READY
from preheat.emulator.stream import EmulatorStream

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["HostCall", "Stream", "stream_of", "submit"]

_NON_BLOCKING = 1
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64)


class Stream:
    """A stream of a context. The default streams are made anew for each call."""

    def __init__(
        self, context: Context, emulated: EmulatorStream, flags: int = 0, priority: int = 0
    ) -> None:
        self.context = context
        self.emulated = emulated
        self.flags = flags
        self.priority = priority

    def close(self) -> None:
        """Destroy the stream once its work has completed."""
        self.emulated.close()


@dataclass(frozen=True)
class HostCall:
    """Work that calls a function of the program with one argument."""

    function: int
    argument: int

    def __call__(self) -> None:
        _HOST_FUNCTION(self.function)(self.argument)


def stream_of(driver: Driver, handle: int) -> Stream:
    """Return the stream with this handle; the default streams are those of the current context."""
    if handle not in DEFAULT_STREAMS:
        return driver.handles.get(handle, Stream)
    context = driver.current()
    emulator = context.gpu.emulator
    if handle in LEGACY_STREAMS:
        emulator.captures.reject_implicit("a call in the legacy default stream")
    return Stream(context, emulator.adopt(handle))


def submit(kind: str, stream: Stream, work: Callable[[], object], *, wait: bool = False) -> None:
    """Execute work of the host in a stream, or capture it. With `wait`, return when it is done."""
    stream.context.gpu.emulator.submit(kind, stream.emulated, work, wait=wait)


@entry("cuStreamCreate")
def _create(driver: Driver, out: int, flags: int) -> None:
    _create_with_priority(driver, out, flags, 0)


@entry("cuStreamCreateWithPriority")
def _create_with_priority(driver: Driver, out: int, flags: int, priority: int) -> None:
    if not out or flags & ~_NON_BLOCKING:
        raise CallError(INVALID_VALUE)
    context = driver.current()
    emulated = context.gpu.emulator.stream(blocking=not flags & _NON_BLOCKING)
    made = Stream(context, emulated, flags, min(max(priority, GREATEST_PRIORITY), 0))
    put(out, driver.handles.add(made))


@entry("cuStreamDestroy", 4000)
def _destroy(driver: Driver, handle: int) -> None:
    driver.handles.get(handle, Stream).close()
    driver.handles.remove(handle)


@entry("cuStreamGetFlags", stream=0)
def _flags(driver: Driver, handle: int, out: int) -> None:
    put(out, stream_of(driver, handle).flags, U32)


@entry("cuStreamGetPriority", stream=0)
def _priority(driver: Driver, handle: int, out: int) -> None:
    put(out, stream_of(driver, handle).priority, I32)


@entry("cuStreamGetCtx", 9020, stream=0)
def _context(driver: Driver, handle: int, out: int) -> None:
    put(out, stream_of(driver, handle).context.handle, U64)


@entry("cuStreamGetCtx", 12050, stream=0)
def _context_or_green(driver: Driver, handle: int, out: int, green: int) -> None:
    _context(driver, handle, out)
    put(green, 0, U64)


@entry("cuStreamGetDevice", stream=0)
def _device(driver: Driver, handle: int, out: int) -> None:
    put(out, stream_of(driver, handle).context.gpu.index, I32)


@entry("cuStreamGetId", stream=0)
def _id(driver: Driver, handle: int, out: int) -> None:
    found = stream_of(driver, handle)
    found.context.gpu.emulator.captures.reject("stream id", found.emulated.id)
    put(out, found.emulated.id, U64)


@entry("cuStreamQuery", stream=0)
def _query(driver: Driver, handle: int) -> int:
    found = stream_of(driver, handle)
    found.context.gpu.emulator.captures.reject("stream query", watched=True)
    return 0 if found.emulated.done() else NOT_READY


@entry("cuStreamSynchronize", stream=0)
def _synchronize(driver: Driver, handle: int) -> None:
    found = stream_of(driver, handle)
    found.context.gpu.emulator.captures.reject("stream synchronize", watched=True)
    found.emulated.synchronize()


@entry("cuStreamAttachMemAsync", stream=0)
def _attach(driver: Driver, handle: int, address: int, size: int, flags: int) -> None:
    del address, size, flags  # Managed memory is host memory, which every stream can use.
    stream_of(driver, handle)


@entry("cuLaunchHostFunc", stream=0)
def _host_function(driver: Driver, handle: int, function: int, argument: int, mode: int = 0) -> None:
    del mode
    if not function:
        raise CallError(INVALID_VALUE)
    submit("host", stream_of(driver, handle), HostCall(function, argument))


@entry("cuStreamAddCallback", stream=0)
def _callback(driver: Driver, handle: int, function: int, argument: int, flags: int) -> None:
    found = stream_of(driver, handle)
    if flags or not function:
        raise CallError(INVALID_VALUE)
    branch = found.emulated.branch
    if branch is not None:
        branch.capture.invalidate("stream callback")
        raise CallError(CAPTURE_UNSUPPORTED)
    submit("host", found, lambda: _CALLBACK(function)(handle, 0, argument))
