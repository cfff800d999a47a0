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
from preheat.program import Program
from preheat.store import Chain, LayerStore
from preheat.toolchain.compiler import Toolchain

__all__ = ["Expectation"]

_LOCATE_WAIT = 2.0  # seconds to wait for another process that locates the compilers
_LOCATE_POLL = 0.005  # seconds between two checks for its result

Wanted = tuple[Program, Arch]


class Expectation:
    """The compiles that the block of a `with` statement may need, announced on entry.

    If the compilers have to be located, the compiler processes start at the same time. One process of
    the node does this, and the others wait a while for the location that it finds. If each process
    started compilers, there would be more of them than processors.

    If the cache is empty, the compiler processes begin to compile before the compilers are fully
    located. The key of a result contains the full location, so the result is stored later, when the
    block makes the same request. The locks of these keys are claimed before other processes can read
    the location, so that no other process compiles the same programs.
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
                lock = self._locks.locate_lock(sys._getframe())
            except Busy:
                time.sleep(_LOCATE_POLL)
                continue
            try:
                self._locate(owner, thread)
            except BaseException:
                self._end()
                raise
            finally:
                if lock is not None:
                    lock.release()

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
        """Return the programs that can be compiled before headers and stored results are known.

        The longest source comes first, as when programs are compiled together.
        """
        if self._cache.shared or not all(
            tier.is_empty() for tier in self._cache.tiers if isinstance(tier, LayerStore)
        ):
            return []  # The cache may have all of them.
        found = [
            (program, arch)
            for program, arch in self._wanted
            if program.language == "cuda" and not program.may_include and not program.uncacheable
        ]
        return sorted(found, key=lambda wanted: -len(wanted[0].source))
