"""Signatures: keys in files, and the signed forms of entries and of bundles."""
