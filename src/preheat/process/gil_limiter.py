"""A limit on the threads that run Python code at the same time.

A thread that waits for a compiler or a disk gives up the interpreter lock. When many threads do so in
turn, each of them waits for the lock again after every system call, and all of them together take
longer than a few would.
"""

from __future__ import annotations

from _thread import get_ident
from queue import Empty, SimpleQueue
from types import TracebackType

__all__ = ["GilLimiter", "released"]

# Seconds after which a thread continues without a turn. The wait is bounded, so that threads that wait
# for each other cannot deadlock.
_MAX_WAIT = 0.05

_held: dict[int, GilLimiter] = {}  # by thread


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
