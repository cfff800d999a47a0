"""Limits the time of the calls of an engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Generic, TypeVar, cast

from preheat.locks import Lock
from preheat.store.remote.engine import MAX_OBJECT_BYTES, Engine, RemoteError, remote_error

__all__ = ["BoundedEngine"]

_MAX_ABANDONED = 8  # abandoned calls that may still run; further calls are refused
T = TypeVar("T")


class BoundedEngine:
    """Runs every call of an engine in its own thread, and abandons the thread after `timeout` seconds.

    The time limits of clients do not hold for everything: a name server that is silent, a reply that
    arrives byte by byte, a hung network file system. `existing` gets the time for each group of
    `rounds`, and `pages` for each page. Every exception of a client except `KeyboardInterrupt` and
    `SystemExit` becomes a `RemoteError`. Ctrl-C interrupts a call.

    While `_MAX_ABANDONED` abandoned calls still run, no further call is started. Calls that run at that
    moment may be abandoned too, so each caller adds at most one.
    """

    def __init__(self, engine: Engine, *, timeout: float) -> None:
        self.name = engine.name
        self.inner = engine
        self._timeout = timeout
        self._abandoned: set[_Thread[object]] = set()
        self._lock = Lock()  # protects `_abandoned`

    @property
    def conditional(self) -> bool:
        """Whether conditions hold. A directory shows it at the first call of `create`."""
        return self.inner.conditional

    @property
    def closes_after_fork(self) -> bool:
        """Whether a forked child may call `close`."""
        return self.inner.closes_after_fork

    def read(self, name: str, *, most: int = MAX_OBJECT_BYTES) -> bytes | None:
        return self._call(lambda: self.inner.read(name, most=most))

    def write(self, name: str, data: bytes) -> None:
        self._call(lambda: self.inner.write(name, data))

    def delete(self, name: str) -> None:
        self._call(lambda: self.inner.delete(name))

    def existing(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for group in self.rounds(names):
            found |= self._call(partial(self.inner.existing, group))
        return found

    def rounds(self, names: Iterable[str]) -> Iterator[list[str]]:
        return self.inner.rounds(names)

    def pages(self, prefix: str = "") -> Iterator[list[str]]:
        # One thread reads the whole list, because an iterator of opendal must stay in its thread.
        thread = self._start(lambda: self.inner.pages(prefix))
        try:
            while (page := self._next(thread)) is not None:
                yield page
        finally:
            thread.stopped = True

    def create(self, name: str, data: bytes, *, seconds: float) -> bool:
        return self._call(lambda: self.inner.create(name, data, seconds=seconds))

    def swap(self, name: str, old: bytes, new: bytes, *, seconds: float) -> bool:
        return self._call(lambda: self.inner.swap(name, old, new, seconds=seconds))

    def discard(self, name: str, old: bytes) -> bool:
        return self._call(lambda: self.inner.discard(name, old))

    def close(self) -> None:
        self.inner.close()

    def _call(self, work: Callable[[], T]) -> T:
        return cast(T, self._next(self._start(lambda: iter([work()]))))

    def _start(self, work: Callable[[], Iterator[T]]) -> _Thread[T]:
        with self._lock:
            self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
            abandoned = len(self._abandoned)
        if abandoned >= _MAX_ABANDONED:
            raise RemoteError(f"{self.name}: {abandoned} earlier calls have not ended yet")
        thread = _Thread(work)
        try:
            thread.start()
        except RuntimeError:  # The interpreter ends: only the limit of the client is left.
            thread.run()
        return thread

    def _next(self, thread: _Thread[T]) -> T | None:
        """Return the next result of a thread within the time limit; None after the last one."""
        try:
            result, error = thread.results.get(timeout=self._timeout)
        except queue.Empty:
            thread.stopped = True
            with self._lock:
                self._abandoned.add(cast("_Thread[object]", thread))
            raise RemoteError(f"{self.name} did not answer in time") from None
        if error is not None:
            try:
                if isinstance(error, RemoteError | KeyboardInterrupt | SystemExit):
                    raise error
                # Also a panic of opendal, which is a `BaseException`.
                raise remote_error(self.name, error) from error
            finally:
                del error  # Its traceback refers to this frame.
        return result


class _Thread(threading.Thread, Generic[T]):
    """Puts the results of an iterator into a queue, and does not keep the process alive."""

    def __init__(self, work: Callable[[], Iterator[T]]) -> None:
        super().__init__(name="preheat-remote-call", daemon=True)
        self.results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self.stopped = False  # No caller reads further results.
        self._work = work

    def run(self) -> None:
        """Iterate. The last item in the queue is an error or None."""
        try:
            for result in self._work():
                self.results.put((result, None))
                if self.stopped:
                    return
            self.results.put((None, None))
        except BaseException as error:
            self.results.put((None, error))
