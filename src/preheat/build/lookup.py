"""One lookup: the stored artifact of a request, the tier that has it, and its header files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from preheat.build.bundles import BundleEntry, MountedBundles
from preheat.build.request import Request
from preheat.errors import ToolchainError
from preheat.model import codec
from preheat.model.artifact import Artifact
from preheat.model.events import Events
from preheat.model.key import Key
from preheat.process.callsite import caller
from preheat.process.lazy import LazyModule, lazy
from preheat.store import Chain, DiskStore
from preheat.toolchain.headers.evidence import Memo
from preheat.toolchain.headers.states import (
    HEADER_LIST,
    HeaderState,
    change,
    decode_states,
    is_toolkit,
    mismatch,
)

if TYPE_CHECKING:
    from preheat.toolchain.headers import own_headers
    from preheat.toolchain.headers.own_headers import HeaderChange, OwnHeaders
else:
    own_headers = LazyModule("preheat.toolchain.headers.own_headers")  # Only a sealed process needs it.

__all__ = ["HEADERS", "HeaderMemos", "Hit", "Lookup", "Miss", "SealedHeaders"]

#: The beginning of the reason for code that was made from other header files.
HEADERS = "headers: "

_MEMOS = 256  # requests whose header states and stamps are kept in memory

_States = list[tuple[HeaderState, str]]  # each with the digest of its code


class Hit(NamedTuple):
    """An artifact, and the name of the tier that had it: "compiler" for one that was just compiled."""

    artifact: Artifact
    tier: str

    @property
    def hit(self) -> Hit:
        """This hit, so that `lookup(…).hit` is the hit or None."""
        return self


class Miss(NamedTuple):
    """Why no stored artifact can be used: a word for counting, a colon, and the details."""

    reason: str

    @property
    def artifact(self) -> None:
        """None, so that `lookup(…).artifact` is the artifact or None."""

    @property
    def hit(self) -> None:
        """None, so that `lookup(…).hit` is the hit or None."""


_hit: Callable[[tuple[Artifact, str]], Hit] = partial(tuple.__new__, Hit)  # in C

_ABSENT = Miss("absent: nothing is stored under this key")
_IN_NO_BUNDLE = Miss("absent: no bundle has it")
_NOWHERE = Miss("absent: it is in no bundle and in no cache")


class Lookup:
    """Looks requests up in the mounted bundles and then in the tiers of the cache."""

    def __init__(
        self,
        cache: Chain,
        bundles: MountedBundles,
        memos: HeaderMemos,
        events: Events,
        sealed_headers: SealedHeaders,
    ) -> None:
        self.cache = cache
        self.bundles = bundles
        self.memos = memos
        self.sealed_headers = sealed_headers
        self._events = events
        self._refused: set[str] = set()
        # Lists of header states by the digest of the request, with the bytes they were decoded from.
        self._states: OrderedDict[str, tuple[bytes, _States]] = OrderedDict()
        # Artifacts that are referenced elsewhere. A hit on one of them does not decode its bytes again.
        self.in_use: WeakValueDictionary[str, Artifact] = WeakValueDictionary()

    def find(
        self, request: Request, *, sealed: bool, verify: bool | None = None, local: bool = False
    ) -> Hit | Miss:
        """Return the stored artifact of `request`, or why there is none that can be used.

        With `verify`, an artifact from a bundle is used only if its header files have not changed. This
        is the default unless the process is `sealed`, which may have no compiler: it compares only the
        program's own header files, once. With `local`, only the bundles and the tiers of this machine
        are searched.
        """
        miss = _ABSENT
        if self.bundles.mounted:
            check = not sealed if verify is None else verify
            result = self._search_bundles(request, sealed=sealed, verify=check)
            if isinstance(result, Hit):
                return result
            miss = result
        try:
            digest = request.digest
        except ToolchainError:  # The keys of a cache name the compiler, and there is none.
            if sealed or verify is True:
                return miss
            raise
        if miss is _IN_NO_BUNDLE:
            miss = _NOWHERE
        cached = self._search_cache(request, digest, miss, self.cache.local if local else None)
        if isinstance(cached, Miss) and sealed and miss.reason.startswith(HEADERS):
            return miss  # The user named the bundle, so its header files are the ones to report.
        return cached

    def _search_cache(
        self, request: Request, digest: str, miss: Miss, end: int | None = None
    ) -> Hit | Miss:
        """Return the first usable artifact, or why the last one is not usable, or `miss`."""
        number = 0
        while (stored := self.cache.search(digest, number, end)) is not None:
            blob, tier, number = stored
            opened = self._open(request, digest, blob, tier)
            if isinstance(opened, Hit):
                return opened
            miss = opened
        return miss

    def find_other(self, request: Request, refused: Artifact) -> Artifact | None:
        """Return an artifact in a cache that is not the `refused` one."""
        try:
            result = self._search_cache(request, request.digest, Miss(""))
        except ToolchainError:
            return None
        other = result.artifact if isinstance(result, Hit) else None
        return None if other == refused else other

    def clear_memory(self) -> None:
        """Forget decoded entries and header stamps, so that lookups decode and compare again."""
        self.in_use.clear()
        self.memos.clear()
        self.sealed_headers.clear()
        self._states.clear()

    def refuse(self, artifact: Artifact) -> None:
        """Never return this artifact from a bundle again, because a device has rejected its code."""
        self._refused.add(artifact.digest)

    # In a bundle

    def _search_bundles(self, request: Request, *, sealed: bool, verify: bool) -> Hit | Miss:
        miss = _IN_NO_BUNDLE
        for entry in self.bundles.entries(request.bundle_key.digest, self.in_use):
            if isinstance(entry, str):
                miss = Miss(entry)
                continue
            reason = self._explain_rejection(request, entry, sealed=sealed, verify=verify)
            if reason is None:
                artifact = entry.artifact
                if not entry.untracked_reason and artifact.digest not in self.in_use:
                    self.in_use[artifact.digest] = artifact
                return Hit(artifact, "bundle")
            miss = Miss(reason)
        return miss

    def _explain_rejection(
        self, request: Request, entry: BundleEntry, *, sealed: bool, verify: bool
    ) -> str | None:
        """Return why `entry` cannot be used in this process now, or None if it can."""
        if entry.artifact.digest in self._refused:
            return "invalid: a device refused the code in the bundle"
        if entry.untracked_reason and not sealed:  # It cannot be verified.
            return f"untracked: {entry.untracked_reason}"
        if not verify or entry.untracked_reason:
            changed = self.sealed_headers.reject(request, entry)
        else:
            changed = (
                self._compare_headers(request, entry.state, mismatch) if entry.state.headers else None
            )
        return None if changed is None else f"{HEADERS}{changed}"

    def bundle_entry(self, request: Request, artifact: Artifact) -> BundleEntry | None:
        """Return the entry of a bundle that holds `artifact`; None when no bundle does."""
        for entry in self.bundles.entries(request.bundle_key.digest, self.in_use):
            if isinstance(entry, BundleEntry) and entry.artifact.digest == artifact.digest:
                return entry
        return None

    # In the cache

    def _open(self, request: Request, digest: str, blob: bytes, tier: str) -> Hit | Miss:
        """Return the artifact in a blob, or the one that its list of header states leads to.

        The tier of the hit is the one that had the code, not the one that had the list.
        """
        try:
            if (artifact := self.in_use.get(digest)) is not None:
                return _hit((artifact, tier))
            if blob.startswith(HEADER_LIST, codec.JSON_AT):
                current = self._find_current(request, self._read_states(digest, blob))
                if isinstance(current, Miss):
                    return current
                digest = current
                # The code of an artifact in use is read as well, because a read prevents eviction.
                code = self.cache.search(digest)
                if code is None:
                    return Miss("evicted: its headers are known, but its code was removed")
                blob, tier, _ = code
                if (artifact := self.in_use.get(digest)) is not None:
                    return _hit((artifact, tier))
            artifact = Artifact.stored(digest, blob)
            self.in_use[digest] = artifact
        except codec.DamagedEntryError as bad:
            self._events.emit("damaged", tier=tier, key=digest, reason=str(bad))
            self.cache.remove(digest)
            return Miss("damaged: the entry failed its check")
        return _hit((artifact, tier))

    def _read_states(self, digest: str, blob: bytes) -> _States:
        """Return the states in a list of header states, which is decoded once."""
        known = self._states.get(digest)
        if known is not None and known[0] == blob:
            return known[1]
        states = decode_states(codec.unpack_checked(blob).meta)
        self._states[digest] = (blob, states)
        while len(self._states) > _MEMOS:
            self._states.popitem(last=False)
        return states

    def _find_current(self, request: Request, states: _States) -> str | Miss:
        """Return the digest of the code that was made from the header files as they are now."""
        memo = self.memos.of(request.key)
        reason = "no header state is stored"
        for state, digest in reversed(states):
            changed = change(state, request.roots, memo)
            if changed is None:
                self.memos.keep(request.key, memo)
                return digest
            reason = changed
        return Miss(f"{HEADERS}{reason}")

    # Header files

    def header_state(self, request: Request, artifact: Artifact) -> HeaderState:
        """Return the header files that `artifact`, the answer to `request`, was made from."""
        if not artifact.headers:
            return HeaderState((), ())
        for stored in self.cache.each(request.digest):
            with suppress(codec.DamagedEntryError):
                for state, digest in decode_states(codec.unpack_checked(stored.blob).meta):
                    if digest == artifact.digest:
                        return state
        return HeaderState(artifact.headers, (), tuple(request.roots))

    def header_change(self, request: Request, artifact: Artifact) -> Callable[[], str | None] | None:
        """Return a function that names a changed header of `artifact`: see `Builder.header_change`."""
        entry = self.bundle_entry(request, artifact)
        state = self.header_state(request, artifact) if entry is None else entry.state
        own = tuple(header for header in state.headers if not is_toolkit(header.root))
        if not own and not request.program.include:
            return None
        rule = change if entry is None else mismatch  # The headers of a bundle may be missing here.
        return partial(self._compare_headers, request, replace(state, headers=own), rule)

    def _compare_headers(
        self, request: Request, state: HeaderState, rule: Callable[..., str | None]
    ) -> str | None:
        memo = self.memos.of(request.bundle_key)
        changed = rule(state, request.roots, memo)
        self.memos.keep(request.bundle_key, memo)
        return changed


class HeaderMemos:
    """The stamps and hashes of the header files of requests, in memory and as notes on the disk."""

    def __init__(self, disk: DiskStore | None, events: Events) -> None:
        self._disk = disk
        self._events = events
        self._memos: OrderedDict[str, Memo] = OrderedDict()

    def of(self, key: Key) -> Memo:
        """Return what is known about the files of a request, in this process or from an earlier one."""
        memo = self._memos.get(key.digest)
        if memo is None:
            memo = Memo(self._disk.note(key.digest) if self._disk else None)
            self._memos[key.digest] = memo
            while len(self._memos) > _MEMOS:
                self._memos.popitem(last=False)
        return memo

    def keep(self, key: Key, memo: Memo) -> None:
        """Write a memo to the disk, if it has changed."""
        if memo.changed and self._disk is not None:
            memo.changed = False
            try:
                self._disk.put_note(key.digest, memo.note())
            except OSError as fault:
                self._events.fault("disk", "note header stamps", fault)

    def clear(self) -> None:
        """Forget what is in memory."""
        self._memos.clear()

    def __len__(self) -> int:
        return len(self._memos)


class SealedHeaders:
    """Compares the header files of entries in a sealed process, each file once.

    `policy` is the value of `PREHEAT_SEALED_HEADERS`. With "error", an entry whose headers differ is
    not used. With "warn", it is used and an event says so. With "ignore", no file is compared. The
    first use of an entry with headers reports a policy that is not "error".
    """

    def __init__(self, policy: str, events: Events) -> None:
        self._policy = policy
        self._events = events
        self._results: dict[tuple[object, ...], tuple[HeaderState, HeaderChange | None]] = {}
        self._reported = policy == "error"

    @lazy
    def _files(self) -> OwnHeaders:
        return own_headers.OwnHeaders()

    def reject(self, request: Request, entry: BundleEntry) -> str | None:
        """Return why `entry` must not be used for `request`, or None if it can be used."""
        state = entry.state
        if not (state.headers or state.absent):
            return None
        if not self._reported:
            self._reported = True
            self._events.emit("headers", policy=self._policy)
        if self._policy == "ignore":
            return None
        roots = request.own_roots
        key = (entry.key, entry.artifact.digest, *roots.values())
        known = self._results.get(key)
        if known is None:
            change = self._files.change(request.program, state, roots, entry.toolkit)
            known = self._results[key] = (state, change)
            if change is not None and self._policy == "warn":
                self._events.emit(
                    "stale", program=request.program.label, arch=str(request.arch), caller=caller(),
                    header=change.path, reason=change.reason,
                )  # fmt: skip
        change = known[1]
        return None if change is None or self._policy == "warn" else change.reason

    def evidence(self, request: Request) -> tuple[str, ...]:
        """Return lines about the change for which an entry was rejected."""
        roots = request.own_roots
        for (entry, _, *places), (state, changed) in self._results.items():
            if changed is None or entry != request.bundle_key.digest or places != [*roots.values()]:
                continue
            line = own_headers.line_that_includes(request.program, state, roots, changed.header)
            return () if line is None else (f"included by {line}",)
        return ()

    def clear(self) -> None:
        """Compare all files again."""
        self.__dict__.pop("_files", None)
        self._results.clear()
