"""Compile source to machine code, without a GPU."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from preheat.toolchain.compiler import Toolchain

__all__ = ["Toolchain"]


def __getattr__(name: str) -> object:
    """Import `Toolchain` when it is used: the start of a worker process is faster without it."""
    if name != "Toolchain":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from preheat.toolchain.compiler import Toolchain

    return Toolchain
