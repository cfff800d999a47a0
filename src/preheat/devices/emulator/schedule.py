"""Deferred streams: work is queued and executed late, in any order that streams and waits allow.

Each stream has a queue. A queue executes its items in order, and an item that waits for a position in
another queue is executed after that position. Nothing else orders work, so a wait that the program
forgot changes its results:

    work is forced     in half of the cases only the work that the target needs is executed, so that a
                       writer may be late; otherwise work of every stream is executed as well, so that
                       a writer may be early
    work is submitted  in one of eight cases some items of some streams are executed
    work is queried    a random number of items is executed, so that polling ends

A seed decides everything: the same calls with the same seed execute in the same order.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from preheat.devices.emulator.driver_errors import driver_error
from preheat.errors import DeviceError, copy_error

__all__ = ["Mark", "Queue", "Scheduler"]

_INCIDENTAL = 1 / 8  # The probability that a submission executes other work.
_PROGRESS = (0, 1, 4, 16)  # The numbers of items that a query may execute.


class Item(NamedTuple):
    """One piece of work. It is executed after the position `needs`."""

    do: Callable[[], object]
    needs: Mark | None = None


class Queue:
    """The work of one stream that has not been executed, oldest first."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.submitted = 0
        self.closed = False

    @property
    def ended(self) -> int:
        """The number of items that have left the queue."""
        return self.submitted - len(self.items)

    @property
    def ready(self) -> bool:
        """Return whether the oldest item can be executed now."""
        return bool(self.items) and ((needs := self.items[0].needs) is None or needs.done)


class Mark:
    """A position in a queue: after its first `position` items."""

    def __init__(self, queue: Queue, position: int) -> None:
        self.queue = queue
        self.position = position
        self.at: float | None = None  # When it was reached, if it was recorded.

    @property
    def done(self) -> bool:
        """Whether everything before the mark was executed."""
        return self.queue.ended >= self.position

    def reach(self) -> None:
        """Record the time."""
        self.at = time.perf_counter()


class Scheduler:
    """The queues by the id of their stream, and when their work is executed.

    `lock` is the lock of the device. `on_fault` is called with a fault when it is first raised. A fault
    ends everything: queued work is dropped, and every later call raises the fault again.
    """

    def __init__(
        self, seed: int, lock: threading.RLock, on_fault: Callable[[DeviceError], None]
    ) -> None:
        self.lock = lock
        self._on_fault = on_fault
        self._random = random.Random(seed)
        self._queues: dict[int, Queue] = {}
        self._fault: DeviceError | None = None
        self._raised = False

    # Streams

    def open(self, stream: int) -> None:
        """Accept work of a new stream."""
        with self.lock:
            self._queues[stream] = Queue()

    def close(self, stream: int) -> None:
        """Accept no more work of a stream. Its queued work is still executed."""
        with self.lock:
            self._queue(stream, "stream destroy").closed = True
            self._forget_closed()

    def _forget_closed(self) -> None:
        self._queues = {at: q for at, q in self._queues.items() if q.items or not q.closed}

    def _queue(self, stream: int, call: str) -> Queue:
        queue = self._queues.get(stream)
        if queue is None or queue.closed:
            raise driver_error(call, 400)
        return queue

    # Submissions

    def submit(self, stream: int, do: Callable[[], object]) -> Mark:
        """Queue work. Return the position after it."""
        with self.lock:
            return self._add(stream, Item(do))

    def record(self, stream: int) -> Mark:
        """Queue a mark that records when it is reached."""
        with self.lock:
            queue = self._queue(stream, "event record")
            mark = Mark(queue, queue.submitted + 1)
            self._add(stream, Item(mark.reach))
            return mark

    def wait(self, stream: int, mark: Mark) -> None:
        """Execute later work of a stream after `mark`."""
        with self.lock:
            self.require()
            if not mark.done:
                self._add(stream, Item(_nothing, mark))

    def end(self, stream: int) -> Mark:
        """Return the position after everything submitted to a stream so far."""
        with self.lock:
            queue = self._queue(stream, "stream query")
            return Mark(queue, queue.submitted)

    def _add(self, stream: int, item: Item) -> Mark:
        self.require()
        queue = self._queue(stream, "submit")
        queue.items.append(item)
        queue.submitted += 1
        mark = Mark(queue, queue.submitted)
        if self.chance(_INCIDENTAL):
            self._advance(self._random.randrange(1, 4))
        return mark

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return self._random.random() < share

    # Execution

    def force(self, mark: Mark) -> None:
        """Execute everything before `mark`, and perhaps other work."""
        with self.lock:
            self._run(_needed(mark) if self.chance(1 / 2) else self._all(), mark)
            self.require()

    def query(self, mark: Mark) -> bool:
        """Execute some work. Return whether everything before `mark` was executed."""
        with self.lock:
            if not mark.done:
                self._advance(self._random.choice(_PROGRESS))
            self.require()
            return mark.done

    def finish(self) -> None:
        """Execute everything. `require` raises a fault of it."""
        with self.lock:
            self._run(self._all())

    def require(self) -> None:
        """Raise the fault that ended everything, if there was one."""
        if self._fault is None:
            return
        if not self._raised:
            self._raised = True
            self._on_fault(self._fault)
        raise copy_error(self._fault)

    def _all(self) -> dict[Queue, int]:
        return {queue: queue.submitted for queue in self._queues.values()}

    def _run(self, limits: dict[Queue, int], until: Mark | None = None) -> None:
        """Execute queues up to their limits, or until `until` is reached."""
        pick = self._policy(limits)
        while until is None or not until.done:
            ready = [queue for queue, limit in limits.items() if queue.ended < limit and queue.ready]
            if not ready:
                return
            self._step(pick(ready))

    def _policy(self, limits: dict[Queue, int]) -> Callable[[list[Queue]], Queue]:
        """Return how to choose among queues: at random each time, or by random priorities."""
        if self.chance(1 / 2):
            return self._random.choice
        rank = {queue: self._random.random() for queue in limits}
        return lambda ready: min(ready, key=rank.__getitem__)

    def _advance(self, count: int) -> None:
        """Execute up to `count` items of any streams."""
        for _ in range(count):
            ready = [queue for queue in self._queues.values() if queue.ready]
            if not ready:
                return
            self._step(self._random.choice(ready))

    def _step(self, queue: Queue) -> None:
        item = queue.items.popleft()
        try:
            item.do()
        except DeviceError as fault:
            self._drop(fault)
        if queue.closed:
            self._forget_closed()

    def _drop(self, fault: DeviceError) -> None:
        """Drop all queued work."""
        self._fault = fault
        for queue in self._queues.values():
            queue.items.clear()


def _needed(mark: Mark) -> dict[Queue, int]:
    """Return how far each queue must be executed to reach `mark`."""
    limits: dict[Queue, int] = {}
    marks = [mark]
    while marks:
        mark = marks.pop()
        queue, position = mark.queue, mark.position
        known = limits.get(queue, queue.ended)
        if position > known:
            limits[queue] = position
            added = islice(queue.items, known - queue.ended, position - queue.ended)
            marks += [item.needs for item in added if item.needs is not None]
    return limits


def _nothing() -> None:
    """Do nothing: the item only waits."""
