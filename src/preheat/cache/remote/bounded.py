"""An engine whose calls end in time, whatever the server, the network or the file system does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Generic, TypeVar, cast

from preheat.cache.remote.engine import MOST_BYTES, Engine, RemoteError

__all__ = ["BoundedEngine"]

_BATCH = 1000  # names of a list that share a time limit
_MOST_LOST = 8  # calls that go on in the background after their time, before further ones are refused
T = TypeVar("T")


class BoundedEngine:
    """An engine whose every call runs in a thread of its own, which is left behind after `timeout`.

    The time limits of clients do not hold for everything: a name server that is silent, a reply that
    arrives byte by byte, a hung network file system. `existing` gets the time for each group of
    `rounds`, and `names` for each thousand names. Another exception of a client than `RemoteError`
    becomes one. Ctrl-C interrupts a call.
    """

    def __init__(self, engine: Engine, *, timeout: float) -> None:
        self.name = engine.name
        self.inner = engine
        self._timeout = timeout
        self._lost: set[threading.Thread] = set()

    @property
    def conditional(self) -> bool:
        """Whether conditions hold. A directory shows it at the first call of `create`."""
        return self.inner.conditional

    @property
    def closes_after_fork(self) -> bool:
        """Whether a forked child may call `close`."""
        return self.inner.closes_after_fork

    def read(self, name: str, *, most: int = MOST_BYTES) -> bytes | None:
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

    def names(self, prefix: str = "") -> Iterator[str]:
        # One thread reads the whole list: those of opendal must not move to another one.
        thread = self._start(lambda: _batches(self.inner.names(prefix)))
        try:
            while batch := self._next(thread):
                yield from batch
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
        self._lost = {thread for thread in self._lost if thread.is_alive()}
        if len(self._lost) >= _MOST_LOST:
            raise RemoteError(f"{self.name}: {len(self._lost)} earlier calls have not ended yet")
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
            self._lost |= {thread}
            raise RemoteError(f"{self.name} did not answer in time") from None
        if error is not None:
            try:
                if isinstance(error, RemoteError) or not isinstance(error, Exception):
                    raise error
                raise RemoteError(f"{self.name}: {type(error).__name__}: {error}") from error
            finally:
                del error  # Its traceback has this frame in it.
        return result


class _Thread(threading.Thread, Generic[T]):
    """Puts the results of an iterator into a queue, and does not keep the process alive."""

    def __init__(self, work: Callable[[], Iterator[T]]) -> None:
        super().__init__(name="preheat-remote-call", daemon=True)
        self.results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self.stopped = False  # Nobody wants further results.
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


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, _BATCH)):
        yield batch
