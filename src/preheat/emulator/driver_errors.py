"""Errors of the emulator with the error codes of a GPU's driver."""

from __future__ import annotations

from preheat.errors import DriverError

__all__ = ["driver_error", "error_of"]

_NAMES = {
    1: ("INVALID_VALUE", "memory of a graph is allocated still, or the capture of an event is over"),
    400: ("INVALID_HANDLE", "there is no such stream"),
    401: ("ILLEGAL_STATE", "the stream is not in a state for this"),
    600: ("NOT_READY", "the event has not happened yet"),
    900: ("STREAM_CAPTURE_UNSUPPORTED", "no capture can hold this"),
    901: ("STREAM_CAPTURE_INVALIDATED", "an earlier call made this capture invalid"),
    902: ("STREAM_CAPTURE_MERGE", "a wait would join two captures"),
    903: ("STREAM_CAPTURE_UNMATCHED", "the capture began in another stream"),
    904: ("STREAM_CAPTURE_UNJOINED", "a stream that was forked from the captured one was not joined"),
    905: ("STREAM_CAPTURE_ISOLATION", "captured work cannot wait for work that is not captured"),
    906: ("STREAM_CAPTURE_IMPLICIT", "the legacy default stream cannot take part in a capture"),
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
