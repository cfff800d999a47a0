"""What every adapter is made of: requests, rows of a manifest, a connection to the store, an adapter.

An adapter replaces functions of its library. What they are given becomes a `Request`, whose entry the
`Connection` finds or makes. A recorded request is a `Row`, from which the `Adapter` makes the request
again for any architecture.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, ModuleType, TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from preheat.adapters.modules import NotPortableError
from preheat.build.builder import Builder
from preheat.build.compile_lock import CompileLock
from preheat.build.foreign_store import ABSENT, ForeignStore, created_now
from preheat.errors import AdapterError, PreheatError
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.model.tracebacks import hide_frames
from preheat.process.callsite import call_site, format_site

__all__ = [
    "Adapter", "ComparableRequest", "Compile", "Connection", "HiddenFrames", "LastKey",
    "NotKeyableError", "Request", "RequiredEntries", "Row", "ThreadState", "changed_environment",
    "directory_of", "not_importable", "replace_everywhere", "require_version", "version_note",
]  # fmt: skip

T = TypeVar("T")

# Requests and rows

#: What a recording keeps of one request of a library, as JSON values. Every row has "root", the
#: directory from which its modules are imported, or "" for installed ones; "env", the variables that
#: are set when the request is made again; and "recorded", facts that are not part of the request.
#: A row with "kept" describes an entry that `bake` cannot make, such as a measurement. The content of
#: the entry is kept beside the manifest.
Row = Mapping[str, Any]


class NotKeyableError(Exception):
    """No key describes everything that the code depends on. The message says why."""


class Request(Protocol):
    """What a library wants to be compiled: a value that has everything that determines the code."""

    @property
    def identity(self) -> ForeignRequest:
        """The entry with the code. Raises `NotKeyableError` when no key describes it."""

    def row(self) -> Row | None:
        """Return what a manifest keeps; None for a request that another process cannot make again."""


class ComparableRequest(Request, Protocol):
    """A request of which the stored one that differs least is shown."""

    @property
    def properties(self) -> Mapping[str, str]:
        """What people compare to see why two requests differ."""


class RequiredEntries(NamedTuple):
    """The entries that a launch needs. `notes` are messages about them for the user.

    `outdated` says why the recording cannot be used at all, such as another version of the library.
    """

    entries: tuple[ForeignRequest, ...]
    notes: tuple[str, ...] = ()
    outdated: str = ""


def changed_environment(row: Row, here: Mapping[str, str]) -> list[str]:
    """Return which variables differ from those of the recording. `here` are those that are set now."""
    before: Mapping[str, str] = row["env"]
    return [
        f"{name} was {before.get(name, 'not set')}, and is {here.get(name, 'not set')}"
        for name in sorted({**here, **before})
        if here.get(name) != before.get(name)
    ]


def version_note(title: str, before: str | None, now: str) -> list[str]:
    """Return a note if a request was recorded with another version of a program."""
    return [] if before == now else [f"recorded with {title} {before}, and this is {now}"]


def not_importable(error: NotPortableError, row: Row) -> AdapterError:
    """Return the error for a function that a bake cannot import."""
    if error.hint is not None:  # The module was found.
        return AdapterError(str(error), hint=error.hint)
    searched = f" and {row['root']}" if row["root"] else ""
    return AdapterError(
        f"{error} (searched: PYTHONPATH{searched})",
        hint="put the module beside the manifest, or its directory on PYTHONPATH",
    )


# The store


class Connection:
    """The store, as one library uses it. Lines of its `modules` are not those of the program."""

    def __init__(self, store: ForeignStore, *modules: ModuleType) -> None:
        self.store = store
        self._directories = tuple(map(directory_of, modules))

    def caller(self) -> str:
        """Return the line of the program that made the request."""
        return format_site(call_site(*self._directories))

    def obtain(
        self,
        request: ForeignRequest,
        make: Callable[[], Mapping[str, bytes]],
        row: Callable[[], Row | None],
    ) -> ForeignEntry:
        """Return the entry of a request. If no bundle and no cache has it, `make` makes it.

        The request is reported to a recorder with its `row`; see `Request.row`.
        """
        entry = self.store.obtain(request, make, called_by=self.caller)
        self.report(entry, row)
        return entry

    def report(self, entry: ForeignEntry, row: Callable[[], Row | None]) -> None:
        """Report to a recorder that an entry was found or made; see `obtain`."""
        if self.store.events.has_sink("foreign_request"):
            site = call_site(*self._directories)
            self.store.events.emit("foreign_request", entry=entry, row=row(), site=site)

    def permit(self, request: ForeignRequest, reason: str, **details: Any) -> None:
        """Raise `SealedError` in a sealed process; see `ForeignStore.permit`."""
        self.store.permit(request, reason, called_by=self.caller, **details)

    def missed(self, request: ForeignRequest, reason: str) -> None:
        """Emit a miss, just before the library compiles; see `ForeignStore.missed`."""
        self.store.report_miss(request, reason, called_by=self.caller)

    def uncached(self, request: ForeignRequest, reason: str) -> None:
        """Report that the result of a compile is used and not stored."""
        self.store.events.emit("uncached", program=request.title, arch=request.target, reason=reason)

    def nearest(
        self,
        request: ComparableRequest,
        describe: Callable[[ForeignEntry], str],
        *,
        absent: str,
        distance: Callable[[Mapping[str, str], Mapping[str, str]], int] = lambda *_: 0,
    ) -> tuple[str | None, tuple[str, ...]]:
        """Describe the entry of the same label that differs least from a request, and how it differs.

        `absent` stands for the value of a property that only one of them has. `distance` of the
        properties decides between entries that differ in as many properties.
        """
        identity = request.identity
        wanted = {"arch": identity.target, **request.properties}
        best: tuple[int, int, str, tuple[str, ...]] | None = None
        for entry in self.store.all(identity.kind):
            if entry.label != identity.label or not entry.properties:
                continue
            there = {"arch": entry.target, **entry.properties}
            differences = tuple(
                f"{name}: {there.get(name, absent)} became {wanted.get(name, absent)}"
                for name in {**there, **wanted}
                if there.get(name) != wanted.get(name)
            )
            found = (len(differences), distance(there, wanted), describe(entry), differences)
            best = found if best is None else min(best, found)
        return (None, ()) if best is None else best[2:]


class Compile:
    """A compile that a library begins in one call and ends in another one, as with a cache of its own.

    A library whose compiler is one function uses `Connection.obtain` instead.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._owner: FrameType | None = None
        self._lock: CompileLock | None = None
        self._started = 0.0

    @contextmanager
    def owned_by(self, owner: FrameType) -> Iterator[None]:
        """Let the call of the frame `owner` make an entry in this block. An error gives it up."""
        self._owner = owner
        try:
            yield
        except Exception:
            self.give_up()
            raise
        finally:
            self._owner = None
            self.end()

    def lock(self, request: ForeignRequest, owner: FrameType | None = None) -> ForeignEntry | None:
        """Look an entry up that was absent, once no other call makes it; see `ForeignStore.lock`.

        Others wait for the entry until `end`, or until the call of the frame `owner` ends.
        """
        owner = owner or self._owner or sys._getframe()
        self._lock, entry = self._connection.store.lock(request, owner)
        return entry

    def begin(self, request: ForeignRequest, reason: str = ABSENT) -> None:
        """Emit a miss. The library compiles from now on."""
        self._connection.missed(request, reason)
        self._started = time.perf_counter()

    def made(
        self, request: ForeignRequest, files: Mapping[str, bytes], properties: Mapping[str, str]
    ) -> ForeignEntry:
        """Store the files that the library has made, and return their entry."""
        provenance = created_now(time.perf_counter() - self._started)
        kind, key, variant, label, arch = request
        entry = ForeignEntry(kind, key, files, variant, label, arch, properties, provenance)
        self._connection.store.keep(entry)
        return entry

    def give_up(self) -> None:
        """Tell those who wait that there will be no entry."""
        if self._lock is not None:
            self._lock.give_up()

    def end(self) -> None:
        """Let those who wait continue."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def directory_of(module: ModuleType) -> str:
    """Return the directory of a library, whose lines are not those of the program."""
    assert module.__file__ is not None
    return os.path.dirname(os.path.abspath(module.__file__)) + os.sep


# The functions of a library


def replace_everywhere(packages: tuple[str, ...], name: str, stock: object, new: object) -> None:
    """Replace a function in all imported modules of `packages` that have a name for it."""
    for title, module in [*sys.modules.items()]:
        if title.startswith(packages) and vars(module).get(name) is stock:
            setattr(module, name, new)


class ThreadState(threading.local):
    """What a thread is doing between the calls of a library. The attributes of a class are defaults."""

    @contextmanager
    def setting(self, **values: Any) -> Iterator[None]:
        """Set attributes for this thread, until the end of a block."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class LastKey(threading.local, Generic[T]):
    """The last key that a library computed in this thread, and the request that it is the key of.

    A library computes a key from everything that determines the code, and passes only the key on. An
    adapter remembers the request until the library uses the key.
    """

    _last: tuple[str | bytes, T] | None = None

    def remember(self, key: str | bytes, request: T) -> None:
        """Remember the request of a key. The one before is forgotten."""
        self._last = (key, request)

    def request_of(self, key: str | bytes) -> T | None:
        """Return the request of a key; None if another key was computed since."""
        return self._last[1] if self._last is not None and self._last[0] == key else None

    def forget(self) -> T | None:
        """Forget the last request, and return it."""
        last, self._last = self._last, None
        return None if last is None else last[1]


