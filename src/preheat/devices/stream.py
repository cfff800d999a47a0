"""Streams and events of the public interface. Other libraries also accept them."""

from __future__ import annotations

from preheat.devices import base
from preheat.devices.active_capture import SYNCHRONIZE, TIME_EVENT, WAIT_OUTSIDE, CapturePoint
from preheat.devices.context import Context
from preheat.errors import CaptureError, InputError
from preheat.model.tracebacks import short_methods
from preheat.process.callsite import caller

__all__ = ["Event", "Stream", "raw_stream", "record_event", "record_in", "wait_in"]

_RECREATE = "make the stream again: gpu.stream()"
_CLOSED = f"{_RECREATE}; the end of a `with` block closes a stream"


@short_methods(without={"require_alive", "require_outside"})
class Event:
    """A point in the work of a stream. The event is destroyed when the object is dropped.

    `gpu.record` and `Stream.record` make events. An event that was recorded inside a capture is a point
    of the graph, and only streams of that capture can wait for it.

    Examples:
        >>> start = gpu.record(timing=True)
        >>> gpu.kernel(SAXPY, "saxpy")[1, 32](2.0, gpu.zeros(4), gpu.zeros(4), 4)
        >>> end = gpu.record(timing=True)
        >>> end.synchronize()
        >>> end.elapsed(start) >= 0
        True
    """

    __slots__ = ("_context", "_timing", "point", "raw")

    def __init__(
        self,
        context: Context,
        raw: base.Event,
        point: CapturePoint | None = None,
        *,
        timing: bool = False,
    ) -> None:
        self._context = context
        self.raw = raw
        self.point = point
        self._timing = timing

    def done(self) -> bool:
        """Return True once the work before the event has completed.

        Examples:
            >>> event = gpu.record()
            >>> gpu.synchronize()
            >>> event.done()
            True
        """
        self.require_alive()
        self._context.refuse_in_capture(SYNCHRONIZE)
        self.require_outside()
        return self.raw.done()

    def synchronize(self) -> None:
        """Wait until the event has completed, and raise the errors of the work before it.

        Raises:
            DeviceError: A kernel before the event failed, or the context is lost.

        Examples:
            >>> gpu.record().synchronize()
        """
        self.require_alive()
        self._context.refuse_in_capture(SYNCHRONIZE)
        self.require_outside()
        self.raw.synchronize()

    def elapsed(self, since: Event) -> float:
        """Return the seconds from `since` to this event. Both were recorded with `timing=True`.

        Raises:
            InputError: One of the events was recorded without `timing=True`.
            DriverError: One of the events has not completed.

        Examples:
            >>> start, end = gpu.record(timing=True), gpu.record(timing=True)
            >>> gpu.synchronize()
            >>> end.elapsed(start) >= 0
            True
        """
        for each in (self, since):
            each.require_alive()
            each.require_outside()
            if not each._timing:
                raise InputError("the event has no time", hint="record it with timing=True")
        return self.raw.elapsed(since.raw)

    def require_alive(self) -> None:
        """Raise when the context of the event is lost."""
        self._context.require_alive("record the event again: gpu.record()")

    def require_outside(self) -> None:
        """Raise for an event that was recorded inside a capture."""
        if self.point is not None:
            raise CaptureError(
                "the event was recorded inside a capture, so it exists only in the graph",
                where=caller(),
                hint="record an event after the replay: gpu.record()",
            )

    def __repr__(self) -> str:
        return f"<Event on {self._context.device.name}>"

    def __del__(self) -> None:
        if hasattr(self, "raw"):
            self._context.deferred_cleanups.append(self.raw.close)


def record_event(context: Context, stream: base.Stream, *, timing: bool = False) -> Event:
    """Return an event after everything submitted to `stream` so far."""
    context.drain_long_queue()
    return Event(context, stream.record(timing=timing), timing=timing)


