"""Many entries in one file: read-only, relocatable, with the same bytes for the same content.

    offset  size  what
    0       8     magic  89 'B' 'A' 'K' 'E' 0d 0a 1a
    8       2     format version, little-endian
    10      4     length m of the meta part, little-endian
    14      4     number n of entries, little-endian
    18      m     meta: a JSON object
    18+m    40n   the index, ascending by digest: the digest in 32 bytes, and in 8, little-endian,
                  where in the file its entry ends
    …       16    XXH3-128 of everything before it
    …       …     the entries (preheat.model.codec), end to end in the order of the index

An entry starts where the one before it ends, and the last entry ends the file. Therefore entries of an
ascending index cannot overlap, leave gaps or lie outside the file. A checksum covers every byte: that
of the index or the entry's. Checksums detect damage, not attacks: a user who can write the file
can write code. Against attacks there are signatures (`preheat.store.signing.bundles`) and
pins (`preheat.model.setting_values`). Both give the SHA-256 of every entry, which is compared whenever
the entry is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from preheat.errors import BundleError
from preheat.model import codec
from preheat.model.codec import DamagedEntryError
from preheat.model.setting_values import split_pin
from preheat.process.files import Descriptor
from preheat.process.messages import count
from preheat.store.base import UntrustedError
from preheat.store.publish import publish
from preheat.store.signing import bundles as bundle_signature
from preheat.store.signing.bundles import BundleSignature, encode_meta
from preheat.store.trust import DistrustedError, NotAFileError, open_file

if TYPE_CHECKING:  # Most processes need no keys.
    from preheat.store.signing.keys import Keyring, SigningKey

__all__ = ["VERSION", "Bundle", "write"]

MAGIC = b"\x89BAKE\r\n\x1a"
VERSION = 1
_HEAD = struct.Struct("<8sHII")
_RECORD = struct.Struct("<32sQ")
_CHECKSUM = 16
_HASH = 32
_CHUNK = 1 << 20
# Bounds on what a reader does, whatever a file claims.
_MAX_META = 4 << 20
_MAX_ENTRIES = 1 << 20
_MAX_ENTRY = 1 << 30  # less than the limit of one read
_NOT_BAKED = "name a file that 'preheat bake' wrote"
_NOT_SIGNED = "sign it with 'preheat bundle sign FILE', or add a pin to its name"
_OTHER_CONTENT = (
    "copy the file again, or correct the pin: 'preheat bundle ls FILE' prints that of a file"
)


class Bundle:
    """A bundle that is open for reading, by any number of threads and forked processes.

    The index is in memory, and an entry is read when it is requested. Replacing the file by a rename
    changes nothing for a process that has it open. A file that is overwritten in place has damaged
    entries.

    Attributes:
        path: The path of the file.
        nbytes: The size of the file.
        stamp: The identity of the file, which is another one after it was replaced.
        meta: Facts about the bundle.
        source: The path with its pin, if it has one.
        signature: What the file says of its signature. `require_signature` verifies it.

    Examples:
        >>> baked = preheat.bake("kernels.toml", "sm_90", output="kernels.heat")
        >>> with preheat.Bundle.open("kernels.heat") as bundle:
        ...     len(bundle), bundle.verify()  # two entries a program: its code, and how it is found
        (2, {})
    """

    def __init__(self, source: Path, file: Descriptor, index: _Index, *, trust: bool) -> None:
        self.source = source
        self.path, pin = split_pin(source)
        # The SHA-256 of every entry, where a pin or a signature proves them.
        self._hashes = None if pin is None else _pinned_hashes(file, index, pin)
        self._signers: Keyring | None = None
        self.nbytes = index.file_size
        self.stamp = index.stamp
        self._trust = trust
        self.meta: Mapping[str, Any] = index.meta
        self.signature = index.signature
        self._records = index.records
        self._first = index.end
        self._file: Descriptor | None = file

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, trust: bool = True, signers: Keyring | None = None
    ) -> Bundle:
        """Open the bundle at `path` and check its index.

        Args:
            path: The path of the file. If it has a pin, as in `kernels.heat@sha256:…`, the pin must be
                the SHA-256 of the file.
            trust: With False, only this user and root may be able to write the file or replace it.
            signers: If they are given, one of them must have signed a bundle that has no pin.

        Raises:
            BundleError: The file is not a valid bundle, cannot be read, or cannot be trusted.

        Examples:
            >>> preheat.Bundle.open("saxpy.cu")
            Traceback (most recent call last):
            preheat.errors.BundleError: saxpy.cu is not a valid bundle: ...
        """
        source = Path(path)
        path, pin = split_pin(source)
        try:
            file, index = _open(path, trust=trust)
            bundle = cls(source, file, index, trust=trust)
            if pin is None and signers is not None:
                bundle.require_signature(signers)
            return bundle
        except DistrustedError as why:
            raise BundleError(f"bundle {path} cannot be trusted: {why}") from None
        except UntrustedError as why:
            raise BundleError(f"bundle {path} cannot be trusted: {why}", hint=why.hint) from None
        except OSError as fault:
            missing = isinstance(fault, FileNotFoundError)
            raise BundleError(
                f"bundle {path} cannot be read: {fault.strerror or fault}",
                hint="'preheat bake MANIFEST' writes a bundle" if missing else None,
            ) from fault
        except _InvalidError as invalid:
            raise BundleError(f"{path} is not a valid bundle: {invalid}", hint=invalid.hint) from None

    def digest(self) -> str:
        """Read the whole file and return its SHA-256, which a pin has.

        Examples:
            >>> baked = preheat.bake("kernels.toml", "sm_90", output="kernels.heat")
            >>> with preheat.Bundle.open("kernels.heat") as bundle:
            ...     pinned = f"kernels.heat@sha256:{bundle.digest()}"
            >>> preheat.Bundle.open(pinned).path.name
            'kernels.heat'
        """
        file, whole = self._open_file(), hashlib.sha256()
        for chunk in _chunks(file, 0, self.nbytes):
            whole.update(chunk)
        return whole.hexdigest()

    def require_signature(self, signers: Keyring) -> bytes:
        """Return the id of the key that has signed the bundle.

        Entries that are read later are compared with the signature.

        Args:
            signers: The keys that are trusted, such as a `preheat.signing.Keyring`.

        Raises:
            ValueError: None of the keys has signed the bundle.

        Examples:
            >>> from preheat.signing import Keyring, SigningKey
            >>> key = SigningKey.new()
            >>> baked = preheat.bake("kernels.toml", "sm_90", output="signed.heat", key=key)
            >>> with preheat.Bundle.open("signed.heat") as bundle:
            ...     bundle.require_signature(Keyring((key.public,))) == key.id
            True
        """
        if self.signature is None:
            raise UntrustedError("it is not signed", hint=_NOT_SIGNED)
        signature = BundleSignature.decode(self.signature)
        digests = b"".join(digest for digest, _ in _RECORD.iter_unpack(self._records))
        signature.verify(signers, self.meta, digests)
        self._signers, self._hashes = signers, signature.hashes
        return signature.key_id

    def get(self, digest: str) -> bytes | None:
        """Return the verified entry with this digest, or None.

        Raises:
            DamagedEntryError: The entry fails its check.
            OSError: The file cannot be read.

        Examples:
            >>> baked = preheat.bake("kernels.toml", "sm_90", output="kernels.heat")
            >>> with preheat.Bundle.open("kernels.heat") as bundle:
            ...     all(bundle.get(digest) for digest in bundle.digests())
            True
        """
        file = self._open_file()
        at = bisect_left(range(len(self)), digest, key=self._digest)
        if at == len(self) or self._digest(at) != digest:
            return None
        return self._read(file, at)

    def digests(self) -> Iterator[str]:
        """Return the digests of all entries in ascending order.

        Examples:
            >>> baked = preheat.bake("kernels.toml", "sm_90", output="kernels.heat")
            >>> len(list(preheat.Bundle.open("kernels.heat").digests()))
            2
        """
        return map(self._digest, range(len(self)))

    def verify(self) -> dict[str, str]:
        """Read the whole file, and return a message for each damaged entry by digest.

        Examples:
            >>> baked = preheat.bake("kernels.toml", "sm_90", output="kernels.heat")
            >>> preheat.Bundle.open("kernels.heat").verify()
            {}
        """
        file = self._open_file()
        wrong = {}
        for at, digest in enumerate(self.digests()):
            try:
                blob = self._read_unchecked(file, at)
                if why := self._damage(at, blob):
                    wrong[digest] = why
                else:
                    codec.unpack_checked(blob)
            except (DamagedEntryError, OSError) as bad:
                wrong[digest] = str(bad)
        return wrong

    def close(self) -> None:
        """Close the file. A `get` that runs in another thread at this time still succeeds.

        Examples:
            >>> baked = preheat.bake("kernels.toml", "sm_90", output="kernels.heat")
            >>> bundle = preheat.Bundle.open("kernels.heat")
            >>> bundle.close()
        """
        self._file = None

    def __len__(self) -> int:
        return len(self._records) // _RECORD.size

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Bundle], tuple[()]]:
        """Pickle the path and its pin: the receiving process opens the file again."""
        return partial(Bundle.open, self.source, trust=self._trust, signers=self._signers), ()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._file is None

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        entries = count(len(self), "entry")
        return f"<Bundle {self.path}: {entries}, {self.nbytes:,} bytes{state}>"

    def _open_file(self) -> Descriptor:
        file = self._file
        if file is None:
            raise BundleError(f"bundle {self.path} is closed")
        return file

    def _digest(self, at: int) -> str:
        start = at * _RECORD.size
        return self._records[start : start + 32].hex()

    def _end(self, at: int) -> int:
        end: int = _RECORD.unpack_from(self._records, at * _RECORD.size)[1]
        return end

    def _read(self, file: Descriptor, at: int) -> bytes:
        blob = self._read_unchecked(file, at)
        if why := self._damage(at, blob):
            raise DamagedEntryError(f"entry {self._digest(at)} of {self.path}: {why}")
        return blob

    def _damage(self, at: int, blob: bytes) -> str | None:
        """Return what is wrong with an entry that was read, or None when it is valid."""
        if self._hashes is not None:
            expected = self._hashes[at * _HASH : (at + 1) * _HASH]
            if hashlib.sha256(blob).digest() != expected:
                return codec.damage(self._digest(at), blob) or "not the entry that was signed or pinned"
        return codec.damage(self._digest(at), blob)

    def _read_unchecked(self, file: Descriptor, at: int) -> bytes:
        start = self._end(at - 1) if at else self._first
        # A memory mapping of a file that is truncated later would kill the process, so the file is
        # read.
        return os.pread(file, self._end(at) - start, start)


def write(
    path: str | os.PathLike[str],
    entries: Mapping[str, bytes],
    meta: Mapping[str, Any],
    key: SigningKey | None = None,
) -> int:
    """Create or replace the bundle at `path` atomically and durably; return its size in bytes.

    `meta` is a JSON object. With `key`, the bundle is signed. Raises `BundleError` when an entry is
    damaged or the file cannot be written; then an existing file at `path` is unchanged.
    """
    path = Path(path)
    try:
        return publish(path, _parts(entries, meta, key))
    except OSError as fault:
        raise BundleError(f"bundle {path} cannot be written: {fault.strerror or fault}") from fault
    except _InvalidError as invalid:
        raise BundleError(f"bundle {path} is not written: {invalid}") from None


# Reading


class _InvalidError(Exception):
    """Why a file is not a valid bundle, and what to do about it."""

    def __init__(
        self, why: str, hint: str = "copy the bundle again, or bake it again with 'preheat bake'"
    ) -> None:
        super().__init__(why)
        self.hint = hint


class _Index(NamedTuple):
    """The part of the file before the entries: `raw`, and what it says."""

    raw: bytes
    meta: dict[str, Any]
    signature: object
    records: bytes
    end: int
    file_size: int
    stamp: tuple[int, ...]


def _open(path: Path, *, trust: bool) -> tuple[Descriptor, _Index]:
    try:
        file = open_file(path, trust=trust)
    except NotAFileError:
        raise _InvalidError("it is not a file", "name the file itself") from None
    try:
        return file, _read_index(file)
    except BaseException:
        file.close()
        raise


def _read_index(descriptor: int) -> _Index:
    """Read and check everything up to the first entry."""
    status = os.fstat(descriptor)
    meta_length, count = _checked_head(os.pread(descriptor, _HEAD.size, 0))
    meta_end = _HEAD.size + meta_length
    records_end = meta_end + count * _RECORD.size
    end = records_end + _CHECKSUM
    if status.st_size < end:
        raise _InvalidError("it is cut short within its index")
    index = os.pread(descriptor, end, 0)
    if xxhash.xxh3_128_digest(memoryview(index)[:records_end]) != index[records_end:]:
        raise _InvalidError("the checksum of its index does not match")
    records = index[meta_end:records_end]
    _check_records(records, end, status.st_size)
    meta = _parse_meta(index[_HEAD.size : meta_end])
    signature = meta.pop(bundle_signature.FIELD, None)
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return _Index(index, meta, signature, records, end, status.st_size, stamp)


def _checked_head(head: bytes) -> tuple[int, int]:
    """Return the length of the meta part and the number of entries."""
    if len(head) < _HEAD.size:
        raise _InvalidError("it is too short")
    magic, version, meta_length, count = _HEAD.unpack(head)
    if magic == codec.MAGIC:
        raise _InvalidError("it is a single entry of a cache", _NOT_BAKED)
    if magic != MAGIC:
        raise _InvalidError("it does not begin with the signature of a bundle", _NOT_BAKED)
    if version != VERSION:
        raise _InvalidError(
            f"it has format version {version}, where {VERSION} is expected",
            "bake it with the same release of preheat that reads it",
        )
    if meta_length > _MAX_META or count > _MAX_ENTRIES:
        raise _InvalidError(f"it claims {count:,} entries and {meta_length:,} bytes of meta")
    return meta_length, count


def _check_records(records: bytes, start: int, size: int) -> None:
    """Check that digests ascend, and that the ends of entries ascend up to the end of the file."""
    before = b""
    for digest, end in _RECORD.iter_unpack(records):
        if digest <= before:
            raise _InvalidError(f"its index is out of order at {digest.hex()}")
        if not start < end <= start + _MAX_ENTRY:
            raise _InvalidError(f"its index puts entry {digest.hex()} at bytes {start:,} to {end:,}")
        before, start = digest, end
    if size < start:
        raise _InvalidError(f"it is cut short: {size:,} of {start:,} bytes")
    if size > start:
        raise _InvalidError(f"it has bytes after its last entry, from byte {start:,} to {size:,}")


def _parse_meta(text: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise _InvalidError(f"its meta part cannot be read: {bad}") from None
    if not isinstance(meta, dict):
        raise _InvalidError("its meta part is not an object")
    return meta


# Pins


def _pinned_hashes(file: Descriptor, index: _Index, pin: str) -> bytes:
    """Return the SHA-256 of every entry; `UntrustedError` when the file's is not the pin."""
    # The index is not read again: the bytes that were parsed are hashed. Entries are read again, and
    # are then compared with their hash. What is written to the file in between is therefore not used.
    whole = hashlib.sha256(index.raw)
    hashes = bytearray()
    start = index.end
    for _, end in _RECORD.iter_unpack(index.records):
        entry = hashlib.sha256()
        for chunk in _chunks(file, start, end):
            whole.update(chunk)
            entry.update(chunk)
        hashes += entry.digest()
        start = end
    if whole.hexdigest() != pin:
        raise UntrustedError(
            f"its SHA-256 is {whole.hexdigest()}, and the pin is {pin}", hint=_OTHER_CONTENT
        )
    return bytes(hashes)


