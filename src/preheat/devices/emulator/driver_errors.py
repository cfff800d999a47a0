"""Errors of the emulator with the error codes of a GPU's driver."""

from __future__ import annotations

from preheat.errors import DriverError

__all__ = ["driver_error", "error_of"]

_NAMES = {
    1: ("INVALID_VALUE", "memory that the graph allocates is allocated still, or is not the graph's"),
    400: ("INVALID_HANDLE", "there is no such stream"),
    401: ("ILLEGAL_STATE", "the stream is not in a state for this"),
    600: ("NOT_READY", "the event has not happened yet"),
    801: ("NOT_SUPPORTED", "captured work goes to one stream alone"),
    900: ("STREAM_CAPTURE_UNSUPPORTED", "no capture can hold this"),
    901: ("STREAM_CAPTURE_INVALIDATED", "an earlier call made this capture invalid"),
    905: ("STREAM_CAPTURE_ISOLATION", "captured work cannot wait for work that is not captured"),
    907: ("CAPTURED_EVENT", "a captured event never happens by itself"),
    908: ("STREAM_CAPTURE_WRONG_THREAD", "another thread began this capture"),
}


def driver_error(call: str, code: int) -> DriverError:
    """Return the error of an emulator call with a code of the driver."""
    return error_of(f"emulator {call}", code)


def error_of(call: str, code: int) -> DriverError:
    """Return the error for a status."""
    name, meaning = _NAMES.get(code, ("ERROR", "the emulator gives no such status"))
    return DriverError(call, code, f"EMULATOR_{name}", meaning)
