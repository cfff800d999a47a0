"""The interface of a server that stores objects by name, such as S3, Redis or WebDAV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from preheat.files import MAX_FILE_BYTES
from preheat.messages import printable

__all__ = [
    "CERTIFICATES_HINT",
    "LEASE_BYTES",
    "MAX_NAMES",
    "MAX_OBJECT_BYTES",
    "Engine",
    "ObjectError",
    "RemoteError",
    "names_of",
    "remote_error",
]

# Larger objects are not read, so that no server can exhaust memory. A directory reads whole files.
MAX_OBJECT_BYTES = MAX_FILE_BYTES
#: What helps if a server has a certificate of an authority that this machine does not know.
CERTIFICATES_HINT = "SSL_CERT_FILE names a file of trusted certificates"
MAX_NAMES = 2_000_000  # objects in a list. A server could go on for ever.
_MAX_PAGES = 200_000  # of a list: a page may be empty
LEASE_BYTES = 4096  # of an object that is compared: a lease has about 40


class RemoteError(OSError):
    """A server could not be used: it is dead, slow, full, read-only, or refuses the credentials.

    `retryable` says whether another attempt may succeed soon, as after a reset connection.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ObjectError(RemoteError):
    """One object cannot be read or written. The server works, and other objects can be used."""


class Engine(Protocol):
    """Objects by name on a server. Names are relative paths of ASCII letters, digits and `/.-_`.

    Every call ends within the time that the engine was given, and raises only `RemoteError`. `existing`
    gets this time for each group of `rounds`, and `pages` for each page.
    An object is written whole or not at all. Safe from any thread; not after a fork, where the owner
    opens a new one.
    """

    name: str  # the URL without credentials, for messages and events

    @property
    def conditional(self) -> bool:
        """Whether `create`, `swap` and `discard` are atomic on this server, as far as is known yet."""

    @property
    def closes_after_fork(self) -> bool:
        """Whether a forked child may call `close` of the engine of its parent."""

    def read(self, name: str, *, most: int = MAX_OBJECT_BYTES) -> bytes | None:
        """Return an object, or None if it does not exist. One of more than `most` bytes is refused."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object."""

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""

    def existing(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that have an object, with few requests where the server permits."""

    def rounds(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yield `names` in groups. `existing` answers for each in about the time of one request."""

    def pages(self, prefix: str = "") -> Iterator[list[str]]:
        """Yield the names of all objects that begin with `prefix`, a folder that ends in `/`.

        Each page takes about one request. A page may be empty, and others may follow it.
        """

    def create(self, name: str, data: bytes, *, seconds: float) -> bool:
        """Write an object unless there is one, and return whether it was written.

        The server may remove the object after `seconds`, where it can.
        """

    def swap(self, name: str, old: bytes, new: bytes, *, seconds: float) -> bool:
        """Replace an object whose content is `old`, and return whether it was replaced."""

    def discard(self, name: str, old: bytes) -> bool:
        """Remove an object whose content is `old`, and return whether it was removed."""

    def close(self) -> None:
        """Close connections. The engine is not used afterwards."""


def names_of(engine: Engine, prefix: str = "") -> Iterator[str]:
    """Yield the name of every object whose name begins with `prefix`, a folder that ends in `/`.

    Raises `RemoteError` for a list of more than `MAX_NAMES` objects, and for one that has so many empty
    pages that it probably never ends.
    """
    count = 0
    for number, page in enumerate(engine.pages(prefix)):
        count += len(page)
        if count > MAX_NAMES:
            raise RemoteError(f"{engine.name} lists more than {MAX_NAMES:,} objects")
        if number >= _MAX_PAGES:
            raise RemoteError(f"{engine.name}: its list of objects has more than {_MAX_PAGES:,} pages")
        yield from page


def remote_error(name: str, error: BaseException) -> RemoteError:
    """Return the `RemoteError` for an exception that a client of the server `name` should not raise."""
    return RemoteError(printable(f"{name}: {type(error).__name__}: {error}"))
