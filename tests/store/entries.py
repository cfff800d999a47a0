"""Numbered entries for tests. The module imports little, so that child processes start fast."""

from __future__ import annotations

import hashlib

from preheat.model import codec
from preheat.store.bundle import Bundle


def digest_of(number: int) -> str:
    """Return the digest of entry `number`."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def blob_of(number: int, size: int = 100, by: str = "") -> bytes:
    """Return the bytes of entry `number`: always the same for the same arguments."""
    code = hashlib.shake_128(f"{number} {by}".encode()).digest(size)
    return codec.pack(digest_of(number), {"number": number, "by": by}, {"code": code})


def content(bundle: Bundle) -> dict[str, bytes | None]:
    """Return every entry of a bundle."""
    return {digest: bundle.get(digest) for digest in bundle.digests()}
