"""Entries of other libraries in the caches and bundles of a builder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from preheat.build.bundles import MountedBundles
from preheat.build.compile_lock import CompileLock, CompileLocks
from preheat.build.counters import Counters
from preheat.build.obtain import Obtainer
from preheat.build.opening import unreachable_stores
from preheat.errors import SealedError
from preheat.model import codec
from preheat.model.artifact import Provenance
from preheat.model.config import SealMode
from preheat.model.events import Events
from preheat.model.foreign import ForeignEntry, ForeignRequest, foreign_kind, is_foreign
from preheat.process.callsite import caller
from preheat.process.lazy import LazyModule
from preheat.store import Chain, LayerStore
from preheat.toolchain.binaries.ptx_section import has_attached_ptx, is_executed

if TYPE_CHECKING:
    from preheat.build import refusal
else:
    refusal = LazyModule("preheat.build.refusal")  # Only a sealed process needs it.

__all__ = ["ABSENT", "UNMEASURED", "ForeignStore", "created_now"]

_JOURNAL_EVERY = 5.0  # seconds between writes of the counters
#: The reason for a miss if the entry was never stored.
ABSENT = "absent: it is in no bundle and in no cache"
#: The reason for a miss if the entry is the result of a measurement.
UNMEASURED = "unmeasured: its result is in no bundle and in no cache"
#: The reason for a miss if the entry was made for the CPU driver, and this process does not use it.
_FOR_CPU_DRIVER = "cpu driver: it was compiled on the CPU driver, and this process uses another driver"


class ForeignStore:
    """Looks foreign entries up in the bundles and then in the caches, and stores new ones.

    Entries that were compiled on the CPU driver are found only by processes on it. Safe from any
    thread, in any number of processes.
    """

    def __init__(
        self,
        cache: Chain,
        bundles: MountedBundles,
        locks: CompileLocks,
        events: Events,
        counters: Counters,
        sealed: Callable[[], SealMode],
    ) -> None:
        self._cache = cache
        self._bundles = bundles
        self._locks = locks
        self.events = events
        self._counters = counters
        self._sealed = sealed
        self._for_cpu_driver: set[str] = set()  # the digests of entries that were not used here

    @property
    def sealed(self) -> SealMode:
        """The seal that is in force."""
        return self._sealed()

    def get(self, request: ForeignRequest, *, local: bool = False) -> ForeignEntry | None:
        """Return a stored entry, or None.

        A hit emits an event. A miss does not, because it may be expected. With `local`, only the
        bundles and the tiers of this machine are searched. Raises `BundleError` in a sealed process
        that cannot use a bundle of its settings.
        """
        self._bundles.require_all(self.sealed)
        for entry, tier in self._search(request.digest, self._cache.local if local else None):
            self.events.emit(
                "hit", tier=tier, key=entry.digest, program=request.title, arch=request.target,
                bytes=entry.size, seconds_saved=entry.provenance.seconds,
            )  # fmt: skip
            self._counters.write(_JOURNAL_EVERY)
            return entry
        return None

    def put(self, entry: ForeignEntry) -> None:
        """Store an entry in every writable tier. An entry of the same identity is replaced."""
        self._cache.put(entry.digest, entry.encode())
        self._for_cpu_driver.discard(entry.digest)

    def remove(self, request: ForeignRequest) -> None:
        """Remove an entry from every writable tier."""
        self._cache.remove(request.digest)

    def obtain(
        self,
        request: ForeignRequest,
        make: Callable[[], Mapping[str, bytes]],
        *,
        called_by: Callable[[], str] = caller,
    ) -> ForeignEntry:
        """Return a stored entry, or store the files that `make` returns.

        Of all threads and processes that share the cache, one calls `make` and the others wait for it.
        Raises `SealedError` in a sealed process that has no such entry; `called_by` returns the line
        that the error names.
        """
        return _ForeignBuild(self, self._locks, request, make, called_by).obtain()

    def lock(
        self, request: ForeignRequest, owner: FrameType
    ) -> tuple[CompileLock, ForeignEntry | None]:
        """Take the right to make an entry, for the call of the frame `owner`, and look it up again.

        If another call, here or on another host, has that right, wait for it for a bounded time. The
        lock ends with `release` or `give_up`, or when the call of `owner` ends.
        """
        lock = self._locks.begin(request.digest, owner)
        try:
            return lock, lock.acquire(partial(self.get, request))
        except BaseException:
            lock.release()
            raise

    def report_miss(
        self, request: ForeignRequest, reason: str, *, called_by: Callable[[], str] = caller
    ) -> None:
        """Emit a miss. In a process that is sealed in mode "warn", emit a warning as well.

        `called_by` returns the line that the warning names.
        """
        if request.digest in self._for_cpu_driver:
            reason = _FOR_CPU_DRIVER
        self.events.emit(
            "miss", key=request.digest, program=request.title, arch=request.target, reason=reason
        )
        if self.sealed is SealMode.WARN:
            self._report_sealed(request, reason, called_by())

    def keep(self, entry: ForeignEntry) -> None:
        """Store an entry that was just made, and emit a `compile` event."""
        self.events.emit(
            "compile", key=entry.digest, program=entry.title, arch=entry.target,
            seconds=entry.provenance.seconds, bytes=entry.size,
        )  # fmt: skip
        self.put(entry)
        self._counters.write(_JOURNAL_EVERY)

    def permit(
        self,
        request: ForeignRequest,
        reason: str,
        *,
        called_by: Callable[[], str] = caller,
        nearest: str | None = None,
        differences: tuple[str, ...] = (),
        hint: str | None = None,
    ) -> None:
        """Raise `SealedError` when this process is sealed, before anything makes the entry.

        `hint` takes the place of the usual one, where a recording would not help.
        """
        if self.sealed is not SealMode.ERROR:
            return
        self._bundles.require_all(SealMode.ERROR)
        if request.digest in self._for_cpu_driver:
            reason, hint = _FOR_CPU_DRIVER, "bake the bundle without the CPU driver"
        reason = self._bundles.fault_of(request.digest) or reason
        line = called_by()
        self._report_sealed(request, reason, line)
        self._counters.write()  # A forked child may end without running exit handlers.
        searched = refusal.search_bundles(self._bundles.bundles, request.title)
        raise SealedError(
            program=request.title,
            arch=request.target,
            reason="; ".join([reason, *unreachable_stores(self._cache)]),
            caller=line,
            evidence=searched.evidence(),
            nearest=nearest,
            differences=differences,
            hint=hint or searched.hint(reason, differences, request.arch, file=False),
        )

    def _report_sealed(self, request: ForeignRequest, reason: str, line: str) -> None:
        self.events.emit(
            "sealed", mode=self.sealed.name.lower(), program=request.title, arch=request.target,
            caller=line, reason=reason,
        )  # fmt: skip

    def all(self, kind: str | None = None) -> Iterator[ForeignEntry]:
        """Yield the entries of all bundles and caches, each once; with `kind`, only those."""
        return filter(_is_usable, self._every_entry(kind))

    def _every_entry(self, kind: str | None) -> Iterator[ForeignEntry]:
        seen: set[str] = set()
        for bundle in self._bundles.bundles:
            for digest in bundle.digests():
                with suppress(codec.DamagedEntryError, OSError):
                    blob = bundle.get(digest)
                    if blob is not None and digest not in seen and _is_of(blob, kind):
                        seen.add(digest)
                        yield _decode(digest, blob)
        for tier in self._cache.tiers:
            if isinstance(tier, LayerStore):
                yield from _read_layer(tier, kind, seen)

    def _search(self, digest: str, end: int | None = None) -> Iterator[tuple[ForeignEntry, str]]:
        """Yield the entry of each bundle and tier that has it, with the name of the tier."""
        for blob in self._bundles.blobs(digest):
            if (entry := self._decode(digest, blob, "bundle")) is not None:
                yield entry, "bundle"
        for stored in self._cache.each(digest, end):
            if (entry := self._decode(digest, stored.blob, stored.tier)) is not None:
                yield entry, stored.tier

    def _decode(self, digest: str, blob: bytes, tier: str) -> ForeignEntry | None:
        try:
            entry = _decode(digest, blob)
        except codec.DamagedEntryError as bad:
            self.events.emit("damaged", tier=tier, key=digest, reason=str(bad))
            if tier != "bundle":
                self._cache.remove(digest)
            return None
        if _is_usable(entry):
            return entry
        self._for_cpu_driver.add(digest)
        return None


class _ForeignBuild(Obtainer[ForeignEntry]):
    """Gets one entry from the store, or makes it from files."""

    def __init__(
        self,
        store: ForeignStore,
        locks: CompileLocks,
        request: ForeignRequest,
        make_files: Callable[[], Mapping[str, bytes]],
        called_by: Callable[[], str],
    ) -> None:
        self.locks = locks
        self.digest = self.flight_key = request.digest
        self._store = store
        self._request = request
        self._make_files = make_files
        self._called_by = called_by

    def look(self, *, local: bool = False) -> ForeignEntry | None:
        return self._store.get(self._request, local=local)

    def permit(self) -> None:
        self._store.permit(self._request, ABSENT, called_by=self._called_by)

    def make(self, lock: CompileLock | None) -> ForeignEntry:
        del lock  # Every entry is stored under the digest of its request.
        request = self._request
        self._store.report_miss(request, ABSENT, called_by=self._called_by)
        started = time.perf_counter()
        files = self._make_files()
        entry = ForeignEntry(
            request.kind, request.key, files, request.variant, request.label, request.arch,
            provenance=created_now(time.perf_counter() - started),
        )  # fmt: skip
        self._store.keep(entry)
        return entry


def created_now(seconds: float) -> Provenance:
    """Return the provenance of an entry that took `seconds` to make."""
    return Provenance(seconds, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def _read_layer(tier: LayerStore, kind: str | None, seen: set[str]) -> Iterator[ForeignEntry]:
    reader = tier.reader()
    for item in tier.items():
        front = tier.first_bytes(item.digest)
        if front is None or item.digest in seen or not _is_of(front, kind):
            continue
        with suppress(codec.DamagedEntryError, OSError):
            blob = reader.get(item.digest)
            if blob is not None:
                seen.add(item.digest)
                yield _decode(item.digest, blob)


def _is_of(front: bytes, kind: str | None) -> bool:
    stored = foreign_kind(front)
    return stored is not None and kind in (None, stored)


def _is_usable(entry: ForeignEntry) -> bool:
    """Return whether the driver of this process is the one that the code of an entry is for.

    On the CPU driver, compilers put their PTX into the machine code.
    """
    return not any(map(has_attached_ptx, entry.files.values())) or is_executed()


def _decode(digest: str, blob: bytes) -> ForeignEntry:
    meta, sections = codec.unpack_checked(blob)
    if not is_foreign(meta):
        raise codec.DamagedEntryError("not an entry of another library")
    return ForeignEntry.decode(digest, meta, sections)
