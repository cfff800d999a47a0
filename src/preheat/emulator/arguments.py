"""Find the arguments of a launch that point into a buffer, so that a fault can name them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from preheat.emulator.memory import Buffer

__all__ = ["ArgumentSpec", "pointers_into"]

_POINTER = 8  # Bytes.


class ArgumentSpec(NamedTuple):
    """One parameter of a kernel: its place in the parameter buffer, and its C++ type or PTX name.

    The label is empty where the type is unknown and the compiler has made up the name.
    """

    offset: int
    size: int
    label: str


def pointers_into(buffer: Buffer, arguments: Sequence[ArgumentSpec], at: int) -> str:
    """Return the positions and types of the arguments that point into `buffer`, or an empty text.

    `at` is the address of the parameter buffer.
    """
    return " and ".join(_pointers_into(buffer, arguments, at))


def _pointers_into(buffer: Buffer, arguments: Sequence[ArgumentSpec], at: int) -> Iterator[str]:
    for position, (offset, size, label) in enumerate(arguments):
        for start in range(0, size - _POINTER + 1, _POINTER):
            address = ctypes.c_uint64.from_address(at + offset + start).value
            if buffer.start <= address < max(buffer.end, buffer.start + 1):
                member = f" at byte {start}" if size > _POINTER else ""
                yield f"argument {position}{', ' if label else ''}{label}{member}"
