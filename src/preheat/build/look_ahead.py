"""Look up many programs on shared stores with few requests, before each program is looked up."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from preheat.arch import Arch
from preheat.build.request import Request
from preheat.errors import ToolchainError
from preheat.program import Program
from preheat.store import Chain
from preheat.toolchain.compiler import Toolchain

__all__ = ["look_ahead"]


def look_ahead(
    cache: Chain, toolchain: Toolchain, wanted: Iterable[tuple[Program, Arch]], *, once: bool = True
) -> None:
    """Look up many programs on shared stores with few requests.

    If a store does not have a program, the next lookup of the program makes no request to it. Without
    `once`, this applies to all lookups of the next minute. Without a shared store, do nothing.
    """
    if not cache.shared:
        return
    with suppress(ToolchainError):  # The keys of entries name the compiler, and there is none.
        cache.look_ahead([Request(*each, toolchain).digest for each in wanted], once=once)
