"""C++ names of mangled names."""

from __future__ import annotations

import ctypes

__all__ = ["demangled"]


def demangled(name: str) -> str | None:
    """Return the C++ name of a mangled name, from the demangler of the C++ runtime, or None."""
    if not name.startswith("_Z"):
        return None
    runtime = ctypes.CDLL("libstdc++.so.6")
    demangle = runtime.__cxa_demangle
    demangle.restype = ctypes.c_void_p
    release = ctypes.CDLL(None).free
    release.argtypes = [ctypes.c_void_p]
    found = demangle(name.encode(), None, None, None)
    if not found:
        return None
    try:
        text = ctypes.string_at(found)
        return text.decode()
    finally:
        release(found)
