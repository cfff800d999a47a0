"""Program to artifact: from the store, or made by the toolchain, once."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from preheat import fork
from preheat.arch import Arch, ladder
from preheat.artifact import Artifact, Header, Provenance
from preheat.build.promise import Near, Promise, search
from preheat.build.seal import in_force
from preheat.build.shelf import Shelf
from preheat.cache import Chain, DiskStore, Found, LayerStore, MemoryStore, Store, codec
from preheat.cache.bundle import Bundle
from preheat.cache.journal import Journal
from preheat.cache.lock import FileLock, release_lost
from preheat.cache.trust import first_usable, make_private, usable
from preheat.callsite import caller
from preheat.config import Config, SealMode
from preheat.errors import (
    CompileError,
    InputError,
    PreheatError,
    SealedError,
    ToolchainChangedError,
    ToolchainError,
    UnknownEntryError,
    fresh,
)
from preheat.events import Events, JsonLines, Stats, log_events
from preheat.key import Key, bundle_key, request_key
from preheat.lazy import lazy
from preheat.program import Program
from preheat.singleflight import SingleFlight
from preheat.toolchain import Toolchain
from preheat.toolchain.evidence import Memo
from preheat.toolchain.headers import (
    TOOLKIT,
    HeaderState,
    Survey,
    Unexpected,
    Untrackable,
    change,
    decode_states,
    mismatch,
    observe,
    pack_states,
)
from preheat.toolchain.sources import own_texts, sources_of
from preheat.tracebacks import shorten

if TYPE_CHECKING:
    from preheat.toolchain.lines import Lines
    from preheat.toolchain.translate import Compiled

__all__ = ["Builder", "Failure", "Miss", "open_disk"]

_STATES = 16  # header states of one program kept side by side
_MEMOS = 256  # requests whose header stamps are kept in memory
_FAILURES = 1024  # rejected programs remembered, and those that could not be stored
_JOURNAL_EVERY = 5.0  # seconds between writes of the counters while there are only hits
_COMPILES = 3  # of one program, until no file is opened that was not looked at before
_SEARCH = 0.5  # seconds to look for a stored entry like the one that is missing

T = TypeVar("T")
Watcher = Callable[[Program, Arch, Artifact], None]


@dataclass(frozen=True)
class _Request:
    """One program for one architecture. Its key names the compiler, so asking for it looks for one."""

    program: Program
    arch: Arch
    toolchain: Toolchain

    @lazy
    def key(self) -> Key:
        identity = self.toolchain.identity(self.program.language)
        return request_key(self.program, self.arch, identity)

    @property
    def digest(self) -> str:
        return self.key.digest

    @property
    def flight(self) -> tuple[str, ...]:
        """What threads share a compile by. Include directories count: they decide on the headers."""
        include = self.program.include if self.program.may_include else ()
        return (self.digest, *include)

    @lazy
    def asked(self) -> Key:
        """What was asked for, whichever compiler there is."""
        return bundle_key(self.program, self.arch)

    @lazy
    def roots(self) -> Mapping[str, str]:
        """The include directories by label; PTX includes nothing."""
        return self.toolchain.roots(self.program) if self.program.language == "cuda" else {}


@dataclass(frozen=True, slots=True)
class Miss:
    """Why nothing stored could be used: a word for counting, then what exactly."""

    reason: str


@dataclass(slots=True)
class Failure:
    """A program the compiler rejected: the error, how often it was asked for, when it first failed."""

    error: PreheatError
    count: int
    first: float


class Builder:
    """Builds programs. Safe from any thread, in any number of processes, and after fork."""

    def __init__(
        self,
        toolchain: Toolchain,
        store: Chain,
        events: Events,
        *,
        disk: DiskStore | None = None,
        journal: Journal | None = None,
        lock_dir: Path | None = None,
        lock_wait: float = 300.0,
        sealed: SealMode = SealMode.OFF,
        trust: bool = False,
    ) -> None:
        self.toolchain, self.store, self.events, self.disk = toolchain, store, events, disk
        self._shelf, self._trust = Shelf(events, trust=trust), trust
        self.watchers: list[Watcher] = []  # told of every program handed out
        self._sealed = sealed
        self._refused: set[str] = set()  # artifacts that a device called invalid: bundles keep theirs
        self._untracked: OrderedDict[str, str] = OrderedDict()  # why an artifact was not stored
        self._journal, self._lock_dir, self._lock_wait = journal, lock_dir, lock_wait
        self._failures: OrderedDict[str, Failure] = OrderedDict()
        self._flights: SingleFlight[Artifact] = SingleFlight(events)
        self._journal_due = 0.0
        # Artifacts someone still holds: a hit on one of them need not take its bytes apart again.
        self._in_use: weakref.WeakValueDictionary[str, Artifact] = weakref.WeakValueDictionary()
        self._memos: OrderedDict[str, Memo] = OrderedDict()
        _alive.add(self)
        fork.register(self)

    @classmethod
    def open(
        cls,
        config: Config | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        events: Events | None = None,
    ) -> Builder:
        """The builder that the settings describe; the environment's when none are given.

        `cache_dir` keeps the cache in that directory and everything else as the environment says.
        """
        if config is not None and cache_dir is not None:
            raise InputError(
                "Builder.open takes a config or a cache_dir, not both",
                hint="config=Config.from_env(cache_dir=…) has both",
            )
        config = config or Config.from_env(cache_dir=cache_dir)
        events = events or Events(log_events())
        if config.events is not None:
            events.sinks.append(JsonLines(config.events))
        layers = usable(config.layers, events, trust=config.trust_cache_dir, write=False)
        tiers: list[Store] = [
            MemoryStore(config.memory_limit),
            *(LayerStore(path, events, trust=config.trust_cache_dir) for path in layers),
        ]
        disk = open_disk(config, events)
        common: dict[str, Any] = {"sealed": config.sealed, "trust": config.trust_cache_dir}
        if disk is None:  # nothing is shared, so there is nobody to wait for
            toolchain = Toolchain(events, timeout=config.compile_timeout)
            builder = cls(toolchain, Chain(tiers, events), events, **common)
        else:
            builder = cls(
                Toolchain(events, timeout=config.compile_timeout, memo_dir=disk.root),
                Chain([*tiers, disk], events),
                events,
                disk=disk,
                journal=disk.journal(),
                lock_dir=disk.lock_dir,
                lock_wait=config.lock_wait,
                **common,
            )
        for path in config.bundles:
            builder._shelf.try_mount(path)
        return builder

    # The main path

    def build(self, program: Program, arch: Arch | str) -> Artifact:
        """The artifact of `program` for `arch`: found in a bundle or the store, or compiled, once.

        Raises `CompileError` with the compiler's log when the program is wrong, `SealedError` when it
        is not stored and nothing may be compiled.
        """
        release_lost()
        try:
            made = self._built(program, arch)
        except PreheatError as error:
            shorten(error)
            raise
        self._show(program, Arch.parse(arch), made)
        return made

    def _built(self, program: Program, arch: Arch | str) -> Artifact:
        try:
            return self._build(self._request(program, arch))
        except ToolchainChangedError:  # the compiler was upgraded under a running process
            self.toolchain.look_again()
            return self._build(self._request(program, arch))

    def _build(self, request: _Request) -> Artifact:
        found = self._find(request)
        if isinstance(found, Artifact):
            return found
        self._require_open(request, found)  # before a compiler is looked for: there may be none
        if request.program.uncacheable:
            return self._compile(request, found)
        return self._flights.run(request.flight, lambda: self._make(request), title=request.digest)

    def rebuild(self, program: Program, arch: Arch | str, *, reason: str) -> Artifact:
        """Other code in the place of what a device called invalid: a cache's, or compiled again."""
        request, miss = self._request(program, arch), Miss(f"invalid: {reason}")
        found = self._find(request, count=False)
        if not isinstance(found, Artifact):
            return self._compile(request, miss)
        other = self._cached(request, miss)[1] if self._keyed(request, or_not=True) else miss
        if other == found:
            other = miss
        self._require_open(request, other)
        self.events.emit("damaged", tier="device", key=found.digest, reason=reason)
        self._refused.add(found.digest)
        if isinstance(other, Artifact):
            return other
        self._in_use.pop(found.digest, None)
        self.store.remove(found.digest)
        return self._compile(request, miss)

    def find(self, program: Program, device: Arch | str, *, exact: bool = False) -> Artifact | None:
        """A stored artifact that runs on `device`, best architecture first; never compiles.

        With `exact` none made for another architecture will do.
        """
        device = Arch.parse(device)
        for arch in (device,) if exact else ladder(device):
            found = self._find(self._request(program, arch))
            if isinstance(found, Artifact):
                self._show(program, device, found)
                return found
        return None

    def require_open(self, program: Program, arch: Arch | str) -> None:
        """`SealedError` when `program` is not stored and this process is sealed."""
        if self.sealed is SealMode.ERROR:
            request = self._request(program, arch)
            self._require_open(request, self._find(request, count=False))

    def promise(self, program: Program, arch: Arch | str, entries: tuple[str, ...] = ()) -> Promise:
        """The artifact of `program` for `arch`, built if need be, as a bundle takes it."""
        artifact = self.build(program, arch)
        request = self._request(program, arch)
        if (baked := self._bundled(request, artifact)) is not None:
            return replace(baked, artifact=artifact, entries=entries, include=program.asked_include)
        note = program.uncacheable or self._untracked.get(artifact.digest, "")
        state = self._state(request, artifact)
        return Promise(request.asked.digest, artifact, state, entries, note, program.asked_include)

    def lines(self, program: Program | None, artifact: Artifact) -> Lines | None:
        """The source lines of `artifact`, which was made from `program`; None where they are not known.

        Code without line information is built once more with it, unless this process is sealed. That is
        stored under a key of its own, and no watcher is told: a manifest has what was asked for.
        """
        from preheat.toolchain.lines import Lines, has_lines  # only faults need it

        try:
            lined = artifact if has_lines(artifact.ptx) else self._lined(program, artifact.arch)
            if lined is None:
                return None
            own = {} if program is None else own_texts(program)  # bundles hold no sources
            return Lines(lined.ptx.decode(), {**lined.sources, **own})
        except (PreheatError, ValueError):  # the fault that asks is more important than its line
            return None

    def _lined(self, program: Program | None, arch: Arch) -> Artifact | None:
        if program is None or program.language != "cuda":
            return None
        request = self._request(replace(program, options=(*program.options, "-lineinfo")), arch)
        found = self._build(request) if self.sealed is SealMode.OFF else self._find(request)
        return found if isinstance(found, Artifact) else None

    def _show(self, program: Program, arch: Arch, artifact: Artifact) -> None:
        for watch in self.watchers:
            watch(program, arch, artifact)

    def _make(self, request: _Request) -> Artifact:
        """Compile, unless another process does so first or the program is known to be wrong."""
        self._recall_failure(request)
        lock = self._file_lock(request, sys._getframe())
        try:
            if lock is not None:
                self._acquire(lock, request)
            found = self._find(request)  # a second look: the last holder may have made it
            if isinstance(found, Artifact):
                return found
            self._tell("miss", request, reason=found.reason)
            return self._compile(request, found)
        finally:
            if lock is not None:
                lock.release()

    def _request(self, program: Program, arch: Arch | str) -> _Request:
        return _Request(program, Arch.parse(arch), self.toolchain)

    # Sealing

    @property
    def sealed(self) -> SealMode:
        """What becomes of a compile: the strictest of the settings' word and `preheat.seal`."""
        return max(self._sealed, in_force())

    def _require_open(self, request: _Request, found: Artifact | Miss) -> None:
        """`SealedError` when nothing was found and nothing may be compiled."""
        if self.sealed is not SealMode.ERROR or isinstance(found, Artifact):
            return
        told, near = self._tell_sealed(request, found), self._nearest(request)
        raise SealedError(
            reason="; ".join([found.reason, *self._shelf.passed_over]),
            nearest=None if near is None else str(near),
            differences=() if near is None else near.differences,
            **told,
        )

    def _tell_sealed(self, request: _Request, miss: Miss) -> dict[str, str]:
        told = {"program": request.program.label, "arch": str(request.arch), "caller": caller()}
        self.events.emit("sealed", mode=self.sealed.name.lower(), reason=miss.reason, **told)
        return told

    def nearest(self, program: Program, arch: Arch | str, *, namesake: bool = False) -> Near | None:
        """The stored artifact most like the one that a build of `program` for `arch` would make.

        With `namesake` it is one of a program with the same label.
        """
        return self._nearest(self._request(program, arch), namesake=namesake)

    def _nearest(self, request: _Request, *, namesake: bool = False) -> Near | None:
        wanted, label = request.asked.table, request.program.label
        caches = [tier for tier in self.store.tiers if isinstance(tier, LayerStore)]
        return search(wanted, label, self.bundles, caches, seconds=_SEARCH, namesake=namesake)

    # Bundles

    def mount(self, path: str | os.PathLike[str]) -> Bundle:
        """Ask the bundle at `path` before everything else; `BundleError` when it cannot be used.

        Again is fine, and takes up the file that has meanwhile replaced it.
        """
        return self._shelf.mount(path)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles mounted, in the order they are asked in."""
        return self._shelf.bundles

    def _promised(self, request: _Request, *, sealed: bool, verify: bool) -> Artifact | Miss:
        """What a bundle answers; with `verify` only while the header files that are there agree."""
        found: Artifact | Miss = Miss("absent: no bundle has it, and no cache")
        for answer in self._shelf.answers(request.asked.digest, self._in_use):
            if isinstance(answer, str):
                found = Miss(answer)
            else:
                found = self._kept(request, answer, sealed=sealed, verify=verify)
            if isinstance(found, Artifact):
                break
        return found

    def _kept(
        self, request: _Request, promise: Promise, *, sealed: bool, verify: bool
    ) -> Artifact | Miss:
        """What `promise` holds, or why that cannot be used here and now."""
        digest, state = promise.artifact.digest, promise.state
        if digest in self._refused:
            return Miss("invalid: a device refused the code in the bundle")
        if promise.note:  # nothing could be checked, so only a seal makes it right
            return promise.artifact if sealed else Miss(f"untracked: {promise.note}")
        if verify and state.headers and (changed := self._changed(request, state)):
            return Miss(f"headers: {changed}")
        return self._in_use.setdefault(digest, promise.artifact)

    def _changed(
        self, request: _Request, state: HeaderState, rule: Callable[..., str | None] = mismatch
    ) -> str | None:
        memo = self._memo(request.asked)
        changed = rule(state, request.roots, memo)
        self._keep_memo(request.asked, memo)
        return changed

    def header_change(self, program: Program, artifact: Artifact) -> Callable[[], str | None] | None:
        """A function that says which header of `artifact` has changed since; None when it has none.

        The headers of the toolkit do not count, but a file that would hide one of them does.
        """
        if not artifact.headers:
            return None
        request = self._request(program, artifact.arch)
        baked = self._bundled(request, artifact)
        state = self._state(request, artifact) if baked is None else baked.state
        own = tuple(header for header in state.headers if header.root not in TOOLKIT)
        if not own and not program.include:
            return None
        rule = change if baked is None else mismatch  # headers of a bundle need not be on this machine
        return partial(self._changed, request, replace(state, headers=own), rule)

    def _bundled(self, request: _Request, artifact: Artifact) -> Promise | None:
        """The entry of a bundle that holds `artifact`; None where no bundle does."""
        for answer in self._shelf.answers(request.asked.digest, self._in_use):
            if isinstance(answer, Promise) and answer.artifact.digest == artifact.digest:
                return answer
        return None

    def _state(self, request: _Request, artifact: Artifact) -> HeaderState:
        """The files that `artifact`, the answer to `request`, was made from."""
        if not artifact.headers:
            return HeaderState((), ())
        for found in self.store.each(request.digest):
            with suppress(codec.DamagedEntryError):
                for state, digest in decode_states(codec.unpack_checked(found.blob).meta):
                    if digest == artifact.digest:
                        return state
        return HeaderState(artifact.headers, (), tuple(request.roots))

    # Looking up

    def key(self, program: Program, arch: Arch | str) -> Key:
        """The key a build of `program` for `arch` goes by."""
        return self._request(program, arch).key

    def why(self, program: Program, arch: Arch | str) -> Artifact | Miss:
        """What a build would find right now, without building; header files are looked at."""
        return self._find(self._request(program, arch), count=False, verify=True)

    def _find(
        self, request: _Request, *, count: bool = True, verify: bool | None = None
    ) -> Artifact | Miss:
        """The stored artifact, or why there is none that can be used.

        Bundles are asked first, and taken at their word where the process is sealed.
        """
        sealed, tier = self.sealed is not SealMode.OFF, "bundle"
        found: Artifact | Miss = Miss("absent: nothing is stored under this key")
        if self.bundles:
            check = not sealed if verify is None else verify
            found = self._promised(request, sealed=sealed, verify=check)
        if isinstance(found, Miss) and self._keyed(request, or_not=sealed or verify is True):
            tier, found = self._cached(request, found)
        if count and isinstance(found, Artifact):
            self._tell_hit(tier, found)
        return found

    def _keyed(self, request: _Request, *, or_not: bool) -> bool:
        """Whether there is a compiler, without which nothing in a cache can be named."""
        try:
            return bool(request.digest)
        except ToolchainError:
            if or_not:
                return False
            raise

    def _cached(self, request: _Request, miss: Miss) -> tuple[str, Artifact | Miss]:
        """What the tiers have, and which one had it; the last reason where none has."""
        for found in self.store.each(request.digest):
            opened = self._open(request, found)
            if isinstance(opened, Artifact):
                return found.tier, opened
            miss = opened
        return "", miss

    def _open(self, request: _Request, found: Found) -> Artifact | Miss:
        """The artifact in what a tier had: the thing itself, or found by its list of header states."""
        digest, blob = request.digest, found.blob
        try:
            if (artifact := self._in_use.get(digest)) is not None:
                return artifact
            meta, sections = codec.unpack_checked(blob)
            if meta.get("kind") == "headers":
                current = self._current_state(request, decode_states(meta))
                if isinstance(current, Miss):
                    return current
                digest = current
                code = self.store.get(digest)
                if code is None:
                    return Miss("evicted: its headers are known, its code is gone")
                if (artifact := self._in_use.get(digest)) is not None:
                    return artifact
                meta, sections = codec.unpack_checked(code.blob)
            artifact = self._in_use[digest] = Artifact.decode(digest, meta, sections)
        except codec.DamagedEntryError as bad:
            self.events.emit("damaged", tier=found.tier, key=digest, reason=str(bad))
            self.store.remove(digest)
            return Miss("damaged: the entry failed its check")
        return artifact

    def _current_state(self, request: _Request, states: list[tuple[HeaderState, str]]) -> str | Miss:
        """The digest of the state that matches the files as they are now."""
        memo = self._memo(request.key)
        reason = "no header state is stored"
        for state, digest in reversed(states):
            changed = change(state, request.roots, memo)
            if changed is None:
                self._keep_memo(request.key, memo)
                return digest
            reason = changed
        return Miss(f"headers: {reason}")

    # Compiling

    def _compile(self, request: _Request, miss: Miss) -> Artifact:
        """Run the compiler and store what it made, unless no key could describe that honestly."""
        self._require_open(request, miss)
        if self.sealed is SealMode.WARN:
            self._tell_sealed(request, miss)
        program, arch = request.program, request.arch
        started = time.perf_counter()
        try:
            compiled, state = self._compile_tracked(request)
        except (CompileError, UnknownEntryError) as error:
            self._tell("reject", request, seconds=time.perf_counter() - started)
            self._remember_failure(request, error)
            raise
        if isinstance(state, Untrackable):
            self.events.emit("uncached", program=program.label, arch=str(arch), reason=str(state))
            # No key describes what decided the code, so the digest is made from the code itself.
            key = request.key.extended(_code_parts(compiled))
            artifact = self._artifact(request, key, compiled, ())
            _remember(self._untracked, artifact.digest, str(state), _FAILURES)
        else:
            key = request.key.extended(state.parts()) if state.headers else request.key
            artifact = self._artifact(request, key, compiled, state.headers)
            self._store(request, artifact, state)
        self.events.emit(
            "compile", key=artifact.digest, program=program.label, arch=str(arch),
            seconds=compiled.seconds, bytes=artifact.size,
        )  # fmt: skip
        self._write_journal()
        return artifact

    def _compile_tracked(self, request: _Request) -> tuple[Compiled, HeaderState | Untrackable]:
        """Compile, and describe that by the files that were read, or say why that is not possible.

        A file counts as read when it is the same before and after. One that was not looked at before,
        because no text spells out its name, costs a second compile.
        """
        program, arch = request.program, request.arch
        if program.uncacheable:
            return self.toolchain.compile(program, arch), Untrackable(program.uncacheable)
        if program.language == "ptx":
            return self.toolchain.compile(program, arch), HeaderState((), ())
        memo = self._memo(request.key)
        survey = Survey(program, request.roots, self.toolchain.located.roots, memo)
        for _ in range(_COMPILES):
            compiled = self.toolchain.compile(program, arch)
            opened = compiled.opened
            if opened is None and program.may_include:
                why = "the compiler did not tell which headers it opened"
                return compiled, Untrackable(why)
            try:
                state = observe(survey, opened or (), memo)
            except Unexpected as names:
                surprise = Untrackable(f"the compiler opens other files each time: {names}")
            except Untrackable as why:
                return compiled, why
            else:
                if state.headers:
                    self._keep_memo(request.key, memo)
                return compiled, state
        return compiled, surprise

    def _artifact(
        self, request: _Request, key: Key, compiled: Compiled, headers: tuple[Header, ...]
    ) -> Artifact:
        return Artifact(
            digest=key.digest,
            label=request.program.label,
            arch=request.arch,
            toolchain=self.toolchain.version(request.program.language),
            parts=request.key.table,
            entries=compiled.entries,
            cubin=compiled.cubin,
            ptx=compiled.ptx,
            names=compiled.names,
            headers=headers,
            log=compiled.log,
            templates=compiled.templates,
            sources=sources_of(request.program, headers, request.roots, self.toolchain.located.roots),
            provenance=Provenance(
                seconds=round(compiled.seconds, 6),
                created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                timing=compiled.timing,
            ),
        )

    def _store(self, request: _Request, artifact: Artifact, state: HeaderState) -> None:
        """Publish the artifact, then, for one that depends on files, the way to find it."""
        self.store.put(artifact.digest, artifact.encode())
        self._in_use[artifact.digest] = artifact
        if not state.headers:
            return
        states: list[tuple[HeaderState, str]] = []
        for found in self.store.each(request.digest):  # the last one is the shared one
            with suppress(codec.DamagedEntryError):
                states = decode_states(codec.unpack_checked(found.blob).meta)
        states = [row for row in states if row[1] != artifact.digest]
        if (excess := len(states) + 1 - _STATES) > 0:
            pinned = set() if self.disk is None else self.disk.pinned()
            dropped = [row for row in states if row[1] not in pinned][:excess]  # the oldest
            states = [row for row in states if row not in dropped]
        states = [*states, (state, artifact.digest)]
        self.store.put(request.digest, pack_states(request.digest, artifact.label, states))

    # Failures

    @property
    def failures(self) -> Mapping[str, Failure]:
        """Programs the compiler rejected in this process, by digest."""
        return dict(self._failures)

    def forget_failures(self) -> None:
        """Try rejected programs again."""
        self._failures.clear()

    def clear_memory(self) -> None:
        """Drop what this process keeps in memory; the next lookup reads the other tiers.

        Artifacts that are in use, bundles that are mounted and loaded kernels stay.
        """
        for tier in self.store.tiers:
            if isinstance(tier, MemoryStore):
                tier.clear()
        self._in_use.clear()
        self._memos.clear()

    def _remember_failure(self, request: _Request, error: PreheatError) -> None:
        """Keep a rejection that nothing outside the program could change."""
        if not request.program.may_include and not request.program.uncacheable:
            failure = Failure(error, 1, time.time())
            _remember(self._failures, request.digest, failure, _FAILURES)

    def _recall_failure(self, request: _Request) -> None:
        failure = self._failures.get(request.digest)
        if failure is not None:
            failure.count += 1
            label = request.program.label
            self.events.emit("recall", key=request.digest, program=label, count=failure.count)
            raise fresh(failure.error, count=failure.count)

    # Processes

    def _file_lock(self, request: _Request, owner: FrameType) -> FileLock | None:
        """Return the lock of this key among the processes of the node; None where nothing is shared."""
        if self._lock_dir is None:
            return None
        return FileLock(self._lock_dir / request.digest, owner=owner)

    def _acquire(self, lock: FileLock, request: _Request) -> None:
        """Take the lock, or go on without it after a bounded wait."""
        started = time.perf_counter()
        try:
            make_private(lock.path.parent, trust=self._trust)
            if lock.acquire(0):
                return
            taken = lock.acquire(self._lock_wait)
        except OSError as fault:
            self.events.fault("lock", "lock", fault)
            return
        waited, outcome = time.perf_counter() - started, "finished" if taken else "gave up"
        self.events.emit("wait", key=request.digest, seconds=waited, outcome=outcome)

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's threads, workers or counts is ours."""
        self.events.forget()
        self.toolchain.after_fork()
        if self._journal is not None:
            self._journal = self._journal.another()

    # Counters

    def stats(self) -> dict[str, Stats]:
        """Counters of this process, and of every process that ever used this cache."""
        mine = self.events.stats()
        if self._journal is None:
            return {"process": mine, "cache": mine}
        self._write_journal()
        return {"process": mine, "cache": self._journal.total()}

    def close(self) -> None:
        """End the compiler processes and write down the counters. The builder can still be used."""
        release_lost()
        self.toolchain.close()
        self._write_journal()

    def _write_journal(self, at_most_every: float = 0) -> None:
        now = time.monotonic()
        if self._journal is None or (at_most_every and now < self._journal_due):
            return
        self._journal_due = now + at_most_every
        try:
            self._journal.write(self.events.stats())
        except OSError as fault:
            self.events.fault("journal", "write", fault)

    def _memo(self, key: Key) -> Memo:
        """What is known about the files of a request: in this process, else from the last one."""
        memo = self._memos.get(key.digest)
        if memo is None:
            memo = Memo(self.disk.note(key.digest) if self.disk else None)
            _remember(self._memos, key.digest, memo, _MEMOS)
        return memo

    def _keep_memo(self, key: Key, memo: Memo) -> None:
        if memo.changed and self.disk is not None:
            memo.changed = False
            try:
                self.disk.put_note(key.digest, memo.note())
            except OSError as fault:
                self.events.fault("disk", "note header stamps", fault)

    def _tell_hit(self, tier: str, artifact: Artifact) -> None:
        self.events.emit(
            "hit", tier=tier, key=artifact.digest, program=artifact.label, arch=str(artifact.arch),
            bytes=artifact.size, seconds_saved=artifact.provenance.seconds,
        )  # fmt: skip
        self._write_journal(_JOURNAL_EVERY)

    def _tell(self, event: str, request: _Request, **fields: Any) -> None:
        program, arch = request.program.label, str(request.arch)
        self.events.emit(event, key=request.digest, program=program, arch=arch, **fields)


def _code_parts(compiled: Compiled) -> Iterator[tuple[str, bytes]]:
    """What tells the code of a compile from any other."""
    yield "cubin", compiled.cubin
    yield "ptx", compiled.ptx


def _remember(kept: OrderedDict[str, T], digest: str, value: T, most: int) -> None:
    """Keep a value, and at most so many: the oldest goes."""
    kept[digest] = value
    while len(kept) > most:
        kept.popitem(last=False)


def open_disk(config: Config, events: Events) -> DiskStore | None:
    """The cache directory that the settings describe; None when it is off or none can be used."""
    trust = config.trust_cache_dir
    root = first_usable(config.cache_dirs, events, trust=trust) if config.cache else None
    if root is None:
        return None
    locks = first_usable([config.lock_dir, root / "locks"], events, trust=trust)
    if locks is None:
        return None
    return DiskStore(
        root,
        events,
        lock_dir=locks,
        limit=config.cache_limit,
        max_files=config.cache_files,
        trust=trust,
    )


_alive: weakref.WeakSet[Builder] = weakref.WeakSet()


def _at_exit() -> None:
    for builder in list(_alive):
        builder.close()


atexit.register(_at_exit)
