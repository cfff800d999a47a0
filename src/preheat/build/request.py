"""One program for one architecture, and the keys by which it is looked up, alone or with others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from preheat.errors import ToolchainError
from preheat.model.arch import Arch
from preheat.model.key import Key, bundle_key, request_digest, request_key
from preheat.model.program import Program
from preheat.process.lazy import lazy
from preheat.store import Chain
from preheat.toolchain.compiler import Toolchain, own_roots

__all__ = ["Request", "look_ahead"]


class Request:
    """A program, the architecture it is wanted for, and the toolchain that would compile it."""

    def __init__(self, program: Program, arch: Arch, toolchain: Toolchain) -> None:
        self.program = program
        self.arch = arch
        self.toolchain = toolchain

    @lazy
    def key(self) -> Key:
        """The key in caches, which names the compiler.

        Raises `ToolchainError` if there is no compiler.
        """
        identity = self.toolchain.identity(self.program.language)
        return request_key(self.program, self.arch, identity)

    @lazy
    def digest(self) -> str:
        """The digest of `key`."""
        identity = self.toolchain.identity(self.program.language)
        return request_digest(self.program, self.arch, identity)

    @lazy
    def bundle_key(self) -> Key:
        """The key in bundles, which names no compiler."""
        return bundle_key(self.program, self.arch)

    @property
    def flight_key(self) -> tuple[str, ...]:
        """The key under which threads share one compile.

        Include directories are part of it, because they decide which headers the compiler opens.
        """
        include = self.program.include if self.program.may_include else ()
        return (self.digest, *include)

    @property
    def own_roots(self) -> Mapping[str, str]:
        """The include directories of the program by label, without those of the toolkit."""
        return own_roots(self.program) if "cuda" in self.program.language else {}

    @lazy
    def roots(self) -> Mapping[str, str]:
        """The include directories by label; only CUDA C++ includes files."""
        return self.toolchain.roots(self.program) if "cuda" in self.program.language else {}


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
