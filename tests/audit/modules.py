"""Modules for tests: fat binaries, PTX, and machine code without any instruction."""

from __future__ import annotations

import struct

__all__ = ["PTX", "cubin", "entry", "fatbin"]

PTX = b"// made for a test\n.version 8.0\n.target sm_90\n.address_size 64\n"


def entry(kind: int, arch: int, content: bytes = b"", flags: int = 0x11) -> bytes:
    """Return an entry of a fat binary."""
    content += b"\0" * (-len(content) % 8)
    head = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(content), 0, 64, 0, 9, arch, 0, 0, flags, 0, 0
    )
    return head + content


def fatbin(*entries: bytes) -> bytes:
    """Return a fat binary with these entries."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def cubin(text: bytes = b"code") -> bytes:
    """Return an ELF file with one section, whose header is the last part of the file."""
    at = 64 + len(text)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1A\x08", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, 1, 0
    )
    section = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, len(text), 0, 0, 1, 0)
    return head + text + section
