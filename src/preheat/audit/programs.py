"""Programs of this machine: whether one is statically linked, and which are compilers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["list_compilers", "static_program"]

_MAX_INTERPRETERS = 4  # The kernel follows as many scripts of scripts.
_ELF = struct.Struct("<16xHHIQQQIHHH")  # the header up to the number of segments
_SEGMENT = struct.Struct("<I52x")  # a segment; the first field is its type
_INTERPRETER = 3  # the segment that names the dynamic loader


def static_program(words: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return the path of the program that a command runs if it is statically linked, else None.

    For a script, the program is its interpreter.
    """
    path = shutil.which(words[0], path=env.get("PATH", os.defpath))
    for _ in range(_MAX_INTERPRETERS):
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


_LIST = "compilers"  # in the directory of an audit
_MAX_BYTES = 65535  # of the list, which the audit library reads at once
_LINE_BYTES = 512
#: Where the parts of compilers are that are not in PATH.
_PLACES = (
    "/usr/lib/gcc/*/*",
    "/usr/lib/gcc-cross/*/*",
    "/usr/libexec/gcc/*/*",
    "/usr/lib/llvm-*/bin",
    "/usr/local/cuda*/bin",
    "/usr/local/cuda*/nvvm/bin",
)
#: Packages that have compilers, and the directories in them.
_PACKAGES = (("nvidia", "*/bin"), ("nvidia", "*/nvvm/bin"), ("triton", "backends/nvidia/bin"))


def list_compilers(directory: Path, library: Path, env: Mapping[str, str]) -> None:
    """Write the list of compilers into the directory of an audit. `library` is the audit library."""
    describe = ctypes.CDLL(str(library)).preheat_audit_describe_compiler
    line = ctypes.create_string_buffer(_LINE_BYTES)

    def is_compiler(path: str) -> bool:
        return bool(describe(os.fsencode(path), line, ctypes.c_size_t(_LINE_BYTES)))

    lines: dict[bytes, None] = {}
    for path in _files(env):
        # A link may give the name of a compiler to a program that does more, such as ccache.
        if is_compiler(path) and is_compiler(os.path.realpath(path)):
            lines[line.value] = None
    (directory / _LIST).write_bytes(b"".join(lines)[:_MAX_BYTES])


def _files(env: Mapping[str, str]) -> Iterator[str]:
    for place in _places(env):
        with suppress(OSError):  # It does not exist, or belongs to another user.
            yield from (os.path.join(place, name) for name in os.listdir(place))


def _places(env: Mapping[str, str]) -> Iterator[str]:
    yield from filter(os.path.isabs, env.get("PATH", os.defpath).split(os.pathsep))
    for pattern in _PLACES:
        yield from map(str, Path("/").glob(pattern.lstrip("/")))
    for home in filter(None, (env.get("CUDA_HOME"), env.get("CUDA_PATH"))):
        yield from (os.path.join(home, name) for name in ("bin", "nvvm/bin"))
    for package, pattern in _PACKAGES:
        found = importlib.util.find_spec(package)
        for root in (found.submodule_search_locations if found else None) or ():
            yield from map(str, Path(root).glob(pattern))
