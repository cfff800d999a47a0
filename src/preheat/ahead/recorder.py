"""Recording a run: requests to builders are written to spool files and merged into a manifest.

Every process appends to its own spool file and holds a lock on it while it lives. A merge takes
the files that are not locked. Nothing is lost when a process is killed: the next merge takes its file.
"""

from __future__ import annotations

import atexit
import base64
import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

# A merge at exit needs this module. An import at exit would run `exec`, as dataclasses do, which makes
# Python forget that an interrupt ended the program, and the exit status would be 1.
import preheat.ahead.manifest.document

# The last rows are written at exit, and need it. An import at exit would make Python forget that an
# interrupt ended the program, because a class of named tuples is made by `eval`.
import preheat.model.lexer  # noqa: F401
from preheat.ahead.manifest import (
    ForeignProgram,
    GraphKeys,
    Manifest,
    ManifestProgram,
    key_literal,
)
from preheat.ahead.manifest.recorded import ENTRY_SUFFIX
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.events import Events, Sink, warn
from preheat.model.foreign import ForeignEntry
from preheat.model.linked_program import BinaryPart, LinkedProgram
from preheat.model.program import Program
from preheat.process import fork
from preheat.process.callsite import CallSite, call_site, format_site
from preheat.process.files import Descriptor, lock_open_file, open_fd
from preheat.process.locks import Lock
from preheat.store.lock import FileLock, hold
from preheat.store.publish import replace as publish

__all__ = ["Recorder", "merge_into", "read_existing", "spool_directory"]

_WAIT = 30.0  # seconds to wait for another process that merges
_TRIES = 100  # to create a file in a directory that other processes remove
_SUFFIX = ".jsonl"
_RECORDED = ("request", "resolve", "graph", "foreign_request")  # the events

T = TypeVar("T")
_Request = tuple[Program, Arch, CallSite]


@dataclass(slots=True)
class _RequestCount:
    """The number of requests of one line of the application for one program."""

    total: int = 0
    written: int = 0  # how many of them are in the spool file


