"""The context of one session of a device: its memory, streams and captures, and their end."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from preheat.devices import base, dlpack
from preheat.devices.active_capture import (
    ALLOCATE,
    OTHER_STREAM,
    SYNCHRONIZE,
    ActiveCapture,
    Allocator,
    RefusedOperation,
)
from preheat.devices.libraries import current_streams
from preheat.devices.order import Order
from preheat.devices.uses import Uses
from preheat.errors import CaptureError, ContextLostError, DeviceError, EmulatorFault, copy_error
from preheat.model.events import Events
from preheat.process import fork
from preheat.process.callsite import caller
from preheat.process.locks import DictLock, run_locked

__all__ = ["Context"]

_RESET = "call gpu.reset(); then {again}"
_NEW_PROCESS = "start a new process: the GPU does not recover in this one"
_LONG_QUEUE = 256  # queued finalizations after which a launch drains the queue as well


class Completion(Protocol):
    """Work that completes, such as an event."""

    def done(self) -> bool:
        """Return True once the work has completed."""


class Resource(Protocol):
    """An object that holds a resource of the device, such as memory."""

    def release(self) -> None:
        """Release the resource now, because the device is closed."""


class UserModule(Protocol):
    """A module as users hold it, around the device's own."""

    raw: base.Module


class _ThreadState(threading.local):
    """State of each thread."""

    allocator: Allocator | None = None
    capture: ActiveCapture | None = None  # the one that this thread has begun and not ended


