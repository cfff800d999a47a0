"""Streams that nothing but captures uses: each takes some, and gives them back in the end."""

from __future__ import annotations

from preheat.devices import base
from preheat.errors import DeviceError
from preheat.runtime.context import Context

__all__ = ["give_back_stream", "is_released", "take_stream"]


def take_stream(context: Context) -> base.Stream:
    """Return a stream for a capture."""
    try:
        return context.idle_capture_streams.popleft()
    except IndexError:
        return context.order.register_capture_stream(context.device.stream())


def give_back_stream(context: Context, stream: base.Stream) -> None:
    """Keep a stream of `take_stream` for later captures, if its capture has ended."""
    if is_released(context, stream):
        context.idle_capture_streams.append(stream)


def is_released(context: Context, stream: base.Stream) -> bool:
    """Return True if no capture has this stream; otherwise destroy it, which ends the capture.

    The end of a capture can fail. A stream that is still captured would let a later capture fail.
    """
    if context.lost is not None:
        return False
    try:
        if stream.capture_status() == "none":
            return True
        context.order.destroy_capture_stream(stream)
    except DeviceError:
        return False  # A stream without a status is not used again either.
    return False