class Recorder:
    """Records what builders return. It never raises: a failure is reported as a fault event.

    A new program, kernel or graph is written at once. A count is written whenever it has doubled, and
    at exit, so a process that is killed leaves at least half of each count.
    """

    def __init__(self, manifest: Path, events: Events) -> None:
        self._manifest = manifest
        self._events = events
        self._attached: WeakSet[Events] = WeakSet()
        self._programs: dict[str, dict[Program, None]] = {}  # by the digest of the artifact
        self._broken = False
        self._begin()
        fork.register(self)

    @classmethod
    def attach(cls, events: Events, manifest: Path) -> None:
        """Record everything that the builders with these events return from now on.

        A process has one recorder for each manifest, however many builders it opens.
        """
        with _attaching:
            recorder = _recorders.get(manifest)
            if recorder is None:
                recorder = _recorders[manifest] = cls(manifest, events)
                atexit.register(recorder.close)
                _at_process_end(recorder.close)
            if events not in recorder._attached:  # Several builders may have the same events.
                recorder._attached.add(events)
                events.subscribe(recorder._sink(events), *_RECORDED)

    def _sink(self, events: Events) -> Sink:
        """Return a sink of `events`, which also get the fault if an event cannot be recorded."""

        def sink(name: str, fields: Mapping[str, Any]) -> None:
            self.on_event(name, fields, events)

        return sink

    def on_event(self, name: str, fields: Mapping[str, Any], events: Events | None = None) -> None:
        """Record a request, a kernel that was resolved, or a graph that was captured."""
        if name == "request":
            request = (fields["program"], fields["arch"], call_site())
            action = partial(self._record_request, request, fields["artifact"])
        elif name == "resolve":
            action = partial(self._record_entry, fields["key"], fields["entry"])
        elif name == "foreign_request":
            action = partial(self._record_foreign, **fields)
        elif name == "graph" and fields["what"] == "captured" and fields["name"] is not None:
            action = partial(self._record_graph, fields["name"], fields["key"])
        else:
            return
        self._attempt("write", action, events)

    def close(self) -> None:
        """Write the counts and merge. Requests after that go to a new spool file."""
        self._attempt("write", self._end)
        self._attempt("merge", lambda: merge_into(self._manifest))

    def after_fork(self) -> None:
        """Start over in a forked child: spool file, lock and counts belong to the parent."""
        if self._spool is not None:
            self._spool.abandon()
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()  # A signal handler may build in the middle of a write.
        self._reset()

    def _reset(self) -> None:
        """Forget what was written. The next write opens a new spool file."""
        self._spool: _Spool | None = None
        self._numbers: dict[Program, int] = {}
        self._counts: dict[_Request, _RequestCount] = {}
        self._foreign: dict[tuple[str, str], tuple[dict[str, Any], _RequestCount]] = {}
        self._once: set[tuple[str, ...]] = set()

    def _attempt(self, verb: str, action: Callable[[], object], events: Events | None = None) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # A failed recording must not disturb the application.
            self._broken = True
            (events or self._events).fault("record", verb, error)

    def _record_request(self, request: _Request, artifact: Artifact) -> None:
        with self._lock:
            self._programs.setdefault(artifact.digest, {})[request[0]] = None
            count = self._counts.get(request)
            if count is None:
                count = self._counts[request] = _RequestCount()
            count.total += 1
            if count.total >= 2 * count.written:
                self._write_count(request, count, seconds=artifact.provenance.seconds)

    def _record_entry(self, digest: str, entry: str) -> None:
        with self._lock:
            for program in self._programs.get(digest, ()):  # Several programs may have one artifact.
                number = self._number(program)
                if self._first("entry", str(number), entry):
                    self._write({"of": number, "entry": entry})

    def _record_foreign(
        self, entry: ForeignEntry, row: Mapping[str, Any] | None, site: CallSite
    ) -> None:
        key = entry.request.reference
        with self._lock:
            found = self._foreign.get((key, format_site(site)))
            if found is None:
                if row is None or row.get("kept"):
                    self._keep(entry)
                found = (_foreign_fields(entry, row, site), _RequestCount())
                self._foreign[key, format_site(site)] = found
            values, count = found
            count.total += 1
            if count.total >= 2 * count.written:
                self._write_foreign_count(values, count)

    def _keep(self, entry: ForeignEntry) -> None:
        """Write an entry that a bake cannot make again to the directory of the recording."""
        if not self._first("kept", entry.digest):
            return
        spool = spool_directory(self._manifest)
        path = f"{spool}/{entry.digest}{ENTRY_SUFFIX}"
        blob = entry.encode(provenance=False)
        _create_in(spool, lambda: publish(path, [blob], durable=False))

    def _record_graph(self, name: str, key: str) -> None:
        with self._lock:
            if not self._first("graph", name, key):
                return
            if (literal := key_literal(key)) is not None:
                self._write({"graph": name, "key": literal})
            elif self._first("skipped", name):
                warn(f"graph {name!r}: key {key} is not a Python literal and is not recorded")

    def _end(self) -> None:
        with self._lock:
            for request, count in self._counts.items():
                if count.total > count.written:
                    self._write_count(request, count)
            for values, count in self._foreign.values():
                if count.total > count.written:
                    self._write_foreign_count(values, count)
            if self._spool is not None:
                self._spool.close()
            self._reset()

    def _write_count(self, request: _Request, count: _RequestCount, **more: Any) -> None:
        program, arch, site = request
        requests = count.total - count.written
        count.written = count.total
        row = {
            "of": self._number(program),
            "arch": str(arch),
            "caller": format_site(site),
            "requests": requests,
        }
        self._write({**row, **more})

    def _write_foreign_count(self, values: Mapping[str, Any], count: _RequestCount) -> None:
        requests = count.total - count.written
        count.written = count.total
        self._write({"foreign": {**values, "requests": requests}})

    def _number(self, program: Program) -> int:
        """Return the number of `program` in the spool file; write the program when it is new."""
        number = self._numbers.get(program)
        if number is None:
            number = len(self._numbers)
            self._write({"number": number, "program": _fields(program)})
            self._numbers[program] = number
        return number

    def _first(self, *what: str) -> bool:
        """Return True at the first call with these arguments."""
        if what in self._once:
            return False
        self._once.add(what)
        return True

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._spool is None:
            self._spool = _Spool(spool_directory(self._manifest))
            _at_process_end(self.close)
        self._spool.write(row)


