"""Compile a request, describe it by the header files that the compiler opened, and store the result."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from preheat.build.bundles import BundleEntry
from preheat.build.lookup import Lookup
from preheat.build.request import Request
from preheat.errors import ToolchainChangedError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact, Header, Provenance
from preheat.model.events import Events
from preheat.model.key import Key
from preheat.model.program import Program
from preheat.process.lazy import LazyModule
from preheat.store import DiskStore
from preheat.toolchain.headers.states import HeaderState, Place, decode_states, join_states, pack_states
from preheat.toolchain.sources import sources_of

if TYPE_CHECKING:
    from preheat.model import linked_program
    from preheat.model.linked_program import LinkedProgram
    from preheat.toolchain.headers import absent_names, observe, own_headers, survey
    from preheat.toolchain.translate import Compiled
else:
    linked_program = LazyModule("preheat.model.linked_program")
    # Only a program that includes files needs the following modules.
    absent_names = LazyModule("preheat.toolchain.headers.absent_names")
    observe = LazyModule("preheat.toolchain.headers.observe")
    own_headers = LazyModule("preheat.toolchain.headers.own_headers")
    survey = LazyModule("preheat.toolchain.headers.survey")

__all__ = ["ArtifactCompiler", "Untracked"]

_STATES = 16  # header states that are kept for one program
_UNTRACKED = 1024  # unstored artifacts whose reason is remembered
_ATTEMPTS = 3  # compiles of one program, until all files that the compiler opens were scanned before
_NO_HEADERS = HeaderState((), ())


class Untracked(NamedTuple):
    """Why no key describes a compile, and what is known of its header files."""

    reason: str
    state: HeaderState = _NO_HEADERS


class ArtifactCompiler:
    """Compiles requests and stores the artifacts in the cache."""

    def __init__(
        self,
        lookup: Lookup,
        events: Events,
        disk: DiskStore | None,
        obtain: Callable[[Program, Arch], Artifact],
    ) -> None:
        """Make a compiler. `obtain` returns the code of a part of a link, stored or compiled."""
        self._lookup = lookup
        self._events = events
        self._disk = disk
        self._obtain = obtain
        self._untracked: OrderedDict[str, Untracked] = OrderedDict()

    def run(self, request: Request) -> tuple[Compiled, HeaderState | Untracked]:
        """Run the compiler, and return the header files that were read, or why they are not known.

        A file is known if its content was the same before and after the compile. If the compiler opens
        a file that was not scanned before the compile, the program is compiled once more.
        """
        program, arch = request.program, request.arch
        toolchain = request.toolchain
        if program.language.endswith("link"):
            assert isinstance(program, linked_program.LinkedProgram)
            return self._link(request, program)
        if program.language == "ptx" or not program.may_include:
            compiled = toolchain.compile(program, arch)
            if program.uncacheable:
                return compiled, Untracked(program.uncacheable)
            if program.language == "ptx" or not compiled.opened:
                return compiled, _NO_HEADERS
        memo = self._lookup.memos.of(request.key)
        files = survey.Survey(program, request.roots, toolchain.located.roots, memo)
        for _ in range(_ATTEMPTS):
            compiled = toolchain.compile(program, arch)
            opened = compiled.opened
            if opened is None and program.may_include:
                return compiled, Untracked("the compiler did not report which headers it opened")
            if program.uncacheable:
                rough = observe.observe_roughly(files, opened or (), memo)
                return compiled, Untracked(program.uncacheable, rough)
            try:
                state = observe.observe(files, opened or (), memo)
            except observe.Unexpected as names:
                surprise = f"the compiler opens other files each time: {names}"
            except absent_names.Untrackable as why:
                return compiled, Untracked(str(why), observe.observe_roughly(files, opened or (), memo))
            else:
                if state.headers:
                    self._lookup.memos.keep(request.key, memo)
                return compiled, state
        return compiled, Untracked(surprise, observe.observe_roughly(files, opened or (), memo))

    def keep(self, request: Request, compiled: Compiled, state: HeaderState | Untracked) -> Artifact:
        """Return the artifact, and store it if a key can describe what its code depends on."""
        program = request.program.label
        arch = str(request.arch)
        if isinstance(state, Untracked):
            self._events.emit("uncached", program=program, arch=arch, reason=state.reason)
            # The code itself is part of the digest, because no key describes what the code depends on.
            code = (("cubin", compiled.cubin), ("ptx", compiled.ptx))
            artifact = self._artifact(request, request.key.extended(code), compiled, ())
            self._untracked[artifact.digest] = state
            while len(self._untracked) > _UNTRACKED:
                self._untracked.popitem(last=False)
        else:
            key = request.key.extended(state.parts()) if state.headers else request.key
            artifact = self._artifact(request, key, compiled, state.headers)
            self.store(request, artifact, state)
        self._events.emit(
            "compile", key=artifact.digest, program=program, arch=arch,
            seconds=compiled.seconds, bytes=artifact.size,
        )  # fmt: skip
        return artifact

    def untracked(self, artifact: Artifact) -> str:
        """Return why this artifact was not stored; empty when it was."""
        known = self._untracked.get(artifact.digest)
        return "" if known is None else known.reason

    def header_state(self, request: Request, artifact: Artifact) -> HeaderState:
        """Return the header files that `artifact` was made from; not all, if it was not stored."""
        known = self._untracked.get(artifact.digest)
        return self._lookup.header_state(request, artifact) if known is None else known.state

    def bundle_entry(self, request: Request, artifact: Artifact) -> BundleEntry:
        """Return what a bundle holds for a request whose artifact was made or found here."""
        note = request.program.uncacheable or self.untracked(artifact)
        state = self.header_state(request, artifact)
        toolkit: tuple[Place, ...] = ()
        if own := request.own_roots:
            toolkit = own_headers.toolkit_places(
                state, own, [*request.toolchain.located.roots.values()]
            )
        key = request.bundle_key.digest
        return BundleEntry(key, artifact, state, untracked_reason=note, toolkit=toolkit)

    def _link(
        self, request: Request, program: LinkedProgram
    ) -> tuple[Compiled, HeaderState | Untracked]:
        """Link, and return the header files that the parts were made from, or why they are not known.

        Each CUDA C++ part is a separate entry, so only a part that has changed is compiled again.
        """
        toolchain = request.toolchain
        identity = toolchain.identity(program.language)
        parts = {index: self._obtain(part, request.arch) for index, part in program.sources.items()}
        compiled = toolchain.link(program, request.arch, parts)
        if toolchain.identity(program.language) != identity:
            raise ToolchainChangedError("a compiler was replaced between the parts of a link")
        why = program.uncacheable
        states = {}
        for index, artifact in parts.items():
            part = program.sources[index]
            if reason := self.untracked(artifact):
                why = why or f"{part.label}: {reason}"
            states[index] = self.header_state(Request(part, request.arch, toolchain), artifact)
        state = join_states(states, request.roots)
        if why:
            return compiled, Untracked(why, state)
        return compiled, state if state.headers else _NO_HEADERS

    def _artifact(
        self, request: Request, key: Key, compiled: Compiled, headers: tuple[Header, ...]
    ) -> Artifact:
        return Artifact(
            digest=key.digest,
            label=request.program.label,
            arch=request.arch,
            toolchain=request.toolchain.version(request.program.language),
            parts=request.key.table,
            entries=compiled.entries,
            cubin=compiled.cubin,
            ptx=compiled.ptx,
            names=compiled.names,
            headers=headers,
            log=compiled.log,
            templates=compiled.templates,
            sources=sources_of(
                request.program, headers, request.roots, request.toolchain.located.roots
            ),
            provenance=Provenance(
                seconds=round(compiled.seconds + compiled.parts_seconds, 6),
                created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                timing=compiled.timing,
            ),
        )

    def store(self, request: Request, artifact: Artifact, state: HeaderState) -> None:
        """Store the artifact and, if it depends on header files, the header list that leads to it."""
        cache = self._lookup.cache
        cache.put(artifact.digest, artifact.encode())
        self._lookup.in_use[artifact.digest] = artifact
        if not state.headers:
            return
        states: list[tuple[HeaderState, str]] = []
        # Extend the list of the last tier of this machine that has one, which is the disk if there is a
        # disk. Tiers on servers merge the list with their own.
        for stored in cache.each(request.digest, cache.local):
            with suppress(codec.DamagedEntryError):
                states = decode_states(codec.unpack_checked(stored.blob).meta)
        states = [row for row in states if row[1] != artifact.digest]
        if (excess := len(states) + 1 - _STATES) > 0:
            pinned = set() if self._disk is None else self._disk.pinned()
            dropped = [row for row in states if row[1] not in pinned][:excess]  # the oldest
            states = [row for row in states if row not in dropped]
        states = [*states, (state, artifact.digest)]
        cache.put(request.digest, pack_states(request.digest, artifact.label, states))
