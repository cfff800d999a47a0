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
56      8     size of the content once it is decompressed
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from preheat.process.locks import no_fork

__all__ = [
    "HEADER_SIZE", "MAGIC", "WRAPPER_MAGIC", "FatbinEntry", "compiled_on", "parse_fatbin", "read_entry",
    "whole_size",
]  # fmt: skip

MAGIC = 0xBA55ED50
#: Of the structure by which programs of nvcc refer to a fat binary: its address is at byte 8.
WRAPPER_MAGIC = 0x466243B1
_HEADER = struct.Struct("<IHHQ")
HEADER_SIZE = _HEADER.size
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_FULL_SIZE = struct.Struct("<56xQ")
_KINDS = {1: "PTX", 2: "machine code", 8: "LTO-IR"}
_LZ4, _ZSTANDARD = 0x2000, 0x8000
_COMPRESSED = _LZ4 | _ZSTANDARD
_SPECIFIC = 0x100000  # an architecture with the suffix `a`, whose code runs on no other
_MAX_ENTRIES = 4096
_MAX_BYTES = 1 << 28  # of an entry once it is decompressed


@dataclass(frozen=True)
class FatbinEntry:
    """One entry. `arch` is 90 for sm_90; `specific` code runs on exactly that architecture."""

    kind: str
    arch: int
    bytes: int
    compressed: bool = False
    specific: bool = False
    offset: int = 0  # of the entry, with its header, in the fat binary

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
        if len(entries) == _MAX_ENTRIES:
            raise ValueError("it has too many entries")
        name = _KINDS.get(kind, f"kind {kind}")
        packed, specific = bool(flags & _COMPRESSED), bool(flags & _SPECIFIC)
        entries.append(FatbinEntry(name, arch, content, packed, specific, at))
        at += length + content
    return tuple(entries)


def whole_size(header: bytes) -> int:
    """Return how many bytes a fat binary has that begins with these `HEADER_SIZE` bytes."""
    _, _, size, entries = _HEADER.unpack(header)
    return int(size) + int(entries)


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


def read_entry(data: bytes, entry: FatbinEntry) -> bytes:
    """Return the content of an entry of the fat binary `data`, decompressed.

    Raises `ValueError` if the content is damaged, or compressed by Zstandard where no library reads it.
    """
    _, _, length, content, packed, *_, flags = _ENTRY.unpack_from(data, entry.offset)
    start = entry.offset + length
    body = data[start : start + (packed or content)]
    if not entry.compressed:
        return body
    if length < _FULL_SIZE.size:
        raise ValueError("a compressed entry does not say how large it is")
    (size,) = _FULL_SIZE.unpack_from(data, entry.offset)
    if size > _MAX_BYTES:
        raise ValueError(f"an entry has {size} bytes")
    found = _read_zstandard(body, size) if flags & _ZSTANDARD else _read_lz4(body)
    if len(found) != size:
        raise ValueError(f"an entry has {len(found)} bytes instead of {size}")
    return found


def _read_zstandard(data: bytes, size: int) -> bytes:
    try:
        with no_fork:
            import zstandard
    except ImportError:
        raise ValueError("it is compressed by Zstandard: pip install zstandard") from None
    try:
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except (zstandard.ZstdError, MemoryError) as bad:
        raise ValueError(f"its compressed content is damaged: {bad}") from None


def _read_lz4(data: bytes) -> bytes:
    """Decompress one block of LZ4: runs of literal bytes, each followed by a copy of earlier bytes."""
    out = bytearray()
    at = 0
    try:
        while at < len(data):
            token = data[at]
            count, at = _read_length(data, at + 1, token >> 4)
            out += data[at : at + count]
            at += count
            if at >= len(data):
                break  # The last run has no copy.
            back = data[at] | data[at + 1] << 8
            count, at = _read_length(data, at + 2, token & 15)
            _copy_earlier(out, back, count + 4)
    except IndexError:
        raise ValueError("its compressed content is cut short") from None
    return bytes(out)


def _read_length(data: bytes, at: int, length: int) -> tuple[int, int]:
    """Return a length, which further bytes extend if it is 15, and the place after it."""
    more = length == 15
    while more:
        length += data[at]
        more = data[at] == 255
        at += 1
    return length, at


def _copy_earlier(out: bytearray, back: int, count: int) -> None:
    """Append `count` bytes from `back` bytes before the end. The copy may overlap what it appends."""
    if not 0 < back <= len(out) or len(out) + count > _MAX_BYTES:
        raise ValueError("its compressed content is damaged")
    copied = bytes(out[-back:])
    out += (copied * (count // back + 1))[:count]
