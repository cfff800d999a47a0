"""Streams and events as users hold them. Other libraries accept them, too."""

from __future__ import annotations

from preheat.devices import base
from preheat.errors import InputError
from preheat.runtime.active_capture import RECORD_EVENT, SYNCHRONIZE
from preheat.runtime.context import Context

__all__ = ["Event", "Stream", "raw_stream", "record_event"]

_RECREATE = "make the stream again: gpu.stream()"


class Event:
    """A point in the work of a stream. The event is destroyed when the object is dropped."""

    __slots__ = ("_context", "raw")

    def __init__(self, context: Context, raw: base.Event) -> None:
        self._context = context
        self.raw = raw

    def done(self) -> bool:
        """Return True once the work before the event has completed."""
        self.require()
        self._context.refuse_in_capture(SYNCHRONIZE)
        return self.raw.done()

    def synchronize(self) -> None:
        """Wait until the event has completed, and raise the errors of the work before it."""
        self.require()
        self._context.refuse_in_capture(SYNCHRONIZE)
        self.raw.synchronize()

    def elapsed(self, since: Event) -> float:
        """Return the seconds from `since` to this event; both are complete and have `timing=True`."""
        self.require()
        since.require()
        return self.raw.elapsed(since.raw)

    def require(self) -> None:
        """Raise when the context of the event is lost."""
        self._context.require_alive("record the event again: gpu.record()")

    def __repr__(self) -> str:
        return f"<Event on {self._context.device.name}>"

    def __del__(self) -> None:
        if hasattr(self, "raw"):
            self._context.deferred_cleanups.append(self.raw.close)


def record_event(context: Context, stream: base.Stream, *, timing: bool = False) -> Event:
    """Return an event after everything submitted to `stream` so far."""
    context.drain_long_queue()
    return Event(context, stream.record(timing=timing))


class Stream:
    """Work that runs in order, concurrently with the work of other streams.

    `close`, the end of a `with` block and dropping the object release the stream. Other libraries
    accept it through `__cuda_stream__`.
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
            raise InputError("this stream is closed", hint=_RECREATE)
        return self._raw

    @property
    def handle(self) -> int:
        """The number by which the driver and other libraries know the stream."""
        return self.raw.handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def record(self, *, timing: bool = False) -> Event:
        """Return an event after everything submitted to this stream so far."""
        self._context.refuse_in_capture(RECORD_EVENT, self.raw)
        return record_event(self._context, self.raw, timing=timing)

    def wait(self, event: Event) -> None:
        """Let later work of this stream wait for `event`; the caller does not wait."""
        event.require()
        self._context.refuse_in_capture(RECORD_EVENT, self.raw)
        self.raw.wait(event.raw)

    def done(self) -> bool:
        """Return True once all submitted work has completed."""
        self._context.refuse_in_capture(SYNCHRONIZE, self.raw)
        return self.raw.done()

    def synchronize(self) -> None:
        """Wait for all submitted work, and raise its errors."""
        self._context.refuse_in_capture(SYNCHRONIZE, self.raw)
        self.raw.synchronize()

    def close(self) -> None:
        """Release the stream; its work continues. A second call does nothing."""
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
