"""Streams and events of the emulator: work is executed when it is submitted, captured or queued."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress

from preheat.devices import base
from preheat.devices.base import LEGACY_STREAMS, PER_THREAD_STREAM
from preheat.emulator.capture import Branch, Captures
from preheat.emulator.errors import driver_error
from preheat.emulator.schedule import QueuePosition, Scheduler
from preheat.errors import DeviceError

__all__ = ["EmulatorEvent", "EmulatorStream", "Streams"]

_FIRST_HANDLE = 1 << 20  # The first handle of streams and events that the emulator creates.
_handles = itertools.count(_FIRST_HANDLE)
_ids = itertools.count(1)


class EmulatorEvent:
    """A point in a stream: a time, a point of a capture, or a position in a queue."""

    def __init__(self, captures: Captures, scheduler: Scheduler | None) -> None:
        self.handle = next(_handles)
        self.scheduler = scheduler
        self._captures = captures
        self.captured: Branch | None = None  # the stream in the capture, as it was then
        self.recorded = False
        self.position: QueuePosition | None = None
        self._at = 0.0

    def record(self, stream: int, branch: Branch | None) -> None:
        """Record the event again. Work that waits for the earlier record still waits for that one."""
        position = None
        captured = None
        if branch is not None:
            branch.capture.require("event record")
            captured = Branch(branch.capture, branch.last, origin=branch.origin)
        elif self.scheduler is not None:
            position = self.scheduler.record(stream)
        self.captured = captured
        self.recorded = True
        self.position = position
        self._at = time.perf_counter()

    @property
    def at(self) -> float:
        """The time when the work before it ended."""
        at = self._at if self.position is None else self.position.reached_at
        if at is None:
            raise driver_error("event elapsed", 600)
        return at

    def done(self) -> bool:
        """Return whether the work before it was executed."""
        self._reject_captured("event query")
        return self.position is None or self.scheduler is None or self.scheduler.query(self.position)

    def synchronize(self) -> None:
        """Execute the work before it."""
        self._reject_captured("event synchronize")
        if self.position is not None and self.scheduler is not None:
            self.scheduler.run_until(self.position)

    def _reject_captured(self, call: str) -> None:
        if self.captured is not None:
            raise self.captured.capture.invalidate(call, 907)

    def elapsed(self, since: base.Event) -> float:
        """Return the seconds from `since` to this event."""
        if not isinstance(since, EmulatorEvent):
            raise DeviceError("the other event belongs to another device")
        return self.at - since.at

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class EmulatorStream:
    """Work in order. All objects for one stream have the same `id` and share its state."""

    def __init__(self, streams: Streams, handle: int, id: int, *, owned: bool) -> None:
        self.handle = handle
        self.id = id
        self._streams = streams
        self._owned = owned
        self._captures = streams.captures
        self._scheduler = streams.scheduler

    @property
    def branch(self) -> Branch | None:
        """The part that this stream has in a capture, or None."""
        return self._captures.find(self.id)

    def record(self, *, timing: bool = False, reuse: base.Event | None = None) -> base.Event:
        """Return an event recorded now: a new one, or `reuse` recorded once more."""
        del timing
        event = EmulatorEvent(self._captures, self._scheduler) if reuse is None else reuse
        if not isinstance(event, EmulatorEvent) or event._captures is not self._captures:
            raise DeviceError("the event belongs to another device")
        event.record(self.id, self.branch)
        return event

    def wait(self, event: base.Event) -> None:
        """Let later work wait for an event. A captured event forks this stream, or joins it."""
        branch = self.branch
        captured = event.captured if isinstance(event, EmulatorEvent) else None
        if captured is not None:
            self._wait_in_capture(branch, captured)
        elif branch is not None:
            raise branch.capture.invalidate("stream wait", 905)
        elif isinstance(event, EmulatorEvent) and event.position is not None:
            self._wait_for(event.position, event.scheduler)

    def _wait_in_capture(self, branch: Branch | None, captured: Branch) -> None:
        theirs = captured.capture
        if theirs.over:
            raise driver_error("stream wait", 1)
        if branch is None and self.handle in LEGACY_STREAMS:
            raise theirs.invalidate("stream wait", 906)
        if branch is None:
            theirs.require("stream wait")
            blocking = self._streams.is_blocking(self.id)
            self._captures.fork(self.id, theirs, captured.last, blocking=blocking)
        elif branch.capture is theirs:
            theirs.require("stream wait")
            branch.wait(captured.last)
        else:
            theirs.invalidate("stream wait")
            raise branch.capture.invalidate("stream wait", 902)

    def _wait_for(self, position: QueuePosition, scheduler: Scheduler | None) -> None:
        if scheduler is self._scheduler is not None:
            self._scheduler.wait(self.id, position)
        elif scheduler is not None:  # An event of another device, whose queues are not visible here.
            scheduler.run_until(position)

    def done(self) -> bool:
        """Return whether everything submitted was executed."""
        self._captures.reject("stream query", self.id)
        scheduler = self._scheduler
        return scheduler is None or scheduler.query(scheduler.current_position(self.id))

    def synchronize(self) -> None:
        """Execute everything submitted."""
        self._captures.reject("stream synchronize", self.id)
        if self._scheduler is not None:
            self._scheduler.run_until(self._scheduler.current_position(self.id))

    def close(self) -> None:
        """Destroy the stream, unless another library owns it. Queued work is still executed."""
        if self._owned:
            self._streams.close(self.handle, self.id)

    def begin_capture(self, mode: str) -> None:
        """Begin to capture work into a graph."""
        if self.handle in LEGACY_STREAMS:
            raise driver_error("begin capture", 900)
        self._captures.begin(self.id, mode, blocking=self._streams.is_blocking(self.id))

    def end_capture(self) -> base.Graph:
        """Return the captured graph."""
        return self._captures.end(self.id)

    def num_captured_nodes(self) -> int:
        """Return how many nodes were captured so far, in all streams of the capture."""
        branch = self.branch
        if branch is None:
            raise driver_error("capture info", 901)
        branch.capture.require("capture info")
        return len(branch.capture.nodes)

    def capture_id(self) -> int | None:
        """Return the number of the capture that this stream takes part in, or None."""
        return None if self.branch is None else self.branch.capture.number

    def capture_status(self) -> str:
        """Return whether this stream is captured."""
        if self.branch is None:
            return "none"
        return "active" if self.branch.capture.valid else "invalidated"

    def retain(self, owner: object) -> None:
        """Keep `owner` alive as long as the graph that is being captured."""
        if self.branch is None:
            raise driver_error("retain", 401)
        self.branch.capture.retain(owner)


class Streams:
    """The streams of a device by handle, until it is reset. Handles of destroyed streams are reused."""

    def __init__(self, captures: Captures, scheduler: Scheduler | None) -> None:
        self.captures = captures
        self.scheduler = scheduler
        self._live: dict[int, int] = {}  # The id by the handle.
        self._free: list[int] = []
        self._blocking: set[int] = set()  # ids
        # By thread. Values of `threading.local` end with each call of a thread that C code started.
        self._per_thread: dict[int, int] = {}
        legacy = self._new()
        self._live.update(dict.fromkeys(LEGACY_STREAMS, legacy))
        if scheduler is not None:
            scheduler.legacy = legacy

    def open(self, *, blocking: bool = False) -> EmulatorStream:
        """Return a new stream, with the handle of a destroyed one if possible."""
        handle = None
        with suppress(IndexError):  # None was destroyed, or another thread took its handle.
            handle = self._free.pop()
        if handle is None:
            handle = next(_handles)
        id = self._live[handle] = self._new(blocking=blocking)
        return EmulatorStream(self, handle, id, owned=True)

    def adopt(self, handle: int) -> EmulatorStream:
        """Return the stream with this handle, or raise a `DriverError`."""
        return EmulatorStream(self, handle, self.id_of(handle), owned=False)

    def id_of(self, handle: int) -> int:
        """Return the id of the stream that has this handle now, or raise a `DriverError`."""
        if handle == PER_THREAD_STREAM:
            return self._default()
        id = self._live.get(handle)
        if id is None and 0 <= handle < _FIRST_HANDLE:  # Of a library that only tests use.
            id = self._live.setdefault(handle, self._new())
        if id is None:
            raise driver_error("stream id", 400)
        return id

    def close(self, handle: int, id: int) -> None:
        """Destroy a stream. Destroying it twice is allowed."""
        if self._live.get(handle) == id:
            del self._live[handle]
            self.captures.abandon(id)
            if self.scheduler is not None:
                self.scheduler.close(id)
            self._free.append(handle)
            self._blocking.discard(id)

    def is_blocking(self, id: int) -> bool:
        """Return whether a stream and the legacy default stream wait for one another."""
        return id in self._blocking

    def _default(self) -> int:
        """Return the id of this thread's default stream. An ended thread may have had it before."""
        thread = threading.get_ident()
        id = self._per_thread.get(thread)
        if id is None:
            id = self._per_thread[thread] = self._new(blocking=True)
        return id

    def _new(self, *, blocking: bool = False) -> int:
        id = next(_ids)
        if blocking:
            self._blocking.add(id)
        if self.scheduler is not None:
            self.scheduler.open(id, blocking=blocking)
        return id
