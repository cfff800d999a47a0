"""The compilers of this machine, by which processes of an audit recognise copies under other names."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["list_compilers"]

_LIST = "compilers"  # in the directory of an audit
_MOST_BYTES = 65535  # of the list, which the audit library reads at once
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
    (directory / _LIST).write_bytes(b"".join(lines)[:_MOST_BYTES])


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
