"""Locks that are not lost with their holder: a thread that waits takes over the lock of a lost holder.

A lock is lost in two ways: an interrupt such as Ctrl-C arrives after the lock is acquired and before
the block that releases it, or the process forks and the child does not have the thread. A `Lock`
remembers the call that acquired it. A thread that waits checks whether that call is still on the stack
of its thread, and takes the lock over when it is not. A `Lock` is therefore not renewed after a fork.

Which lock to use:

    to protect                              use                      in a forked child
    data of this process                    `Lock`                   works as it is
    one computation for many threads        `SingleFlight`           works as it is
    data that every launch or replay uses   `DictLock`               `after_fork` must free it
    other data of a device                  `threading.Lock`         `after_fork` must replace it
    files that processes share              `store.lock.FileLock`    closed: the parent holds it
    an import, the start of a process       `no_fork`                a fork waits for it

`threading.Lock` costs less than `Lock`, but an interrupt in its `with` statement can leave it locked.

Every step is one operation of the interpreter (a dictionary's `setdefault`, a store to an attribute),
so an interrupt never leaves a lock in an intermediate state.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from _thread import allocate_lock, get_ident
from operator import attrgetter

TYPE_CHECKING = False  # `typing` and `types` cost more than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["DictLock", "Holder", "Lock", "no_fork", "run_locked", "wait_before_logging"]

_POLL = (0.0005, 0.05)  # first and longest pause between two checks of the holder, in seconds
_FORK_WAIT = 10.0  # seconds that a fork waits at most for `no_fork`


class Holder:
    """A running call that holds something, linked to the call that took over from it."""

    __slots__ = ("_after", "frame", "thread")

    def __init__(self, frame: FrameType | None) -> None:
        """`frame` belongs to a function that this thread runs, not to a generator.

        None means that the function has ended.
        """
        self.frame = frame
        self.thread = get_ident()
        self._after: dict[None, Holder] = {}

    def alive(self, frames: dict[int, FrameType] | None = None) -> bool:
        """Return whether the function is still running, so that `frame` is on the stack of its thread.

        `frames` are the frames that threads run, if the caller has them already.
        """
        frame = self.frame
        if frame is None:
            return False
        try:
            _pause_collections()
            if frames is None:  # The caller's frame, for the reason that `_frames_of_threads` gives.
                frames = {**sys._current_frames(), get_ident(): sys._getframe(1)}
            running = frames.get(self.thread)
            while running is not None and running is not frame:
                running = running.f_back
            return running is not None
        finally:
            _resume_collections()

    def end(self) -> None:
        """Release what the call holds, and what its frame keeps in memory."""
        self.frame = None

    def last(self) -> Holder:
        """Return the most recent of the calls that took over, or this call when none did."""
        last = self
        while last._after:
            last = last._after[None]
        return last

    def take_over_from(self, before: Holder) -> bool:
        """Become the holder after `before`. Return False if another call was first."""
        return before._after.setdefault(None, self) is self


def _frames_of_threads(frame: FrameType) -> dict[int, FrameType]:
    """Return the frame that each thread runs; for this thread `frame`, which a caller runs.

    The frame of a function that keeps the result would be a cycle of references, and everything in the
    frames below it would stay in memory until the next garbage collection.
    """
    try:
        _pause_collections()
        return {**sys._current_frames(), get_ident(): frame}
    finally:
        _resume_collections()


# Python 3.11 may collect garbage whenever it makes a frame object. A finalizer may then let other
# threads run, and they leave the frames that are being read: the interpreter crashes. A collection
# inside `sys._current_frames` deadlocks with a thread that starts or ends (fixed in 3.11.9). Since
# Python 3.12, collections run only between instructions.
_HELD_BY = attrgetter("frame")  # A lookup in C: each call of Python on this path is counted by a test.
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
_reading: dict[int, int] = {}  # the threads that read stacks, and how many calls of each do
_paused = False  # whether collections are disabled because of them


def _pause_collections() -> None:
    """Disable garbage collections until this thread calls `_resume_collections`."""
    global _paused
    if _COLLECTS_ANYWHERE:
        thread = get_ident()
        _reading[thread] = _reading.get(thread, 0) + 1
        if gc.isenabled():
            _paused = True
            gc.disable()


def _resume_collections() -> None:
    """Enable garbage collections again when the last thread has read its stacks."""
    global _paused
    if _COLLECTS_ANYWHERE:
        thread = get_ident()
        if (calls := _reading.pop(thread, 1) - 1) > 0:
            _reading[thread] = calls
        if _paused and not _reading:
            _paused = False
            gc.enable()


def _forget_other_readers() -> None:
    """Enable garbage collections in a forked child, where the threads that read do not exist."""
    _reading.clear()
    _resume_collections()


os.register_at_fork(after_in_child=_forget_other_readers)


class Lock:
    """A lock that at most `holders` calls hold at the same time, used in a `with` statement.

    The thread that holds the lock can acquire it again, because a signal handler may have to. The value
    of the `with` statement is True when the last holder was lost: it may have left what the lock
    protects half changed. A generator must not yield while it holds the lock, because a suspended
    generator is on no stack.
    """

    __slots__ = ("_freed", "_holders")

    def __init__(self, holders: int = 1) -> None:
        self._holders = [Holder(None) for _ in range(holders)]
        # Released to wake a waiting thread. A missed wake-up delays the thread by one poll.
        self._freed = allocate_lock()

    def __enter__(self) -> bool:
        frame = sys._getframe(1)
        last = self._holders[0]
        # The lock is free, as it is most of the time. Another holder may be lost, if there are several.
        if last.frame is None and not last._after and not any(map(_HELD_BY, self._holders[1:])):
            mine = Holder(frame)
            if last._after.setdefault(None, mine) is mine:
                self._holders[0] = mine
                return False
        return self.acquire(frame) is True

    def __exit__(self, *_: object) -> None:
        frame = sys._getframe(1)
        last = self._holders[0]
        if last.frame is frame and not last._after and not self._freed.locked():
            last.frame = None  # No thread waits, as is the case most of the time.
        else:
            self.release(frame)

    def locked(self) -> bool:
        """Return whether the lock has all the holders that it can have."""
        return all(holder.last().alive() for holder in self._holders)

    def acquire(self, frame: FrameType, timeout: float | None = None) -> bool | None:
        """Hold the lock for the function of `frame`, and return whether the last holder was lost.

        Returns None when the lock is not free within `timeout` seconds.
        """
        mine = Holder(frame)
        pause, longest = _POLL
        waited = False
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # Read all holders before the frames, which would not include the frame of a later holder.
            held = [holder.last() for holder in self._holders]
            frames = _frames_of_threads(frame) if any(last.frame for last in held) else {}
            nested, lost = self._take_place(mine, held, frames)
            if lost is not None:
                if waited and len(self._holders) > 1:
                    # Two calls that release the lock at about the same time wake only one thread.
                    # That thread wakes the next one, which finds the other free place.
                    self._wake()
                return lost
            if nested:  # This thread would wait for itself.
                return False
            if deadline is not None and time.monotonic() >= deadline:
                return None
            self._freed.acquire(timeout=pause)
            waited = True
            pause = min(2 * pause, longest)

    def _take_place(
        self, mine: Holder, held: list[Holder], frames: dict[int, FrameType]
    ) -> tuple[bool, bool | None]:
        """Take a free place or a lost holder's place, and forget the other lost holders.

        The first value is True if this thread holds a place already. The second one says whether the
        last holder of the place was lost. It is None if no place was taken.
        """
        nested = False
        lost = None
        for index, last in enumerate(held):
            was_held = last.frame is not None
            if was_held and last.alive(frames):
                nested = nested or last.thread == mine.thread
            elif lost is None and mine.take_over_from(last):
                self._holders[index] = mine
                lost = was_held  # The call has ended without releasing the lock.
            elif lost is not None:
                last.end()  # Its frame keeps everything in memory that its callers use.
        return nested, lost

    def release(self, frame: FrameType) -> None:
        """Release the lock if the function of `frame` holds it."""
        for holder in self._holders:
            last = holder.last() if holder._after else holder
            if last.frame is frame:
                last.end()
                self._wake()
                return

    def _wake(self) -> None:
        """Let a waiting thread check the holders."""
        if self._freed.locked():
            try:
                self._freed.release()
            except RuntimeError:  # Another thread released it first.
                return


#: Held during imports and process starts. A fork waits for this lock, because a fork in the middle
#: would leave them half done in the child.
no_fork = Lock()


def _before_fork() -> None:
    # The wait is bounded, because a fork handler of another library may hold what an import waits for.
    forking = sys._getframe().f_back
    if forking is not None:
        no_fork.acquire(forking, _FORK_WAIT)


def _after_fork() -> None:
    forking = sys._getframe().f_back
    if forking is not None:
        no_fork.release(forking)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

_waits_before_logging: list[bool] = []


def wait_before_logging() -> None:
    """Make a fork wait for `no_fork` before it takes the lock of `logging`.

    Call it inside `with no_fork`, before the import of a module that makes a logger, such as asyncio.
    Fork handlers run in the reverse order of their registration. The handler of `logging` takes a lock
    that the import waits for. It must not run before the fork has waited for the import, so the handler
    of `no_fork` is registered again after it.
    """
    if not _waits_before_logging:
        with no_fork:
            import logging  # noqa: F401

        os.register_at_fork(before=_before_fork)
        _waits_before_logging.append(True)


#: A lock that a signal handler cannot leave locked: {0: True} while it is free, empty while a thread
#: holds it.
#:
#: `with lock:` of `threading.Lock` is not safe where a signal handler may raise: from Python 3.13 on,
#: the handler can run after the lock was acquired and before the block began, and then it is never
#: released. Deleting the entry of a dict acquires the lock and is a single bytecode instruction, which
#: is either executed or not; storing the entry releases it. That is also cheaper than `threading.Lock`.
DictLock = dict[int, bool]


def run_locked(lock: DictLock, do: Callable[[], T]) -> T:
    """Wait for `lock`, call `do` while holding it, and return the result.

    Waiting is polling, so `do` should be short. The lock is not reentrant.
    """
    while True:
        try:
            del lock[0]
            break
        except KeyError:
            time.sleep(20e-6)
    try:
        return do()
    finally:
        lock[0] = True
