"""The interface of a store, and what its users and its implementations exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

__all__ = [
    "CLOSE_SECONDS",
    "ConditionalStore",
    "Found",
    "Merger",
    "Store",
    "UntrustedError",
    "Upload",
    "UploadResult",
]

CLOSE_SECONDS = 10.0  # the longest time that the end of a process waits for writes to servers


class Store(Protocol):
    """Bytes by name: in memory, in a directory, or on a server.

    In most stores the name is the hexadecimal digest of an entry (`preheat.model.codec`), and `get`
    returns only bytes that were verified. In the engine of a server (`preheat.store.remote.engine`) it
    is the path of any object.

    Every method may raise `OSError`. `get` may also raise `DamagedEntryError`, or `UntrustedError` for
    bytes that nobody trusted has signed. `Chain` makes an event of each of them, and uses the store
    again at the next request.
    """

    name: str  # for messages and events, without credentials

    @property
    def writable(self) -> bool:
        """Whether this process may call `put` and `remove`."""

    def get(self, name: str, /) -> bytes | None:
        """Return the bytes, or None if the store does not have the name."""

    def put(self, name: str, data: bytes, /) -> None:
        """Create or replace the bytes, as a whole or not at all."""

    def exists(self, names: Iterable[str], /) -> set[str]:
        """Return the `names` that the store has. Their bytes may be damaged."""

    def names(self) -> Iterator[str]:
        """Yield every name, in no particular order."""

    def remove(self, name: str, /) -> None:
        """Remove the bytes, if there are any."""


class ConditionalStore(Store, Protocol):
    """A store whose writes can have a condition, which leases among hosts need."""

    @property
    def conditional(self) -> bool:
        """Whether `create`, `swap` and `discard` are atomic, as far as is known yet."""

    def create(self, name: str, data: bytes, /, *, seconds: float) -> bool:
        """Write an object unless there is one, and return whether it was written.

        The store may remove the object after `seconds`, where it can.
        """

    def swap(self, name: str, old: bytes, new: bytes, /, *, seconds: float) -> bool:
        """Replace an object whose content is `old`, and return whether it was replaced."""

    def discard(self, name: str, old: bytes, /) -> bool:
        """Remove an object whose content is `old`, and return whether it was removed."""


class UntrustedError(ValueError):
    """No trusted key has signed these bytes. The message is the reason, and `hint` is a next step."""

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


class Upload(NamedTuple):
    """An entry that a server must have, and a function that returns its bytes.

    `header_list` is the list of header states that leads to the entry, if there is one.
    """

    digest: str
    read: Callable[[], bytes]
    header_list: Upload | None = None


class UploadResult(NamedTuple):
    """How many of the given entries a server had, how many were written, and how many are missing.

    `reason` says why an entry is missing.
    """

    tier: str
    present: int
    written: int
    missing: int
    reason: str


class Merger(Protocol):
    """Combines two versions of an entry that changes: a list that leads to other entries."""

    def applies(self, blob: bytes) -> bool:
        """Return whether `blob` is an entry that changes. Its first bytes are enough."""

    def merge(self, digest: str, mine: bytes, theirs: bytes) -> bytes:
        """Return `mine` with what `theirs` has in addition; `mine` itself when that is nothing.

        Both are entries of `digest` that `codec.damage` accepts.
        """


class Found(NamedTuple):
    """A blob, and the name of the tier that had it."""

    blob: bytes
    tier: str
