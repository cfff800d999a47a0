"""Bundles that are signed or pinned: what is accepted, and every change that is refused."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import BundleError
from preheat.model.codec import DamagedEntryError
from preheat.store import bundle
from preheat.store.bundle import Bundle, write
from preheat.store.signing.bundles import BundleSignature, sign
from preheat.store.signing.keys import Keyring, SigningKey, UntrustedError
from tests.store.entries import blob_of, content, digest_of

pytest.importorskip("cryptography", reason="cryptography is not installed")

KEY, OTHER = SigningKey.new(), SigningKey.new()
TRUSTED = Keyring((KEY.public,))
META = {"format": "test", "größe": [1, 2.5, None]}
SMALL = {digest_of(number): blob_of(number, 50) for number in range(4)}
FIRST = min(SMALL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kernels.heat"


@pytest.fixture
def signed(path: Path) -> Path:
    write(path, SMALL, META, KEY)
    return path


def pinned(path: Path) -> str:
    return f"{path}@sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def refused(reason: str, source: str | Path, signers: Keyring | None = TRUSTED) -> None:
    with pytest.raises(BundleError, match=f"cannot be trusted: .*{reason}"):
        Bundle.open(source, signers=signers)


def other_blob(number: int) -> bytes:
    """Return another valid entry with the digest and the length of entry `number`."""
    blob = blob_of(number, 50, by="evil")
    assert len(blob) != len(blob_of(number, 50))
    return blob_of(number, 50 - len("evil"), by="evil")


def overwrite_first_entry(path: Path) -> None:
    """Replace an entry in place by another valid one of the same length."""
    old = SMALL[FIRST]
    new = next(other_blob(n) for n in range(4) if digest_of(n) == FIRST)
    assert len(new) == len(old)
    data = path.read_bytes()
    assert data.count(old) == 1
    with open(path, "r+b") as file:
        file.seek(data.index(old))
        file.write(new)


# Signatures


def test_a_signed_bundle_is_read_with_and_without_keys(signed: Path) -> None:
    for signers in (TRUSTED, Keyring((OTHER.public, KEY.public)), None):
        with Bundle.open(signed, signers=signers) as opened:
            assert content(opened) == SMALL
            assert opened.meta == META
            assert opened.verify() == {}


def test_the_same_content_and_key_give_the_same_bytes(signed: Path) -> None:
    first = signed.read_bytes()
    write(signed, dict(reversed(SMALL.items())), META, KEY)
    assert signed.read_bytes() == first


def test_an_unsigned_bundle_has_the_bytes_that_it_always_had(path: Path) -> None:
    write(path, SMALL, META)
    assert b"signature" not in path.read_bytes()
    assert Bundle.open(path).signature is None


def test_an_unsigned_bundle_and_one_of_another_key_are_refused(path: Path) -> None:
    write(path, SMALL, META)
    refused("it is not signed", path)
    write(path, SMALL, META, OTHER)
    refused(f"it is signed by key {OTHER.id.hex()}, which is not trusted", path)
    refused("is not trusted", path, Keyring(()))


def forged(path: Path, signature: Any, *, meta: Any = META, entries: Any = SMALL) -> Path:
    """Write a bundle with any signature, and checksums that are right."""
    write(path, entries, {**meta, "signature": signature})
    return path


def signature_of(meta: Any = META, entries: Any = SMALL, key: SigningKey = KEY) -> dict[str, str]:
    digests = sorted(entries)
    joined = b"".join(map(bytes.fromhex, digests))
    return sign(key, meta, joined, [entries[digest] for digest in digests]).encode()


def test_a_signature_is_one_of_this_content_alone(path: Path) -> None:
    fine = signature_of()
    assert content(Bundle.open(forged(path, fine), signers=TRUSTED)) == SMALL
    fewer = {digest: blob for digest, blob in SMALL.items() if digest != FIRST}
    more = SMALL | {digest_of(9): blob_of(9)}
    renamed = fewer | {digest_of(9): blob_of(9)}
    for meta, entries, reason in (
        (META | {"format": "other"}, SMALL, "does not match its content"),
        (META | {"more": 1}, SMALL, "does not match its content"),
        ({}, SMALL, "does not match its content"),
        (META, fewer, "another number of entries"),
        (META, more, "another number of entries"),
        (META, renamed, "does not match its content"),
    ):
        refused(reason, forged(path, fine, meta=meta, entries=entries))


def test_an_entry_that_was_replaced_is_damaged_when_it_is_read(path: Path) -> None:
    """The index of the forged file is right, and its entry is valid, but it is not the signed one."""
    number = next(n for n in range(4) if digest_of(n) == FIRST)
    forged(path, signature_of(), entries=SMALL | {FIRST: other_blob(number)})
    assert Bundle.open(path).verify() == {}
    opened = Bundle.open(path, signers=TRUSTED)
    with pytest.raises(DamagedEntryError, match="not the entry that was signed or pinned"):
        opened.get(FIRST)
    assert opened.verify() == {FIRST: "not the entry that was signed or pinned"}
    assert opened.get(max(SMALL)) == SMALL[max(SMALL)]


def test_the_signature_of_an_entry_is_not_one_of_a_bundle(path: Path) -> None:
    real = BundleSignature.decode(signature_of())
    hashes = b"".join(hashlib.sha256(SMALL[digest]).digest() for digest in sorted(SMALL))
    digests = b"".join(map(bytes.fromhex, sorted(SMALL)))
    other = KEY.sign("entry", (b"1", b"{}", digests, hashes))
    refused("does not match its content", forged(path, real._replace(value=other).encode()))


@pytest.mark.parametrize(
    "signature",
    [1, "x", [], {}, {"key": 1}, signature_of() | {"key": "00"}, signature_of() | {"value": "zz"},
     signature_of() | {"hashes": None}, {"algorithm": "new"}],
)  # fmt: skip
def test_a_signature_of_another_form_is_refused_only_where_one_is_required(
    path: Path, signature: object
) -> None:
    refused("its signature has an unknown form", forged(path, signature))
    assert content(Bundle.open(path)) == SMALL


def test_every_changed_byte_of_a_signed_file_is_found(signed: Path) -> None:
    data = signed.read_bytes()
    chance = random.Random(5)
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 1 << chance.randrange(8)
        signed.write_bytes(damaged)
        try:
            wrong = Bundle.open(signed, signers=TRUSTED).verify()
        except BundleError:
            continue
        assert len(wrong) == 1, at


def test_a_bundle_can_be_required_to_be_signed_after_it_was_opened(signed: Path) -> None:
    opened = Bundle.open(signed)
    assert opened.require_signature(TRUSTED) == KEY.id
    with pytest.raises(UntrustedError, match="not trusted"):
        opened.require_signature(Keyring((OTHER.public,)))


# Pins


@pytest.mark.parametrize("key", [None, KEY])
def test_a_pinned_bundle_is_read(path: Path, key: SigningKey | None) -> None:
    write(path, SMALL, META, key)
    opened = Bundle.open(pinned(path))
    assert content(opened) == SMALL
    assert opened.path == path
    assert str(opened.source) == pinned(path)
    assert f"{path}@sha256:{opened.digest()}" == pinned(path)


def test_a_pin_is_as_good_as_a_signature(path: Path) -> None:
    write(path, SMALL, META)
    assert content(Bundle.open(pinned(path), signers=TRUSTED)) == SMALL


def test_another_bundle_than_the_pinned_one_is_refused(path: Path) -> None:
    write(path, SMALL, META)
    source = pinned(path)
    write(path, {FIRST: SMALL[FIRST]}, META)
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    refused(f"its SHA-256 is {now}, and the pin is {source[-64:]}", source)


def test_a_pinned_bundle_with_another_entry_is_refused(path: Path) -> None:
    write(path, SMALL, META)
    source = pinned(path)
    overwrite_first_entry(path)
    assert Bundle.open(path).verify() == {}
    refused("its SHA-256 is", source)


def test_a_file_that_is_not_a_bundle_is_named_as_such(path: Path) -> None:
    path.write_bytes(b"hello, this is no bundle")
    with pytest.raises(BundleError, match=f"{path} is not a valid bundle"):
        Bundle.open(pinned(path))
    with pytest.raises(BundleError, match=f"bundle {path}x cannot be read"):
        Bundle.open(f"{path}x@sha256:{'0' * 64}")


# Races


@pytest.mark.parametrize("how", ["pin", "signature"])
def test_an_entry_that_is_overwritten_later_is_damaged(signed: Path, how: str) -> None:
    """The entry that replaces it is valid, so that its checksum alone would not find it."""
    source = pinned(signed) if how == "pin" else signed
    opened = Bundle.open(source, signers=TRUSTED)
    overwrite_first_entry(signed)
    with pytest.raises(DamagedEntryError, match="not the entry that was signed or pinned"):
        opened.get(FIRST)
    assert opened.get(max(SMALL)) == SMALL[max(SMALL)]


def test_the_file_that_is_hashed_is_the_file_that_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path leads to another bundle as soon as the file is open."""
    write(path, SMALL, META)
    source, other = pinned(path), path.with_name("other.heat")
    write(other, {FIRST: SMALL[FIRST]}, META)
    real = bundle._open

    def open_and_replace(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        os.replace(other, path)
        return result

    monkeypatch.setattr(bundle, "_open", open_and_replace)
    assert content(Bundle.open(source)) == SMALL


def test_a_file_that_is_overwritten_while_it_is_hashed_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, SMALL, META)
    source, real = pinned(path), bundle._pinned_hashes

    def overwrite_and_hash(*args: Any) -> Any:
        overwrite_first_entry(path)
        return real(*args)

    monkeypatch.setattr(bundle, "_pinned_hashes", overwrite_and_hash)
    refused("its SHA-256 is", source)


def test_an_index_that_is_overwritten_while_entries_are_hashed_has_no_effect(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parsed index is hashed, not the one in the file, so the bundle is what was pinned."""
    write(path, SMALL, META)
    source, real = pinned(path), bundle._pinned_hashes

    def overwrite_and_hash(*args: Any) -> Any:
        with open(path, "r+b") as file:
            file.write(bytes(40))
        return real(*args)

    monkeypatch.setattr(bundle, "_pinned_hashes", overwrite_and_hash)
    assert content(Bundle.open(source)) == SMALL


# Other processes


def test_a_pickled_bundle_is_opened_with_its_pin_or_its_keys(signed: Path) -> None:
    by_pin = pickle.dumps(Bundle.open(pinned(signed)))
    by_key = pickle.dumps(Bundle.open(signed, signers=TRUSTED))
    for pickled in (by_pin, by_key):
        assert content(pickle.loads(pickled)) == SMALL
    write(signed, {FIRST: SMALL[FIRST]}, META, OTHER)
    for pickled in (by_pin, by_key):
        with pytest.raises(BundleError, match="cannot be trusted"):
            pickle.loads(pickled)