class HiddenFrames:
    """Removes the frames of preheat from errors of preheat that leave a replaced function."""

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, PreheatError):
            hide_frames(error)


def require_version(library: str, found: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> None:
    """Raise `AdapterError` unless a version is in the range that the adapter accepts.

    As many parts of the version are compared as a limit has: `(3, 9)` accepts 3.9.7.
    """
    parts = tuple(int(part) for part in found.split("+")[0].split(".")[: len(newest)] if part.isdigit())
    if not oldest <= parts or parts > newest:
        first, last = (".".join(map(str, each)) for each in (oldest, newest))
        raise AdapterError(
            f"{library} {found} is not known: the adapter accepts {first} to {last}",
            hint="install one of these versions, or a newer preheat",
        )


class Adapter(ABC):
    """Connects the compiler of one library to the store of a builder.

    `name` is also the kind of the entries, and `module` is the module of the library. `package` is its
    name for pip, if that is not the first part of `module`.

    Once it is installed, everything that the library compiles is looked up in the store first and
    stored afterwards. A miss in a sealed process raises `SealedError`. Each request is emitted as a
    `foreign_request` event, which a recorder writes to the manifest.

    A library whose entries can be made again has `required`. Otherwise, `not_baked` says why not.
    With `bakes_apart`, a bake makes each request in a process of its own: the code of a request would
    depend on what the library compiled before.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    package: ClassVar[str] = ""
    not_baked: ClassVar[str] = ""
    bakes_apart: ClassVar[bool] = False

    @abstractmethod
    def install(self, builder: Builder) -> None:
        """Connect the imported library. Raises `AdapterError` for an unknown version."""

    def required(self, row: Row, arch: Arch, coverage: str, *, make: bool) -> RequiredEntries:
        """Return the entries of a recorded request for `arch`. With `make`, make and store them.

        No device is needed. `coverage` is one of `COVERAGES` of the manifest.
        """
        del row, arch, coverage, make
        raise AdapterError(self.not_baked)

    def bake(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Make the entries of a recorded request for `arch`, without a device, and store them.

        It runs in a separate process, in which the adapter is installed.
        """
        return self.required(row, arch, coverage, make=True)

    def keys(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Return the entries that `bake` would make, without making them."""
        return self.required(row, arch, coverage, make=False)

    def count(self, row: Row, coverage: str) -> int:
        """Return the largest number of kernels that `bake` makes for one architecture."""
        del row, coverage
        return 0 if self.not_baked else 1
