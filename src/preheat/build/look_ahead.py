"""Shared stores are asked for many programs at once, before each of them is looked up."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from preheat.arch import Arch
from preheat.build.request import Request
from preheat.cache import Chain
from preheat.errors import ToolchainError
from preheat.program import Program
from preheat.toolchain.compiler import Toolchain

__all__ = ["look_ahead"]


def look_ahead(
    cache: Chain, toolchain: Toolchain, wanted: Iterable[tuple[Program, Arch]], *, once: bool = True
) -> None:
    """Ask shared stores for many programs with few requests.

    The next lookup of a program that they do not have makes no request. Without `once`, all lookups of
    it in the next minute make none. The function does nothing where there is no shared store.
    """
    if not cache.shared:
        return
    with suppress(ToolchainError):  # Without a compiler, entries cannot be named.
        cache.look_ahead([Request(*each, toolchain).digest for each in wanted], once=once)
