"""Ed25519 keys: files of keys, signatures, and the public keys that a process trusts.

The package `cryptography` does the cryptography. It is an extra and takes long to import, so that it is
imported when a key is used.

A private key is a file in PEM form (PKCS #8), as `preheat keys new` and `openssl genpkey -algorithm
ed25519` write it. A file of public keys has one or more PEM blocks. Lines between them that start with
`#` are comments.

The signed message is a constant prefix and the SHA-512 of the context and all parts, each with its
length before it. Different contexts, or different lists of parts, never give the same message. So the
signature of an entry is never valid for a bundle.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from preheat.errors import InputError, KeyFileError
from preheat.process.files import open_fd
from preheat.process.locks import no_fork
from preheat.store.base import UntrustedError
from preheat.store.signing import KEY_ID_SIZE
from preheat.store.trust import DistrustedError, NotAFileError, open_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [
    "Keyring",
    "Keys",
    "PublicKey",
    "SigningKey",
    "UntrustedError",
    "load_public",
    "require_absent",
]

AnyPath = str | os.PathLike[str]

_PREFIX = b"preheat signature 1\0"
_PUBLIC, _PRIVATE, _ENCRYPTED = "PUBLIC KEY", "PRIVATE KEY", "ENCRYPTED PRIVATE KEY"
_MAKE_ONE = "make one with 'preheat keys new FILE'"
_BLOCK = re.compile(r"^-----BEGIN ([A-Z0-9 ]+)-----$.*?^-----END \1-----$", re.DOTALL | re.MULTILINE)
_MAX_FILE = 1 << 20
_OTHERS_ACCESS = stat.S_IRWXG | stat.S_IRWXO
_PRIME = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
#: The y coordinates of the eight points of small order: of order 1, 2 and 4, and two of order 8.
_SMALL_ORDER = (1, _PRIME - 1, 0, _ORDER_8, _PRIME - _ORDER_8)


@dataclass(frozen=True)
class PublicKey:
    """The public half of a key: 32 bytes."""

    raw: bytes

    @property
    def id(self) -> bytes:
        """A short digest of the key. It only names the key: signatures are verified by the key."""
        return hashlib.sha256(b"preheat key\0" + self.raw).digest()[:KEY_ID_SIZE]

    def verify(self, signature: bytes, context: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Return whether this key has signed `parts` in `context`."""
        library = _cryptography()
        key = library.ed25519.Ed25519PublicKey.from_public_bytes(self.raw)
        try:
            key.verify(signature, _message(context, parts))
        except library.exceptions.InvalidSignature:
            return False
        return True

    def pem(self) -> str:
        """Return the key as a PEM block, for a file of public keys."""
        library = _cryptography()
        key = library.ed25519.Ed25519PublicKey.from_public_bytes(self.raw)
        pem: bytes = key.public_bytes(
            library.serialization.Encoding.PEM,
            library.serialization.PublicFormat.SubjectPublicKeyInfo,
        )
        return pem.decode()

    def save(self, path: AnyPath, *, comment: str) -> None:
        """Write a new file of public keys; `KeyFileError` if the file exists."""
        _save_new(path, f"{comment}\n{self.pem()}", 0o644)

    def __repr__(self) -> str:
        return f"<PublicKey {self.id.hex()}>"


