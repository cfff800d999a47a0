"""Locks that outlive whoever held them: a lost holder keeps nobody waiting.

A thread loses a lock without giving it back in two ways: an interrupt such as Ctrl-C arrives between
taking it and the block that gives it back, or the process forks and the child has no such thread. A
`Lock` remembers which call took it. Whoever waits looks whether that call is still on the stack of its
thread, and takes the lock over when it is not. Nothing has to be renewed in a forked child.

Every step is one operation of the interpreter (a dictionary's `setdefault`, a store to an attribute),
so that an interrupt finds each lock either as it was or as it will be.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock, get_ident

TYPE_CHECKING = False  # `typing` and `types` cost more than the rest
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Call", "Lock", "no_fork"]

_POLL = (0.0005, 0.05)  # first and longest pause between two looks at the holder, in seconds
_FORK_WAIT = 10.0  # seconds that a fork waits at most for what must not be forked


class Call:
    """A call in progress, and the call that followed it as the holder of a thing."""

    __slots__ = ("_after", "frame", "thread")

    def __init__(self, frame: FrameType | None) -> None:
        """Begin a call in the function of `frame`, no generator's; None makes a call that has ended."""
        self.frame, self.thread = frame, get_ident()
        self._after: dict[None, Call] = {}

    def alive(self) -> bool:
        """Return whether the function still runs: `frame` is on the stack of its thread."""
        frame = self.frame
        if frame is None:
            return False
        running = sys._current_frames().get(self.thread)
        while running is not None and running is not frame:
            running = running.f_back
        return running is not None

    def end(self) -> None:
        """Give up what the call holds, and what its frame keeps in memory."""
        self.frame = None

    def last(self) -> Call:
        """Return the most recent of the calls that followed this one."""
        last = self
        while last._after:
            last = last._after[None]
        return last

    def follow(self, before: Call) -> bool:
        """Become the one call that follows `before`; False when another one did."""
        return before._after.setdefault(None, self) is self


class Lock:
    """A lock with room for so many holders, used in a `with` statement of a function.

    It can be taken again by the thread that holds it, as a signal handler may. The value of the `with`
    statement is True when the last holder was lost, perhaps amid a change to what the lock protects.
    A generator must not yield while it holds one: suspended, it is on no stack.
    """

    __slots__ = ("_freed", "_holders")

    def __init__(self, places: int = 1) -> None:
        self._holders = [Call(None) for _ in range(places)]
        self._freed = allocate_lock()  # released to wake one that waits; to lose that costs a pause

    def __enter__(self) -> bool:
        return self.take(sys._getframe(1)) is True

    def __exit__(self, *_: object) -> None:
        self.give_back(sys._getframe(1))

    def locked(self) -> bool:
        """Return whether somebody holds every place."""
        return all(holder.last().alive() for holder in self._holders)

    def take(self, frame: FrameType, timeout: float | None = None) -> bool | None:
        """Hold a place for the function of `frame`; None when it could not be had in time.

        Else the result says whether the last holder was lost.
        """
        mine = Call(frame)
        pause, longest = _POLL
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            nested = False
            for place, holder in enumerate(self._holders):
                last = holder.last()
                lost = last.frame is not None
                if lost and last.alive():
                    nested = nested or last.thread == mine.thread
                elif mine.follow(last):
                    self._holders[place] = mine
                    return lost
            if nested:  # waiting for ourselves would never end
                return False
            if deadline is not None and time.monotonic() >= deadline:
                return None
            self._freed.acquire(timeout=pause)
            pause = min(2 * pause, longest)

    def give_back(self, frame: FrameType) -> None:
        """Give up the place that the function of `frame` holds, if it holds one."""
        for holder in self._holders:
            last = holder.last()
            if last.frame is frame:
                last.end()
                if self._freed.locked():
                    try:
                        self._freed.release()
                    except RuntimeError:  # another thread did so first
                        continue
                return


#: Held while doing what a forked child could not finish in the place of the thread that began it:
#: importing a module, starting a process. A fork waits for it.
no_fork = Lock()


def _before_fork() -> None:
    # A handler of another library may hold what an import waits for, hence the bound.
    forking = sys._getframe().f_back
    if forking is not None:
        no_fork.take(forking, _FORK_WAIT)


def _after_fork() -> None:
    forking = sys._getframe().f_back
    if forking is not None:
        no_fork.give_back(forking)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
