"""The table of the functions of the driver, in all their versions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["KINDS", "EntryPoint", "read_table"]

_TABLE = Path(__file__).parent / "native" / "entry_points.def"
_ROW = re.compile(r"E\((\w+),(\d+),([01]),(\w+),(\w*)\)")


class _Bytes(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


#: The kinds of arguments. Pointers and handles have 64 bits; `S` is a structure passed by value.
KINDS: dict[str, Any] = {
    "Q": ctypes.c_uint64,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "B": ctypes.c_ubyte,
    "H": ctypes.c_ushort,
    "f": ctypes.c_float,
    "S": _Bytes,
}


class EntryPoint(NamedTuple):
    """One version of a function."""

    name: str
    version: int  # the version of CUDA in which it was added: 12030 for 12.3
    per_thread: bool  # stream 0 means the default stream of the calling thread
    symbol: str  # under which the library exports it
    kinds: str  # of its arguments


def read_table() -> Iterator[EntryPoint]:
    """Yield all functions. The position of each is the number of its slot in the shim."""
    for name, version, per_thread, symbol, kinds in _ROW.findall(_TABLE.read_text()):
        yield EntryPoint(name, int(version), per_thread == "1", symbol, kinds)
