"""Threads that compile: a limit on how many run Python code at a time, and how they are cancelled.

A thread that waits for a compiler or a disk gives up the interpreter lock. When many threads do so in
turn, each of them waits for the lock again after every system call, and all of them together take
longer than a few would.
"""

from __future__ import annotations

import os
import select
from _thread import get_ident
from queue import Empty, SimpleQueue
from types import TracebackType

from preheat.process.files import adopt_fd

__all__ = ["Cancellation", "Cancelled", "GilLimiter", "current_cancellation", "released"]

# Seconds after which a thread continues without a turn. The wait is bounded, so that threads that wait
# for each other cannot deadlock.
_MAX_WAIT = 0.05

_held: dict[int, GilLimiter] = {}  # by thread
_cancellations: dict[int, Cancellation] = {}  # by thread


class GilLimiter:
    """Lets `number` threads run at a time.

    A thread has one of that many turns in a `with` block, except in a `released` block.
    """

    def __init__(self, number: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(number):
            self._free.put(None)

    def __enter__(self) -> None:
        self.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give()

    def take(self) -> None:
        """Wait for a turn, for a bounded time."""
        try:
            self._free.get(timeout=_MAX_WAIT)
        except Empty:
            return
        _held[get_ident()] = self

    def give(self) -> None:
        """Give the turn of this thread to another one, if it has one."""
        if _held.pop(get_ident(), None) is not None:
            self._free.put(None)


class released:  # noqa: N801 - used like a function
    """Give up the turn of this thread during a block in which it waits."""

    __slots__ = ("_turns",)

    def __enter__(self) -> None:
        self._turns = _held.get(get_ident())
        if self._turns is not None:
            self._turns.give()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._turns is not None:
            self._turns.take()


class Cancelled(BaseException):
    """The compile of this thread was cancelled.

    It is not an `Exception`: like an interrupt, it ends only the work of this thread. Another thread
    that waits for the same result takes over the work.
    """


class Cancellation:
    """Ends the compiles of all threads that run inside its `with` statement."""

    def __init__(self) -> None:
        self.cancelled = False
        #: Readable once the compiles are cancelled, for a thread that waits for another descriptor.
        self.descriptor = adopt_fd(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __enter__(self) -> Cancellation:
        _cancellations[get_ident()] = self
        return self

    def __exit__(self, *_: object) -> None:
        _cancellations.pop(get_ident(), None)

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


def current_cancellation() -> Cancellation | None:
    """Return the `Cancellation` of this thread, or None."""
    return _cancellations.get(get_ident())
