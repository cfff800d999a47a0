"""The base of every engine, which has objects by path on one server, and the engine for an address."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from preheat.errors import InputError
from preheat.process.files import MAX_FILE_BYTES
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock
from preheat.process.messages import printable
from preheat.store.remote.url import Remote

if TYPE_CHECKING:
    from preheat.store.remote import file_engine, opendal_engine, redis_engine
else:  # A process needs the engines of its stores only, and their clients take long to import.
    file_engine = LazyModule("preheat.store.remote.file_engine")
    opendal_engine = LazyModule("preheat.store.remote.opendal_engine")
    redis_engine = LazyModule("preheat.store.remote.redis_engine")

__all__ = [
    "CERTIFICATES_HINT",
    "LEASE_BYTES",
    "MAX_OBJECT_BYTES",
    "Engine",
    "ObjectError",
    "RemoteError",
    "TimeLimit",
    "missing_package",
    "open_engine",
    "remote_error",
]

# Larger objects are not read, so that no server can exhaust memory. A directory reads whole files.
MAX_OBJECT_BYTES = MAX_FILE_BYTES
#: What helps if a server has a certificate of an authority that this machine does not know.
CERTIFICATES_HINT = "SSL_CERT_FILE names a file of trusted certificates"
MAX_NAMES = 2_000_000  # objects in a list. A server could go on for ever.
_MAX_PAGES = 200_000  # of a list: a page may be empty
_MAX_ABANDONED = 8  # abandoned calls that may still run; further calls are refused
LEASE_BYTES = 4096  # of an object that is compared: a lease has about 40

T = TypeVar("T")


class RemoteError(OSError):
    """A server could not be used: it is dead, slow, full, read-only, or refuses the credentials.

    `retryable` says whether another attempt may succeed soon, as after a reset connection.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ObjectError(RemoteError):
    """One object cannot be read or written. The server works, and other objects can be used."""


def remote_error(name: str, error: BaseException) -> RemoteError:
    """Return the `RemoteError` for an exception that a client of the server `name` should not raise."""
    return RemoteError(printable(f"{name}: {type(error).__name__}: {error}"))


class Engine(ABC):
    """A `ConditionalStore` of objects by path: relative paths of ASCII letters, digits and `/.-_`.

    The public methods end within `timeout` seconds and raise only `RemoteError`. `exists` gets this
    time for each group of names, and `names` for each page. A subclass implements the methods below
    them, by the client of its server. Safe from any thread; not after a fork, where the owner opens a
    new engine.
    """

    writable = True
    conditional = False
    group_size = 1000  # names that `_existing` is asked for at once
    closes_after_fork = False  # whether a forked child may call `close` of the engine of its parent

    def __init__(self, name: str, *, timeout: float) -> None:
        self.name = name  # the URL without credentials, for messages and events
        self.limit = TimeLimit(name, timeout)
        self._timeout = 0.9 * timeout  # of the client. It comes first: then no thread is left behind.

    def get(self, name: str, /, *, limit: int = MAX_OBJECT_BYTES) -> bytes | None:
        """Return an object, or None if it does not exist. One of more than `limit` bytes is refused."""
        return self.limit.call(lambda: self._get(name, limit))

    def put(self, name: str, data: bytes, /) -> None:
        """Create or replace an object."""
        self.limit.call(lambda: self._put(name, data))

    def remove(self, name: str, /) -> None:
        """Remove an object, if there is one."""
        self.limit.call(lambda: self._remove(name))

    def exists(self, names: Iterable[str], /) -> set[str]:
        """Return the `names` that have an object, with few requests where the server permits."""
        found: set[str] = set()
        for group in self._groups(names):
            found |= self.limit.call(partial(self._existing, group))
        return found

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the name of every object whose name begins with `prefix`, a folder that ends in `/`.

        Raises `RemoteError` for a list of more than `MAX_NAMES` objects, and for one that has so many
        empty pages that it probably never ends.
        """
        count = 0
        for number, page in enumerate(self.limit.iterate(lambda: self._pages(prefix))):
            count += len(page)
            if count > MAX_NAMES:
                raise RemoteError(f"{self.name} lists more than {MAX_NAMES:,} objects")
            if number >= _MAX_PAGES:
                raise RemoteError(
                    f"{self.name}: its list of objects has more than {_MAX_PAGES:,} pages"
                )
            yield from page

    def create(self, name: str, data: bytes, /, *, seconds: float) -> bool:
        """Write an object unless there is one, and return whether it was written."""
        return self.limit.call(lambda: self._create(name, data, seconds))

    def swap(self, name: str, old: bytes, new: bytes, /, *, seconds: float) -> bool:
        """Replace an object whose content is `old`, and return whether it was replaced."""
        return self.limit.call(lambda: self._swap(name, old, new, seconds))

    def discard(self, name: str, old: bytes, /) -> bool:
        """Remove an object whose content is `old`, and return whether it was removed."""
        return self.limit.call(lambda: self._discard(name, old))

    def refuses_stale_conditions(self, name: str) -> bool:
        """Return whether the server checks the conditions of requests; the object is replaced.

        Some gateways ignore them. Only an engine that relies on conditions has to find that out.
        """
        del name
        return True

    def close(self) -> None:
        """Close connections, if there are any. The engine is not used afterwards."""
        return

    # What an engine implements

    @abstractmethod
    def _get(self, name: str, limit: int) -> bytes | None: ...

    @abstractmethod
    def _put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yield `names` in groups. `_existing` answers for each in about the time of one request."""
        rest = iter(names)
        while group := list(islice(rest, self.group_size)):
            yield group

    @abstractmethod
    def _existing(self, names: list[str]) -> set[str]: ...

    @abstractmethod
    def _pages(self, prefix: str) -> Iterator[list[str]]:
        """Yield the names below a folder in pages, each of which takes about one request."""

    def _create(self, name: str, data: bytes, seconds: float) -> bool:
        """Look before the object is written, so that two callers may both succeed."""
        del seconds
        if self._existing([name]):
            return False
        self._put(name, data)
        return True

    def _swap(self, name: str, old: bytes, new: bytes, seconds: float) -> bool:
        del seconds
        if self._get(name, LEASE_BYTES) != old:
            return False
        self._put(name, new)
        return True

    def _discard(self, name: str, old: bytes) -> bool:
        if self._get(name, LEASE_BYTES) != old:
            return False
        self._remove(name)
        return True


