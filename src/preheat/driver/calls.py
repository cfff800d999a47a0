"""Registers the functions of the driver by name and version, and turns their exceptions into statuses.

A function takes the `Driver` and then the arguments of its C type: handles, addresses and numbers, all
as integers. It returns a status or None, which means success. `CallError` ends it with another status.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from preheat.device.base import PER_THREAD_STREAM
from preheat.driver.entry_points import EntryPoint
from preheat.driver.faults import CallError, status_of
from preheat.driver.status import DEINITIALIZED, NOT_INITIALIZED

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["CallError", "Implementation", "bound", "entry", "find", "implementations"]

F = TypeVar("F", bound=Callable[..., Any])


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


def find(point: EntryPoint, table: list[EntryPoint]) -> Implementation | None:
    """Return the implementation of a function, or None.

    A function for the per-thread default stream is that of the version before it.
    """
    version = point.version
    if point.per_thread:
        plain = [other.version for other in table if other.name == point.name and not other.per_thread]
        version = max((at for at in plain if at <= version), default=min(plain, default=version))
    return implementations.get((point.name, version)) or implementations.get((point.name, None))


def bound(driver: Driver, point: EntryPoint, found: Implementation) -> Callable[..., int]:
    """Return the function that the shim calls: it returns a status in every case."""
    function, after_fault, before_init, stream, default_stream = found
    if point.per_thread and stream is not None:
        function = _with_thread_stream(function, stream)
    elif point.per_thread and default_stream:
        function = partial(function, stream=PER_THREAD_STREAM)
    finalizing = sys.is_finalizing
    ended = 0 if _releases(point.name) else DEINITIALIZED
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
            if finalizing():  # Modules may be gone by now, those of the driver too.
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


def _releases(name: str) -> bool:
    """Return whether a function releases something, which succeeds after the end of the interpreter."""
    words = ("Destroy", "Free", "Unload", "Release", "Unregister", "Synchronize")
    return any(word in name for word in words)
