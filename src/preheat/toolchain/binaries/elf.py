"""Read ELF files: the build id of a shared library, without loading it, and the size of an image."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from preheat.process.locks import no_fork

__all__ = ["ELF", "PT_NOTE", "build_id", "elf_size", "gnu_build_id"]

ELF = b"\x7fELF"
PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NO_BITS = 8


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
        with no_fork:
            import hashlib  # Few libraries have no build id.

        file.seek(0)
        return f"sha256-{hashlib.file_digest(file, 'sha256').hexdigest()[:40]}"


def elf_size(read: Callable[[int, int], bytes]) -> int:
    """Return how many bytes an ELF file has, from its start to the end of its last part.

    `read` returns the bytes at an offset, or fewer where there are no more. Raises `ValueError` if the
    headers of the file are not complete.
    """
    fields = _HEADER.unpack(_whole(read, 0, _HEADER.size))
    segments, sections = fields[5], fields[6]
    part, parts, row, rows = fields[9], fields[10], fields[11], fields[12]
    if sections and row != _SECTION.size:
        raise ValueError(f"its sections have descriptions of {row} bytes")
    if sections and not rows:  # There are more than the header can say.
        rows = _SECTION.unpack(_whole(read, sections, row))[5]
    end: int = max(_HEADER.size, segments + part * parts, sections + row * rows)
    for each in _SECTION.iter_unpack(_whole(read, sections, row * rows)):
        if each[1] != _NO_BITS:
            end = max(end, each[4] + each[5])
    return end


def _whole(read: Callable[[int, int], bytes], offset: int, size: int) -> bytes:
    data = read(offset, size)
    if len(data) < size:
        raise ValueError(f"it is cut short at byte {offset + len(data)}")
    return data


def gnu_build_id(notes: bytes) -> str | None:
    """Return the build id among the notes of an ELF file, or None."""
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name_at = at + 12
        at = name_at + _pad(name_size)
        if kind == _NT_GNU_BUILD_ID and notes[name_at : name_at + name_size] == b"GNU\0":
            return notes[at : at + size].hex()
        at += _pad(size)
    return None


def _pad(size: int) -> int:
    return (size + 3) & ~3
