"""PTX in a section of a cubin, beside the machine code that was made from it.

The section is the last one, has a type of its own, and follows the other sections, so that every reader
of cubins skips it. Texts in it are separated by NUL bytes. Without the section, the cubin is what the
compiler made, byte for byte.

`driver/native/compilers.c` adds the same section to the results of NVRTC and nvJitLink.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

__all__ = [
    "SECTION_TYPE",
    "attach_ptx",
    "attached_ptx",
    "detach_ptx",
    "has_attached_ptx",
    "is_executed",
]

#: The type of the section, in the range of types that programs may define: "PTX" in ASCII.
SECTION_TYPE = 0x80505458

_ELF = b"\x7fELF\x02\x01"  # of 64 bits, little-endian
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_COUNT, _TABLE = 60, 40  # the places of e_shnum and e_shoff in the header
#: How its row begins: it has no name and no flags.
_OWN_ROW = struct.pack("<IIQ", 0, SECTION_TYPE, 0)
_LARGEST_COUNT = 0xFF00  # SHN_LORESERVE: the first section has the number of more sections than that
_SIZE = 32  # the place of sh_size in a row
_ALIGNMENT = 16


class _Table(NamedTuple):
    """The table of sections: its place and the number of its rows."""

    offset: int
    rows: int


def attach_ptx(cubin: bytes, ptx: bytes) -> bytes:
    """Return a cubin with one more section that has this PTX; a section that it has already goes.

    Raises `ValueError` if the bytes are not an ELF file of 64 bits with sections.
    """
    plain = detach_ptx(cubin)
    table = _table(plain)
    if table is None:
        raise ValueError("it is not a cubin, or has no sections")
    start = _align(len(plain))
    place = _align(start + len(ptx))
    made = bytearray(place + (table.rows + 1) * _SECTION.size)
    made[: len(plain)] = plain
    made[start : start + len(ptx)] = ptx
    end = place + table.rows * _SECTION.size
    made[place:end] = plain[table.offset : table.offset + table.rows * _SECTION.size]
    # `detach_ptx` reads from its address and its entry size where the table was, and the old size.
    row = (0, SECTION_TYPE, 0, table.offset, start, len(ptx), 0, 0, 1, len(plain))
    _SECTION.pack_into(made, end, *row)
    if _set_table(made, place, table.rows + 1):
        struct.pack_into("<Q", made, place + _SIZE, table.rows + 1)
    return bytes(made)


def attached_ptx(cubin: bytes) -> list[bytes]:
    """Return the texts in the section, without their NUL bytes; none if there is no such section.

    Raises `ValueError` if the section is outside of the bytes.
    """
    row = _own_row(cubin)
    if row is None:
        return []
    offset, size = row[4], row[5]
    if offset + size > len(cubin):
        raise ValueError(f"its PTX ends at byte {offset + size} of {len(cubin)}")
    return [text for text in cubin[offset : offset + size].split(b"\0") if text.strip()]


def has_attached_ptx(data: bytes) -> bool:
    """Return whether bytes have a cubin with the section anywhere in them, as in a pickled kernel."""
    return _OWN_ROW in data


def is_executed() -> bool:
    """Return whether the driver of this process executes the PTX in cubins: it is the CPU driver."""
    return hasattr(ctypes.CDLL(None), "preheat_driver_install")


def detach_ptx(cubin: bytes) -> bytes:
    """Return the cubin as the compiler made it, without the section."""
    row = _own_row(cubin)
    table = _table(cubin)
    if row is None or table is None:
        return cubin
    offset, size = row[3], row[9]
    if size > len(cubin) or offset + (table.rows - 1) * _SECTION.size > size:
        return cubin
    plain = bytearray(cubin[:size])
    _set_table(plain, offset, table.rows - 1)
    return bytes(plain)


def _own_row(cubin: bytes) -> tuple[int, ...] | None:
    """Return the row of the section, which is the last one of the table."""
    table = _table(cubin)
    if table is None:
        return None
    row = _SECTION.unpack_from(cubin, table.offset + (table.rows - 1) * _SECTION.size)
    return row if row[1] == SECTION_TYPE else None


def _table(cubin: bytes) -> _Table | None:
    """Return the table of sections; None if the bytes are not an ELF file with one."""
    if len(cubin) < _HEADER.size or not cubin.startswith(_ELF):
        return None
    fields = _HEADER.unpack_from(cubin)
    offset, size, count = fields[6], fields[11], fields[12]
    if size != _SECTION.size or not offset or offset + size > len(cubin):
        return None
    if not count:  # The first row has the number in its size.
        count = _SECTION.unpack_from(cubin, offset)[5]
    return _Table(offset, count) if count and offset + count * size <= len(cubin) else None


def _set_table(cubin: bytearray, offset: int, count: int) -> bool:
    """Write the place of the table, and say whether the number of its rows does not fit the header."""
    many = count >= _LARGEST_COUNT
    struct.pack_into("<Q", cubin, _TABLE, offset)
    struct.pack_into("<H", cubin, _COUNT, 0 if many else count)
    return many


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
