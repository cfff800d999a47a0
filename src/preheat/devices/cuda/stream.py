"""Streams and events of a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import TYPE_CHECKING

from preheat.devices.base import DEFAULT_STREAMS, LEGACY_STREAMS, Event
from preheat.devices.cuda.driver import (
    NOT_CURRENT,
    call,
    error_of,
    library,
    relaxed_capture_mode,
    retain,
)
from preheat.devices.cuda.graph import CudaGraph

if TYPE_CHECKING:
    from preheat.devices.cuda.device import CudaDevice

__all__ = ["CudaEvent", "CudaStream"]

_NOT_READY = 600
_STATUS = ("none", "active", "invalidated")
_NO_TIMING = 2
_INVALIDATED = 901


class CudaEvent:
    """A point in a stream."""

    def __init__(self, *, timing: bool) -> None:
        self.handle = int(call("cuEventCreate", 0 if timing else _NO_TIMING))

    def done(self) -> bool:
        """Return True once the work before the event has completed."""
        with relaxed_capture_mode():
            return _ready("cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Wait until the event has completed."""
        with relaxed_capture_mode():
            call("cuEventSynchronize", self.handle)

    def elapsed(self, since: Event) -> float:
        """Return the seconds from `since` to this event."""
        return float(call("cuEventElapsedTime", since.handle, self.handle)) / 1e3

    def close(self) -> None:
        """Destroy the event; the driver keeps it for the streams that still wait for it."""
        call("cuEventDestroy", self.handle)


class CudaStream:
    """A stream of ours or of another library.

    The handle of a default stream means the default stream of the context that is current.
    """

    def __init__(self, device: CudaDevice, handle: int, *, owned: bool) -> None:
        self._device = device
        self.handle = handle
        self._owned = owned
        # Calls that name another stream than a default one need no current context.
        self._in_context = device.current if handle in DEFAULT_STREAMS else nullcontext
        with device.current():
            self.id = _id_of(handle)

    def record(self, *, timing: bool = False, reuse: Event | None = None) -> Event:
        """Return an event after everything submitted so far; `reuse` is recorded once more."""
        if reuse is None:
            with self._device.current():
                reuse = CudaEvent(timing=timing)
        (status,) = library().cuEventRecord(reuse.handle, self.handle)
        if status in NOT_CURRENT:  # This is a default stream, and another context is current.
            with self._device.current():
                call("cuEventRecord", reuse.handle, self.handle)
        elif status:
            raise error_of("cuEventRecord", status)
        return reuse

    def wait(self, event: Event) -> None:
        """Let later work wait for `event`."""
        with self._in_context():
            call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def done(self) -> bool:
        """Return True once all submitted work has completed."""
        with self._in_context(), relaxed_capture_mode():
            return _ready("cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Wait for all submitted work."""
        with self._in_context(), relaxed_capture_mode():
            call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Destroy the stream, unless another library owns it; its work continues."""
        if self._owned:
            call("cuStreamDestroy", self.handle)

    def begin_capture(self, mode: str) -> None:
        """Record later work in a graph instead of running it."""
        modes = library().CUstreamCaptureMode
        with self._device.current():
            how = getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode.upper()}")
            call("cuStreamBeginCapture", self.handle, how)

    def end_capture(self) -> CudaGraph:
        """End the capture and return its graph."""
        with self._device.current():
            return CudaGraph(self._device, call("cuStreamEndCapture", self.handle))

    def num_captured_nodes(self) -> int:
        """Return how many nodes are captured so far."""
        status, _, graph, *_ = call("cuStreamGetCaptureInfo", self.handle)
        if _STATUS[int(status)] != "active":
            raise error_of("cuStreamGetCaptureInfo", _INVALIDATED)
        return int(call("cuGraphGetNodes", graph, 0)[1])

    def capture_id(self) -> int | None:
        """Return the number of the capture that this stream takes part in, or None."""
        if self.handle in LEGACY_STREAMS:
            return None  # See `capture_status`.
        with self._in_context():
            status, number, *_ = call("cuStreamGetCaptureInfo", self.handle)
        return None if _STATUS[int(status)] == "none" else int(number)

    def capture_status(self) -> str:
        """Return whether this stream is being captured."""
        if self.handle in LEGACY_STREAMS:
            return "none"  # It cannot be captured, and the query could invalidate other captures.
        with self._in_context():
            return _STATUS[int(call("cuStreamIsCapturing", self.handle))]

    def retain(self, owner: object) -> None:
        """Keep `owner` alive as long as the graph that is being captured, or an executable of it."""
        with self._device.current():
            graph = call("cuStreamGetCaptureInfo", self.handle)[2]
            retain(graph, owner)


def _id_of(handle: int) -> int:
    """Return the id that the driver has for a stream, or a negative one while it is captured.

    The query for the id of a captured stream fails and invalidates the capture.
    """
    if handle in LEGACY_STREAMS or not int(call("cuStreamIsCapturing", handle)):
        return int(call("cuStreamGetId", handle))
    if len(_captured) >= _MANY_CAPTURED:
        _captured.clear()
    capture = int(call("cuStreamGetCaptureInfo", handle)[1])
    return _captured.setdefault((capture, handle), next(_captured_ids))


_MANY_CAPTURED = 256
_captured: dict[tuple[int, int], int] = {}  # ids of captured streams, by capture and handle
_captured_ids = itertools.count(-1, -1)


def _ready(name: str, handle: object) -> bool:
    (status,) = getattr(library(), name)(handle)
    if status and status != _NOT_READY:
        raise error_of(name, status)
    return not status
