"""Streams and events of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.devices.base import Event
from preheat.devices.cuda.driver import call, error_of, library
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
        """Whether the work before it has ended."""
        return _ready("cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Wait until it has."""
        call("cuEventSynchronize", self.handle)

    def elapsed(self, since: Event) -> float:
        """Seconds from `since` to this event."""
        return float(call("cuEventElapsedTime", since.handle, self.handle)) / 1e3

    def close(self) -> None:
        """Give it back; the driver keeps what is still waited for."""
        call("cuEventDestroy", self.handle)


class CudaStream:
    """A stream, our own or another library's."""

    def __init__(self, device: CudaDevice, handle: int, *, owned: bool) -> None:
        self._device, self.handle, self._owned = device, handle, owned

    def record(self, *, timing: bool = False) -> CudaEvent:
        """An event after everything submitted so far."""
        with self._device.current():
            event = CudaEvent(timing=timing)
            call("cuEventRecord", event.handle, self.handle)
        return event

    def wait(self, event: Event) -> None:
        """Let later work wait for `event`."""
        with self._device.current():
            call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def done(self) -> bool:
        """Whether everything submitted has ended."""
        with self._device.current():
            return _ready("cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Wait until it has."""
        with self._device.current():
            call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Give it back; its work goes on."""
        if self._owned:
            call("cuStreamDestroy", self.handle)

    def begin_capture(self, mode: str) -> None:
        """From here on work becomes a graph."""
        modes = library().CUstreamCaptureMode
        with self._device.current():
            how = getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode.upper()}")
            call("cuStreamBeginCapture", self.handle, how)

    def end_capture(self) -> CudaGraph:
        """What was captured."""
        with self._device.current():
            return CudaGraph(self._device, call("cuStreamEndCapture", self.handle))

    def captured(self) -> int:
        """How many nodes were captured so far."""
        status, _, graph, *_ = call("cuStreamGetCaptureInfo", self.handle)
        if _STATUS[int(status)] != "active":
            raise error_of("cuStreamGetCaptureInfo", _INVALIDATED)
        return int(call("cuGraphGetNodes", graph, 0)[1])

    def capture_status(self) -> str:
        """Whether this stream is captured."""
        with self._device.current():
            return _STATUS[int(call("cuStreamIsCapturing", self.handle))]


def _ready(name: str, handle: object) -> bool:
    (status,) = getattr(library(), name)(handle)
    if status and status != _NOT_READY:
        raise error_of(name, status)
    return not status
