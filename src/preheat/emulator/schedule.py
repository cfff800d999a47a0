"""Deferred streams: work is queued and executed late, in any order that streams and waits allow.

Each stream has a queue. A queue executes its items in order, and an item that waits for a position in
another queue is executed after that position. Nothing else orders work, so a wait that the program
forgot changes its results:

    work is forced     in half of the cases only the work that the target needs is executed, so that a
                       writer may be late; otherwise work of every stream is executed as well, so that
                       a writer may be early
    work is submitted  in one of eight cases some items of some streams are executed
    work is queried    a random number of items is executed, so that polling ends

The legacy default stream and streams that are `blocking` wait for one another: its work comes after all
that they have queued, and their later work comes after it.

A seed decides everything: the same calls with the same seed execute in the same order.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from preheat.emulator.errors import driver_error
from preheat.errors import DeviceError, copy_error

__all__ = ["Queue", "QueuePosition", "Scheduler"]

_SUBMIT_PROBABILITY = 1 / 8  # The probability that a submission executes other work.
_QUERY_COUNTS = (0, 1, 4, 16)  # The numbers of items that a query may execute.


class Item(NamedTuple):
    """One piece of work. It is executed after the position `after`, if that is given."""

    work: Callable[[], object]
    after: QueuePosition | None = None


class Queue:
    """The work of one stream that has not been executed, oldest first."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.items: deque[Item] = deque()
        self.submitted = 0
        self.closed = False
        self.blocking = blocking
        self.waited: QueuePosition | None = None  # the last one in the legacy default stream

    @property
    def executed(self) -> int:
        """The number of items that have left the queue."""
        return self.submitted - len(self.items)

    @property
    def ready(self) -> bool:
        """Return whether the oldest item can be executed now."""
        return bool(self.items) and ((after := self.items[0].after) is None or after.done)