def _at_process_end(action: Callable[[], None]) -> None:
    """Run `action` at the end of a child of multiprocessing, which does not run `atexit`.

    In a parent it runs after the parent has waited for its children.
    """
    if util := sys.modules.get("multiprocessing.util"):
        util.Finalize(None, action, exitpriority=-1)


class _Spool:
    """The spool file of this process, with a JSON object in each line. It is locked until `close`."""

    def __init__(self, directory: Path) -> None:
        self._file = _create_in(directory, lambda: self._open(directory))

    def _open(self, directory: Path) -> Descriptor:
        name = f"{directory}/{os.getpid()}-{os.urandom(6).hex()}"
        file = open_fd(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        lock_open_file(file, name)
        # A merge takes files with this suffix that are not locked, so the lock must come first.
        os.rename(name, name + _SUFFIX)
        return file

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. Raises `OSError` when it cannot be written completely."""
        line = json.dumps(row).encode() + b"\n"
        if os.write(self._file, line) < len(line):  # One write: it is complete or the disk is full.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # A forked child may have a copy.
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptor, and leave the lock to the process that holds it."""
        self._file.close()


#: The recorders of this process, by manifest.
_recorders: dict[Path, Recorder] = {}
_attaching = Lock()


# Merging


def spool_directory(manifest: Path) -> Path:
    """Return the directory beside `manifest` with the spool files that are not merged yet."""
    return manifest.with_name(f"{manifest.name}.spool")


def read_existing(manifest: Path) -> Manifest:
    """Return the manifest at a path, or an empty one if there is no file.

    Raises `InputError` when a program in it cannot be read: a rewrite would lose that program.
    """
    if not manifest.exists():
        return Manifest()
    found = Manifest.read(manifest)
    if found.unreadable:
        title, error = found.unreadable[0]
        hint = "restore the file, or remove its [[program]] from the manifest"
        raise InputError(f"{manifest}: {title}: {error}", hint=hint)
    return found


def merge_into(manifest: Path, *others: Manifest, fresh: bool = False) -> int:
    """Merge the recordings of processes that have ended, and `others`, into the file `manifest`.

    With `fresh`, the file gets only `others`. Returns the number of processes that still record.
    Raises `InputError` for a manifest that cannot be read or written. The file and the recordings stay
    unchanged in that case.
    """
    spool = spool_directory(manifest)
    if not (others or fresh or spool.is_dir()):
        return 0
    with _merge_lock(spool, sys._getframe()):
        files = sorted(spool.glob(f"*{_SUFFIX}"))
        ended = [file for file in files if _has_ended(file)]
        if fresh:
            Manifest().merged(*others).write(manifest, fresh=True)
        elif ended or others:
            with _naming_spool(spool if ended else None):
                recorded = Manifest(recorded=(str(spool),) if ended else ())
                parts = (*map(_read_spool, ended), recorded, *others)
                read_existing(manifest).merged(*parts).write(manifest)
        for file in ended:
            file.unlink()
        if len(files) == len(ended):  # Others may still need theirs.
            for file in spool.glob(f"*{ENTRY_SUFFIX}"):
                file.unlink()
    return len(files) - len(ended)


@contextmanager
def _naming_spool(spool: Path | None) -> Iterator[None]:
    """Add the location of the recording that could not be merged to an error."""
    try:
        yield
    except InputError as error:
        if spool is None:
            raise
        raise InputError(
            f"{error}; the recording is kept in {spool} for the next merge", hint=error.hint
        ) from None


@contextmanager
def _merge_lock(spool: Path, owner: FrameType) -> Iterator[None]:
    """Hold the lock of merges for the function of `owner`, and remove the spool when it is empty."""
    lock = FileLock(spool / "lock", owner=owner, trust=True)  # Root may merge for other users.
    try:
        if not _create_in(spool, lambda: lock.acquire(_WAIT)):
            raise TimeoutError(f"another process has held {lock.path} for {_WAIT:.0f} seconds")
        yield
    finally:
        lock.release()
        with suppress(OSError):  # Other processes use it.
            spool.rmdir()


def _has_ended(file: Path) -> bool:
    """Return True if the process that wrote `file` has ended, or has closed the file."""
    with hold(file, 0, trust=True) as ended:
        return ended


def _create_in(directory: Path, make: Callable[[], T]) -> T:
    """Return the result of `make`, which creates a file in `directory`.

    Any merge may remove the directory while it is empty, so it is created as often as needed.
    """
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        with suppress(FileNotFoundError):
            return make()
    return make()  # Raise the error.


def _read_spool(file: Path) -> Manifest:
    """Return what one process recorded. An incomplete line of a killed process is ignored."""
    programs: dict[int, Program] = {}
    items: list[ManifestProgram] = []
    graphs: list[GraphKeys] = []
    foreign: list[ForeignProgram] = []
    for row in _rows(file):
        try:
            if "foreign" in row:
                foreign.append(_foreign(row["foreign"]))
            elif "graph" in row:
                graphs.append(GraphKeys(row["graph"], (row["key"],)))
            elif "of" in row:
                items.append(_item(programs[row["of"]], row))
            else:
                programs[row["number"]] = _program(row["program"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{file} was recorded by another release of preheat: {error!r}",
                hint="merge it with that release, or remove it",
            ) from error
    return Manifest(tuple(items), tuple(graphs), foreign=tuple(foreign))


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_bytes().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def _item(program: Program, row: Mapping[str, Any]) -> ManifestProgram:
    return ManifestProgram(
        program=program,
        archs=(Arch.parse(row["arch"]),) if "arch" in row else (),
        entries=(row["entry"],) if "entry" in row else (),
        seconds=row.get("seconds", 0.0),
        requests=row.get("requests", 0),
        callers=(row["caller"],) if row.get("caller", "?") != "?" else (),
    )


def _foreign_fields(
    entry: ForeignEntry, row: Mapping[str, Any] | None, site: CallSite
) -> dict[str, Any]:
    """Return the row of a spool file for one request of another library."""
    request = dict(row or {})
    recorded, root = request.pop("recorded", None), request.pop("root", "")
    return {
        "kind": entry.kind,
        "name": entry.request.name,
        "request": _canonical(request) if request else "",
        "recorded": _canonical(recorded) if recorded else "",
        "root": root,
        "archs": [] if entry.arch is None else [str(entry.arch)],
        "entries": [entry.request.reference],
        "seconds": entry.provenance.seconds,
        "callers": [line] if (line := format_site(site)) != "?" else [],
    }


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _foreign(row: Mapping[str, Any]) -> ForeignProgram:
    """Return the request of a row that `_foreign_fields` made."""
    lists = {name: tuple(row[name]) for name in ("entries", "callers")}
    return ForeignProgram(**{**row, **lists, "archs": tuple(map(Arch.parse, row["archs"]))})


def _fields(program: Program | BinaryPart) -> dict[str, Any]:
    """Return the fields of a program, or of a part of one, as JSON has them."""
    if isinstance(program, LinkedProgram):
        own = {"label": program.label, "lto": program.lto, "options": program.options}
        return {**own, "parts": [_fields(part) for part in program.parts]}
    row = {f.name: getattr(program, f.name) for f in fields(program)}
    if isinstance(program, BinaryPart):
        row["data"] = base64.b64encode(program.data).decode()
    return row


def _program(row: Mapping[str, Any]) -> Program:
    """Return the program of a row that `_fields` made."""
    if "parts" in row:
        return LinkedProgram.of(**{**row, "parts": [_part(part) for part in row["parts"]]})
    lists = {name: tuple(row[name]) for name in ("options", "include", "names")}
    pairs = {name: tuple(map(tuple, row.get(name, ()))) for name in ("headers", "spellings")}
    return Program(**{**row, **lists, **pairs})


def _part(row: Mapping[str, Any]) -> Program | BinaryPart:
    if "data" in row:
        return BinaryPart(**{**row, "data": base64.b64decode(row["data"])})
    return _program(row)
