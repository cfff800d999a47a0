"""The functions of the driver: the table of all, those that are implemented, and their exceptions.

A function that is implemented takes the `Driver` and then the arguments of its C type: handles,
addresses and numbers, all as integers. It returns a status or None, which means success. `CallError`
ends it with another status. Errors of the emulator become statuses too, and the user is told what a
status does not say.
"""

from __future__ import annotations

import ctypes
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from preheat.devices.base import PER_THREAD_STREAM
from preheat.driver.status import (
    ASSERT,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    LAUNCH_FAILED,
    MISALIGNED_ADDRESS,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    UNKNOWN,
)
from preheat.errors import DeviceError, DriverError, EmulatorFault, UnsupportedInstructionError

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = [
    "KINDS", "CallError", "EntryPoint", "Implementation", "bind", "entry", "fault_status",
    "find_implementations", "implementations", "read_table", "say", "status_of",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

_MISALIGNED = re.compile(r"(reads|writes) \d+ bytes at \w+, which is not a multiple of ")

# The table

_TABLE = Path(__file__).parent / "native" / "entry_points.def"
_ROW = re.compile(r"E\((\w+),(\d+),([01]),(\w+),(\w*)\)")


class _Bytes(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


#: The kinds of arguments. Pointers and handles have 64 bits; `S` is a structure passed by value.
KINDS: dict[str, Any] = {
    "Q": ctypes.c_uint64,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "B": ctypes.c_ubyte,
    "H": ctypes.c_ushort,
    "f": ctypes.c_float,
    "S": _Bytes,
}


class EntryPoint(NamedTuple):
    """One version of a function."""

    name: str
    version: int  # the version of CUDA in which it was added: 12030 for 12.3
    per_thread: bool  # stream 0 means the default stream of the calling thread
    symbol: str  # under which the library exports it
    kinds: str  # of its arguments


def read_table() -> Iterator[EntryPoint]:
    """Yield all functions. The position of each is the number of its slot in the shim."""
    for name, version, per_thread, symbol, kinds in _ROW.findall(_TABLE.read_text()):
        yield EntryPoint(name, int(version), per_thread == "1", symbol, kinds)


# What is implemented


class Implementation(NamedTuple):
    """A function of the driver.

    Attributes:
        function: What is called.
        after_fault: True if it works in a context that a fault has ended.
        before_init: True if it works before `cuInit`.
        stream: The position of the stream among its arguments, or None.
        default_stream: True if it takes the default stream as the keyword argument `stream`.
    """

    function: Callable[..., int | None]
    after_fault: bool = False
    before_init: bool = False
    stream: int | None = None
    default_stream: bool = False


#: By name and version; the version is None for a function that has the same arguments in all versions.
implementations: dict[tuple[str, int | None], Implementation] = {}


def entry(
    name: str,
    *versions: int,
    after_fault: bool = False,
    before_init: bool = False,
    stream: int | None = None,
    default_stream: bool = False,
) -> Callable[[F], F]:
    """Register a function, for some versions or for all of them."""

    def register(function: F) -> F:
        made = Implementation(function, after_fault or before_init, before_init, stream, default_stream)
        for version in versions or (None,):
            implementations[name, version] = made
        return function

    return register


def find_implementations(table: list[EntryPoint]) -> Iterator[Implementation | None]:
    """Yield the implementation of each function in the table, or None.

    A function for the per-thread default stream is the one of the version before it.
    """
    plain: defaultdict[str, list[int]] = defaultdict(list)
    for point in table:
        if not point.per_thread:
            plain[point.name].append(point.version)
    for point in table:
        version, known = point.version, plain[point.name]
        if point.per_thread:
            version = max((at for at in known if at <= version), default=min(known, default=version))
        yield implementations.get((point.name, version)) or implementations.get((point.name, None))


def bind(driver: Driver, point: EntryPoint, found: Implementation, *, ended: int) -> Callable[..., int]:
    """Return the function that the shim calls: it returns a status in every case.

    `ended` is the status while the interpreter ends.
    """
    function, after_fault, before_init, stream, default_stream = found
    if point.per_thread and stream is not None:
        function = _with_thread_stream(function, stream)
    elif point.per_thread and default_stream:
        function = partial(function, stream=PER_THREAD_STREAM)
    finalizing = sys.is_finalizing
    name = point.name

    def call(*args: Any) -> int:
        try:
            if not (driver.initialized or before_init):
                return NOT_INITIALIZED
            if driver.faulted and not after_fault and (status := driver.context_status()):
                return status
            return function(driver, *args) or 0
        except CallError as error:
            return error.status
        except BaseException as error:
            if finalizing():  # Modules may be gone by now, the driver's too.
                return ended
            return status_of(driver, name, error)

    return call


def _with_thread_stream(function: Callable[..., int | None], stream: int) -> Callable[..., int | None]:
    """Let stream 0 mean the default stream of the thread."""
    at = stream + 1  # after the driver

    def call(*args: Any) -> int | None:
        if args[at] == 0:
            args = (*args[:at], PER_THREAD_STREAM, *args[at + 1 :])
        return function(*args)

    return call


# Exceptions


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
