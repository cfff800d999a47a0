"""The interface of a server that keeps objects by name, such as S3, Redis or WebDAV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

__all__ = ["LEASE_BYTES", "MOST_BYTES", "Engine", "ObjectError", "RemoteError"]

MOST_BYTES = 1 << 30  # of an object that is read: bounds the memory, whatever a server sends
LEASE_BYTES = 4096  # of an object that is compared: a lease has about 40


class RemoteError(OSError):
    """A server could not be used: it is dead, slow, full, read-only, or refuses the credentials.

    `retryable` tells whether another attempt may succeed soon, as after a reset connection.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ObjectError(RemoteError):
    """One object cannot be read or written, and the server works: others can be."""


class Engine(Protocol):
    """Objects by name on a server. Names are relative paths of ASCII letters, digits and `/.-_`.

    Every call ends within the time that the engine was given, and raises only `RemoteError`. `existing`
    gets this time for each group of `rounds`, and `names` for each thousand names.
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

    def read(self, name: str, *, most: int = MOST_BYTES) -> bytes | None:
        """Return an object; None when there is none. One of more than `most` bytes is refused."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object."""

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""

    def existing(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that have an object, with few requests where the server permits."""

    def rounds(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yield `names` in groups. `existing` answers for each in about the time of one request."""

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the name of every object whose name begins with `prefix`, a folder that ends in `/`."""

    def create(self, name: str, data: bytes, *, seconds: float) -> bool:
        """Write an object unless there is one, and return whether it was written.

        The server may remove the object after `seconds`, where it can.
        """

    def swap(self, name: str, old: bytes, new: bytes, *, seconds: float) -> bool:
        """Replace an object whose content is `old`, and return whether it was replaced."""

    def discard(self, name: str, old: bytes) -> bool:
        """Remove an object whose content is `old`, and return whether it was removed."""

    def close(self) -> None:
        """Close connections. The engine is not used any more."""
