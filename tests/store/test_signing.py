"""Keys and signatures: files that are accepted and refused, and what a signature covers."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InputError, KeyFileError
from preheat.store.signing.keys import Keyring, PublicKey, SigningKey, UntrustedError, load_public
from tests.store.support import NOBODY, needs_root

pytest.importorskip("cryptography", reason="cryptography is not installed")

KEY, OTHER = SigningKey.new(), SigningKey.new()
EC_KEY = """-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt
6zOg9KE5RdiYwpZP40Li/hp/m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q==
-----END PUBLIC KEY-----
"""
parts = st.lists(st.binary(max_size=6), max_size=4)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    KEY.save(tmp_path / "private.pem")
    return tmp_path / "private.pem"


def public_file(place: Path, *keys: SigningKey, comment: str = "") -> Path:
    file = place / f"public-{len(list(place.iterdir()))}.pem"
    file.write_text("".join(f"{comment}{key.public.pem()}" for key in keys))
    return file


# Signatures


@given(parts, parts, st.sampled_from(["entry", "bundle"]))
def test_a_signature_is_one_of_its_context_and_parts_alone(
    one: list[bytes], other: list[bytes], context: str
) -> None:
    signature = KEY.sign("entry", one)
    same = (context, other) == ("entry", one)
    assert KEY.public.verify(signature, context, other) is same
    assert KEY.public.verify(signature, "entry", one)
    assert not OTHER.public.verify(signature, "entry", one)


def test_parts_that_join_to_the_same_bytes_have_other_signatures() -> None:
    signature = KEY.sign("entry", [b"ab", b"c"])
    for other in ([b"a", b"bc"], [b"abc"], [b"ab", b"c", b""], [b"", b"ab", b"c"]):
        assert not KEY.public.verify(signature, "entry", other)


def test_a_part_cannot_be_taken_for_a_context() -> None:
    assert not KEY.public.verify(KEY.sign("entry", [b"x"]), "entr", [b"y", b"x"])
    assert not KEY.public.verify(KEY.sign("a", [b"b"]), "", [b"a", b"b"])


def test_a_keyring_says_which_key_it_does_not_know_or_believe() -> None:
    keys = Keyring((OTHER.public, KEY.public))
    signature = KEY.sign("entry", [b"x"])
    keys.verify(KEY.id, signature, "entry", [b"x"])
    for key_id, content, reason in (
        (KEY.id, b"y", f"its signature by key {KEY.id.hex()} does not match its content"),
        (OTHER.id, b"x", f"its signature by key {OTHER.id.hex()} does not match its content"),
        (bytes(8), b"x", f"it is signed by key {'0' * 16}, which is not trusted"),
    ):
        with pytest.raises(UntrustedError, match=reason):
            keys.verify(key_id, signature, "entry", [content])


def test_a_private_key_is_not_shown() -> None:
    assert KEY.seed.hex() not in f"{KEY!r} {KEY}"
    assert str(KEY.seed) not in f"{KEY!r} {KEY}"
    assert KEY.id.hex() in repr(KEY)


def test_keys_are_values_that_other_processes_can_have() -> None:
    keys = Keyring((KEY.public,))
    assert pickle.loads(pickle.dumps((KEY, keys))) == (KEY, keys)


# Files


def test_a_new_file_is_private_and_holds_the_key(private: Path) -> None:
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert SigningKey.load(private) == KEY


def test_a_key_is_never_overwritten(private: Path) -> None:
    with pytest.raises(KeyFileError, match="it exists, and a key is never overwritten") as caught:
        OTHER.save(private)
    assert caught.value.hint
    assert SigningKey.load(private) == KEY


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError, match="it exists"):
        KEY.save(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666])
def test_a_private_key_that_others_can_read_or_write_is_refused(private: Path, mode: int) -> None:
    private.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}") as caught:
        SigningKey.load(private)
    assert str(private) in str(caught.value)
    assert "PREHEAT_TRUST_CACHE_DIR" not in str(caught.value)


@needs_root
def test_the_group_may_read_a_secret_that_belongs_to_root(private: Path) -> None:
    private.chmod(0o640)
    assert SigningKey.load(private) == KEY
    private.chmod(0o644)
    with pytest.raises(KeyFileError, match="other users can read this private key"):
        SigningKey.load(private)


@needs_root
def test_keys_of_other_users_are_refused(private: Path) -> None:
    public = public_file(private.parent, KEY)
    for file in (private, public):
        os.chown(file, NOBODY, NOBODY)
        with pytest.raises(KeyFileError, match=f"belongs to user {NOBODY}, not to you$"):
            load_public(file)


def test_public_keys_that_others_can_write_are_refused(tmp_path: Path) -> None:
    file = public_file(tmp_path, KEY)
    file.chmod(0o646)
    with pytest.raises(
        KeyFileError, match=r"others can write to it \(mode 0646\); run chmod go-w on it$"
    ):
        Keyring.load([file])


def test_several_files_of_several_keys_are_trusted_each_key_once(tmp_path: Path) -> None:
    third = SigningKey.new()
    files = [
        public_file(tmp_path, KEY, OTHER, comment="# made in July\n\n"),
        public_file(tmp_path, third, KEY),
    ]
    assert Keyring.load(files) == Keyring((KEY.public, OTHER.public, third.public))
    assert Keyring.load([]) == Keyring(())


def test_a_writer_trusts_its_own_key(tmp_path: Path) -> None:
    assert Keyring.load([public_file(tmp_path, OTHER)], own=KEY).keys == (OTHER.public, KEY.public)
    assert Keyring.load([], own=KEY) == Keyring((KEY.public,))


def test_the_public_keys_of_both_kinds_of_files_are_shown(private: Path) -> None:
    assert load_public(private) == (KEY.public,)
    assert load_public(public_file(private.parent, OTHER, KEY)) == (OTHER.public, KEY.public)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no key, where public keys are expected"),
        ("# nothing\n", "it has no key"),
        ("hello\n", "it has lines that are neither a key in PEM form nor a comment"),
        (KEY.public.pem() + "x\n", "neither a key in PEM form nor a comment"),
        (KEY.public.pem()[:-10], "neither a key in PEM form nor a comment"),
        (KEY.public.pem().replace("MCow", "MCox"), "a key in it cannot be used"),
        (EC_KEY, "it is not an Ed25519 key"),
        (KEY.public.pem().replace("PUBLIC KEY", "CERTIFICATE"), "it has a certificate, where"),
        ("\x00\xff", "neither a key in PEM form nor a comment"),
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(KeyFileError, match=reason):
        Keyring.load([tmp_path / "keys"])


PRIME = 2**255 - 19


def points_of_small_order() -> set[bytes]:
    """Return all encodings of points of which eight times is the neutral element, by RFC 8032."""
    d = -121665 * pow(121666, -1, PRIME)
    root = pow(2, (PRIME - 1) // 4, PRIME)  # of -1

    def x_of(y: int) -> int | None:
        square = (y * y - 1) * pow(d * y * y + 1, -1, PRIME) % PRIME
        x = pow(square, (PRIME + 3) // 8, PRIME)
        return next((each for each in (x, x * root % PRIME) if each * each % PRIME == square), None)

    def add(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
        (x, y), (u, v) = one, two
        product = d * x * y * u * v
        return (
            (x * v + y * u) * pow(1 + product, -1, PRIME) % PRIME,
            (y * v + x * u) * pow(1 - product, -1, PRIME) % PRIME,
        )

    found: set[int] = set()
    order = 2**252 + 27742317777372353535851937790883648493
    for y in range(2, 40):  # The order of a point times that of its group's prime part divides 8.
        x = x_of(y)
        if x is None:
            continue
        multiple, base = (0, 1), (x, y)
        for bit in bin(order)[2:]:
            multiple = add(multiple, multiple)
            multiple = add(multiple, base) if bit == "1" else multiple
        each = multiple
        for _ in range(8):
            found.add(each[1])
            each = add(each, multiple)
    assert len(found) == 5
    encoded = [y + more for y in found for more in (0, PRIME) if y + more < 2**255]
    return {(y | sign << 255).to_bytes(32, "little") for y in encoded for sign in (0, 1)}


def test_a_public_key_of_small_order_is_refused(tmp_path: Path) -> None:
    """It accepts signatures that nobody had to have a private key for."""
    file = tmp_path / "keys"
    for raw in points_of_small_order():
        file.write_text(PublicKey(raw).pem())
        with pytest.raises(KeyFileError, match="anyone can make a signature that this key accepts"):
            Keyring.load([file])


def test_a_public_key_with_a_number_beyond_the_prime_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(PublicKey((PRIME + 3).to_bytes(32, "little")).pem())
    with pytest.raises(KeyFileError, match="larger than the prime"):
        Keyring.load([tmp_path / "keys"])


def test_a_private_key_is_not_accepted_among_trusted_keys(private: Path) -> None:
    with pytest.raises(KeyFileError, match="it has a private key, where public keys") as caught:
        Keyring.load([private])
    assert "preheat keys show" in str(caught.value.hint)


def test_a_public_key_is_not_accepted_as_a_private_one(tmp_path: Path) -> None:
    file = public_file(tmp_path, KEY)
    for mode in (0o600, 0o644):
        file.chmod(mode)
        with pytest.raises(KeyFileError, match="it has a public key, where one private key"):
            SigningKey.load(file)


def test_an_encrypted_private_key_is_refused_with_the_command_that_decrypts_it(private: Path) -> None:
    private.write_text(private.read_text().replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY"))
    with pytest.raises(KeyFileError, match="its private key is encrypted") as caught:
        SigningKey.load(private)
    assert caught.value.hint == "decrypt it with 'openssl pkey -in FILE -out NEW'"


def test_another_kind_of_private_key_is_named(private: Path) -> None:
    private.write_text(private.read_text().replace("PRIVATE KEY", "OPENSSH PRIVATE KEY"))
    with pytest.raises(KeyFileError, match="it has an openssh private key, where") as caught:
        SigningKey.load(private)
    assert caught.value.hint == "make one with 'preheat keys new FILE'"


def test_messages_do_not_quote_a_damaged_private_key(private: Path) -> None:
    lines = private.read_text().splitlines()
    for damaged in (lines[1:], lines[:-1], [lines[0], lines[1][:-9], lines[2]]):
        private.write_text("\n".join(damaged))
        with pytest.raises(KeyFileError) as caught:
            SigningKey.load(private)
        assert not any(lines[1][at : at + 8] in str(caught.value) for at in range(len(lines[1]) - 8))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, reason in (
        ("missing", "it cannot be read: No such file"),
        (".", "it is not a file"),
        ("pipe", "it is not a file"),
        ("bytes", "it is not text"),
    ):
        with pytest.raises(KeyFileError, match=reason):
            Keyring.load([tmp_path / name])
    with pytest.raises(KeyFileError, match="it cannot be written: No such file"):
        KEY.save(tmp_path / "missing" / "key")


def test_a_file_with_windows_line_ends_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(KEY.public.pem().replace("\n", "\r\n").encode())
    assert Keyring.load([tmp_path / "keys"]) == Keyring((KEY.public,))


def test_without_cryptography_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(InputError, match="signatures need the package cryptography") as caught:
        SigningKey.new()
    assert caught.value.hint == "pip install 'preheat[remote]'"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_keys_of_openssl_are_read_and_ours_are_read_by_openssl(tmp_path: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)

    openssl("genpkey", "-algorithm", "ed25519", "-out", "theirs.pem")
    openssl("pkey", "-in", "theirs.pem", "-pubout", "-out", "theirs.pub")
    (tmp_path / "theirs.pem").chmod(0o600)
    theirs = SigningKey.load(tmp_path / "theirs.pem")
    assert Keyring.load([tmp_path / "theirs.pub"]).keys == (theirs.public,)
    KEY.save(tmp_path / "ours.pem")
    openssl("pkey", "-in", "ours.pem", "-pubout", "-out", "ours.pub")
    assert Keyring.load([tmp_path / "ours.pub"]).keys == (KEY.public,)
