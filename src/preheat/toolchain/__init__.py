"""Compile source to machine code, without a GPU."""

from preheat.toolchain.compiler import Toolchain

__all__ = ["Toolchain"]
