"""Copies what is missing from one store to another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from preheat.errors import PreheatError
from preheat.model.codec import DamagedEntryError
from preheat.store.base import Merger, Store, UntrustedError
from preheat.store.disk import DiskStore
from preheat.store.layer import LayerStore
from preheat.store.remote.engine import ObjectError, RemoteError
from preheat.store.trust import DistrustedError

__all__ = ["Copier", "CopyResult", "Lists", "Objection", "Progress", "Refusal"]

_THREADS = 8  # Most of the time of a copy is spent waiting for a server or for the disk.
_WINDOW = 4 * _THREADS  # digests that threads have at a time, so that memory does not grow
_LOCK_WAIT = 10.0  # seconds to wait for a process that adds to the same list

T = TypeVar("T")
#: Returns why an entry is not copied, an empty text for one that was not selected, or None. Raises
#: `DamagedEntryError` for an entry that no store should have.
Objection = Callable[[str, bytes], str | None]


class Lists(Merger, Protocol):
    """The entries that change: lists that lead to other entries."""

    def targets(self, blob: bytes) -> set[str]:
        """Return the digests that a list leads to; `DamagedEntryError` if it cannot be read."""

    def restrict(self, digest: str, blob: bytes, targets: Collection[str]) -> bytes | None:
        """Return a list with the rows that lead to these targets only; None without any."""


class Progress(Protocol):
    """What shows the progress of a copy."""

    def step(self, doing: str, advance: int = 1) -> None:
        """Count entries that are done; `doing` names the last of them."""


class Refusal(NamedTuple):
    """Why an entry was not copied: it is `damaged` or `untrusted`, or the target did not take it.

    `what` is `damaged`, `untrusted` or `not written`.
    """

    what: str
    reason: str


@dataclass
class CopyResult:
    """What a copy did, or would do. Sizes are in bytes."""

    copied: int = 0
    bytes: int = 0
    present: int = 0  # entries that the target had
    merged: int = 0  # lists that were written or got more rows
    left_out: int = 0  # entries that were not selected
    skipped: dict[str, int] = field(default_factory=dict)  # number by the reason of the objection
    refused: dict[str, Refusal] = field(default_factory=dict)  # by digest


class _Outcome(NamedTuple):
    """What became of one entry: a word, with a reason, the size of the entry, or a list."""

    what: str
    reason: str = ""
    size: int = 0
    listed: bytes = b""


@dataclass(kw_only=True)
class Copier:
    """Copies the entries of `source` that `target` lacks. Each one is verified before it is written.

    Entries are copied before the lists that lead to them, so that an interrupted copy leaves no list
    without its entries. A repeated copy continues. Without `with_lists`, no list is copied. Threads
    read and write entries, and the thread that called counts them.
    """

    source: Store
    target: Store
    lists: Lists
    objection: Objection
    with_lists: bool = True
    dry_run: bool = False
    _result: CopyResult = field(default_factory=CopyResult, init=False)
    _present: set[str] = field(default_factory=set, init=False)
    #: Digests of entries that the target has, or gets.
    _available: set[str] = field(default_factory=set, init=False)
    _found_lists: dict[str, bytes] = field(default_factory=dict, init=False)

    def copy(self, progress: Callable[[int], AbstractContextManager[Progress]]) -> CopyResult:
        """Copy once, and return what was done. `progress` is called with the number of entries."""
        digests = sorted(set(self.source.names()))
        try:
            with progress(len(digests)) as bar:
                self._copy_all(digests, bar)
        except OSError as fault:
            raise PreheatError(
                f"the copy to {self.target.name} ended after {self._result.copied:,} entries: {fault}",
                hint="repeat the command: it copies what is missing",
            ) from fault
        return self._result

    def _copy_all(self, digests: list[str], bar: Progress) -> None:
        """Copy entries, and then merge the lists that lead to them."""
        self._present = self.target.exists(digests)
        self._available |= self._present
        to_read = [digest for digest in digests if self._must_read(digest)]
        self._result.present += len(digests) - len(to_read)
        bar.step("present", advance=len(digests) - len(to_read))
        for digest, outcome in _in_threads(self._copy, to_read):
            self._count(digest, outcome)
            bar.step(digest[:12])
        if self.with_lists:
            self._merge_lists()

    def _must_read(self, digest: str) -> bool:
        """Return whether an entry is missing, or may be a list, which is merged."""
        if digest not in self._present:
            return True
        if not self.with_lists:
            return False
        for store in (self.source, self.target):
            if isinstance(store, LayerStore):
                return self.lists.applies(store.first_bytes(digest) or b"")
        return True

    # In threads

    def _copy(self, digest: str) -> _Outcome:
        """Copy one entry, unless it is a list."""
        try:
            blob = self.source.get(digest)
            if blob is None:  # It was removed in the meantime.
                return _Outcome("gone")
            if self.lists.applies(blob):
                return _Outcome("list", listed=blob)
            why = self.objection(digest, blob)
        except (UntrustedError, DistrustedError) as bad:
            return _Outcome("untrusted", str(bad))
        except (DamagedEntryError, OSError) as bad:
            if isinstance(bad, RemoteError) and not isinstance(bad, ObjectError):
                raise  # It concerns all entries.
            return _Outcome("damaged", str(bad))
        if digest in self._present:
            return _Outcome("present")
        if why is not None:
            return _Outcome("skipped" if why else "left out", why)
        if not self.dry_run:
            try:
                self.target.put(digest, blob)
            except ObjectError as error:  # For example an entry that is too large for the server.
                return _Outcome("not written", str(error))
        return _Outcome("copied", size=len(blob))

    def _merge(self, digest: str) -> bool | ObjectError:
        """Add those rows of a list to the target whose entries are there, and return if it changed."""
        listed = self.lists.restrict(digest, self._found_lists[digest], self._available)
        if listed is None:
            return False
        lock = None
        try:
            if isinstance(self.target, DiskStore):  # No other process of this node may add to it.
                with suppress(OSError):
                    lock = self.target.key_lock(digest, sys._getframe())
                    lock.acquire(_LOCK_WAIT)
            return self._add(digest, listed)
        except ObjectError as error:
            return error
        finally:
            if lock is not None:
                lock.release()

    def _add(self, digest: str, listed: bytes) -> bool:
        """Write a list with the rows that the target has; return False if the target has them all."""
        try:
            mine = self.target.get(digest)
        except (DamagedEntryError, UntrustedError, DistrustedError, ObjectError):  # It is replaced.
            mine = None
        merged = listed if mine is None else self.lists.merge(digest, mine, listed)
        if merged == mine:
            return False
        if not self.dry_run:
            self.target.put(digest, merged)
        return True

    # In the thread that called

    def _count(self, digest: str, outcome: _Outcome) -> None:
        result = self._result
        match outcome.what:
            case "copied":
                result.copied += 1
                result.bytes += outcome.size
                self._available.add(digest)
            case "list":
                self._found_lists[digest] = outcome.listed
            case "present":
                result.present += 1
            case "left out":
                result.left_out += 1
            case "skipped":
                result.skipped[outcome.reason] = result.skipped.get(outcome.reason, 0) + 1
            case "damaged" | "untrusted" | "not written" as what:
                result.refused[digest] = Refusal(what, outcome.reason)

    def _merge_lists(self) -> None:
        targets: set[str] = set()
        for digest, blob in list(self._found_lists.items()):
            try:
                targets |= self.lists.targets(blob)
            except DamagedEntryError as bad:
                self._result.refused[digest] = Refusal("damaged", str(bad))
                del self._found_lists[digest]
        # The target may have entries that the source has not.
        self._available |= self.target.exists(targets - self._available)
        for digest, changed in _in_threads(self._merge, self._found_lists):
            if isinstance(changed, ObjectError):
                self._result.refused[digest] = Refusal("not written", str(changed))
            else:
                self._result.merged += changed


def _in_threads(act: Callable[[str], T], digests: Iterable[str]) -> Iterator[tuple[str, T]]:
    """Yield each digest with what `act` returns for it, as it ends. The first error ends all.

    No result is kept after it was yielded.
    """
    rest = iter(digests)
    running: dict[Future[T], str] = {}
    threads = ThreadPoolExecutor(_THREADS)
    try:
        while True:
            for digest in islice(rest, _WINDOW - len(running)):
                running[threads.submit(act, digest)] = digest
            if not running:
                return
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(ended), ended.result()
    finally:
        threads.shutdown(cancel_futures=True)