class Context:
    """What is allocated in one session of a device. All of it becomes unusable when the session ends.

    `lost` is None while the context can be used, and afterwards the reason why it cannot. `recovers`
    says whether a reset of the device helps. `captures_by_thread` has the active captures.
    `unrestricted` is True while the context is not lost and no capture is active. It is all that a
    launch or a replay of the native core tests.

    Finalizers take no lock and do not call the driver. They append the work to `deferred_cleanups`, or
    a module to `unused_modules`, and `drain` does the work at the next safe point, which is never
    inside a capture. They also use no global name, because Python sets those to None at exit before
    it collects the last objects. Streams are reused and never destroyed, so that nothing can hold a
    destroyed one.
    """

    __slots__ = (  # The native core reads them at their offsets.
        "__weakref__", "_cause", "_drain_lock", "_held_until_done", "_intact", "_remedy", "_state_lock",
        "_synchronizing", "capture_lock", "captures_by_thread", "deferred_cleanups", "device", "events",
        "idle_capture_streams", "idle_streams", "kernel_fill", "last_replayed", "lost",
        "modules", "order", "recovers", "resolve_lock", "resources", "stream", "thread_state",
        "unrestricted", "unused_modules",
    )  # fmt: skip

    def __init__(self, device: base.Device, events: Events) -> None:
        self.device = device
        self.events = events
        self.lost: ContextLostError | None = None
        self._cause: DeviceError | None = None
        self.recovers = True
        self._intact = False  # True if everything is still usable after the fault that `lost` reports
        self._remedy = ""
        self.captures_by_thread: dict[int, ActiveCapture] = {}
        self.unrestricted = True
        self.last_replayed: str | None = None  # the name of a graph
        self._state_lock: DictLock = {0: True}
        self.deferred_cleanups: deque[Callable[[], None]] = deque()
        self.unused_modules: deque[base.Module] = deque()
        self.idle_streams: deque[tuple[int, base.Stream]] = deque()
        self.idle_capture_streams: deque[base.Stream] = deque()  # see `graph/captured_streams.py`
        self._held_until_done: deque[tuple[Completion, object]] = deque()
        self.modules: weakref.WeakSet[UserModule] = weakref.WeakSet()  # what users or the session hold
        self.resources: weakref.WeakSet[Resource] = weakref.WeakSet()  # memory, graphs and the like
        self.resolve_lock = threading.Lock()
        self.thread_state = _ThreadState()
        device.on_loss = self.handle_loss
        self.order = Order(device, partial(current_streams, device), self.deferred_cleanups.append)
        self.stream = self.order.register_stream(device.stream())
        self.kernel_fill: Callable[[int, bytes, int, base.Stream], bool] | None = None  # `KernelFill`
        self._drain_lock: DictLock = {0: True}  # held by the thread that empties the queues
        # Held while a capture begins, and by what would invalidate it: a wait for the device, a free.
        self.capture_lock = threading.RLock()
        self._synchronizing = False
        fork.register(self)

    # Streams

    def new_stream(self, priority: int) -> base.Stream:
        """Return a stream of ours beside the first: one that nothing holds any more, or a new one."""
        self.require_alive()
        with suppress(IndexError):  # Another thread took the last one.
            for _ in range(len(self.idle_streams)):
                idle = self.idle_streams.popleft()
                if idle[0] == priority:
                    return idle[1]
                self.idle_streams.append(idle)
        return self.order.register_stream(self.device.stream(priority=priority))

    # Captures

    def add_capture(self, capture: ActiveCapture) -> None:
        """Let the work of this thread become part of `capture`."""

        def add() -> None:
            if threading.get_ident() in self.captures_by_thread:
                raise CaptureError(
                    "this thread is capturing already", hint="end that capture before the next begins"
                )
            self.captures_by_thread[threading.get_ident()] = capture
            self.thread_state.capture = capture
            self._update_unrestricted()

        run_locked(self._state_lock, add)

    def _update_unrestricted(self) -> None:
        self.unrestricted = self.lost is None and not self.captures_by_thread

    def active_captures(self) -> list[ActiveCapture]:
        """Abort the captures that nothing can end any more, and return the other active ones."""
        for capture in list(self.captures_by_thread.values()):
            if capture.abandoned:
                capture.abort()
        return list(self.captures_by_thread.values())

    def remove_capture(self, capture: ActiveCapture) -> bool:
        """Remove a capture, from any thread; return True if it was active."""

        def remove() -> bool:
            if self.thread_state.capture is capture:
                self.thread_state.capture = None
            was = capture in self.captures_by_thread.values()
            self.captures_by_thread = {
                thread: one for thread, one in self.captures_by_thread.items() if one is not capture
            }
            self._update_unrestricted()
            return was

        return run_locked(self._state_lock, remove)

    def active_capture(self, stream: base.Stream | None = None) -> ActiveCapture | None:
        """Return the capture that work of this thread, in `stream` if given, becomes part of."""
        captures = self.active_captures()
        mine = self.captures_by_thread.get(threading.get_ident())
        for other in captures:
            if other is not mine and other.stream is stream:
                raise CaptureError("another thread is capturing this stream")
        if mine is not None and not mine.streams.includes(stream):
            mine.refuse(OTHER_STREAM, stream)
            return None
        return mine

    def allocator(self) -> Allocator | None:
        """Return the allocator for new arrays of this thread; None for the device itself."""
        capture = self.active_capture()
        return self.thread_state.allocator if capture is None else capture.allocator

    def refuse_in_capture(self, operation: RefusedOperation, stream: base.Stream | None = None) -> None:
        """Raise if an active capture does not permit `operation`."""
        for capture in self.active_captures():
            capture.refuse(operation, stream)

    # Loss of the context

    def require_alive(self, again: str = "make what you need again") -> None:
        """Raise when this context is lost; `again` says how to replace the object in use."""
        if self.lost is not None:
            raise copy_error(self.lost, hint=self.remedy(again))

    def remedy(self, again: str) -> str | None:
        """Return what to do once the context is lost; `again` says how to replace the object."""
        return self._remedy.format(again=again) or None

    def handle_loss(self, error: DeviceError) -> None:
        """Record an error that ends this context.

        The device may report the same fault again once the line of its source is known.
        """
        plain = error.plain if isinstance(error, EmulatorFault) else None
        located = plain is not None and plain is self._cause
        if (self.lost is None) if located else (self.lost is not None):
            return  # `recover` was called in the meantime, or there was a fault before.
        # Work on host memory runs when it is submitted, so no work is queued behind the fault.
        immediate = isinstance(error, EmulatorFault) and self.device.dlpack[0] == base.ON_HOST
        intact = immediate and not self.captures_by_thread
        self._cause = error
        if self.last_replayed is not None:
            error.args = (f"{error}\nthe last graph replayed was {self.last_replayed}",)
        if isinstance(error, ContextLostError):  # The device itself still works.
            self._lose(str(error), error.hint or "", only_first=True)
        else:
            recovers = self.device.recovers
            reason = f"{self.device.name} is lost after an error: {error}"
            remedy = _RESET if recovers else _NEW_PROCESS
            self._lose(reason, remedy, recovers=recovers, only_first=not located)
            self._intact = recovers and (self._intact if located else intact)
        if not located:
            self.events.emit("lost", device=self.device.name, reason=str(error))

    def _lose(
        self, reason: str, remedy: str, *, recovers: bool = True, only_first: bool = False
    ) -> None:

        def lose() -> None:
            if only_first and self.lost is not None:
                return
            self.lost = ContextLostError(reason)
            self._remedy = remedy
            self.recovers = recovers
            self._update_unrestricted()

        run_locked(self._state_lock, lose)

    def recover(self) -> bool:
        """Make the context, with everything in it, usable again after a fault of a kernel.

        This is possible on an emulator without a schedule, and outside captures. Return False if
        only a reset of the device helps. Memory that the kernel was writing may have any contents.
        """

        def recover() -> bool:
            if self._intact:
                self.lost = None
                self._update_unrestricted()
            return self._intact

        return run_locked(self._state_lock, recover)

    def close(self) -> None:
        """Release everything once the work of the device has completed."""
        self.synchronize()
        self.mark_closed()
        for resource in list(self.resources):
            resource.release()
        for module in list(self.modules):
            module.raw.unload()
        self.order.close()

    def mark_reset(self) -> None:
        """End this context, because the device is reset."""
        self._end(
            "it was reset, and everything on it was lost", "the device was reset already: {again}"
        )

    def mark_closed(self) -> None:
        """End this context, because the device is closed."""
        remedy = f"open the device again: preheat.device({self.device.name!r}); then {{again}}"
        self._end("it was closed", remedy, recovers=False)

    def mark_forked(self) -> None:
        """End this context in a forked child, which cannot use the device."""
        # The finalizers of these objects would call the driver.
        _leaked.extend((*self.deferred_cleanups, *self._held_until_done))
        self._end(
            "this process was forked from one that was using the GPU, which CUDA does not allow",
            "start workers with multiprocessing's 'spawn' or 'forkserver' method",
            recovers=False,
        )

    def _end(self, reason: str, remedy: str, *, recovers: bool = True) -> None:
        """Make everything in this context unusable, and drop what is queued.

        This replaces an earlier reason, because after a reset the earlier fault no longer matters.
        """
        self._lose(f"{self.device.name}: {reason}", remedy, recovers=recovers)
        self._intact = False
        for queue in (
            self.deferred_cleanups,
            self.unused_modules,
            self.idle_streams,
            self.idle_capture_streams,
            self._held_until_done,
        ):
            queue.clear()

    # Memory

    def allocate(self, size: int, stream: base.Stream) -> int:
        """Free unused memory and allocate; if there is not enough memory, wait and try again.

        It waits only for streams of preheat. A wait for the device would invalidate captures of other
        libraries.
        """
        self.require_alive()
        self.refuse_in_capture(ALLOCATE)
        self.drain()
        try:
            return self.device.allocate(size, stream)
        except MemoryError:
            self._wait_for_streams()
            dlpack.end_dropped_exports()
            self._drop_completed()
            self.drain()
            return self.device.allocate(size, stream)

    def free(self, address: int, home: base.Stream, uses: Uses) -> None:
        """Free memory in its home stream after all its uses, or later if a capture prevents it."""
        try:
            self.order.section(home, {uses: True}).enter()
        except CaptureError:
            self.deferred_cleanups.append(partial(self.free, address, home, uses))
            return
        self.device.free(address, home)

    def hold_until(self, event: Completion, owner: object) -> None:
        """Keep a reference to `owner` until the work before an event has completed."""
        self._drop_completed()
        self._held_until_done.append((event, owner))

    def _drop_completed(self) -> None:
        if self.captures_by_thread:
            return
        with suppress(IndexError):  # The queue is empty.
            while True:
                oldest = self._held_until_done.popleft()
                done = False
                try:
                    done = oldest[0].done()
                finally:
                    if not done:
                        self._held_until_done.appendleft(oldest)
                if not done:
                    return

    def drain_long_queue(self) -> None:
        """Drain a queue that has grown long because the program does not allocate."""
        if len(self.deferred_cleanups) > _LONG_QUEUE:
            self.drain()

    def drain(self, *, modules: bool = False) -> None:
        """Do the work that finalizers queued. Unloading `modules` waits for the device."""
        if self.active_captures() or not (self.deferred_cleanups or (modules and self.unused_modules)):
            return  # There is nothing to do, or a capture does not permit it.
        if self._synchronizing:
            return  # Another thread waits for the device, and this one need not.
        try:
            del self._drain_lock[0]  # One instruction, which no signal can interrupt.
        except KeyError:
            return  # Another thread is draining.
        try:
            with self.capture_lock:
                self._run_deferred(modules=modules)
        finally:
            self._drain_lock[0] = True

    def _run_deferred(self, *, modules: bool) -> None:
        for _ in range(len(self.deferred_cleanups)):  # What cannot be done yet is queued again.
            if not self.unrestricted or not self.deferred_cleanups:
                break
            self.deferred_cleanups.popleft()()
        if modules and self.unused_modules and self.unrestricted:
            doomed = [self.unused_modules.popleft() for _ in range(len(self.unused_modules))]
            self.device.synchronize()  # Then none of these can be running.
            for module in doomed:
                module.unload()

    def synchronize(self) -> None:
        """Wait for the device, then free everything that nothing holds."""
        self.require_alive()
        self.refuse_in_capture(SYNCHRONIZE)
        self.wait_for_work()
        if self.captures_by_thread:
            return
        dlpack.end_dropped_exports()
        self._drop_completed()
        self.drain(modules=True)

    def wait_for_work(self) -> None:
        """Wait for the device or, while a thread captures, for our streams one by one."""
        library = self.order.capturing_library()
        if library is not None:  # The wait would invalidate its capture.
            raise CaptureError(
                f"synchronising while {library} is capturing a graph",
                where=caller(),
                hint="synchronise after that capture",
            )
        with self.capture_lock:
            if not self.active_captures():
                try:
                    self._synchronizing = True
                    self.device.synchronize()
                finally:
                    self._synchronizing = False
                return
        self._wait_for_streams()

    def after_fork(self) -> None:
        """Renew the locks in a forked child, where a GPU cannot be used any more."""
        self._drain_lock = {0: True}
        self._state_lock = {0: True}
        self.resolve_lock = threading.Lock()
        self.capture_lock = threading.RLock()
        self.order.after_fork()
        mine = threading.get_ident()  # The child has no other thread.
        self.captures_by_thread = {
            thread: one for thread, one in self.captures_by_thread.items() if thread == mine
        }
        self._update_unrestricted()
        if self.device.survives_fork:
            self.device.after_fork()
        else:
            self.mark_forked()

    def _wait_for_streams(self) -> None:
        for stream in self.order.streams():
            stream.synchronize()


_leaked: list[object] = []
