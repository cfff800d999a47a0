"""Program to artifact: from the store, or made by the toolchain, once."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import container
from preheat.arch import Arch, ladder
from preheat.artifact import Artifact, Header, Provenance
from preheat.callers import caller
from preheat.config import Config
from preheat.errors import (
    BundleError,
    CompileError,
    PreheatError,
    SealedError,
    ToolchainChangedError,
    ToolchainError,
    UnknownEntryError,
    fresh,
)
from preheat.events import Events, JsonLines, Stats, log_faults
from preheat.flights import Flights
from preheat.key import Key, bundle_key, request_key
from preheat.program import Program
from preheat.promise import Near, Promise, nearest, promised, promises
from preheat.seal import Mode, in_force
from preheat.store import Chain, DiskStore, Found, LayerStore, MemoryStore, Store
from preheat.store.bundle import Bundle
from preheat.store.journal import Journal
from preheat.store.lock import FileLock
from preheat.store.trust import first_usable, make_private, unusable, usable
from preheat.toolchain import Toolchain
from preheat.toolchain.headers import (
    HeaderState,
    Memo,
    Untrackable,
    change,
    decode_states,
    encode_states,
    observe,
)

if TYPE_CHECKING:
    from preheat.toolchain.translate import Compiled

__all__ = ["Builder", "Failure", "Miss", "open_disk"]

_STATES = 16  # header states of one program kept side by side
_MEMOS = 256  # requests whose header stamps are kept in memory
_FAILURES = 1024  # rejected programs remembered
_JOURNAL_EVERY = 5.0  # seconds between writes of the counters while there are only hits
_SEARCH = 0.5  # seconds to look for a stored entry like the one that is missing

Watcher = Callable[[Program, Arch, Artifact], None]


@dataclass(frozen=True)
class _Request:
    """One program for one architecture. Its key names the compiler, so asking for it looks for one."""

    program: Program
    arch: Arch
    toolchain: Toolchain

    @cached_property
    def key(self) -> Key:
        identity = self.toolchain.identity(self.program.language)
        return request_key(self.program, self.arch, identity)

    @property
    def digest(self) -> str:
        return self.key.digest

    @cached_property
    def asked(self) -> Key:
        """What was asked for, whichever compiler there is."""
        return bundle_key(self.program, self.arch)

    @cached_property
    def roots(self) -> Mapping[str, str]:
        return self.toolchain.roots(self.program) if self.program.may_include else {}


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
        sealed: Mode = Mode.OFF,
        trust: bool = False,
    ) -> None:
        self.toolchain, self.store, self.events, self.disk = toolchain, store, events, disk
        self._mounted: dict[tuple[int, ...], Bundle] = {}  # by what tells a file from its successor
        self.watchers: list[Watcher] = []  # told of every program handed out
        self._sealed, self._trust = sealed, trust
        self._unmounted: list[str] = []  # bundles of the settings that could not be used, and why
        self._untracked: dict[str, str] = {}  # why an artifact could not be stored, by its digest
        self._journal, self._lock_dir, self._lock_wait = journal, lock_dir, lock_wait
        self._failures: OrderedDict[str, Failure] = OrderedDict()
        self._flights: Flights[Artifact] = Flights(events)
        self._journal_due = 0.0
        # Artifacts someone still holds: a hit on one of them need not take its bytes apart again.
        self._in_use: weakref.WeakValueDictionary[str, Artifact] = weakref.WeakValueDictionary()
        self._memos: OrderedDict[str, Memo] = OrderedDict()
        _alive.add(self)

    @classmethod
    def open(cls, config: Config | None = None, *, events: Events | None = None) -> Builder:
        """The builder that the settings describe; the environment's when none are given."""
        config = config or Config.from_env()
        events = events or Events(log_faults())
        if config.events is not None:
            events.sinks.append(JsonLines(config.events))
        layers = usable(config.layers, events, trust=config.trust_cache_dir, write=False)
        tiers: list[Store] = [
            MemoryStore(config.memory_limit),
            *(LayerStore(path, events) for path in layers),
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
                journal=Journal(disk.root / "stats", lock_dir=disk.lock_dir),
                lock_dir=disk.lock_dir,
                lock_wait=config.lock_wait,
                **common,
            )
        for path in config.bundles:
            builder._try_mount(path)
        return builder

    # The main path

    def build(self, program: Program, arch: Arch | str) -> Artifact:
        """The artifact of `program` for `arch`: found in a bundle or the store, or compiled, once.

        Raises `CompileError` with the compiler's log when the program is wrong, `SealedError` when it
        is not stored and nothing may be compiled.
        """
        try:
            made = self._build(self._request(program, arch))
        except ToolchainChangedError:  # the compiler was upgraded under a running process
            self.toolchain.look_again()
            made = self._build(self._request(program, arch))
        self._show(program, Arch.parse(arch), made)
        return made

    def _build(self, request: _Request) -> Artifact:
        found = self._find(request)
        if isinstance(found, Artifact):
            return found
        self._require_open(request, found)
        if request.program.uncacheable:
            return self._compile(request)
        return self._flights.share(request.digest, lambda: self._make(request))

    def rebuild(self, program: Program, arch: Arch | str, *, reason: str) -> Artifact:
        """Compile again what a device called invalid, and put it in the place of what is stored."""
        request = self._request(program, arch)
        self._require_open(request, Miss(f"invalid: {reason}"))
        found = self._find(request, count=False)
        if isinstance(found, Artifact):
            self.events.emit("damaged", tier="device", key=found.digest, reason=reason)
            self._in_use.pop(found.digest, None)
            self.store.remove(found.digest)
        return self._compile(request)

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
        if self.sealed is Mode.ERROR:
            request = self._request(program, arch)
            self._require_open(request, self._find(request, count=False))

    def promise(self, program: Program, arch: Arch | str, entries: tuple[str, ...] = ()) -> Promise:
        """The artifact of `program` for `arch`, built if need be, as a bundle takes it."""
        artifact = self.build(program, arch)
        request = self._request(program, arch)
        note = program.uncacheable or self._untracked.get(artifact.digest, "")
        return Promise(request.asked.digest, artifact, self._state(request, artifact), entries, note)

    def _show(self, program: Program, arch: Arch, artifact: Artifact) -> None:
        for watch in self.watchers:
            watch(program, arch, artifact)

    def _make(self, request: _Request) -> Artifact:
        """Compile, unless another process does so first or the program is known to be wrong."""
        self._recall_failure(request)
        with self._locked(request):
            found = self._find(request)  # a second look: the last holder may have made it
            if isinstance(found, Artifact):
                return found
            self._tell("miss", request, reason=found.reason)
            return self._compile(request)

    def _request(self, program: Program, arch: Arch | str) -> _Request:
        return _Request(program, Arch.parse(arch), self.toolchain)

    # Sealing

    @property
    def sealed(self) -> Mode:
        """What becomes of a compile: the strictest of the settings' word and `preheat.seal`."""
        return max(self._sealed, in_force())

    def _require_open(self, request: _Request, found: Artifact | Miss) -> None:
        """Nothing while compiling is allowed; where it is not, a word or the error that says why."""
        mode = self.sealed
        if mode is Mode.OFF or isinstance(found, Artifact):
            return
        told = {"program": request.program.label, "arch": str(request.arch), "caller": caller()}
        self.events.emit("sealed", mode=mode.name.lower(), reason=found.reason, **told)
        if mode is Mode.ERROR:
            near = self._nearest(request)
            raise SealedError(
                reason="; ".join([found.reason, *self._unmounted]),
                nearest=None if near is None else str(near),
                differences=() if near is None else near.differences,
                **told,
            )

    def nearest(self, program: Program, arch: Arch | str) -> Near | None:
        """The stored artifact most like the one that a build of `program` for `arch` would make."""
        return self._nearest(self._request(program, arch))

    def _nearest(self, request: _Request) -> Near | None:
        label = request.program.label
        found = nearest(request.asked.table, label, self._baked())
        if found is None or found.artifact.label != label:
            found = nearest(request.asked.table, label, self._stored()) or found
        return found

    def _baked(self) -> Iterator[Artifact]:
        for bundle in self.bundles:
            with suppress(container.DamagedEntryError):
                yield from (promise.artifact for promise in promises(bundle))

    def _stored(self) -> Iterator[Artifact]:
        """Artifacts on disk, the most recently used first, for as long as one may look."""
        until = time.monotonic() + _SEARCH
        reader = None if self.disk is None else LayerStore(self.disk.root, Events())
        for item in sorted(self.disk.items(), key=lambda i: -i.last_read) if self.disk else ():
            blob = reader.get(item.digest) if reader and time.monotonic() < until else None
            with suppress(container.DamagedEntryError):
                if blob is not None:
                    meta, sections = container.unpack_checked(blob)
                    if meta.get("kind") == "artifact":
                        yield Artifact.decode(item.digest, meta, sections)

    # Bundles

    def mount(self, path: str | os.PathLike[str]) -> Bundle:
        """Ask the bundle at `path` before everything else; `BundleError` when it cannot be used."""
        path = Path(os.path.abspath(path))
        made = Bundle.open(path)
        if why := unusable(path, trust=self._trust, write=False):
            raise BundleError(f"bundle {path} cannot be trusted: {why}")
        found = os.stat(path)
        stamp = (found.st_dev, found.st_ino, found.st_mtime_ns)
        return self._mounted.setdefault(stamp, made)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles mounted, in the order they are asked in."""
        return tuple(self._mounted.values())

    def _try_mount(self, path: Path) -> None:
        """A bundle that the settings name; one that cannot be used stops nothing here."""
        try:
            self.mount(path)
        except BundleError as error:
            self.events.emit("refused", path=str(path), reason=str(error))
            self._unmounted.append(str(error))

    def _promised(self, request: _Request, *, verify: bool) -> Artifact | Miss:
        """What a bundle answers; with `verify` only while the header files that are there agree."""
        miss = Miss("absent: no bundle has it, and no cache")
        for bundle in self.bundles:
            try:
                promise = promised(bundle, request.asked.digest)
            except OSError as fault:
                self.events.fault("bundle", "read", fault)
                continue
            except container.DamagedEntryError as bad:
                digest = request.asked.digest
                self.events.emit("damaged", tier="bundle", key=digest, reason=str(bad))
                miss = Miss("damaged: the entry failed its check")
                continue
            if promise is None:
                continue
            changed = verify and promise.state.headers and self._changed(request, promise.state)
            if not changed:
                return self._in_use.setdefault(promise.artifact.digest, promise.artifact)
            miss = Miss(f"headers: {changed}")
        return miss

    def _changed(self, request: _Request, state: HeaderState) -> str | None:
        memo = self._memos.setdefault(request.asked.digest, Memo())
        return change(state, request.roots, memo, present=True)

    def _state(self, request: _Request, artifact: Artifact) -> HeaderState:
        """The files that `artifact`, the answer to `request`, was made from."""
        if not artifact.headers:
            return HeaderState((), ())
        for bundle in self.bundles:
            promise = promised(bundle, request.asked.digest)
            if promise is not None and promise.artifact.digest == artifact.digest:
                return promise.state
        for found in self.store.each(request.digest):
            for state, digest in decode_states(container.unpack_checked(found.blob).meta):
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
        sealed, tier = self.sealed is not Mode.OFF, "bundle"
        found: Artifact | Miss = Miss("absent: nothing is stored under this key")
        if self.bundles and (sealed or not request.program.uncacheable):
            found = self._promised(request, verify=not sealed if verify is None else verify)
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
            meta, sections = container.unpack_checked(blob)
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
                meta, sections = container.unpack_checked(code.blob)
            artifact = self._in_use[digest] = Artifact.decode(digest, meta, sections)
        except container.DamagedEntryError as bad:
            self.events.emit("damaged", tier=found.tier, key=digest, reason=str(bad))
            self.store.remove(digest)
            return Miss("damaged: the entry failed its check")
        return artifact

    def _current_state(self, request: _Request, states: list[tuple[HeaderState, str]]) -> str | Miss:
        """The digest of the state that matches the files as they are now."""
        memo = self._memo(request)
        reason = "no header state is stored"
        for state, digest in reversed(states):
            changed = change(state, request.roots, memo)
            if changed is None:
                self._keep_memo(request, memo)
                return digest
            reason = changed
        return Miss(f"headers: {reason}")

    # Compiling

    def _compile(self, request: _Request) -> Artifact:
        """Run the compiler and store what it made, unless no key could describe that honestly."""
        program, arch = request.program, request.arch
        started = time.perf_counter()
        try:
            compiled = self.toolchain.compile(program, arch)
        except (CompileError, UnknownEntryError) as error:
            self._tell("reject", request, seconds=time.perf_counter() - started)
            self._remember_failure(request, error)
            raise
        try:
            state = self._describe(request, compiled)
        except Untrackable as reason:
            self.events.emit("uncached", program=program.label, arch=str(arch), reason=str(reason))
            artifact = self._artifact(request, request.key, compiled, ())
            self._untracked[artifact.digest] = str(reason)
        else:
            key = request.key.extended(state.parts()) if state.headers else request.key
            artifact = self._artifact(request, key, compiled, state.headers)
            self._store(request, artifact, state)
        self._tell("compile", request, seconds=compiled.seconds, bytes=artifact.size)
        self._write_journal()
        return artifact

    def _describe(self, request: _Request, compiled: Compiled) -> HeaderState:
        """The files this compile depended on; `Untrackable` when they cannot be told."""
        program = request.program
        if program.uncacheable:
            raise Untrackable(program.uncacheable)
        if not program.may_include:
            return HeaderState((), ())
        if compiled.opened is None:
            raise Untrackable("the compiler did not tell which headers it opened")
        memo = self._memo(request)
        toolkit = self.toolchain.located.roots
        state = observe(program, compiled.opened, request.roots, toolkit, memo, compiled.started_ns)
        self._keep_memo(request, memo)
        return state

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
            with suppress(container.DamagedEntryError):
                states = decode_states(container.unpack_checked(found.blob).meta)
        states = [row for row in states if row[1] != artifact.digest]
        states = [*states, (state, artifact.digest)][-_STATES:]
        meta = {"kind": "headers", "label": artifact.label, "states": encode_states(states)}
        self.store.put(request.digest, container.pack(request.digest, meta, {}))

    # Failures

    @property
    def failures(self) -> Mapping[str, Failure]:
        """Programs the compiler rejected in this process, by digest."""
        return dict(self._failures)

    def forget_failures(self) -> None:
        """Try rejected programs again."""
        self._failures.clear()

    def _remember_failure(self, request: _Request, error: PreheatError) -> None:
        """Keep a rejection that nothing outside the program could change."""
        if not request.program.may_include and not request.program.uncacheable:
            self._failures[request.digest] = Failure(error, 1, time.time())
            while len(self._failures) > _FAILURES:
                self._failures.popitem(last=False)

    def _recall_failure(self, request: _Request) -> None:
        failure = self._failures.get(request.digest)
        if failure is not None:
            failure.count += 1
            label = request.program.label
            self.events.emit("recall", key=request.digest, program=label, count=failure.count)
            raise fresh(failure.error, count=failure.count)

    # Processes

    @contextmanager
    def _locked(self, request: _Request) -> Iterator[None]:
        """Hold this key among the processes of the node, or go on without after a bounded wait."""
        if self._lock_dir is None:
            yield
            return
        lock = FileLock(self._lock_dir / request.digest)
        try:
            self._acquire(lock, request)
            yield
        finally:
            lock.release()

    def _acquire(self, lock: FileLock, request: _Request) -> None:
        started = time.perf_counter()
        try:
            make_private(lock.path.parent)
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
        self._flights = Flights(self.events)
        for tier in self.store.tiers:
            if isinstance(tier, MemoryStore):
                tier.after_fork()
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

    def _memo(self, request: _Request) -> Memo:
        """What is known about the files of this request: in this process, else from the last one."""
        memo = self._memos.get(request.digest)
        if memo is None:
            memo = Memo(self.disk.note(request.digest) if self.disk else None)
            self._memos[request.digest] = memo
            while len(self._memos) > _MEMOS:
                self._memos.popitem(last=False)
        return memo

    def _keep_memo(self, request: _Request, memo: Memo) -> None:
        if memo.changed and self.disk is not None:
            memo.changed = False
            try:
                self.disk.put_note(request.digest, memo.note())
            except OSError as fault:
                self.events.fault("disk", "note header stamps", fault)

    def _tell_hit(self, tier: str, artifact: Artifact) -> None:
        saved = artifact.provenance.seconds
        self.events.emit(
            "hit", tier=tier, key=artifact.digest, bytes=artifact.size, seconds_saved=saved
        )
        self._write_journal(_JOURNAL_EVERY)

    def _tell(self, event: str, request: _Request, **fields: Any) -> None:
        program, arch = request.program.label, str(request.arch)
        self.events.emit(event, key=request.digest, program=program, arch=arch, **fields)


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
        root, events, lock_dir=locks, limit=config.cache_limit, max_files=config.cache_files
    )


_alive: weakref.WeakSet[Builder] = weakref.WeakSet()


def _after_fork() -> None:
    for builder in list(_alive):
        builder.after_fork()


def _at_exit() -> None:
    for builder in list(_alive):
        builder.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
