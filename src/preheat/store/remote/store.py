"""The store of entries on a server that many machines share."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

from preheat.model import codec
from preheat.model.events import Events
from preheat.process import fork
from preheat.process.locks import Lock
from preheat.store.base import CLOSE_SECONDS, Merger, UntrustedError, Upload, UploadResult
from preheat.store.remote.engine import Engine, ObjectError, RemoteError
from preheat.store.remote.server import Kind, PausedError, Server, size_of
from preheat.store.remote.url import ROOT, digest_of, entry_name
from preheat.store.remote.worker import Worker
from preheat.store.signing.entries import unwrap, wrap
from preheat.store.signing.keys import Keys

__all__ = ["DIGESTS_PER_REQUEST", "RemoteStore"]

_SETTLE = 10.0  # the longest time that `settle` waits, in seconds
DIGESTS_PER_REQUEST = 500  # in one request for those that exist
_ABSENCE_SECONDS = 60.0  # seconds for which an answer of `look_ahead` is used
_MAX_REMEMBERED = 1024  # digests that are remembered as removed, and as dropped


class _Absence(NamedTuple):
    """Until when a digest counts as absent, and whether only the next `get` uses that."""

    until: float
    once: bool


class RemoteStore:
    """Entries on a server, in signed form. The server reports its faults itself.

    `get` asks the server, unless it is paused, and verifies the answer. `unanswered` is the number of
    calls for which the server was paused or did not answer. An object that nobody trusted has signed,
    or a damaged one, is not removed, because other machines may trust it or have a better connection.

    `put` writes an entry. `put_later` queues it, and threads write it. It never waits: an entry that
    does not fit into the queue, or that cannot be written, is a `dropped` event. `close` waits for the
    queue for a bounded time.

    `remove` deletes nothing on the server, because other machines use it too. This process ignores the
    entry there until it writes a new one.

    `read_keys` is called when the first object is read or written. With `writable`, the process may
    write; it then has a key to sign, or entries need no signature. `merger` combines two versions of an
    entry that changes.
    """

    def __init__(
        self,
        server: Server,
        events: Events,
        *,
        read_keys: Callable[[], Keys] = Keys,
        writable: bool = True,
        merger: Merger | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.name = server.name
        self.writable = writable
        self.unanswered = 0
        self.server = server
        self._events = events
        self._read_keys = read_keys
        self._keys: Keys | None = None
        self._merger = merger
        self._worker = worker or Worker()
        self._dropping = False
        self._absent: dict[str, _Absence] = {}  # digests that `look_ahead` did not find
        self._refused: OrderedDict[str, object] = OrderedDict()  # a new object for each removal
        self._unwritten: OrderedDict[str, None] = OrderedDict()  # digests that were dropped
        self._lock = Lock()  # protects `_absent`, `_refused` and `_unwritten`
        fork.register(self)

    # Reading

    def get(self, digest: str) -> bytes | None:
        """Return the verified entry, or None when the server does not have it."""
        if digest in self._refused or (self._absent and self._is_absent(digest)):
            return None
        try:
            return self._get(digest)
        except PausedError:
            self.unanswered += 1
            self._try_again(digest)
            raise
        except RemoteError as error:
            self.unanswered += not isinstance(error, ObjectError)
            raise

    def _get(self, digest: str, *, kind: Kind = "read") -> bytes | None:
        """Return the verified entry. `kind` is "write" if it is read only to be written again."""
        read = partial(self._read, digest)
        data = self.server.call("read", read, kind=kind, size=size_of)
        if data is None:
            return None
        blob = unwrap(digest, data, self.keys().trusted)
        if why := codec.damage(digest, blob):
            raise codec.DamagedEntryError(why)
        return blob

    def _read(self, digest: str, engine: Engine) -> bytes | None:
        self.keys()  # A key error is reported like a failed request.
        return engine.get(entry_name(digest))

    def keys(self) -> Keys:
        """Return the keys of this store, which are read once. Raises `RemoteError`."""
        if self._keys is None:
            self._keys = self._read_keys()
        return self._keys

    def _try_again(self, digest: str) -> None:
        """After a pause, read `digest` in the background, to see whether the server works again."""
        if self.server.breaker.claim_trial():
            read = partial(self._read, digest)
            trial = partial(self.server.trial, "read", read, size=size_of)
            self._worker.submit("trial", trial, size=0, give_up=_nothing)

    def _is_absent(self, digest: str) -> bool:
        """Return whether `look_ahead` has found that the server does not have the digest."""
        with self._lock:
            absence = self._absent.get(digest)
            if absence is None:
                return False
            valid = absence.until > time.monotonic()
            if absence.once or not valid:
                del self._absent[digest]
            return valid

    def look_ahead(self, digests: Iterable[str], *, once: bool = True) -> None:
        """Ask for many digests with few requests. The next `get` of one that is absent makes none.

        With `once`, a second `get` asks the server, because another machine may have stored the entry.
        After a minute, every `get` asks the server.
        """
        now = time.monotonic()
        with self._lock:
            self._absent = {key: each for key, each in self._absent.items() if each.until > now}
        wanted = set(digests)
        try:
            missing = wanted - self.exists(wanted)
        except RemoteError:  # It was reported.
            return
        until = time.monotonic() + _ABSENCE_SECONDS
        with self._lock:
            self._absent.update(dict.fromkeys(missing, _Absence(until, once)))

    def exists(self, digests: Iterable[str]) -> set[str]:
        """Return the `digests` that the server has, with few requests."""
        found: set[str] = set()
        rest = iter(sorted(set(digests)))  # Neighbours are in the same folder, which can be listed.
        while batch := list(islice(rest, DIGESTS_PER_REQUEST)):
            by_name = {entry_name(digest): digest for digest in batch}
            there = self.server.exists(by_name)
            found |= {digest for name, digest in by_name.items() if name in there}
        return found

    def names(self) -> Iterator[str]:
        """Yield the digest of every entry on the server."""
        names = self.server.names(ROOT)
        return (digest for name in names if (digest := digest_of(name)) is not None)

    # Writing

    def put(self, digest: str, blob: bytes) -> None:
        """Write an entry now; `ValueError` for one that is too long for a server."""
        self._send(digest, blob, None)

    def put_later(
        self, digest: str, blob: bytes, ended: Callable[[str, str], None] | None = None
    ) -> None:
        """Queue an entry to be written, if this process may write.

        `ended` is called with the digest and the reason why it was dropped, which is empty for an entry
        that was written.
        """
        with self._lock:
            self._absent.pop(digest, None)
            self._unwritten.pop(digest, None)
            refusal = self._refused.get(digest)
        if not self.writable:
            return

        def end(reason: str) -> None:
            if reason:
                self._drop(digest, reason)
            if ended is not None:
                ended(digest, reason)

        queued = self._worker.submit(
            digest,
            partial(self._write, digest, blob, refusal, end),
            size=len(blob),
            give_up=partial(end, "there was no time before the process ended"),
        )
        if not queued:
            end("too many entries wait to be written")
            if not self._dropping:
                self._events.fault(self.name, "queue an entry", RemoteError("the queue is full"))
        self._dropping = not queued

    def _write(self, digest: str, blob: bytes, refusal: object, end: Callable[[str], None]) -> None:
        """Write an entry, and call `end` with the reason why that failed, or an empty text.

        `refusal` belongs to the entry that it replaces, or is None.
        """
        try:
            if self._merger is not None and self._merger.applies(blob):
                written = self._write_merged(digest, blob, self._merger, refusal)
            else:
                written = self._send(digest, blob, refusal)
        except (RemoteError, ValueError) as error:  # `ValueError`: the entry is too long for a server.
            end(str(error))
        else:
            if written is not None:
                self._events.emit("put", tier=self.name, key=digest, bytes=written)
            end("")

    def _write_merged(self, digest: str, blob: bytes, merger: Merger, refusal: object) -> int | None:
        """Write `blob` together with what the server has; return its size, or None for nothing new.

        Another machine may write between the two requests. What it added is lost then, and compiled
        again when it is needed.
        """
        theirs = None
        with suppress(UntrustedError, codec.DamagedEntryError):  # It is replaced.
            theirs = self._get(digest, kind="write")
        merged = blob if theirs is None else merger.merge(digest, blob, theirs)
        return None if merged == theirs else self._send(digest, merged, refusal)

    def _send(self, digest: str, blob: bytes, refusal: object) -> int:
        def write(engine: Engine) -> int:
            data = wrap(digest, blob, self.keys().signing)
            engine.put(entry_name(digest), data)
            return len(data)

        self.server.call("write", write, kind="write", size=int)
        with self._lock:
            if refusal is not None and self._refused.get(digest) is refusal:  # Not removed again since.
                del self._refused[digest]
        return len(blob)

    def upload(self, entries: Sequence[Upload]) -> UploadResult | None:
        """Write the entries that the server does not have, and wait while its queue becomes shorter.

        A list of header states is written after its code. It is always merged with the server's,
        which may have a list without the state of this machine. An entry that the server could not be
        asked for is written. Returns None where this process may not write.
        """
        if not self.writable:
            return None
        if entries:
            self._try_now(entries[0].digest)
        wanted = {each.digest: each for each in entries}
        present: set[str] = set()
        with suppress(RemoteError):  # It was reported.
            present = self.exists(wanted)
        missing = self._upload([each for digest, each in wanted.items() if digest not in present])
        lists = {
            each.header_list.digest: each
            for each in wanted.values()
            if each.header_list is not None and each.digest not in missing
        }
        dropped = self._upload([each.header_list for each in lists.values() if each.header_list])
        missing |= {lists[digest].digest: reason for digest, reason in dropped.items()}
        there = len(present - missing.keys())
        return UploadResult(
            tier=self.name,
            present=there,
            written=len(wanted) - there - len(missing),
            missing=len(missing),
            reason=next(iter(missing.values()), ""),
        )

    def _upload(self, entries: Sequence[Upload]) -> dict[str, str]:
        """Write entries; return the digests of those that were not written, with the reasons."""
        missing = {each.digest: "the server took too long" for each in entries}

        def ended(digest: str, reason: str) -> None:
            if reason:
                missing[digest] = reason
            else:
                missing.pop(digest, None)

        for each in entries:
            self.settle()
            self.put_later(each.digest, each.read(), ended)
        before = float("inf")
        while 0 < self.load < before:
            before = self.load
            self.settle(0)
        return dict(missing)

    def _try_now(self, digest: str) -> None:
        """If requests are paused, read `digest`, to see whether the server works again.

        A pause may be as long as a minute, and a bake writes to the server only once.
        """
        if not self.server.available("read"):
            self.server.trial("read", partial(self._read, digest), size=size_of)
        if self.server.available("read"):
            self.server.forget_refusals()

    def was_dropped(self, digest: str) -> bool:
        """Return whether the last entry that was put under this digest could not be written."""
        return digest in self._unwritten

    def _drop(self, digest: str, reason: str) -> None:
        with self._lock:
            self._unwritten[digest] = None
            while len(self._unwritten) > _MAX_REMEMBERED:
                self._unwritten.popitem(last=False)
        self._events.emit("dropped", tier=self.name, key=digest, reason=reason)

    def remove(self, digest: str) -> None:
        """Ignore this entry on the server from now on. It stays there for other machines."""
        with self._lock:
            self._refused[digest] = object()
            while len(self._refused) > _MAX_REMEMBERED:
                self._refused.popitem(last=False)

    def when_written(self, callback: Callable[[], object]) -> None:
        """Call `callback` once all entries that were put before are on the server, or were dropped.

        The call may come from any thread, at once or later.
        """
        self._worker.when_done(callback)

    @property
    def load(self) -> float:
        """How full the queue is, from 0 to 1."""
        return self._worker.load

    def settle(self, load: float = 0.5) -> None:
        """Wait until the load of the queue, from 0 to 1, is at most `load`, for a bounded time.

        A bake calls it, because it compiles for other machines and can wait.
        """
        if self._worker.load > load:
            self._worker.wait(load, _SETTLE)

    def flush(self, seconds: float) -> bool:
        """Wait for the writes, and drop those that have not begun after `seconds`.

        Returns whether nothing is left.
        """
        return self._worker.flush(seconds)

    # Processes

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is queued, and close the connections. The store can still be used."""
        if not self.flush(seconds):
            late = RemoteError("some entries were not written within the time limit")
            self._events.fault(self.name, "write", late)
        self.server.close()

    def after_fork(self) -> None:
        """Leave the queue to the parent process."""
        self._worker.after_fork()


def _nothing() -> None:
    """Do nothing: a trial that is not made needs no report."""
