"""The signature of a bundle, which is a field of its meta part.

    {"signature": {"key": id of the key, in hex,
                   "value": Ed25519 signature, in hex,
                   "hashes": SHA-256 of every entry in the order of the index, joined, in base64}}

The key signs the other fields of the meta part, the digests of the index, and the hashes. Mounting a
signed bundle therefore reads only its index. Every entry is compared with its hash when it is read. A
reader that does not know of signatures ignores the field.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.store.base import UntrustedError
from preheat.store.signing import KEY_ID_SIZE, SIGNATURE_SIZE

if TYPE_CHECKING:  # `keys` takes longer to import than this module.
    from preheat.store.signing.keys import Keyring, SigningKey

__all__ = ["CONTEXT", "FIELD", "BundleSignature", "encode_meta", "sign"]

CONTEXT = "bundle"
FIELD = "signature"
_FORMAT = b"1"


class BundleSignature(NamedTuple):
    """Who has signed a bundle, and the hashes of the entries."""

    key_id: bytes
    value: bytes
    hashes: bytes

    @classmethod
    def decode(cls, fields: object) -> BundleSignature:
        """Return the signature in a meta part; `UntrustedError` when it has another form."""
        try:
            key, value, hashes = (fields[name] for name in ("key", "value", "hashes"))  # type: ignore[index]
            made = cls(bytes.fromhex(key), bytes.fromhex(value), binascii.a2b_base64(hashes))
        except (KeyError, TypeError, ValueError):
            raise UntrustedError("its signature has an unknown form") from None
        if (len(made.key_id), len(made.value)) != (KEY_ID_SIZE, SIGNATURE_SIZE):
            raise UntrustedError("its signature has an unknown form")
        return made

    def encode(self) -> dict[str, str]:
        """Return the field of the meta part."""
        hashes = binascii.b2a_base64(self.hashes, newline=False).decode()
        return {"key": self.key_id.hex(), "value": self.value.hex(), "hashes": hashes}

    def verify(self, signers: Keyring, meta: Mapping[str, Any], digests: bytes) -> None:
        """Raise `UntrustedError` unless one of `signers` has signed this meta part and the entries."""
        if len(self.hashes) != len(digests):
            raise UntrustedError("its signature covers another number of entries")
        signers.verify(self.key_id, self.value, CONTEXT, _signed_parts(meta, digests, self.hashes))


def sign(
    key: SigningKey, meta: Mapping[str, Any], digests: bytes, blobs: Iterable[bytes]
) -> BundleSignature:
    """Sign a bundle with this meta part and these entries, in the order of `digests`."""
    hashes = b"".join(hashlib.sha256(blob).digest() for blob in blobs)
    return BundleSignature(key.id, key.sign(CONTEXT, _signed_parts(meta, digests, hashes)), hashes)


def encode_meta(meta: Mapping[str, Any]) -> bytes:
    """Return JSON that is the same for equal objects."""
    return json.dumps(dict(meta), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _signed_parts(meta: Mapping[str, Any], digests: bytes, hashes: bytes) -> tuple[bytes, ...]:
    try:
        return _FORMAT, encode_meta(meta), digests, hashes
    except (ValueError, RecursionError):  # NaN, which the parser of Python accepts.
        raise UntrustedError("its meta part cannot be signed") from None
