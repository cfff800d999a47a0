"""The interface of a tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = [
    "CLOSE_SECONDS",
    "Filled",
    "Filling",
    "Found",
    "Holder",
    "Merger",
    "SharedTier",
    "Tier",
    "WritableTier",
]

CLOSE_SECONDS = 10.0  # the longest time that the end of a process waits for writes to servers


class Tier(Protocol):
    """A tier: bytes by hexadecimal digest.

    `get` returns bytes that `codec.damage` has accepted, or None when the tier does not have the
    digest. For damaged bytes it emits a `damaged` event and returns None.

    A tier may raise only `OSError`. `Chain` reports it as a `fault` event, and uses the tier again at
    the next request. A tier that is also read without a chain, such as `LayerTier`, may emit the
    `fault` event of `get` itself and return None.
    """

    name: str

    def get(self, digest: str) -> bytes | None: ...


@runtime_checkable
class WritableTier(Tier, Protocol):
    """A tier that can be written."""

    def put(self, digest: str, blob: bytes) -> None: ...
    def remove(self, digest: str) -> None: ...


@runtime_checkable
class Holder(Protocol):
    """A tier that can check for an entry without reading it."""

    def holds(self, digest: str) -> bool:
        """Return whether there is an entry, which may be damaged."""


@runtime_checkable
class SharedTier(WritableTier, Protocol):
    """A tier on a server that many machines share. It comes after the tiers of this machine.

    `put` returns before the entry is written, and the tier emits the `put` event itself. `unanswered`
    grows with every `get` that returned None because the server was not available or did not answer.
    """

    unanswered: int

    def look_ahead(self, digests: Iterable[str], *, once: bool = True) -> None:
        """Look up many digests at once. The next `get` of a digest that is absent makes no request.

        Without `once`, this applies to every `get` of it for a while.
        """

    def settle(self, load: float = 0.5) -> None:
        """Wait, for a bounded time, until at most this fraction of the queue is still to be written."""

    def fill(self, entries: Sequence[Filling]) -> Filled | None:
        """Write the entries that the server does not have, and wait for that.

        Returns None for a server that this process may not write to.
        """

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is queued, and wait for that for up to `seconds`."""


class Filling(NamedTuple):
    """An entry that a server must have, and a function that returns its bytes.

    `header_list` is the list of header states that leads to the entry, if there is one.
    """

    digest: str
    read: Callable[[], bytes]
    header_list: Filling | None = None


class Filled(NamedTuple):
    """How many of the given entries a server had, how many were written, and how many are missing.

    `reason` says why an entry is missing.
    """

    tier: str
    present: int
    written: int
    missing: int
    reason: str


class Merger(Protocol):
    """Combines two versions of an entry that changes. Most entries never change."""

    def applies(self, blob: bytes) -> bool:
        """Return whether `blob` is an entry that changes."""

    def merge(self, digest: str, mine: bytes, theirs: bytes) -> bytes:
        """Return `mine` with what `theirs` has in addition; `mine` itself when that is nothing.

        Both are entries of `digest` that `codec.damage` accepts.
        """


class Found(NamedTuple):
    """A blob, and the name of the tier that had it."""

    blob: bytes
    tier: str
