"""Ed25519 on bytes: the functions of the package `cryptography` that preheat uses.

Only `keys` imports this module, when a key is used: `cryptography` is an extra, and takes long to
import.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "generate",
    "parse_private",
    "parse_public",
    "private_pem",
    "public_of",
    "public_pem",
    "sign",
    "verify",
]


_PRIME = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
#: The y coordinates of the eight points of small order: of order 1, 2 and 4, and two of order 8.
_SMALL_ORDER = (1, _PRIME - 1, 0, _ORDER_8, _PRIME - _ORDER_8)


def generate() -> bytes:
    """Return a new private key, 32 bytes."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_of(seed: bytes) -> bytes:
    """Return the public key of a private one, 32 bytes."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def sign(seed: bytes, message: bytes) -> bytes:
    """Return the signature of a message, 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(seed).sign(message)


def verify(raw: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether the public key `raw` accepts the signature."""
    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def private_pem(seed: bytes) -> str:
    """Return a private key as a PEM block, PKCS #8 without a password."""
    pem = Ed25519PrivateKey.from_private_bytes(seed).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem.decode()


def public_pem(raw: bytes) -> str:
    """Return a public key as a PEM block."""
    pem = Ed25519PublicKey.from_public_bytes(raw).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem.decode()


def parse_private(pem: str) -> bytes:
    """Return the private key of a PEM block; `ValueError` for any other text or kind of key."""
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (TypeError, UnsupportedAlgorithm) as bad:  # TypeError: it has a password.
        raise ValueError(str(bad)) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("it is not an Ed25519 key")
    return key.private_bytes_raw()


def parse_public(pem: str) -> bytes:
    """Return the public key of a PEM block; `ValueError` for any other text or kind of key.

    A key of small order is refused as well, because signatures that it accepts can be made by anyone.
    """
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except UnsupportedAlgorithm as bad:
        raise ValueError(str(bad)) from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("it is not an Ed25519 key")
    raw = key.public_bytes_raw()
    y = int.from_bytes(raw, "little") & ~(1 << 255)  # The highest bit is the sign of x.
    if y % _PRIME in _SMALL_ORDER:
        raise ValueError("anyone can make a signature that this key accepts")
    if y >= _PRIME:
        raise ValueError("its number is larger than the prime of the curve")
    return raw
