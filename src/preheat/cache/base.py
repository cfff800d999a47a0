"""The interface of a tier."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Found", "Tier", "WritableTier"]


class Tier(Protocol):
    """A tier: bytes by hexadecimal digest.

    `get` returns verified bytes, or None when the tier does not have the digest. A tier that fails
    raises `OSError`, and nothing else, which `Chain` turns into an event.
    """

    name: str

    def get(self, digest: str) -> bytes | None: ...


@runtime_checkable
class WritableTier(Tier, Protocol):
    """A tier that can be written."""

    def put(self, digest: str, blob: bytes) -> None: ...
    def remove(self, digest: str) -> None: ...


class Found(NamedTuple):
    """A blob, and the name of the tier that had it."""

    blob: bytes
    tier: str
