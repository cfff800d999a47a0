"""Jobs that threads do in the background, bounded in number and size."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from preheat.process.locks import Lock

__all__ = ["Worker"]

_POLL = 0.005  # seconds between two looks at whether all jobs are done


class Job(NamedTuple):
    """What to run, its size in bytes, and what to do when there is no time for it any more."""

    run: Callable[[], None]
    size: int
    give_up: Callable[[], None]


class _Lane:
    """Jobs that one thread does in order. `running` is True while there is such a thread."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.running = False


class Worker:
    """Runs jobs in up to `threads` threads, which end when there is nothing to do.

    Jobs of the same key run one after another, in order. At most `max_jobs` and `max_bytes` wait or
    run. A forked child begins with no job: the parent does those.
    """

    def __init__(self, *, threads: int = 4, max_jobs: int = 1024, max_bytes: int = 256 << 20) -> None:
        self._lanes = tuple(_Lane() for _ in range(threads))
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._jobs = self._bytes = 0  # of the jobs that wait or run

    @property
    def load(self) -> float:
        """How full the queue is, from 0 to 1."""
        return max(self._jobs / self._max_jobs, self._bytes / self._max_bytes)

    def submit(
        self, key: str, run: Callable[[], None], *, size: int, give_up: Callable[[], None]
    ) -> bool:
        """Queue a job and return at once; False when there are too many jobs already.

        `run` raises nothing. `give_up` is called instead of it when `flush` runs out of time.
        """
        lane = self._lanes[hash(key) % len(self._lanes)]
        with self._lock:
            full = self._jobs >= self._max_jobs or self._bytes + size > self._max_bytes
            if full and self._jobs > 0:  # One job always fits, whatever its size.
                return False
            lane.jobs.append(Job(run, size, give_up))
            self._jobs += 1
            self._bytes += size
            begin, lane.running = not lane.running, True
        if begin:
            self._start(lane)
        return True

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback`, once, when all jobs that were submitted before are done or given up.

        A thread of the worker calls it, or this one when there is no job.
        """
        left = len(self._lanes)

        def pass_lane() -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = left == 0
            if last:
                callback()

        for lane in self._lanes:
            with self._lock:
                waits = lane.running or bool(lane.jobs)
                if waits:
                    self._jobs += 1
                    lane.jobs.append(Job(pass_lane, 0, pass_lane))
            if not waits:
                pass_lane()

    def _start(self, lane: _Lane) -> None:
        thread = threading.Thread(target=self._work, args=(lane,), name="preheat-remote", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # The interpreter ends, or there are too many threads: `flush` does it.
            lane.running = False

    def _work(self, lane: _Lane) -> None:
        try:
            while (job := self._next(lane)) is not None:
                self._run(job)
        except BaseException:
            lane.running = False
            raise

    def _next(self, lane: _Lane) -> Job | None:
        """Return the next job of a thread; None when it ends, because there is none."""
        with self._lock:
            if lane.jobs:
                return lane.jobs.popleft()
            lane.running = False
            return None

    def _run(self, job: Job) -> None:
        try:
            job.run()
        finally:
            self._count_end(job)

    def _count_end(self, job: Job) -> None:
        with self._lock:
            self._jobs -= 1
            self._bytes -= job.size

    def flush(self, seconds: float) -> bool:
        """Wait until all jobs are done; give up those that have not begun after `seconds`.

        Returns whether all jobs were done. A job that runs is not ended.
        """
        deadline = time.monotonic() + seconds
        while (busy := self._busy()) and time.monotonic() < deadline:
            if not self._run_one_without_thread():
                time.sleep(_POLL)
        if busy:
            self._give_up()
        return not busy

    def wait(self, load: float, seconds: float) -> None:
        """Wait until the load is at most `load`, but no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while self.load > load and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _busy(self) -> bool:
        return any(lane.running or lane.jobs for lane in self._lanes)

    def _run_one_without_thread(self) -> bool:
        """Run a job whose thread could not be started, and return whether there was one."""
        for lane in self._lanes:
            if lane.jobs and not lane.running and (job := self._next(lane)) is not None:
                self._run(job)
                return True
        return False

    def _give_up(self) -> None:
        for lane in self._lanes:
            while lane.jobs:
                with self._lock:
                    job = lane.jobs.popleft() if lane.jobs else None
                if job is not None:
                    job.give_up()
                    self._count_end(job)

    def after_fork(self) -> None:
        """Forget the jobs of the parent, which has the threads that do them."""
        self._lanes = tuple(_Lane() for _ in self._lanes)
        self._jobs = self._bytes = 0
