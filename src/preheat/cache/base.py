"""What a tier is."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Found", "Store", "WritableStore"]


class Store(Protocol):
    """A tier: bytes by hex digest.

    `get` answers "is it there" and "give it" at once, with verified bytes or None. A tier that
    cannot do what it is asked raises `OSError`; `Chain` turns that into an event.
    """

    name: str

    def get(self, digest: str) -> bytes | None: ...


@runtime_checkable
class WritableStore(Store, Protocol):
    """A tier that also takes bytes."""

    def put(self, digest: str, blob: bytes) -> None: ...
    def remove(self, digest: str) -> None: ...


class Found(NamedTuple):
    """A blob and the tier that had it."""

    blob: bytes
    tier: str
