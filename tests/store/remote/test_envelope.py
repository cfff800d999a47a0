"""Entries as servers keep them: what `unwrap` returns, and everything that it refuses."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preheat.model import codec
from preheat.store.base import UntrustedError
from preheat.store.signing import entries as envelope
from preheat.store.signing.entries import unwrap, wrap
from preheat.store.signing.keys import Keyring, SigningKey
from tests.store.entries import blob_of, digest_of

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

KEY, OTHER = SigningKey.new(), SigningKey.new()
TRUSTED = Keyring((KEY.public,))
DIGEST = digest_of(1)
RANDOM = blob_of(1)  # Random bytes, which zstd does not make smaller.
TEXT = codec.pack(DIGEST, {"kind": "test"}, {"ptx": b"mov.u32 %r1, %tid.x;\n" * 500})
BLOBS = {"stored": RANDOM, "compressed": TEXT}
HEAD = struct.Struct("<8sHHQ32s8s64s")
SIGNATURE = (  # of RANDOM by the key 00 01 … 1f
    "4d729598139e0c12586faa4275891b0fbfe075f4bdf9365833ad2a4d2924517f"
    "a6cd1ea35596e58f4ca054464a95e2c620dc7ee0f655a0e43ffe42e821b97001"
)


ANY = "."  # every reason


def refused(
    reason: str, data: bytes, *, digest: str = DIGEST, trusted: Keyring | None = TRUSTED
) -> None:
    with pytest.raises(UntrustedError, match=reason):
        unwrap(digest, data, trusted)


def changed(data: bytes, **fields: object) -> bytes:
    """Return an object with other fields in its head."""
    names = ("magic", "version", "flags", "length", "digest", "key_id", "signature")
    head = dict(zip(names, HEAD.unpack_from(data), strict=True)) | fields
    return HEAD.pack(*head.values()) + data[HEAD.size :]


def unsigned(payload: bytes, *, flags: int = 0, length: int | None = None) -> bytes:
    """Return an unsigned object with any payload."""
    size = len(payload) if length is None else length
    return HEAD.pack(envelope.MAGIC, 1, flags, size, bytes.fromhex(DIGEST), b"", b"") + payload


def signed(payload: bytes, *, flags: int = 2, length: int | None = None, version: int = 1) -> bytes:
    """Return an object with any payload and fields that the trusted key signs."""
    data = changed(unsigned(payload, flags=flags, length=length), key_id=KEY.id, version=version)
    signature = KEY.sign(envelope.CONTEXT, (data[8:60], payload))
    return changed(data, signature=signature)


# Round trips


@given(st.binary(max_size=2000), st.booleans())
@example(b"", True)
@example(bytes(100_000), True)
def test_what_is_wrapped_is_unwrapped(blob: bytes, with_key: bool) -> None:
    data = wrap(DIGEST, blob, KEY if with_key else None)
    assert unwrap(DIGEST, data, None) == blob
    if with_key:
        assert unwrap(DIGEST, data, TRUSTED) == blob


def test_an_entry_is_compressed_only_where_that_makes_it_smaller() -> None:
    assert len(wrap(DIGEST, TEXT, KEY)) < len(TEXT) / 10
    assert len(wrap(DIGEST, RANDOM, KEY)) == HEAD.size + len(RANDOM)


def test_an_entry_too_long_for_readers_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "_MAX_ENTRY", 10)
    with pytest.raises(ValueError, match="an entry of 11 bytes is too long; the limit is 10"):
        wrap(DIGEST, bytes(11), KEY)


def test_the_bytes_of_a_signed_entry_do_not_change_between_releases() -> None:
    key = SigningKey._from_seed(bytes(range(32)))
    data = wrap(DIGEST, RANDOM, key)
    assert key.id.hex() == "8bef1c18e30f9612"
    fields = f"01000200{len(RANDOM):02x}00000000000000{DIGEST}{key.id.hex()}"
    assert data[:60].hex() == f"8953454e540d0a1a{fields}"
    assert data[HEAD.size :] == RANDOM
    assert data[60 : HEAD.size].hex() == SIGNATURE


def test_the_key_that_an_object_claims_is_known_without_trust() -> None:
    assert envelope.key_id(wrap(DIGEST, TEXT, KEY)) == KEY.id
    assert envelope.key_id(wrap(DIGEST, TEXT, None)) is None


def test_without_zstd_entries_are_stored_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wrap(DIGEST, TEXT, KEY)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert wrap(DIGEST, TEXT, KEY)[HEAD.size :] == TEXT
    refused(r"it is compressed: pip install 'preheat\[remote\]'", data)


# Keys


def test_either_key_is_accepted_while_keys_are_rotated() -> None:
    both = Keyring((KEY.public, OTHER.public))
    for key in (KEY, OTHER):
        assert unwrap(DIGEST, wrap(DIGEST, TEXT, key), both) == TEXT


@pytest.mark.parametrize("kind", BLOBS)
def test_an_entry_of_another_key_is_refused(kind: str) -> None:
    refused(f"signed by key {OTHER.id.hex()}, which is not trusted", wrap(DIGEST, BLOBS[kind], OTHER))
    refused("is not trusted", wrap(DIGEST, BLOBS[kind], KEY), trusted=Keyring(()))


def test_an_entry_of_another_key_with_a_trusted_id_is_refused() -> None:
    refused("does not match its content", changed(wrap(DIGEST, TEXT, OTHER), key_id=KEY.id))


def test_an_unsigned_copy_of_a_signed_entry_is_refused() -> None:
    data = wrap(DIGEST, TEXT, KEY)
    refused("it is not signed", wrap(DIGEST, TEXT, None))
    refused("it is not signed", changed(data, flags=1, key_id=b"", signature=b""))
    refused("it has a signature, and is marked as unsigned", changed(data, flags=1))
    refused("it has a signature, and is marked as unsigned", changed(data, flags=1), trusted=None)


def test_a_signature_of_another_kind_of_thing_is_refused() -> None:
    data = wrap(DIGEST, TEXT, KEY)
    bundle = KEY.sign("bundle", (data[8:60], data[HEAD.size :]))
    refused("does not match its content", changed(data, signature=bundle))


# Replays, damage, other formats


@pytest.mark.parametrize("trusted", [TRUSTED, None])
def test_an_entry_under_another_key_is_refused(trusted: Keyring | None) -> None:
    other = digest_of(2)
    replayed = wrap(DIGEST, TEXT, KEY)
    refused(f"it is the entry of another digest, {DIGEST}", replayed, digest=other, trusted=trusted)


def test_a_signed_entry_with_the_digest_of_another_is_refused() -> None:
    renamed = changed(wrap(DIGEST, TEXT, KEY), digest=bytes.fromhex(digest_of(2)))
    refused("does not match its content", renamed, digest=digest_of(2))


@pytest.mark.parametrize("kind", BLOBS)
def test_a_truncated_entry_is_refused_at_every_length(kind: str) -> None:
    data = wrap(DIGEST, BLOBS[kind], KEY)
    for length in range(len(data)):
        refused(ANY, data[:length])
    for unsigned_length in range(len(wrap(DIGEST, BLOBS[kind], None))):
        refused(ANY, wrap(DIGEST, BLOBS[kind], None)[:unsigned_length], trusted=None)


@pytest.mark.parametrize("kind", BLOBS)
def test_an_entry_that_goes_on_is_refused(kind: str) -> None:
    refused("does not match its content", wrap(DIGEST, BLOBS[kind], KEY) + b"\0")
    refused(ANY, wrap(DIGEST, BLOBS[kind], None) + b"\0", trusted=None)


@pytest.mark.parametrize("kind", BLOBS)
def test_a_flipped_bit_is_refused_anywhere(kind: str) -> None:
    data = bytearray(wrap(DIGEST, BLOBS[kind], KEY))
    head, payload = range(HEAD.size * 8), range(HEAD.size * 8, len(data) * 8, 11)
    for bit in (*head, *payload):
        data[bit // 8] ^= 1 << bit % 8
        refused(ANY, bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    assert unwrap(DIGEST, bytes(data), TRUSTED) == BLOBS[kind]


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_refused_even_if_it_is_signed(version: int) -> None:
    refused(f"format version {version}, where 1 is expected", signed(RANDOM, version=version))


def test_an_entry_without_an_envelope_is_refused() -> None:
    for trusted in (TRUSTED, None):
        refused("not an entry that preheat wrote to a server", TEXT, trusted=trusted)


def test_unknown_flags_are_refused_even_if_they_are_signed() -> None:
    refused("it has unknown flags: 0x6", signed(RANDOM, flags=6))


# Sizes that lie


def test_a_lying_length_is_refused() -> None:
    frame = zstandard.compress(bytes(1000))
    refused("it has 100 of 99 bytes", signed(bytes(100), length=99))
    refused("its zstd frame has another length than it claims", signed(frame, flags=3, length=999))
    refused("it claims 1,099,511,627,776 bytes", signed(frame, flags=3, length=1 << 40))


BOMB = bytes(64 << 20)


@pytest.mark.parametrize("trusted", [TRUSTED, None])
@pytest.mark.parametrize("length", [1000, len(BOMB)])
def test_a_decompression_bomb_is_refused_before_memory_is_taken(
    trusted: Keyring | None, length: int
) -> None:
    """The true length is in the envelope, in the frame, or in neither, but never in both."""
    names_length = zstandard.ZstdCompressor(write_content_size=length == 1000).compress(BOMB)
    tracemalloc.start()
    try:
        refused("another length", signed(names_length, flags=3, length=length), trusted=trusted)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_holds_more_than_it_says_is_refused() -> None:
    honest, more = (zstandard.ZstdCompressor().compress(bytes(n)) for n in (1000, 100_000))
    assert zstandard.frame_content_size(more) == 100_000
    blocks = more[zstandard.frame_header_size(more) :]
    lying = honest[: zstandard.frame_header_size(honest)] + blocks
    for trusted in (TRUSTED, None):
        refused("it cannot be decompressed", signed(lying, flags=3, length=1000), trusted=trusted)


def test_several_frames_and_other_bytes_after_a_frame_are_refused() -> None:
    frame = zstandard.compress(bytes(1000))
    for payload in (frame * 2, frame + b"x", b"", frame[:-1], b"x" + frame):
        refused(ANY, signed(payload, flags=3, length=1000))


# Anything else


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_raise_only_untrusted_errors(data: bytes, known: bool) -> None:
    with pytest.raises(UntrustedError):
        unwrap(DIGEST, data, TRUSTED if known else None)


@settings(max_examples=200)
@given(
    payload=st.binary(max_size=60) | st.binary(max_size=60).map(zstandard.compress),
    flags=st.integers(0, 4),
    length=st.integers(0, 200) | st.integers(0, 2**64 - 1),
    version=st.sampled_from([0, 1, 1, 1, 2]),
    key=st.sampled_from([None, KEY.id, OTHER.id]),
)
def test_any_fields_raise_only_untrusted_errors(
    payload: bytes, flags: int, length: int, version: int, key: bytes | None
) -> None:
    data = signed(payload, flags=flags, length=length, version=version)
    data = data if key is None else changed(data, key_id=key)
    for trusted in (TRUSTED, None):
        try:
            blob = unwrap(DIGEST, data, trusted)
        except UntrustedError:
            continue
        assert len(blob) == length


def test_damaged_frames_raise_only_untrusted_errors() -> None:
    frame, chance = zstandard.compress(TEXT), random.Random(1)
    for _ in range(500):
        damaged = bytearray(frame)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            blob = unwrap(DIGEST, unsigned(bytes(damaged), flags=1, length=len(TEXT)), None)
        except UntrustedError:
            continue
        assert len(blob) == len(TEXT)  # The checksum of the entry finds what zstd did not.