def _chunks(file: Descriptor, start: int, end: int) -> Iterator[bytes]:
    for at in range(start, end, _CHUNK):
        yield os.pread(file, min(_CHUNK, end - at), at)


# Writing


def _parts(
    entries: Mapping[str, bytes], meta: Mapping[str, Any], key: SigningKey | None
) -> list[bytes]:
    """Return the bytes of a bundle in pieces; equal arguments give equal bytes."""
    blobs = dict(sorted(entries.items()))
    for digest, blob in blobs.items():
        if len(blob) > _MAX_ENTRY:
            raise _InvalidError(f"entry {digest} has {len(blob):,} bytes; {_MAX_ENTRY:,} is the most")
        if why := codec.damage(digest, blob):
            raise _InvalidError(f"entry {digest} is damaged: {why}")
    text = encode_meta(meta if key is None else _signed_meta(blobs, meta, key))
    if len(text) > _MAX_META or len(blobs) > _MAX_ENTRIES:
        raise _InvalidError(f"{len(blobs):,} entries and {len(text):,} bytes of meta are too many")
    index = _packed_index(text, {digest: len(blob) for digest, blob in blobs.items()})
    return [index, *blobs.values()]


def _signed_meta(
    blobs: Mapping[str, bytes], meta: Mapping[str, Any], key: SigningKey
) -> dict[str, Any]:
    digests = b"".join(map(bytes.fromhex, blobs))
    signature = bundle_signature.sign(key, meta, digests, blobs.values())
    return {**meta, bundle_signature.FIELD: signature.encode()}


def _packed_index(text: bytes, lengths: Mapping[str, int]) -> bytes:
    index = bytearray(_HEAD.pack(MAGIC, VERSION, len(text), len(lengths)) + text)
    end = len(index) + len(lengths) * _RECORD.size + _CHECKSUM
    for digest, length in lengths.items():
        end += length
        index += _RECORD.pack(bytes.fromhex(digest), end)
    return bytes(index) + xxhash.xxh3_128_digest(index)
