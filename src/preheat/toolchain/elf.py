"""Read the build id of a shared library from its file, without loading it."""

from __future__ import annotations

import os
import struct

__all__ = ["PT_NOTE", "build_id", "gnu_build_id"]

PT_NOTE = 4
_NT_GNU_BUILD_ID = 3


def build_id(path: str | os.PathLike[str]) -> str:
    """Return the GNU build id of an ELF file, or a hash of the contents of a file that has none."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:6] == b"\x7fELF\x02\x01":  # 64 bit, little-endian, as on every platform of CUDA 13.
            offset, size, entries = struct.unpack_from("<Q14xHH", head, 32)
            file.seek(offset)
            table = file.read(size * entries)
            for start in range(0, len(table), size):
                kind, _, position, _, _, length = struct.unpack_from("<IIQQQQ", table, start)
                if kind == PT_NOTE:
                    file.seek(position)
                    if found := gnu_build_id(file.read(length)):
                        return found
        import hashlib  # Few libraries have no build id, and workers start faster without the module.

        file.seek(0)
        return f"sha256-{hashlib.file_digest(file, 'sha256').hexdigest()[:40]}"


def gnu_build_id(notes: bytes) -> str | None:
    """Return the build id among the notes of an ELF file, or None."""
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name_at = at + 12
        at = name_at + _padded(name_size)
        if kind == _NT_GNU_BUILD_ID and notes[name_at : name_at + name_size] == b"GNU\0":
            return notes[at : at + size].hex()
        at += _padded(size)
    return None


def _padded(size: int) -> int:
    return (size + 3) & ~3
