"""From source to machine code, without a GPU."""

from preheat.toolchain.compiler import Compiled, Toolchain

__all__ = ["Compiled", "Toolchain"]