@short_methods()
class Stream:
    """A queue of work, made by `gpu.stream`. Work in it runs in order, concurrently with other streams.

    `close`, the end of a `with` block and dropping the object release the stream. Other libraries
    accept it through `__cuda_stream__`.

    Examples:
        >>> x, y, saxpy = gpu.zeros(4), gpu.zeros(4), gpu.kernel(SAXPY, "saxpy")
        >>> with gpu.stream() as side:
        ...     saxpy.launch(2.0, x, y, 4, grid=1, block=32, stream=side)
        ...     side.synchronize()
    """

    def __init__(self, context: Context, priority: int = 0) -> None:
        self._context = context
        self._priority = priority
        self._raw: base.Stream | None = context.new_stream(priority)

    @property
    def raw(self) -> base.Stream:
        """The stream of the device interface."""
        self._context.require_alive(_RECREATE)
        if self._raw is None:
            raise InputError("this stream is closed", hint=_CLOSED)
        return self._raw

    @property
    def handle(self) -> int:
        """The number by which the driver and other libraries know the stream."""
        return self.raw.handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def record(self, *, timing: bool = False) -> Event:
        """Return an event after everything that was submitted to this stream so far.

        Inside a capture it is a point of the graph, if this stream is a part of the capture.

        Args:
            timing: Let `Event.elapsed` measure the time from or to this event.

        Examples:
            >>> event = gpu.stream().record()
            >>> event.synchronize()
        """
        return record_in(self._context, self.raw, timing=timing)

    def wait(self, other: object) -> None:
        """Let later work of this stream wait for an event, or for all work in another stream so far.

        The caller does not wait. Inside a capture, the wait for an event of the capture forks this
        stream: work of the capturing thread in it is captured from here on, as a branch of the graph.
        Before the end, the captured stream has to wait for the branch: see `Gpu.wait`.

        Args:
            other: An `Event` or a `Stream`, or a stream of another library.

        Examples:
            >>> x, side = gpu.zeros(4), gpu.stream()
            >>> side.wait(gpu.record())
        """
        wait_in(self._context, self.raw, other)

    def done(self) -> bool:
        """Return True once all submitted work has completed.

        Examples:
            >>> gpu.stream().done()
            True
        """
        self._context.refuse_in_capture(SYNCHRONIZE, self.raw)
        return self.raw.done()

    def synchronize(self) -> None:
        """Wait for all submitted work, and raise its errors.

        Raises:
            DeviceError: A kernel failed since the last check, or the context is lost.

        Examples:
            >>> gpu.stream().synchronize()
        """
        self._context.refuse_in_capture(SYNCHRONIZE, self.raw)
        self.raw.synchronize()

    def close(self) -> None:
        """Release the stream. Its work continues. A second call does nothing.

        Examples:
            >>> side = gpu.stream()
            >>> side.close()
        """
        raw = self._raw
        self._raw = None
        if raw is not None:
            self._context.idle_streams.append((self._priority, raw))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_raw"):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._raw is None else self._raw.id
        return f"<Stream {state} on {self._context.device.name}>"


def record_in(context: Context, stream: base.Stream | None, *, timing: bool) -> Event:
    """Return an event after everything submitted to `stream`; None means the device's own.

    In a thread that captures, the event becomes part of the capture if the stream is. The captured
    stream then takes the place of the device's own.
    """
    context.require_alive()
    capture = context.active_capture(stream)
    if capture is None:
        return record_event(context, stream or context.stream, timing=timing)
    if timing:
        context.refuse_in_capture(TIME_EVENT)
    with capture.operation():
        point = capture.streams.record(stream)
    return Event(context, point.event, point)


def wait_in(context: Context, stream: base.Stream | None, other: object) -> None:
    """Let later work of `stream` wait for an event or a stream; None means the device's own."""
    event = other if isinstance(other, Event) else _event_of(context, other)
    event.require_alive()
    if event.point is None:
        if context.active_capture(stream) is not None:
            context.refuse_in_capture(WAIT_OUTSIDE)
        (stream or context.stream).wait(event.raw)
        return
    capture = context.active_capture()
    if capture is None:
        event.require_outside()
        return
    with capture.operation():
        capture.streams.wait(stream, event.point)


def _event_of(context: Context, stream: object) -> Event:
    """Return an event after everything submitted to a stream, which may be another library's."""
    return record_in(context, raw_stream(context, stream), timing=False)


def raw_stream(context: Context, stream: object) -> base.Stream:
    """Return the device's stream for one of ours, or for any object with `__cuda_stream__`."""
    if isinstance(stream, Stream):
        raw = stream.raw  # A stream from before a reset has none.
        if stream._context is not context:
            raise InputError(f"{stream!r} does not belong to {context.device.name}")
        return raw
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise InputError(f"{stream!r} has version {version} of __cuda_stream__, not 0")
        return context.order.adopt(handle)
    for attribute in ("cuda_stream", "ptr"):  # torch and CuPy before they had the protocol
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return context.order.adopt(handle)
    raise InputError(
        f"{stream!r} is not a stream",
        hint="pass gpu.stream(), a torch or CuPy stream, or anything with __cuda_stream__",
    )