class TimeLimit:
    """Runs each call in its own thread, and abandons the thread after `seconds`.

    The time limits of clients do not hold for everything: a name server that is silent, a reply that
    arrives byte by byte, a hung network file system. Every exception of a client except
    `KeyboardInterrupt` and `SystemExit` becomes a `RemoteError`. Ctrl-C interrupts a call.

    While `_MAX_ABANDONED` abandoned calls still run, no further call is started. Calls that run at that
    moment may be abandoned too, so each caller adds at most one.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._abandoned: set[_Thread[object]] = set()
        self._lock = Lock()  # protects `_abandoned`

    def call(self, work: Callable[[], T]) -> T:
        """Return what `work` returns."""
        return cast(T, self._next(self._start(lambda: iter([work()]))))

    def iterate(self, work: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield the items of the iterator that `work` returns. Each item has the time limit."""
        # One thread takes all items, because an iterator of opendal must stay in its thread.
        thread = self._start(work)
        try:
            while (item := self._next(thread)) is not None:
                yield item
        finally:
            thread.stopped = True

    def _start(self, work: Callable[[], Iterator[T]]) -> _Thread[T]:
        with self._lock:
            self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
            abandoned = len(self._abandoned)
        if abandoned >= _MAX_ABANDONED:
            raise RemoteError(f"{self._name}: {abandoned} earlier calls have not ended yet")
        thread = _Thread(work)
        try:
            thread.start()
        except RuntimeError:  # The interpreter ends: only the limit of the client is left.
            thread.run()
        return thread

    def _next(self, thread: _Thread[T]) -> T | None:
        """Return the next result of a thread within the time limit; None after the last one."""
        try:
            result, error = thread.results.get(timeout=self._seconds)
        except queue.Empty:
            thread.stopped = True
            with self._lock:
                self._abandoned.add(cast("_Thread[object]", thread))
            raise RemoteError(f"{self._name} did not answer in time") from None
        if error is not None:
            try:
                if isinstance(error, RemoteError | KeyboardInterrupt | SystemExit):
                    raise error
                # Also a panic of opendal, which is a `BaseException`.
                raise remote_error(self._name, error) from error
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


# Opening an engine


def open_engine(remote: Remote, *, timeout: float, private: bool = False) -> Engine:
    """Open the engine for `remote`, whose calls end within `timeout` seconds. Nothing is sent yet.

    With `private`, a directory is used in which only this user may write; see `FileEngine`.
    Raises `InputError` when a package is missing, and `RemoteError` for settings that are incomplete,
    or for a package that cannot be used.
    """
    if remote.service == "redis":
        return redis_engine.RedisEngine(remote, timeout=timeout)
    if remote.service == "file":
        return file_engine.FileEngine(remote, timeout=timeout, private=private)
    try:
        s3 = remote.service == "s3"
        kind = opendal_engine.S3Engine if s3 else opendal_engine.OpendalEngine
        return kind(remote, timeout=timeout)
    except ModuleNotFoundError as missing:
        raise InputError(
            f"{remote.name} needs the package {missing.name}, which is not installed",
            hint="pip install 'preheat[remote]'",
        ) from None
    except (RemoteError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as broken:  # For example a build for another system, or another version.
        raise remote_error(f"{remote.name}: the package opendal cannot be used", broken) from broken


def missing_package(remote: Remote) -> str | None:
    """Return which package `remote` needs and this environment lacks, and how to install it; or None.

    Nothing is imported.
    """
    if remote.service in ("redis", "file") or find_spec("opendal") is not None:
        return None
    return "the package opendal is not installed: pip install 'preheat[remote]'"
