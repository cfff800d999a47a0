"""Programs that a call will need: workers compile them while the compilers are being located."""

from __future__ import annotations

import sys
import time
from _thread import get_ident
from collections.abc import Callable, Iterable
from types import FrameType

from preheat.arch import Arch
from preheat.build.key_locks import Busy, KeyLocks
from preheat.build.request import Request
from preheat.cache import Chain, LayerTier
from preheat.program import Program
from preheat.toolchain.compiler import Toolchain

__all__ = ["Expectation"]

_LOCATE_WAIT = 2.0  # seconds to wait for another process that locates the compilers
_LOCATE_POLL = 0.005  # seconds between two looks for its result

Wanted = tuple[Program, Arch]


class Expectation:
    """The compiles that the block of a `with` statement may need, announced on entry.

    If the compilers have to be located, the compiler processes start meanwhile. One process of the node
    does so, and the others wait for its result, for a while: with compiler processes of each there
    would be more of them than processors.

    Where the cache is empty, these processes begin to compile before the compilers are located in full.
    The key of a result needs the full location, so a result is stored by the compile of the block that
    makes the same request. The locks of these keys are claimed before other processes get to know where
    the compilers are, so that no other process compiles the same.
    """

    def __init__(
        self,
        toolchain: Toolchain,
        locks: KeyLocks,
        cache: Chain,
        wanted: Iterable[Wanted],
        *,
        most: int | None = None,
        prepare: Callable[[], object],
    ) -> None:
        self._toolchain = toolchain
        self._locks = locks
        self._cache = cache
        self._wanted = list(dict.fromkeys(wanted))
        self._compiles = min(len(self._wanted), most or len(self._wanted))
        self._prepare = prepare
        self._began = False

    def __enter__(self) -> None:
        if self._compiles < 2:
            return
        owner = sys._getframe(1)
        thread = get_ident()
        deadline = time.monotonic() + _LOCATE_WAIT
        while not self._toolchain.recall() and time.monotonic() < deadline:
            try:
                first = self._locks.first(sys._getframe())
            except Busy:
                time.sleep(_LOCATE_POLL)
                continue
            try:
                self._locate(owner, thread)
            except BaseException:
                self._end()
                raise
            finally:
                if first is not None:
                    first.release()

    def __exit__(self, *_: object) -> None:
        if self._began:
            self._end()

    def _locate(self, owner: FrameType, thread: int) -> None:
        def claim(program: Program, arch: Arch) -> bool:
            digest = Request(program, arch, self._toolchain).digest
            return self._locks.claim(digest, owner, thread)

        self._began = True
        self._toolchain.locate_for(self._compiles, self._independent(), self._prepare, claim)

    def _end(self) -> None:
        self._toolchain.end_early()
        self._locks.release_claims()

    def _independent(self) -> list[Wanted]:
        """Return what can be compiled before anything is known of headers and of stored results.

        The order is that in which programs are compiled together.
        """
        if self._cache.shared or not all(
            tier.is_empty() for tier in self._cache.tiers if isinstance(tier, LayerTier)
        ):
            return []  # It may have all of them.
        found = [
            (program, arch)
            for program, arch in self._wanted
            if program.language == "cuda" and not program.may_include and not program.uncacheable
        ]
        return sorted(found, key=lambda wanted: -len(wanted[0].source))
