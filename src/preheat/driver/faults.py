"""Errors of the emulator as statuses of the driver, and the messages about them."""

from __future__ import annotations

import re
import sys
import traceback
from typing import TYPE_CHECKING

from preheat.driver.status import (
    ASSERT,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    LAUNCH_FAILED,
    MISALIGNED_ADDRESS,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    UNKNOWN,
)
from preheat.errors import DeviceError, DriverError, EmulatorFault, UnsupportedInstructionError

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

_MISALIGNED = re.compile(r"(reads|writes) \d+ bytes at \w+, which is not a multiple of ")

__all__ = ["CallError", "fault_status", "say", "status_of"]


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
        return OUT_OF_MEMORY
    if isinstance(error, DeviceError):
        say(f"{call}: {error}")
        return INVALID_VALUE
    say(f"{call} failed in the driver itself: please report this")
    traceback.print_exception(error)
    return UNKNOWN


def fault_status(fault: EmulatorFault) -> int:
    """Return the status that a GPU would give for a fault of a kernel."""
    if isinstance(fault, UnsupportedInstructionError):
        return NOT_SUPPORTED
    # A message may also contain the name of the kernel, which may contain these words.
    if _MISALIGNED.match(fault.message):
        return MISALIGNED_ADDRESS
    if fault.message.startswith("assertion "):
        return ASSERT
    return LAUNCH_FAILED if fault.address is None else ILLEGAL_ADDRESS
