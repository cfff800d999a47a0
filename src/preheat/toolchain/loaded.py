"""Read the build ids of the libraries loaded in this process. Runs in the worker process only."""

from __future__ import annotations

import ctypes
import os
import struct

from preheat.toolchain.binaries.elf import PT_NOTE, gnu_build_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["loaded_builds"]

_HEADER = struct.Struct("<IIQQQQQQ")


class _Library(ctypes.Structure):
    """The beginning of `struct dl_phdr_info`."""

    _fields_ = (
        ("address", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("count", ctypes.c_uint16),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)


def loaded_builds() -> dict[str, str]:
    """Return the build id of every loaded library by the path of its file, or "" if it has none.

    The ids are read from memory, because the file may have been replaced after it was loaded.
    """
    builds: dict[str, str] = {}

    def note(library: Any, size: int, data: int | None) -> int:
        del size, data
        one: _Library = library.contents
        if one.name:
            builds[os.path.realpath(os.fsdecode(one.name))] = next(_ids(one), "")
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(_Callback(note), None)
    return builds


def _ids(library: _Library) -> Iterator[str]:
    table = ctypes.string_at(library.headers, library.count * _HEADER.size)
    for kind, _, _, address, _, _, length, _ in _HEADER.iter_unpack(table):
        if kind == PT_NOTE:
            notes = ctypes.string_at(library.address + address, length)
            if build := gnu_build_id(notes):
                yield build
