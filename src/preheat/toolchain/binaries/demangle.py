"""C++ names of mangled names."""

from __future__ import annotations

import ctypes

__all__ = ["demangle"]


def demangle(name: str) -> str | None:
    """Return the C++ name of a mangled name, from the demangler of the C++ runtime, or None."""
    if not name.startswith("_Z"):
        return None
    convert = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    convert.restype = ctypes.c_void_p
    release = ctypes.CDLL(None).free
    release.argtypes = [ctypes.c_void_p]
    text = convert(name.encode(), None, None, None)
    if not text:
        return None
    try:
        return ctypes.string_at(text).decode()
    finally:
        release(text)
