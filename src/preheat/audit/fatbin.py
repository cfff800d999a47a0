"""The entries of a fat binary: machine code, PTX and intermediate code for several architectures.

offset  size  a fat binary
0       4     magic 0xba55ed50, little-endian, as all numbers
4       2     version
6       2     size of this header
8       8     size of the entries that follow

offset  size  an entry
0       2     kind: 1 PTX, 2 machine code, 8 LTO-IR
4       4     size of the header of the entry
8       8     size of its content
16      4     size of the content without padding, if it is compressed
28      4     architecture: 90 for sm_90
40      8     flags
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["MAGIC", "FatbinEntry", "compiled_on", "parse_fatbin"]

MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_KINDS = {1: "PTX", 2: "machine code", 8: "LTO-IR"}
_COMPRESSED = 0x2000 | 0x8000  # by LZ4, by Zstandard
_SPECIFIC = 0x100000  # an architecture with the suffix `a`, whose code runs on no other
_MOST_ENTRIES = 4096


@dataclass(frozen=True)
class FatbinEntry:
    """One entry. `arch` is 90 for sm_90; `specific` code runs on exactly that architecture."""

    kind: str
    arch: int
    bytes: int
    compressed: bool = False
    specific: bool = False

    def runs_on(self, capability: int) -> bool:
        """Return whether it is machine code for a device of this compute capability, such as 90."""
        if self.kind != "machine code":
            return False
        if self.specific:
            return self.arch == capability
        return self.arch // 10 == capability // 10 and self.arch <= capability


def parse_fatbin(data: bytes) -> tuple[FatbinEntry, ...]:
    """Return the entries. Raises `ValueError` when the bytes are not a whole fat binary."""
    if len(data) < _HEADER.size:
        raise ValueError("it is too short for a fat binary")
    magic, _, header, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("it does not begin as a fat binary")
    at, end = header, header + size
    if header < _HEADER.size or end > len(data):
        raise ValueError("it is cut short")
    entries: list[FatbinEntry] = []
    while at + _ENTRY.size <= end:
        kind, _, length, content, _, _, _, _, arch, _, _, flags = _ENTRY.unpack_from(data, at)
        if length < _ENTRY.size or at + length + content > end:
            raise ValueError(f"entry {len(entries)} is cut short")
        if len(entries) == _MOST_ENTRIES:
            raise ValueError("it has too many entries")
        name = _KINDS.get(kind, f"kind {kind}")
        packed, specific = bool(flags & _COMPRESSED), bool(flags & _SPECIFIC)
        entries.append(FatbinEntry(name, arch, content, packed, specific))
        at += length + content
    return tuple(entries)


def compiled_on(entries: tuple[FatbinEntry, ...], capability: int | None) -> bool:
    """Return whether the driver compiles such a fat binary on a device of this compute capability.

    It takes machine code if there is some for the device. Otherwise it compiles PTX for the device or
    for an older one, if there is some. Where the capability is not known, any machine code counts.
    """
    code = [entry for entry in entries if entry.kind == "machine code"]
    if capability is None:
        return bool(entries) and not code
    usable = any(entry.kind != "machine code" and entry.arch <= capability for entry in entries)
    return usable and not any(entry.runs_on(capability) for entry in code)
