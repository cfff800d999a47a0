"""The form of an entry on a server: compressed where that helps, and signed.

    offset  size  what
    0       8     magic  89 'S' 'E' 'N' 'T' 0d 0a 1a
    8       2     format version, little-endian
    10      2     flags, little-endian: 1 = the payload is a zstd frame, 2 = signed
    12      8     length of the entry, little-endian: the payload's when it is decompressed
    20      32    the digest that the entry answers to
    52      8     id of the key that signed it, zeros in an unsigned one
    60      64    Ed25519 signature, zeros in an unsigned one
    124     …     payload: the entry (preheat.model.codec)

The signature covers bytes 8 to 60 and the payload as it is stored. It is verified before anything is
decompressed. The digest is part of it, so an entry that is copied to the name of another one is
refused. Version and flags are part of it, so a signed entry is not valid as one of another format.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from preheat.process.files import MAX_FILE_BYTES
from preheat.process.locks import no_fork
from preheat.store.base import UntrustedError
from preheat.store.signing import KEY_ID_SIZE, SIGNATURE_SIZE

if TYPE_CHECKING:  # `keys` takes longer to import than this module.
    from preheat.store.signing.keys import Keyring, SigningKey

__all__ = ["MAGIC", "VERSION", "key_id", "unwrap", "wrap"]

MAGIC = b"\x89SENT\r\n\x1a"
VERSION = 1
CONTEXT = "entry"
_HEAD = struct.Struct(f"<8sHHQ32s{KEY_ID_SIZE}s{SIGNATURE_SIZE}s")
_SIGNED_HEAD = slice(len(MAGIC), _HEAD.size - SIGNATURE_SIZE)
_COMPRESSED, _SIGNED = 1, 2
_NO_KEY, _NO_SIGNATURE = bytes(KEY_ID_SIZE), bytes(SIGNATURE_SIZE)
_LEVEL = 3
_MAX_ENTRY = MAX_FILE_BYTES - _HEAD.size  # It limits the memory of a reader.


def wrap(digest: str, blob: bytes, key: SigningKey | None) -> bytes:
    """Return the entry `blob` in the form of a server, signed unless `key` is None."""
    if len(blob) > _MAX_ENTRY:
        raise ValueError(f"an entry of {len(blob):,} bytes is too long; the limit is {_MAX_ENTRY:,}")
    compressed = _compress(blob)
    payload = blob if compressed is None else compressed
    flags = (0 if compressed is None else _COMPRESSED) | (0 if key is None else _SIGNED)
    signer = _NO_KEY if key is None else key.id
    fields = (MAGIC, VERSION, flags, len(blob), bytes.fromhex(digest), signer)
    head = _HEAD.pack(*fields, _NO_SIGNATURE)
    if key is not None:
        head = _HEAD.pack(*fields, key.sign(CONTEXT, (head[_SIGNED_HEAD], payload)))
    return head + payload


def unwrap(digest: str, data: bytes, trusted: Keyring | None) -> bytes:
    """Return the entry in `data`, an object of a server; `UntrustedError` when it is refused.

    With `trusted`, one of its keys has signed the entry for `digest`. Without, the signature is not
    looked at, and the entry may be unsigned. The entry itself is not checked: see `codec.damage`.
    """
    head = _parse(data)
    if head.digest != digest:
        raise UntrustedError(f"it is the entry of another digest, {head.digest}")
    payload = memoryview(data)[_HEAD.size :]
    if trusted is not None:
        if not head.flags & _SIGNED:
            raise UntrustedError("it is not signed")
        trusted.verify(head.key_id, head.signature, CONTEXT, (data[_SIGNED_HEAD], payload))
    if head.flags & _COMPRESSED:
        return _decompress(payload, head.length)
    if len(payload) != head.length:
        raise UntrustedError(f"it has {len(payload):,} of {head.length:,} bytes")
    return bytes(payload)


def key_id(data: bytes) -> bytes | None:
    """Return the id of the key that an object claims as its signer; None for an unsigned object.

    Nothing is verified. `UntrustedError` when the object has another form.
    """
    head = _parse(data)
    return head.key_id if head.flags & _SIGNED else None


class _Head(NamedTuple):
    flags: int
    length: int
    digest: str
    key_id: bytes
    signature: bytes


def _parse(data: bytes) -> _Head:
    if len(data) < _HEAD.size:
        raise UntrustedError("it is too short")
    magic, version, flags, length, digest, key, signature = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise UntrustedError("it is not an entry that preheat wrote to a server")
    if version != VERSION:
        raise UntrustedError(f"it has format version {version}, where {VERSION} is expected")
    if flags & ~(_COMPRESSED | _SIGNED):
        raise UntrustedError(f"it has unknown flags: {flags:#x}")
    if length > _MAX_ENTRY:
        raise UntrustedError(f"it claims {length:,} bytes; the limit is {_MAX_ENTRY:,}")
    if not flags & _SIGNED and (key, signature) != (_NO_KEY, _NO_SIGNATURE):
        raise UntrustedError("it has a signature, and is marked as unsigned")
    return _Head(flags, length, digest.hex(), key, signature)


def _compress(blob: bytes) -> bytes | None:
    """Return `blob` as a zstd frame; None when that is not smaller, or zstd is not installed."""
    try:
        with no_fork:
            import zstandard
    except ImportError:
        return None
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(blob)
    return frame if len(frame) < len(blob) else None


def _decompress(frame: memoryview, length: int) -> bytes:
    """Return the content of a zstd frame that has exactly `length` bytes."""
    try:
        with no_fork:
            import zstandard
    except ImportError:
        raise UntrustedError("it is compressed: pip install 'preheat[remote]'") from None
    try:
        # The frame says first how long its content is, and `decompress` allocates that much.
        if zstandard.frame_content_size(frame) != length:
            raise UntrustedError("its zstd frame has another length than it claims")
        blob = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as bad:
        raise UntrustedError(f"it cannot be decompressed: {bad}") from None
    if len(blob) != length:
        raise UntrustedError(f"it is decompressed to {len(blob):,} of {length:,} bytes")
    return blob
