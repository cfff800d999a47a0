"""Cancelling the compiles of other threads."""

from __future__ import annotations

import os
import select
from _thread import get_ident

from preheat.process.files import owned
from preheat.process.gil_limiter import released

__all__ = ["Cancellation", "Cancelled", "current"]


class Cancelled(BaseException):
    """The compile of this thread was cancelled.

    It is not an `Exception`: like an interrupt, it ends only the work of this thread. Another thread
    that waits for the same result takes over the work.
    """


_by_thread: dict[int, Cancellation] = {}


class Cancellation:
    """Ends the compiles of all threads that run inside its `with` statement."""

    def __init__(self) -> None:
        self.cancelled = False
        #: Readable once the compiles are cancelled, for a thread that waits for another descriptor.
        self.descriptor = owned(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __enter__(self) -> Cancellation:
        _by_thread[get_ident()] = self
        return self

    def __exit__(self, *_: object) -> None:
        _by_thread.pop(get_ident(), None)

    def cancel(self) -> None:
        """End the compiles. Those that begin later end at once."""
        self.cancelled = True
        os.eventfd_write(self.descriptor, 1)

    def check(self) -> None:
        """Raise `Cancelled` once the compiles are cancelled."""
        if self.cancelled:
            raise Cancelled

    def sleep(self, seconds: float) -> None:
        """Sleep, at most until the compiles are cancelled."""
        ended = select.poll()
        ended.register(self.descriptor, select.POLLIN)
        with released():
            ended.poll(seconds * 1000)


def current() -> Cancellation | None:
    """Return the `Cancellation` of this thread, or None."""
    return _by_thread.get(get_ident())
