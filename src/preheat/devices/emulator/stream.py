"""Streams and events of the emulator: work is done when it is submitted, unless it is captured."""

from __future__ import annotations

import itertools
import time

from preheat.devices import base
from preheat.devices.emulator.capture import Capture, Captures, refusal
from preheat.errors import DeviceError

__all__ = ["EmulatorEvent", "EmulatorStream"]

_handles = itertools.count(1 << 8)  # beyond the numbers that mean a GPU's default streams


class EmulatorEvent:
    """A point in a stream: the time at which it was recorded, or a place in a capture."""

    def __init__(self, captures: Captures, capture: Capture | None = None) -> None:
        self.handle = next(_handles)
        self.at = time.perf_counter()
        self.capture, self._captures = capture, captures

    def done(self) -> bool:
        """Always: work is done when it is submitted."""
        self._asked("event query")
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""
        self._asked("event synchronize")

    def _asked(self, call: str) -> None:
        if self.capture is not None:
            raise self.capture.invalidate(call, 907)
        self._captures.guard(call)

    def elapsed(self, since: base.Event) -> float:
        """Seconds from `since` to this event."""
        if not isinstance(since, EmulatorEvent):
            raise DeviceError("the other event belongs to another device")
        return self.at - since.at

    def close(self) -> None:
        """Nothing to give back."""


class EmulatorStream:
    """Work in order."""

    def __init__(self, captures: Captures, handle: int | None = None) -> None:
        self.handle = next(_handles) if handle is None else handle
        self._captures = captures

    @property
    def capture(self) -> Capture | None:
        """The capture that work of this stream becomes part of."""
        return self._captures.of(self.handle)

    def record(self, *, timing: bool = False) -> base.Event:
        """An event of this moment."""
        del timing
        if self.capture is not None:
            self.capture.require("event record")
        return EmulatorEvent(self._captures, self.capture)

    def wait(self, event: base.Event) -> None:
        """Nothing to wait for; captured and other work never wait for one another."""
        theirs = event.capture if isinstance(event, EmulatorEvent) else None
        if self.capture is not None and theirs is not self.capture:
            raise self.capture.invalidate("stream wait", 905)
        if theirs is not None and theirs is not self.capture:
            raise theirs.invalidate("stream wait", 801)

    def done(self) -> bool:
        """Always."""
        self._captures.guard("stream query", self.handle)
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""
        self._captures.guard("stream synchronize", self.handle)

    def close(self) -> None:
        """Nothing to give back."""

    def begin_capture(self, mode: str) -> None:
        """From here on work becomes a graph."""
        self._captures.begin(self.handle, mode)

    def end_capture(self) -> base.Graph:
        """What was captured."""
        return self._captures.end(self.handle)

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
