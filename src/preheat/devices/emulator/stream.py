"""Streams and events of the emulator: work is done when it is submitted, captured or queued."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress

from preheat.devices import base
from preheat.devices.base import LEGACY_STREAMS, PER_THREAD_STREAM
from preheat.devices.emulator.capture import Capture, Captures
from preheat.devices.emulator.refusal import refusal
from preheat.devices.emulator.schedule import Mark, Scheduler
from preheat.errors import DeviceError

__all__ = ["EmulatorEvent", "EmulatorStream", "Streams"]

_OURS = 1 << 20  # handles from here on are those of streams and events that the emulator made
_handles = itertools.count(_OURS)
_ids = itertools.count(1)


class EmulatorEvent:
    """A point in a stream: a time, a place in a capture, or a mark in a queue."""

    def __init__(self, captures: Captures, scheduler: Scheduler | None) -> None:
        self.handle = next(_handles)
        self.scheduler, self._captures = scheduler, captures
        self.capture: Capture | None = None
        self.mark: Mark | None = None
        self._at = 0.0

    def record(self, stream: int, capture: Capture | None) -> None:
        """Record the event again. Work that waits for the earlier record keeps waiting for that."""
        mark = None
        if capture is not None:
            capture.require("event record")
        elif self.scheduler is not None:
            mark = self.scheduler.record(stream)
        self.capture, self.mark, self._at = capture, mark, time.perf_counter()

    @property
    def at(self) -> float:
        """When the work before it had ended."""
        at = self._at if self.mark is None else self.mark.at
        if at is None:
            raise refusal("event elapsed", 600)
        return at

    def belongs_to(self, captures: Captures) -> bool:
        """Whether it is an event of the device with these captures."""
        return self._captures is captures

    def done(self) -> bool:
        """Whether the work before it was executed; at once unless it is queued."""
        self._asked("event query")
        return self.mark is None or self.scheduler is None or self.scheduler.query(self.mark)

    def synchronize(self) -> None:
        """Execute the work before it."""
        self._asked("event synchronize")
        if self.mark is not None and self.scheduler is not None:
            self.scheduler.force(self.mark)

    def _asked(self, call: str) -> None:
        if self.capture is not None:
            raise self.capture.invalidate(call, 907)

    def elapsed(self, since: base.Event) -> float:
        """Seconds from `since` to this event."""
        if not isinstance(since, EmulatorEvent):
            raise DeviceError("the other event belongs to another device")
        return self.at - since.at

    def close(self) -> None:
        """Nothing to give back."""


class EmulatorStream:
    """Work in order; all objects for one stream have the same `id` and share its state."""

    def __init__(self, streams: Streams, handle: int, id: int, *, owned: bool) -> None:
        self.handle, self.id = handle, id
        self._streams, self._owned = streams, owned
        self._captures, self._scheduler = streams.captures, streams.scheduler

    @property
    def capture(self) -> Capture | None:
        """The capture that work of this stream becomes part of."""
        return self._captures.of(self.id)

    def record(self, *, timing: bool = False, again: base.Event | None = None) -> base.Event:
        """An event of this moment: a new one, or `again` once more."""
        del timing
        event = EmulatorEvent(self._captures, self._scheduler) if again is None else again
        if not isinstance(event, EmulatorEvent) or not event.belongs_to(self._captures):
            raise DeviceError("the event belongs to another device")
        event.record(self.id, self.capture)
        return event

    def wait(self, event: base.Event) -> None:
        """Let queued work wait for a queued event; captured and other work never wait for another."""
        theirs = event.capture if isinstance(event, EmulatorEvent) else None
        if self.capture is not None and theirs is not self.capture:
            raise self.capture.invalidate("stream wait", 905)
        if theirs is not None and theirs is not self.capture:
            raise theirs.invalidate("stream wait", 801)
        if isinstance(event, EmulatorEvent) and event.mark is not None and self.capture is None:
            self._follow(event.mark, event.scheduler)

    def _follow(self, mark: Mark, scheduler: Scheduler | None) -> None:
        if scheduler is self._scheduler is not None:
            self._scheduler.wait(self.id, mark)
        elif scheduler is not None:  # of another device, whose queues this one cannot see
            scheduler.force(mark)

    def done(self) -> bool:
        """Whether everything submitted was executed; always unless work is queued."""
        self._captures.guard("stream query", self.id)
        return self._scheduler is None or self._scheduler.query(self._scheduler.end(self.id))

    def synchronize(self) -> None:
        """Execute everything submitted."""
        self._captures.guard("stream synchronize", self.id)
        if self._scheduler is not None:
            self._scheduler.force(self._scheduler.end(self.id))

    def close(self) -> None:
        """Destroy the stream if it is not another library's; queued work is still executed."""
        if self._owned:
            self._streams.close(self.handle, self.id)

    def begin_capture(self, mode: str) -> None:
        """From here on work becomes a graph."""
        if self.handle in LEGACY_STREAMS:
            raise refusal("begin capture", 900)
        self._captures.begin(self.id, mode)

    def end_capture(self) -> base.Graph:
        """What was captured."""
        return self._captures.end(self.id)

    def captured(self) -> int:
        """How many nodes were captured so far."""
        if self.capture is None:
            raise refusal("capture info", 901)
        self.capture.require("capture info")
        return len(self.capture)

    def capture_status(self) -> str:
        """Whether this stream is captured."""
        if self.capture is None:
            return "none"
        return "active" if self.capture.valid else "invalidated"

    def retain(self, owner: object) -> None:
        """Keep `owner` as long as the graph that is being captured."""
        if self.capture is None:
            raise refusal("retain", 401)
        self.capture.retain(owner)


class Streams:
    """The streams of one life of a device, by handle; a handle is used again once it is free."""

    def __init__(self, captures: Captures, scheduler: Scheduler | None) -> None:
        self.captures, self.scheduler = captures, scheduler
        self._live: dict[int, int] = {}  # the id by the handle
        self._free: list[int] = []
        self._of_thread = threading.local()
        self._live.update(dict.fromkeys(LEGACY_STREAMS, self._new()))

    def open(self) -> EmulatorStream:
        """A new stream, with the handle of one that was destroyed if there is one."""
        handle = None
        with suppress(IndexError):  # none was, or another thread was first
            handle = self._free.pop()
        if handle is None:
            handle = next(_handles)
        id = self._live[handle] = self._new()
        return EmulatorStream(self, handle, id, owned=True)

    def adopt(self, handle: int) -> EmulatorStream:
        """The stream with this handle; a `DriverError` where there is none."""
        return EmulatorStream(self, handle, self.id_of(handle), owned=False)

    def id_of(self, handle: int) -> int:
        """The id of the stream that has this handle now; a `DriverError` where there is none."""
        if handle == PER_THREAD_STREAM:
            return self._default()
        id = self._live.get(handle)
        if id is None and 0 <= handle < _OURS:  # of a library that only tests know
            id = self._live.setdefault(handle, self._new())
        if id is None:
            raise refusal("stream id", 400)
        return id

    def close(self, handle: int, id: int) -> None:
        """Destroy a stream; twice is fine."""
        if self._live.get(handle) == id:
            del self._live[handle]
            self.captures.abandon(id)
            if self.scheduler is not None:
                self.scheduler.close(id)
            self._free.append(handle)

    def _default(self) -> int:
        """The id of this thread's default stream."""
        if not hasattr(self._of_thread, "id"):
            self._of_thread.id = self._new()
        id: int = self._of_thread.id
        return id

    def _new(self) -> int:
        id = next(_ids)
        if self.scheduler is not None:
            self.scheduler.open(id)
        return id
