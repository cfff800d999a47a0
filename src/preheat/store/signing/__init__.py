"""Signatures: keys in files (`keys`), and the signed forms of entries and of bundles."""

__all__ = ["KEY_ID_SIZE", "SIGNATURE_SIZE"]

KEY_ID_SIZE = 8
SIGNATURE_SIZE = 64
