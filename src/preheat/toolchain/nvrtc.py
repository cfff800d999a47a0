"""NVRTC, called through ctypes. Runs in the worker process only.

The bindings of NVIDIA do the same, but their import takes longer than a compile, and every worker
process of a cold start would have to wait for it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
from collections import namedtuple

TYPE_CHECKING = False  # `typing` takes long to import, and callers wait for the first compile.
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = [
    "CANARY", "Compiled", "OtherLibraryError", "compile_program", "load", "loaded_files",
    "opened_headers", "version_and_archs",
]  # fmt: skip

#: NVRTC opens this header first in every compile. A trace without it is incomplete.
CANARY = "__nv_nvrtc_builtin_header.h"
_SUCCESS = 0

#: The result of NVRTC. `cubin` and `ptx` are empty if it failed. `lowered` has the mangled names. With
#: `-dlto` there is LTO-IR, and neither cubin nor PTX.
Compiled = namedtuple("Compiled", "status log cubin ptx lowered ltoir", defaults=(b"", b"", {}, b""))

_loaded: dict[str, ctypes.CDLL] = {}  # The library of this process, by path.


class OtherLibraryError(Exception):
    """Another NVRTC is loaded in this process. The two would share one library of built-ins."""


def load(path: str) -> None:
    """Load the library at `path`, which all functions of this module use.

    `OSError` if it is not a library.
    """
    if path in _loaded:
        return
    if _loaded:
        raise OtherLibraryError(*_loaded)
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    _load_builtins(library, path)
    _loaded[path] = library


def _load_builtins(library: ctypes.CDLL, path: str) -> None:
    """Load the built-ins beside NVRTC, which its first compile opens only by name.

    Then the loader finds the loaded library. It does not search the directory of NVRTC 13.0 itself,
    because the wheel of that version has no RPATH. Without the file, the loader searches as usual.
    """
    directory, file = os.path.split(os.path.realpath(path))
    name = file.partition(".so")[0].replace("libnvrtc", "libnvrtc-builtins", 1)
    builtins = os.path.join(directory, f"{name}.so.{_version(library)}")
    if os.path.exists(builtins):
        ctypes.CDLL(builtins)


def _version(library: ctypes.CDLL) -> str:
    """Return the major and the minor version of NVRTC, such as `13.0`."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def loaded_files() -> list[str]:
    """Return the path of the library, in a list, or an empty list if none is loaded."""
    return list(_loaded)


def compile_program(
    source: bytes,
    name: str,
    options: Sequence[str],
    *,
    names: Sequence[str],
    headers: Mapping[str, bytes],
) -> Compiled:
    """Compile one program to cubin and PTX, or to LTO-IR with the option `-dlto`."""
    (nvrtc,) = _loaded.values()
    program = ctypes.c_void_p()
    result = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        source,
        name.encode(),
        len(headers),
        _strings(headers.values()),
        _strings([header.encode() for header in headers]),
    )
    if result != _SUCCESS:
        status = _name(nvrtc, result)
        return Compiled(status, f"nvrtcCreateProgram failed: {status}")
    try:
        for expression in names:
            nvrtc.nvrtcAddNameExpression(program, expression.encode())
        encoded = [option.encode() for option in options]
        result = nvrtc.nvrtcCompileProgram(program, len(encoded), _strings(encoded))
        status = _name(nvrtc, result)
        # The logs of the front end and of the assembler are joined with a NUL byte.
        log = _bytes(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        text = log.replace(b"\0", b"").decode("utf-8", "replace")
        if result != _SUCCESS:
            return Compiled(status, text)
        return Compiled(
            status,
            text,
            _bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
            _bytes(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0"),
            _lowered_names(nvrtc, program, names),
            # Without the option, the size is the size of an empty text.
            _bytes(program, nvrtc.nvrtcGetLTOIRSize, nvrtc.nvrtcGetLTOIR),
        )
    except LookupError as unknown:
        return Compiled("NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID", f"{text}\n{unknown}".strip())
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _lowered_names(
    nvrtc: ctypes.CDLL, program: ctypes.c_void_p, names: Sequence[str]
) -> dict[str, str]:
    """Return the mangled name of each expression, or raise `LookupError` if there is none."""
    found = {}
    for expression in names:
        lowered = ctypes.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(lowered))
        if lowered.value is None:  # The source ends inside a literal: the expression was not read.
            raise LookupError(f"__nv_name_map has no entry for {expression}")
        found[expression] = lowered.value.decode()
    return found


@functools.cache
def version_and_archs() -> tuple[str, list[int]]:
    """Return the exact version, which is only in the banner of its PTX, and the architectures.

    The compile that this takes also loads the built-ins, so later ones take less time.
    """
    (nvrtc,) = _loaded.values()
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(archs)
    # NVRTC's own cache would initialize CUDA in this process, which is slow and hangs under debuggers.
    options = [f"--gpu-architecture=compute_{archs[0]}", "--no-cache"]
    banner = compile_program(b"", "/preheat/version.cu", options, names=(), headers={}).ptx
    found = re.search(rb"release [\d.]+, V([\d.]+)", banner)
    if found:
        return found[1].decode(), list(archs)
    return _version(nvrtc), list(archs)


def opened_headers(trace: str | os.PathLike[str]) -> list[str] | None:
    """Return the headers that a compile opened, by its names for them, or None if they are unknown."""
    try:
        with open(trace, "rb") as file:
            events = json.loads(file.read())["traceEvents"]
        opened = [e["args"]["detail"] for e in events if e.get("name") == "Processing Header File"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if CANARY not in opened:
        return None
    return [name for name in dict.fromkeys(opened) if name != CANARY]


def _name(nvrtc: ctypes.CDLL, result: int) -> str:
    text: bytes = nvrtc.nvrtcGetErrorString(result)
    return text.decode()


def _strings(texts: Collection[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*texts)


def _bytes(program: ctypes.c_void_p, size_of: Callable[..., int], get: Callable[..., int]) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    return buffer.raw if get(program, buffer) == _SUCCESS else b""
