"""Errors of the emulator as statuses of the driver, and the messages about them."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from preheat.errors import DeviceError, DriverError, EmulatorFault, UnsupportedInstructionError

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["CallError", "fault_status", "say", "status_of"]

_INVALID_VALUE = 1
_ILLEGAL_ADDRESS = 700
_ASSERT = 710
_MISALIGNED = 716
_LAUNCH_FAILED = 719
_NOT_SUPPORTED = 801
_UNKNOWN = 999


class CallError(Exception):
    """Ends a call of the driver with a status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def say(message: str) -> None:
    """Write one message of the driver for the user."""
    sys.stderr.write(f"preheat: {message}\n")


def status_of(driver: Driver, call: str, error: BaseException) -> int:
    """Return the status for an exception, and tell the user what the status does not say."""
    if isinstance(error, EmulatorFault):
        return driver.report_fault(error)
    if isinstance(error, DriverError):
        return error.code
    if isinstance(error, MemoryError):
        return 2
    if isinstance(error, DeviceError):
        say(f"{call}: {error}")
        return _INVALID_VALUE
    say(f"{call} failed in the driver itself: please report this")
    traceback.print_exception(error)
    return _UNKNOWN


def fault_status(fault: EmulatorFault) -> int:
    """Return the status that a GPU would give for a fault of a kernel."""
    if isinstance(fault, UnsupportedInstructionError):
        return _NOT_SUPPORTED
    if "aligned" in fault.message:
        return _MISALIGNED
    if "assert" in fault.message:
        return _ASSERT
    return _LAUNCH_FAILED if fault.address is None else _ILLEGAL_ADDRESS
