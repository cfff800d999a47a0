"""Reads and writes memory of the program at addresses that it passed."""

from __future__ import annotations

import ctypes
from typing import Any

from preheat.driver.calls import CallError
from preheat.driver.status import INVALID_VALUE

__all__ = [
    "F32",
    "I32",
    "U8",
    "U16",
    "U32",
    "U64",
    "get",
    "put",
    "read",
    "read_structure",
    "text",
    "write",
]

U8, U16, U32, U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
I32, F32 = ctypes.c_int32, ctypes.c_float


def get(address: int, kind: Any = U64) -> int:
    """Return the number at an address."""
    value: int = kind.from_address(address).value
    return value


def put(address: int, value: float, kind: Any = U64) -> None:
    """Write a number, unless the address is null: the program does not want it then."""
    if address:
        kind.from_address(address).value = value


def read(address: int, size: int) -> bytes:
    """Return bytes at an address."""
    return ctypes.string_at(address, size)


def read_structure(address: int, size: int) -> bytes:
    """Return the bytes of a structure that a program has to give; `CallError` for a null address."""
    if not address:
        raise CallError(INVALID_VALUE)
    return read(address, size)


def write(address: int, data: bytes) -> None:
    """Write bytes to an address."""
    ctypes.memmove(address, data, len(data))


def text(address: int) -> str:
    """Return the text at an address, up to its zero byte."""
    return ctypes.string_at(address).decode()
