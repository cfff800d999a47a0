"""The program that a command runs, and whether it is statically linked."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from typing import BinaryIO

__all__ = ["static_program"]

_MOST_INTERPRETERS = 4  # The kernel follows as many scripts of scripts.
_ELF = struct.Struct("<16xHHIQQQIHHH")  # the header up to the number of segments
_SEGMENT = struct.Struct("<I52x")  # a segment; the first field is its type
_INTERPRETER = 3  # the segment that names the dynamic loader


def static_program(words: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return the path of the program that a command runs if it is statically linked, else None.

    For a script, the program is its interpreter.
    """
    path = shutil.which(words[0], path=env.get("PATH", os.defpath))
    for _ in range(_MOST_INTERPRETERS):
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                start = file.read(2)
                if start == b"#!":
                    line = file.readline(4096).split()
                    path = os.fsdecode(line[0]) if line else None
                    continue
                return os.path.abspath(path) if start == b"\x7fE" and _is_static(file) else None
        except OSError:
            return None
    return None


def _is_static(file: BinaryIO) -> bool:
    file.seek(0)
    header = file.read(_ELF.size)
    if len(header) < _ELF.size or header[:5] != b"\x7fELF\x02":
        return False
    fields: tuple[int, ...] = _ELF.unpack(header)
    first, each, number = fields[4], fields[8], fields[9]
    for index in range(number):
        file.seek(first + index * each)
        segment = file.read(_SEGMENT.size)
        if len(segment) < _SEGMENT.size or _SEGMENT.unpack(segment)[0] == _INTERPRETER:
            return False
    return number > 0
