"""The interface of a tier."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Found", "Tier", "WritableTier"]


class Tier(Protocol):
    """A tier: bytes by hexadecimal digest.

    `get` returns bytes that `codec.damage` has accepted, or None when the tier does not have the
    digest. For damaged bytes it emits a `damaged` event and returns None.

    A tier may raise only `OSError`. `Chain` reports it as a `fault` event, and asks the tier again at
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


class Found(NamedTuple):
    """A blob, and the name of the tier that had it."""

    blob: bytes
    tier: str
