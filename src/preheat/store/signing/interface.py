"""Interfaces for making and verifying signatures. `keys` has the keys and the cryptography.

A signature is made over a context and a list of parts. The context names what is signed, so that the
signature of an entry is never valid for a bundle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["KEY_ID_SIZE", "SIGNATURE_SIZE", "Signer", "UntrustedError", "Verifier"]

KEY_ID_SIZE = 8
SIGNATURE_SIZE = 64


class UntrustedError(ValueError):
    """No trusted key has signed these bytes. The message is the reason, and `hint` is a next step."""

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


class Signer(Protocol):
    """A private key. `preheat.store.signing.keys.SigningKey` is one."""

    @property
    def id(self) -> bytes:
        """The identity of its public key, `KEY_ID_SIZE` bytes."""

    def sign(self, context: str, parts: Iterable[bytes | memoryview]) -> bytes:
        """Return the signature of `parts` in `context`, `SIGNATURE_SIZE` bytes."""


class Verifier(Protocol):
    """Public keys that are trusted. `preheat.store.signing.keys.Keyring` is one."""

    def verify(
        self, key_id: bytes, signature: bytes, context: str, parts: Iterable[bytes | memoryview]
    ) -> None:
        """Raise `UntrustedError` unless the key `key_id` is trusted and has signed `parts`."""