class QueuePosition:
    """A position in a queue: after the first `count` items that were submitted."""

    def __init__(self, queue: Queue, count: int) -> None:
        self.queue = queue
        self.count = count
        self.reached_at: float | None = None  # The time, if an event was recorded here.

    @property
    def done(self) -> bool:
        """Return whether everything before the position was executed."""
        return self.queue.executed >= self.count

    def set_time(self) -> None:
        """Set the time at which the position was reached."""
        self.reached_at = time.perf_counter()


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
        self.legacy: int | None = None  # The legacy default stream.
        self._random = random.Random(seed)
        self._queues: dict[int, Queue] = {}
        self._fault: DeviceError | None = None
        self._raised = False

    def restart(self, seed: int) -> None:
        """Choose from here on as a new scheduler with this seed does."""
        with self.lock:
            self._random = random.Random(seed)

    def recover(self) -> None:
        """Accept work again after a fault."""
        with self.lock:
            self._fault = None
            self._raised = False

    # Streams

    def open(self, stream: int, *, blocking: bool = False) -> None:
        """Accept work of a new stream. One that is `blocking` is ordered with the legacy stream."""
        with self.lock:
            self._queues[stream] = Queue(blocking=blocking)

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

    def submit(self, stream: int, work: Callable[[], object]) -> QueuePosition:
        """Queue work. Return the position after it."""
        with self.lock:
            return self._add(stream, Item(work))

    def record(self, stream: int) -> QueuePosition:
        """Queue an item that sets the time of the position after it, and return that position."""
        with self.lock:
            queue = self._queue(stream, "event record")
            self._order(stream, queue)
            position = QueuePosition(queue, queue.submitted + 1)
            self._add(stream, Item(position.set_time))
            return position

    def wait(self, stream: int, position: QueuePosition) -> None:
        """Execute later work of a stream after `position`."""
        with self.lock:
            self.raise_fault()
            if not position.done:
                self._add(stream, Item(_no_work, position))

    def current_position(self, stream: int) -> QueuePosition:
        """Return the position after everything submitted to a stream so far."""
        with self.lock:
            queue = self._queue(stream, "stream query")
            self._order(stream, queue)
            return QueuePosition(queue, queue.submitted)

    def _order(self, stream: int, queue: Queue) -> None:
        """Let later work of a stream come after that for which its kind of stream waits."""
        if stream == self.legacy:
            for other in self._queues.values():
                if other.blocking and other.items:
                    self._wait(queue, QueuePosition(other, other.submitted))
        elif queue.blocking and self.legacy is not None:
            legacy = self._queues[self.legacy]
            if legacy.items and (queue.waited is None or queue.waited.count < legacy.submitted):
                queue.waited = QueuePosition(legacy, legacy.submitted)
                self._wait(queue, queue.waited)

    def _wait(self, queue: Queue, position: QueuePosition) -> None:
        queue.items.append(Item(_no_work, position))
        queue.submitted += 1

    def _add(self, stream: int, item: Item) -> QueuePosition:
        self.raise_fault()
        queue = self._queue(stream, "submit")
        self._order(stream, queue)
        queue.items.append(item)
        queue.submitted += 1
        position = QueuePosition(queue, queue.submitted)
        if self.chance(_SUBMIT_PROBABILITY):
            self._run_some(self._random.randrange(1, 4))
        return position

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return self._random.random() < share

    def shuffled(self, after: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return an order of pieces of work in which each follows those that it comes `after`."""
        if all(at == 0 or at - 1 in before for at, before in enumerate(after)):
            return range(len(after))  # There is no other one.
        with self.lock:
            rank = [self._random.random() for _ in after]
        followers: list[list[int]] = [[] for _ in after]
        for at, before in enumerate(after):
            for number in before:
                followers[number].append(at)
        missing = [len(before) for before in after]
        ready = [(rank[at], at) for at, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, chosen = heapq.heappop(ready)
            order.append(chosen)
            for at in followers[chosen]:
                missing[at] -= 1
                if not missing[at]:
                    heapq.heappush(ready, (rank[at], at))
        return order

    # Execution

    def run_until(self, position: QueuePosition) -> None:
        """Execute everything before `position`, and perhaps other work."""
        with self.lock:
            self._run(_dependencies(position) if self.chance(1 / 2) else self._all(), position)
            self.raise_fault()

    def query(self, position: QueuePosition) -> bool:
        """Execute some work. Return whether everything before `position` was executed."""
        with self.lock:
            if not position.done:
                self._run_some(self._random.choice(_QUERY_COUNTS))
            self.raise_fault()
            return position.done

    def run_all(self) -> None:
        """Execute everything that is queued. `raise_fault` raises the fault of it, if there is one."""
        with self.lock:
            self._run(self._all())

    def raise_fault(self) -> None:
        """Raise the fault that ended everything, if there was one."""
        if self._fault is None:
            return
        if not self._raised:
            self._raised = True
            self._on_fault(self._fault)
        raise copy_error(self._fault)

    def _all(self) -> dict[Queue, int]:
        return {queue: queue.submitted for queue in self._queues.values()}

    def _run(self, limits: dict[Queue, int], until: QueuePosition | None = None) -> None:
        """Execute queues up to their limits, or until `until` is reached."""
        pick = self._choose_policy(limits)
        while until is None or not until.done:
            ready = [queue for queue, limit in limits.items() if queue.executed < limit and queue.ready]
            if not ready:
                return
            self._run_next(pick(ready))

    def _choose_policy(self, limits: dict[Queue, int]) -> Callable[[list[Queue]], Queue]:
        """Return how to choose among queues: at random each time, or by random priorities."""
        if self.chance(1 / 2):
            return self._random.choice
        rank = {queue: self._random.random() for queue in limits}
        return lambda ready: min(ready, key=rank.__getitem__)

    def _run_some(self, count: int) -> None:
        """Execute up to `count` items of any streams."""
        for _ in range(count):
            ready = [queue for queue in self._queues.values() if queue.ready]
            if not ready:
                return
            self._run_next(self._random.choice(ready))

    def _run_next(self, queue: Queue) -> None:
        item = queue.items.popleft()
        try:
            item.work()
        except DeviceError as fault:
            self._fail(fault)
        if queue.closed:
            self._forget_closed()

    def _fail(self, fault: DeviceError) -> None:
        """Store the fault, and drop all queued work."""
        self._fault = fault
        for queue in self._queues.values():
            queue.items.clear()


def _dependencies(position: QueuePosition) -> dict[Queue, int]:
    """Return how far each queue must be executed to reach `position`."""
    limits: dict[Queue, int] = {}
    worklist = [position]
    while worklist:
        position = worklist.pop()
        queue = position.queue
        known = limits.get(queue, queue.executed)
        if position.count > known:
            limits[queue] = position.count
            added = islice(queue.items, known - queue.executed, position.count - queue.executed)
            worklist += [item.after for item in added if item.after is not None]
    return limits


def _no_work() -> None:
    """Do nothing: the item only waits."""
