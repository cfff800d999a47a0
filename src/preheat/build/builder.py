"""Program to artifact: looked up in bundles and caches, or compiled once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from preheat.build import seal
from preheat.build.at_exit import close_at_exit
from preheat.build.bundles import BundleEntry, MountedBundles
from preheat.build.compile_lock import Attempt, CompileLocks, KeyLocks
from preheat.build.counters import Counters, expose_counters
from preheat.build.lookup import HeaderMemos, Hit, Lookup, Miss, SealedHeaders
from preheat.build.obtain import Build, Failure, Failures
from preheat.build.opening import open_chain, record_requests, required_signers
from preheat.build.request import Request, look_ahead
from preheat.errors import InputError, PreheatError
from preheat.model.arch import Arch, runnable_archs
from preheat.model.artifact import Artifact
from preheat.model.config import VARIABLES, Config, SealMode, environ
from preheat.model.events import Events, JsonLines, Stats, audit_sink, logged_events
from preheat.model.key import Key
from preheat.model.misspelled import warn_of_misspelled
from preheat.model.program import Program
from preheat.model.tracebacks import shorten_traceback
from preheat.process import fork
from preheat.process.lazy import LazyModule, lazy
from preheat.store import Chain, DiskStore, LayerStore, MemoryStore
from preheat.store.lock import release_lost
from preheat.toolchain.compiler import Toolchain

if TYPE_CHECKING:
    from preheat.build import compile as compiling
    from preheat.build import foreign_store, parallel, refusal
    from preheat.build.compile import ArtifactCompiler
    from preheat.build.foreign_store import ForeignStore
    from preheat.build.parallel import Runner
    from preheat.build.refusal import Near
    from preheat.store.bundle import Bundle
    from preheat.store.signing.keys import Keyring
else:  # A process that only finds programs needs none of them.
    compiling = LazyModule("preheat.build.compile")
    foreign_store = LazyModule("preheat.build.foreign_store")
    parallel = LazyModule("preheat.build.parallel")
    refusal = LazyModule("preheat.build.refusal")

__all__ = ["Builder"]

_JOURNAL_EVERY = 5.0  # seconds between writes of the counters while there are only hits
_SEARCH = 0.5  # seconds to search for the stored artifact that is most similar to a missing one


class Builder:
    """Builds programs: looks them up in bundles and caches, compiles what is missing, and stores it.

    It is safe from any thread, in any number of processes, and after a fork. Every function of preheat
    uses `preheat.default_builder()` unless it is given another one.

    Attributes:
        cache_dir: The directory of the cache, or None if the cache is in memory only.

    Examples:
        >>> builder = preheat.Builder.open()
        >>> artifact = builder.build(preheat.Program.of(SAXPY), "sm_90")
        >>> builder.lookup(preheat.Program.of(SAXPY), "sm_90").tier
        'memory'
    """

    def __init__(
        self,
        toolchain: Toolchain,
        cache: Chain,
        events: Events,
        *,
        disk: DiskStore | None = None,
        lock_wait: float = 300.0,
        sealed: SealMode = SealMode.OFF,
        trust: bool = False,
        signers: Callable[[], Keyring] | None = None,
        sealed_headers: str = "error",
    ) -> None:
        self.toolchain = toolchain
        self.cache = cache
        self.events = events
        self.disk = disk
        self.cache_dir = None if disk is None else disk.root
        self._bundles = MountedBundles(events, trust=trust, signers=signers)
        own_headers = SealedHeaders(sealed_headers, events)
        self._stored = Lookup(cache, self._bundles, HeaderMemos(disk, events), events, own_headers)
        self._counters = Counters(events, disk.journal() if disk else None)
        self._failures = Failures(events)
        # Without a disk, no process of this machine shares anything with this one.
        key_locks = KeyLocks(disk.lock_dir if disk else None, events, wait=lock_wait, trust=trust)
        self._locks = CompileLocks(key_locks, cache, events, wait=lock_wait)
        self._sealed = sealed
        close_at_exit(self, cache.shared)
        fork.register(self)

    @classmethod
    def open(
        cls,
        config: Config | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        events: Events | None = None,
    ) -> Builder:
        """Open the builder that the settings describe.

        Args:
            config: The settings. By default they are read from the environment.
            cache_dir: The directory of the cache. All other settings come from the environment.
            events: The receiver of events.

        Raises:
            ConfigError: A variable of the environment has an invalid value.

        Examples:
            >>> builder = preheat.Builder.open(cache_dir="my-cache")
        """
        if config is not None and cache_dir is not None:
            raise InputError(
                "Builder.open takes a config or a cache_dir, not both",
                hint="config=Config.from_env(cache_dir=…) has both",
            )
        config = config or Config.from_env(cache_dir=cache_dir)
        warn_of_misspelled(environ(), [variable.name for variable in VARIABLES])
        events = events or logged_events()
        if config.events is not None:
            events.subscribe(JsonLines(config.events))
        if (sink := audit_sink(environ())) is not None:
            events.subscribe(sink)
        expose_counters(config, events)
        record_requests(config, events)
        cache, disk = open_chain(config, events)
        memo_dir = disk.root if disk else None
        builder = cls(
            Toolchain(events, timeout=config.compile_timeout, memo_dir=memo_dir),
            cache,
            events,
            disk=disk,
            lock_wait=config.lock_wait,
            sealed=config.sealed,
            trust=config.trust_cache_dir,
            signers=required_signers(config),
            sealed_headers=config.sealed_headers,
        )
        for path in config.bundles:
            builder._bundles.mount_or_reject(path)
        return builder

    @lazy
    def _compiler(self) -> ArtifactCompiler:
        return compiling.ArtifactCompiler(
            self._stored,
            self.events,
            self.disk,
            lambda part, arch: self.obtain(part, arch, record=False).artifact,
        )

    @lazy
    def background(self) -> Runner:
        """The threads for requests that do not wait. `close` cancels what has not ended."""
        return parallel.Runner()

    # The main path

    def build(self, program: Program, arch: Arch | str, *, record: bool = True) -> Artifact:
        """Return the artifact of `program` for `arch` from a bundle or a cache, or compile it, once.

        Args:
            program: The program.
            arch: The architecture, such as `"sm_90"`.
            record: Emit a `request` event, which recordings use.

        Raises:
            CompileError: The compiler rejects the program. The error has its log.
            SealedError: The program is not stored, and this process is sealed.
            BundleError: This process is sealed, and a bundle of its settings cannot be used.

        Examples:
            >>> builder = preheat.default_builder()
            >>> builder.build(preheat.Program.of(SAXPY), "sm_90").entries[0].name
            'saxpy'
        """
        try:
            return self.obtain(program, arch, record=record).artifact
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def obtain(
        self,
        program: Program,
        arch: Arch | str,
        *,
        exact: bool = True,
        record: bool = True,
        attempt: Attempt | None = None,
    ) -> Hit:
        """Return the artifact that `build` returns, and the name of the tier that had it.

        Without `exact`, stored code for another architecture that runs on this one is used as well.
        With `attempt`, raise `WouldWait` instead of waiting for another thread or process that compiles
        the same program. A later call with the same `attempt` continues.
        """
        release_lost()
        build = None if attempt is None else attempt.build
        if build is None:
            result = self.find(program, arch, exact=exact, record=record)
            if isinstance(result, Hit):
                return result
            build = result
            if attempt is not None:
                attempt.build = build
        return build.obtain(attempt)

    def find(
        self,
        program: Program,
        arch: Arch | str,
        *,
        exact: bool = True,
        choose_arch: Callable[[Arch], Arch] | None = None,
        record: bool = True,
    ) -> Hit | Build:
        """Return the stored artifact, or a `Build` whose `obtain` compiles it.

        `choose_arch` returns the architecture to compile for, if it is another one. Raises the errors
        of `obtain` that need no compile.
        """
        request = Request(program, arch if type(arch) is Arch else Arch.parse(arch), self.toolchain)
        result = self._find_and_count(request) if exact else self._find_best(request)
        if isinstance(result, Miss):
            return Build(self, request, result, choose_arch, record=record)
        if record and self.events.has_sink("request"):
            self._emit_request(request, result)
        return result

    def rebuild(self, program: Program, arch: Arch | str, *, reason: str) -> Artifact:
        """Return other code for a program whose stored code was rejected by a device.

        It is another stored artifact, or it is compiled again. `reason` is the error of the device.
        """
        request = self._request(program, arch)
        miss = Miss(f"invalid: {reason}")
        result = self._stored.find(request, sealed=self.sealed is not SealMode.OFF)
        if isinstance(result, Miss):
            return Build(self, request, miss).make(None).artifact
        invalid = result.artifact
        other = self._stored.find_other(request, invalid)
        build = Build(self, request, miss) if other is None else None
        self.events.emit("damaged", tier="device", key=invalid.digest, reason=reason)
        self._stored.refuse(invalid)
        if build is None:
            assert other is not None
            return other
        self._stored.in_use.pop(invalid.digest, None)
        self.cache.remove(invalid.digest)
        return build.make(None).artifact

    def _request(self, program: Program, arch: Arch | str) -> Request:
        return Request(program, arch if type(arch) is Arch else Arch.parse(arch), self.toolchain)

    def _emit_request(self, request: Request, hit: Hit) -> None:
        if self.events.has_sink("request"):
            self.events.emit(
                "request", program=request.program, arch=request.arch, artifact=hit.artifact
            )

    # Lookup

    def lookup(
        self, program: Program, device: Arch | str, *, exact: bool = False, record: bool = True
    ) -> Hit | Miss:
        """Return a stored artifact that runs on `device`, or why there is none. Nothing is compiled.

        Args:
            program: The program.
            device: The architecture of the device. The best architecture whose code it runs is looked
                up first.
            exact: Accept only an artifact for exactly this architecture.
            record: Emit a `request` event, which recordings use.

        Returns:
            A `Hit` with `artifact` and `tier`, or a `Miss` with `reason`, whose `artifact` is None.

        Examples:
            >>> builder = preheat.default_builder()
            >>> builder.lookup(preheat.Program.of("__global__ void absent() {}"), "sm_90").reason
            'absent: nothing is stored under this key'
        """
        request = self._request(program, device)
        result = self._find_and_count(request) if exact else self._find_best(request)
        if record and isinstance(result, Hit):
            self._emit_request(request, result)
        return result

    def _find_best(self, request: Request) -> Hit | Miss:
        """Look a request up, and then requests for other architectures that run on its own."""
        program, device = request.program, request.arch
        own = self._request(program, device.plain) if device.suffix else request
        first = self._find_and_count(own)
        if isinstance(first, Hit):
            return first
        others = list(islice(runnable_archs(device), 1, None))
        look_ahead(self.cache, self.toolchain, [(program, arch) for arch in others])
        for arch in others:
            result = self._find_and_count(self._request(program, arch))
            if isinstance(result, Hit):
                return result
        return first

    def explain_lookup(self, program: Program, arch: Arch | str) -> Artifact | Miss:
        """Return the artifact that a build would find now, or the reason why it would compile.

        All header files are compared as they are now. A build in a sealed process compares only the
        program's own ones, and each of them once.

        Examples:
            >>> program = preheat.Program.of(SAXPY)
            >>> artifact = preheat.compile(program, "sm_90")
            >>> preheat.default_builder().explain_lookup(program, "sm_90") == artifact
            True
        """
        sealed = self.sealed is not SealMode.OFF
        result = self._stored.find(self._request(program, arch), sealed=sealed, verify=True)
        return result.artifact if isinstance(result, Hit) else result

    def key(self, program: Program, arch: Arch | str) -> Key:
        """Return the key of `program` for `arch` in caches.

        Examples:
            >>> key = preheat.default_builder().key(preheat.Program.of(SAXPY), "sm_90")
            >>> dict(key.parts)["arch"]
            b'sm_90'
        """
        return self._request(program, arch).key

    def nearest(self, program: Program, arch: Arch | str, *, namesake: bool = False) -> Near | None:
        """Return the stored artifact that is most similar to the one of `program` for `arch`.

        Args:
            program: The program.
            arch: The architecture.
            namesake: Consider only programs with the same label.

        Examples:
            >>> artifact = preheat.compile(SAXPY, "sm_90", label="saxpy.cu")
            >>> program = preheat.Program.of(SAXPY, label="saxpy.cu")
            >>> near = preheat.default_builder().nearest(program, "sm_89", namesake=True)
            >>> near.artifact.label
            'saxpy.cu'
        """
        table = self._request(program, arch).bundle_key.table
        caches = [tier for tier in self.cache.tiers if isinstance(tier, LayerStore)]
        return refusal.find_nearest(
            table, program.label, self.bundles, caches, seconds=_SEARCH, namesake=namesake
        )

    def _find_and_count(self, request: Request, *, local: bool = False) -> Hit | Miss:
        """Look a request up, and count a hit.

        With `local`, only the tiers of this machine are searched.
        """
        mode = self.sealed
        if self._bundles.rejected:
            self._bundles.require_all(mode)
        result = self._stored.find(request, sealed=mode is not SealMode.OFF, local=local)
        if isinstance(result, Hit):
            artifact = result.artifact
            self.events.emit(
                "hit", tier=result.tier, key=artifact.digest, program=artifact.label,
                arch=artifact.arch.name, bytes=artifact.size,
                seconds_saved=artifact.provenance.seconds,
            )  # fmt: skip
            if time.monotonic() >= self._counters.due:
                self._counters.write(_JOURNAL_EVERY)
        return result

    # Sealing

    @property
    def sealed(self) -> SealMode:
        """The stricter of the settings' mode and `preheat.seal`'s."""
        mode = seal.in_force()
        return mode if mode > self._sealed else self._sealed

    # Bundles

    def mount(self, path: str | os.PathLike[str]) -> Bundle:
        """Search the bundle at `path` before the caches from now on, and return the bundle.

        `path` may have a pin, as in `kernels.heat@sha256:…`. Mounting the same path twice is allowed.
        The second call picks up a replaced file.

        Raises:
            BundleError: The file is not a valid bundle, or it cannot be trusted.

        Examples:
            >>> baked = preheat.bake("kernels.toml", "sm_90", output="kernels.heat")
            >>> builder = preheat.Builder.open()
            >>> builder.mount("kernels.heat").path.name
            'kernels.heat'
        """
        bundle = self._bundles.mount(path)
        self._bundles.report_unsuited()
        return bundle

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The mounted bundles, in the order in which they are searched."""
        return self._bundles.bundles

    def bundle_entry(
        self,
        program: Program,
        arch: Arch | str,
        entries: tuple[str, ...] = (),
        attempt: Attempt | None = None,
    ) -> tuple[BundleEntry, str]:
        """Build `program` for `arch`, and return its entry for a bundle and the tier that had it.

        `attempt` means the same as for `obtain`.
        """
        artifact, tier = self.obtain(program, arch, attempt=attempt)
        request = self._request(program, arch)
        include = program.include_spellings
        baked = self._stored.bundle_entry(request, artifact)
        entry = baked or self._compiler.bundle_entry(request, artifact)
        return replace(entry, artifact=artifact, entries=entries, include=include), tier

    # Other libraries

    @lazy
    def foreign(self) -> ForeignStore:
        """The entries of other libraries in the same bundles and caches."""
        return foreign_store.ForeignStore(
            self.cache, self._bundles, self._locks, self.events, self._counters, lambda: self.sealed
        )

    # Header files

    def header_change(self, program: Program, artifact: Artifact) -> Callable[[], str | None] | None:
        """Return a function that names the header of `artifact` that has changed; None without headers.

        Headers of the toolkit are not compared, but a file that would hide one of them is found.
        """
        if not artifact.headers:
            return None
        return self._stored.header_change(self._request(program, artifact.arch), artifact)

    # What this process remembers

    @property
    def failures(self) -> Mapping[str, Failure]:
        """The programs that the compiler rejected in this process, by digest."""
        return dict(self._failures.by_digest)

    def forget_failures(self) -> None:
        """Compile rejected programs again when they are requested.

        Examples:
            >>> preheat.default_builder().forget_failures()
            >>> len(preheat.default_builder().failures)
            0
        """
        self._failures.by_digest.clear()

    def clear_memory(self) -> None:
        """Drop what this process keeps in memory, so that the next lookup reads the other tiers.

        Mounted bundles and loaded kernels stay. Artifacts that callers hold stay valid, but a lookup
        decodes them again.

        Examples:
            >>> builder, program = preheat.default_builder(), preheat.Program.of(SAXPY)
            >>> artifact = builder.build(program, "sm_90")
            >>> builder.clear_memory()
            >>> builder.lookup(program, "sm_90").tier
            'disk'
        """
        for tier in self.cache.tiers:
            if isinstance(tier, MemoryStore):
                tier.clear()
        self._stored.clear_memory()

    def stats(self) -> dict[str, Stats]:
        """Return the counters of this process, and the sums over every process that used this cache.

        Examples:
            >>> builder = preheat.Builder.open(cache_dir="new-cache")
            >>> artifact = builder.build(preheat.Program.of(SAXPY), "sm_90")
            >>> builder.stats()["process"]["compiles"]
            1
        """
        return self._counters.stats()

    # Threads and processes

    def after_fork(self) -> None:
        """Start with new workers and counters in a forked child."""
        self.__dict__.pop("background", None)  # The child does not have its threads.
        self.toolchain.after_fork()
        self._counters.after_fork()

    def close(self, seconds: float | None = None) -> None:
        """End the compiler processes, and write the counters and what is queued for shared stores.

        The builder can still be used.

        Args:
            seconds: The longest time to wait for writes to shared stores. The default is ten seconds.

        Examples:
            >>> builder = preheat.Builder.open()
            >>> builder.close()
        """
        release_lost()
        if (background := self.__dict__.pop("background", None)) is not None:
            background.cancel()
        self.toolchain.close()
        self._locks.close()
        self.cache.close(seconds)
        self._counters.write()
