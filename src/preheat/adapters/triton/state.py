"""The state that the parts of the adapter share in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from preheat.adapters.base import Connection, Row, ThreadState
from preheat.adapters.triton.directory import KernelDirectory
from preheat.model.foreign import ForeignEntry, ForeignRequest

if TYPE_CHECKING:
    from preheat.adapters.triton.tuning import Tuning

__all__ = ["MissedError", "State", "Work", "set_state", "state"]


class MissedError(Exception):
    """A kernel is not stored, and the caller may use one that assumes less."""


class Work(ThreadState):
    """What a thread is doing.

    `tuning` is what it is tuning. With `weak_allowed`, a miss raises `MissedError`: the caller looks
    for a weaker kernel. The entries that the thread uses are added to `collected`.
    """

    tuning: Tuning | None = None
    weak_allowed = False
    collected: list[ForeignRequest] | None = None


class State(NamedTuple):
    """The store, what the threads are doing, and where the files of kernels are written."""

    connection: Connection
    work: Work
    directory: KernelDirectory

    def report(self, entry: ForeignEntry, row: Callable[[], Row | None] = lambda: None) -> None:
        """Report that an entry was found or made. The row is None if it cannot be made again."""
        if self.work.collected is not None:
            self.work.collected.append(entry.request)
        self.connection.report(entry, row)


_state: State | None = None


def set_state(new: State) -> None:
    """Make `new` the state of this process."""
    global _state
    _state = new


def state() -> State:
    """Return the state of this process. The adapter is installed."""
    assert _state is not None
    return _state