@dataclass(frozen=True)
class SigningKey:
    """A private key: 32 bytes, which neither its `repr` nor an error message shows."""

    seed: bytes = field(repr=False)
    public: PublicKey

    @classmethod
    def new(cls) -> SigningKey:
        """Make a key from the randomness of the operating system."""
        return cls._from_seed(_cryptography().ed25519.Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def load(cls, path: AnyPath) -> SigningKey:
        """Read the file of a private key; `KeyFileError` when it is invalid or others can read it."""
        text, status = _read(path)
        blocks = _blocks(path, text)
        kinds = [kind for kind, _ in blocks]
        if kinds == [_ENCRYPTED]:
            why = "its private key is encrypted, and a process cannot ask for the password"
            raise KeyFileError(path, why, hint="decrypt it with 'openssl pkey -in FILE -out NEW'")
        if kinds != [_PRIVATE]:
            why = f"it has {_list_kinds(blocks)}, where one private key is expected"
            raise KeyFileError(path, why, hint=_MAKE_ONE)
        if exposed := _exposure(status):
            raise KeyFileError(
                path, exposed, hint="chmod 600 the file, and replace the key if it was read"
            )
        return cls._from_seed(_parse_key(path, _parse_private, blocks[0][1]))

    def save(self, path: AnyPath) -> None:
        """Write a new file that only this user can read; `KeyFileError` if it exists."""
        serialization = _cryptography().serialization
        pem: bytes = self._private_key().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _save_new(path, pem.decode(), 0o600)

    @property
    def id(self) -> bytes:
        """The id of the public key."""
        return self.public.id

    def sign(self, context: str, parts: Iterable[bytes | memoryview]) -> bytes:
        """Return the signature of `parts` in `context`: 64 bytes. Equal parts have equal signatures."""
        return self._private_key().sign(_message(context, parts))

    @classmethod
    def _from_seed(cls, seed: bytes) -> SigningKey:
        key = _cryptography().ed25519.Ed25519PrivateKey.from_private_bytes(seed)
        return cls(seed, PublicKey(key.public_key().public_bytes_raw()))

    def _private_key(self) -> Ed25519PrivateKey:
        key: Ed25519PrivateKey = _cryptography().ed25519.Ed25519PrivateKey.from_private_bytes(self.seed)
        return key


@dataclass(frozen=True)
class Keyring:
    """The public keys that a process trusts: several while keys are rotated."""

    keys: tuple[PublicKey, ...]

    @classmethod
    def load(cls, paths: Iterable[AnyPath], own: SigningKey | None = None) -> Keyring:
        """Read files of public keys; `KeyFileError` for one that is invalid or that others can write.

        The public half of `own` is trusted too: a writer accepts what it signed.
        """
        keys = [key for path in paths for key in _read_public(path)]
        if own is not None:
            keys.append(own.public)
        return cls(tuple(dict.fromkeys(keys)))

    def verify(
        self, key_id: bytes, signature: bytes, context: str, parts: Iterable[bytes | memoryview]
    ) -> None:
        """Raise `UntrustedError` unless the key `key_id` is trusted and has signed `parts`."""
        for key in self.keys:
            if key.id == key_id:
                if key.verify(signature, context, parts):
                    return
                raise UntrustedError(
                    f"its signature by key {key_id.hex()} does not match its content",
                    hint="copy the file again from a source that you trust",
                )
        raise UntrustedError(
            f"it is signed by key {key_id.hex()}, which is not trusted",
            hint="name the file of this public key in PREHEAT_TRUSTED_KEYS if you trust it",
        )


class Keys(NamedTuple):
    """The keys of a process or a store: those that are trusted, and the one that signs.

    Without `trusted`, unsigned entries are accepted. Without `signing`, none is signed.
    """

    trusted: Keyring | None = None
    signing: SigningKey | None = None

    @classmethod
    def load(cls, signing: AnyPath | None, trusted: Sequence[AnyPath]) -> Keys:
        """Read the files of keys; `KeyFileError` for one that cannot be used.

        A process that signs trusts its own key.
        """
        own = None if signing is None else SigningKey.load(signing)
        if own is None and not trusted:
            return cls()
        return cls(Keyring.load(trusted, own=own), own)


def load_public(path: AnyPath) -> tuple[PublicKey, ...]:
    """Return the public keys of a file, or the public half of the private key in it."""
    text, _ = _read(path)
    if [kind for kind, _ in _blocks(path, text)] == [_PRIVATE]:
        return (SigningKey.load(path).public,)
    return _read_public(path)


def require_absent(path: AnyPath) -> None:
    """Raise `KeyFileError` if the file exists, because a key is never overwritten."""
    if os.path.lexists(path):
        raise _refuse_existing(path)


def _message(context: str, parts: Iterable[bytes | memoryview]) -> bytes:
    hashed = hashlib.sha512()
    for part in (context.encode(), *parts):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return _PREFIX + hashed.digest()


class _Cryptography(NamedTuple):
    """The modules of `cryptography` that are used here."""

    ed25519: ModuleType
    exceptions: ModuleType
    serialization: ModuleType


def _cryptography() -> _Cryptography:
    """Import the package; `InputError` when it is not installed."""
    with no_fork:
        try:
            from cryptography import exceptions
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric import ed25519
        except ImportError as missing:
            raise InputError(
                f"signatures need the package cryptography: {missing}",
                hint="pip install 'preheat[remote]'",
            ) from None
    return _Cryptography(ed25519, exceptions, serialization)


def _parse_private(pem: str) -> bytes:
    """Return the private key of a PEM block; `ValueError` for any other text or kind of key."""
    library = _cryptography()
    try:
        key = library.serialization.load_pem_private_key(pem.encode(), password=None)
    except (TypeError, library.exceptions.UnsupportedAlgorithm) as bad:  # TypeError: a password.
        raise ValueError(str(bad)) from None
    if not isinstance(key, library.ed25519.Ed25519PrivateKey):
        raise ValueError("it is not an Ed25519 key")
    seed: bytes = key.private_bytes_raw()
    return seed


def _parse_public(pem: str) -> bytes:
    """Return the public key of a PEM block; `ValueError` for any other text or kind of key.

    A key of small order is refused as well, because signatures that it accepts can be made by anyone.
    """
    library = _cryptography()
    try:
        key = library.serialization.load_pem_public_key(pem.encode())
    except library.exceptions.UnsupportedAlgorithm as bad:
        raise ValueError(str(bad)) from None
    if not isinstance(key, library.ed25519.Ed25519PublicKey):
        raise ValueError("it is not an Ed25519 key")
    raw: bytes = key.public_bytes_raw()
    y = int.from_bytes(raw, "little") & ~(1 << 255)  # The highest bit is the sign of x.
    if y % _PRIME in _SMALL_ORDER:
        raise ValueError("anyone can make a signature that this key accepts")
    if y >= _PRIME:
        raise ValueError("its number is larger than the prime of the curve")
    return raw


# Files


def _read(path: AnyPath) -> tuple[str, os.stat_result]:
    """Return the text of a file that only this user and root can change, and its status."""
    try:
        with open_file(Path(path)) as file:
            data, status = os.read(file, _MAX_FILE), os.fstat(file)
        return data.decode(), status
    except DistrustedError as distrusted:
        raise KeyFileError(path, f"it cannot be trusted: {distrusted.why}") from None
    except NotAFileError as other:
        raise KeyFileError(path, str(other.strerror)) from None
    except OSError as fault:
        raise KeyFileError(path, f"it cannot be read: {fault.strerror or fault}") from fault
    except UnicodeDecodeError:
        raise KeyFileError(path, "it is not text") from None


def _exposure(status: os.stat_result) -> str | None:
    """Return why other users can read a private key, or None.

    The group may read a file of root: Kubernetes gives a secret to a user who is not root that way.
    """
    mode = stat.S_IMODE(status.st_mode)
    allowed = stat.S_IRGRP if status.st_uid == 0 else 0
    if mode & _OTHERS_ACCESS & ~allowed:
        return f"other users can read this private key (mode {mode:04o})"
    return None


def _read_public(path: AnyPath) -> tuple[PublicKey, ...]:
    text, _ = _read(path)
    blocks = _blocks(path, text)
    if {kind for kind, _ in blocks} != {_PUBLIC}:
        why = f"it has {_list_kinds(blocks)}, where public keys are expected"
        raise KeyFileError(
            path, why, hint="'preheat keys show FILE' prints the public key of a private one"
        )
    return tuple(PublicKey(_parse_key(path, _parse_public, block)) for _, block in blocks)


def _blocks(path: AnyPath, text: str) -> list[tuple[str, str]]:
    """Return kind and text of every PEM block; `KeyFileError` for other lines.

    The message does not quote them: they may be a part of a private key.
    """
    text = "\n".join(line.rstrip() for line in text.splitlines())
    between = _BLOCK.sub("", text).splitlines()
    if any(line and not line.startswith("#") for line in between):
        raise KeyFileError(path, "it has lines that are neither a key in PEM form nor a comment")
    return [(block[1], block[0]) for block in _BLOCK.finditer(text)]


def _list_kinds(blocks: list[tuple[str, str]]) -> str:
    kinds = (kind.lower() for kind, _ in blocks)
    return " and ".join(f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" for kind in kinds) or "no key"


def _parse_key(path: AnyPath, parse: Callable[[str], bytes], block: str) -> bytes:
    try:
        return parse(block)
    except ValueError as bad:
        raise KeyFileError(path, f"a key in it cannot be used: {bad}", hint=_MAKE_ONE) from None


def _save_new(path: AnyPath, text: str, mode: int) -> None:
    """Create a file, and remove it again when it cannot be written."""
    try:
        with open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            try:
                os.write(file, text.encode())
                os.fsync(file)
            except BaseException:
                with suppress(OSError):
                    os.unlink(path)
                raise
    except FileExistsError:
        raise _refuse_existing(path) from None
    except OSError as fault:
        raise KeyFileError(path, f"it cannot be written: {fault.strerror or fault}") from fault


def _refuse_existing(path: AnyPath) -> KeyFileError:
    why = "it exists, and a key is never overwritten"
    return KeyFileError(path, why, hint="name a file that does not exist")
