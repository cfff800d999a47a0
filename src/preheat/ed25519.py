"""Ed25519 on bytes: the functions of the package `cryptography` that preheat uses.

Only `preheat.signing` imports this module, when a key is used: `cryptography` is an extra, and its
import takes about 35 ms.
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
    """Return the public key of a PEM block; `ValueError` for any other text or kind of key."""
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except UnsupportedAlgorithm as bad:
        raise ValueError(str(bad)) from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("it is not an Ed25519 key")
    return key.public_bytes_raw()
