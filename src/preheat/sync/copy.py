"""Copy what is missing from one store to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

from preheat.arch import Arch
from preheat.errors import PreheatError
from preheat.progress import Progress, progress
from preheat.store import codec
from preheat.store.codec import DamagedEntryError
from preheat.store.remote.engine import ObjectError
from preheat.store.signing.interface import UntrustedError
from preheat.sync.store import CUDA, Content, Source, Target, decode, kind_of
from preheat.toolchain.headers import HeaderState, decode_states, is_header_list, pack_states

__all__ = ["Choice", "Refusal", "SyncResult", "sync"]

_THREADS = 8  # Most of the time of a copy is spent waiting for a server or for the disk.
_WINDOW = 4 * _THREADS  # digests that threads have at a time, so that memory does not grow

T = TypeVar("T")


class Choice(NamedTuple):
    """Which entries to copy: of these architectures and this kind, or all of them."""

    archs: frozenset[Arch] = frozenset()
    kind: str | None = None

    def includes(self, content: Content) -> bool:
        """Return whether an entry is to be copied. Files for no architecture suit all of them."""
        right_arch = not self.archs or content.arch is None or content.arch in self.archs
        return right_arch and self.kind in (None, kind_of(content))


_ALL = Choice()


class Refusal(NamedTuple):
    """Why an entry was not copied: it is `damaged` or `untrusted`, or the target did not take it.

    `what` is `damaged`, `untrusted` or `not written`.
    """

    what: str
    reason: str


@dataclass
class SyncResult:
    """What a sync did, or would do. Sizes are in bytes."""

    copied: int = 0
    bytes: int = 0
    present: int = 0  # entries that the target had
    merged: int = 0  # header lists that were written or got more states
    left_out: int = 0  # entries of other architectures or kinds
    skipped: dict[str, int] = field(default_factory=dict)  # number by the reason of the target
    refused: dict[str, Refusal] = field(default_factory=dict)  # by digest


def sync(source: Source, target: Target, choice: Choice = _ALL, *, dry_run: bool = False) -> SyncResult:
    """Copy the entries of `source` that `target` lacks. Each one is verified before it is written.

    Code is copied before the header lists that lead to it, so that an interrupted sync leaves no list
    without its code. A repeated sync continues.
    """
    result = SyncResult()
    copier = _Copier(source, target, choice, result, dry_run=dry_run)
    digests = sorted(set(source.digests()))
    result.skipped |= source.skipped
    try:
        with progress("copying", len(digests)) as bar:
            copier.run(digests, bar)
    except OSError as fault:
        raise PreheatError(
            f"the copy to {target.name} ended after {result.copied:,} entries: {fault}",
            hint="repeat the command: it copies what is missing",
        ) from fault
    return result


class _Outcome(NamedTuple):
    """What became of one entry: a word, with a reason, the size of the entry, or a header list."""

    what: str
    reason: str = ""
    size: int = 0
    header_list: bytes = b""


class _Copier:
    """One sync. Threads read and write entries, and the thread that called counts them."""

    def __init__(
        self, source: Source, target: Target, choice: Choice, result: SyncResult, *, dry_run: bool
    ) -> None:
        self._source = source
        self._target = target
        self._choice = choice
        self._result = result
        self._dry_run = dry_run
        self._present: set[str] = set()
        self._available: set[str] = set()  # digests of code that the target has, or gets
        self._lists: dict[str, bytes] = {}

    def run(self, digests: list[str], bar: Progress) -> None:
        """Copy code and foreign files, and then merge the header lists that lead to them."""
        self._present = self._target.existing(digests)
        self._available |= self._present
        to_read = [digest for digest in digests if self._must_read(digest)]
        self._result.present += len(digests) - len(to_read)
        bar.step("present", advance=len(digests) - len(to_read))
        for digest, outcome in _in_threads(self._copy, to_read):
            self._count(digest, outcome)
            bar.step(digest[:12])
        self._merge_lists()

    def _must_read(self, digest: str) -> bool:
        """Return whether an entry is missing, or may be a header list, which is merged."""
        if digest not in self._present:
            return True
        if self._choice.kind not in (None, CUDA):
            return False
        for store in (self._source, self._target):
            if (known := store.is_header_list(digest)) is not None:
                return known
        return True

    # In threads

    def _copy(self, digest: str) -> _Outcome:
        """Copy one entry, unless it is a header list."""
        try:
            blob = self._source.read(digest)
            if blob is None:  # It was removed in the meantime.
                return _Outcome("gone")
            if is_header_list(blob):
                return _Outcome("list", header_list=blob)
            content = decode(digest, blob)
        except DamagedEntryError as bad:
            return _Outcome("damaged", str(bad))
        except UntrustedError as bad:
            return _Outcome("untrusted", str(bad))
        if digest in self._present:
            return _Outcome("present")
        if not self._choice.includes(content):
            return _Outcome("left out")
        if why := self._target.objection(content):
            return _Outcome("skipped", why)
        if not self._dry_run:
            try:
                self._target.write(digest, blob)
            except ObjectError as error:  # For example an entry that is too large for the server.
                return _Outcome("not written", str(error))
        return _Outcome("copied", size=len(blob))

    def _merge(self, digest: str) -> bool | ObjectError:
        """Add those states of a header list to the target whose code is there."""
        label, states = _decode_list(self._lists[digest])
        kept = [row for row in states if row[1] in self._available]
        if not kept:
            return False
        packed = pack_states(digest, label, kept)
        try:
            return self._target.merge(digest, packed, dry_run=self._dry_run)
        except ObjectError as error:
            return error

    # In the thread that called

    def _count(self, digest: str, outcome: _Outcome) -> None:
        result = self._result
        match outcome.what:
            case "copied":
                result.copied += 1
                result.bytes += outcome.size
                self._available.add(digest)
            case "list":
                self._lists[digest] = outcome.header_list
            case "present":
                result.present += 1
            case "left out":
                result.left_out += 1
            case "skipped":
                result.skipped[outcome.reason] = result.skipped.get(outcome.reason, 0) + 1
            case "damaged" | "untrusted" | "not written" as what:
                result.refused[digest] = Refusal(what, outcome.reason)

    def _merge_lists(self) -> None:
        if self._choice.kind not in (None, CUDA):
            return
        codes: set[str] = set()
        for digest, blob in list(self._lists.items()):
            try:
                codes |= {code for _, code in _decode_list(blob)[1]}
            except DamagedEntryError as bad:
                self._result.refused[digest] = Refusal("damaged", str(bad))
                del self._lists[digest]
        # The target may have code that the source has not.
        self._available |= self._target.existing(codes - self._available)
        for digest, changed in _in_threads(self._merge, self._lists):
            if isinstance(changed, ObjectError):
                self._result.refused[digest] = Refusal("not written", str(changed))
            else:
                self._result.merged += changed


def _decode_list(blob: bytes) -> tuple[str, list[tuple[HeaderState, str]]]:
    """Return label and states of a header list; `DamagedEntryError` when it is not one."""
    meta = codec.unpack_checked(blob).meta
    return str(meta.get("label", "")), decode_states(meta)


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
