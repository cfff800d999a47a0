"""Recording a run: what the builder hands out goes to a spool, and from there into the manifest.

Every process appends to a spool file of its own, which it locks for as long as it lives. Merging takes
the files that nobody holds, so nothing is lost however a process ends: at the latest, the next one to
merge finds it.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

# A merge at exit needs this module. Importing it then would run `exec`, as dataclasses do, which makes
# Python forget that an interrupt ended the program: the exit status would be 1.
import preheat.ahead.manifest.document  # noqa: F401
from preheat import fork
from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram, key_literal
from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.build.builder import Builder
from preheat.cache.lock import FileLock, hold
from preheat.callsite import CallSite, call_site, format_site
from preheat.errors import InputError
from preheat.events import Events, warn
from preheat.files import Descriptor, opened
from preheat.locks import Lock
from preheat.program import Program

__all__ = ["Recorder", "known", "merge", "spool_of"]

_WAIT = 30.0  # seconds to wait for another process that merges
_TRIES = 100  # to make a file in a directory that others remove
_ENDING = ".jsonl"

T = TypeVar("T")
_Request = tuple[Program, Arch, CallSite]


@dataclass(slots=True)
class _Sight:
    """How often one line of the application asked for one program, and how much of that is written."""

    asked: int = 0
    told: int = 0


class Recorder:
    """Writes down what a builder hands out. It never raises: what it cannot do is a fault.

    New things are written at once. A count is written whenever it has doubled and at exit, so what a
    process that was killed leaves behind is at least half of it.
    """

    def __init__(self, manifest: Path, events: Events) -> None:
        self._manifest, self._events = manifest, events
        self._programs: dict[str, dict[Program, None]] = {}  # by the digest of their artifact
        self._broken = False
        self._begin()
        fork.register(self)

    @classmethod
    def attach(cls, builder: Builder, manifest: Path) -> Recorder:
        """Record everything that `builder` returns from now on."""
        recorder = cls(manifest, builder.events)
        builder.watchers.append(recorder.saw_program)
        builder.events.sinks.append(recorder.saw_event)
        atexit.register(recorder.close)
        _before_end(recorder.close)
        return recorder

    def saw_program(self, program: Program, arch: Arch, artifact: Artifact) -> None:
        """The builder handed out `artifact`."""
        request = (program, arch, call_site())
        self._attempt("write", lambda: self._saw(request, artifact))

    def saw_event(self, name: str, told: Mapping[str, Any]) -> None:
        """A kernel was resolved, a graph captured, or something happened that is not recorded."""
        if name == "resolve":
            self._attempt("write", lambda: self._saw_entry(told["key"], told["entry"]))
        elif name == "graph" and told["what"] == "captured" and told["name"] is not None:
            self._attempt("write", lambda: self._saw_graph(told["name"], told["key"]))

    def close(self) -> None:
        """Write the counts and merge; what is seen after that begins another file."""
        self._attempt("write", self._end)
        self._attempt("merge", lambda: merge(self._manifest))

    def after_fork(self) -> None:
        """In a forked child: the file and its lock are the parent's, and so is what it counted."""
        if self._spool is not None:
            self._spool.leave()
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()  # a signal handler may build in the middle of a write
        self._forget()

    def _forget(self) -> None:
        """Nothing is written down yet."""
        self._spool: _Spool | None = None
        self._numbers: dict[Program, int] = {}
        self._sights: dict[_Request, _Sight] = {}
        self._once: set[tuple[str, ...]] = set()

    def _attempt(self, verb: str, action: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # whatever it is, it is not the application's trouble
            self._broken = True
            self._events.fault("record", verb, error)

    def _saw(self, request: _Request, artifact: Artifact) -> None:
        with self._lock:
            self._programs.setdefault(artifact.digest, {})[request[0]] = None
            sight = self._sights.get(request)
            if sight is None:
                sight = self._sights[request] = _Sight()
            sight.asked += 1
            if sight.asked >= 2 * sight.told:
                self._tell(request, sight, seconds=artifact.provenance.seconds)

    def _saw_entry(self, digest: str, entry: str) -> None:
        with self._lock:
            for program in self._programs.get(digest, ()):  # several, where their headers are equal
                number = self._number(program)
                if self._first("entry", str(number), entry):
                    self._write({"of": number, "entry": entry})

    def _saw_graph(self, name: str, key: str) -> None:
        with self._lock:
            if not self._first("graph", name, key):
                return
            if (spelling := key_literal(key)) is not None:
                self._write({"graph": name, "key": spelling})
            elif self._first("skipped", name):
                warn(f"graph {name!r}: key {key} is no Python literal and is not recorded")

    def _end(self) -> None:
        with self._lock:
            for request, sight in self._sights.items():
                if sight.asked > sight.told:
                    self._tell(request, sight)
            if self._spool is not None:
                self._spool.close()
            self._forget()

    def _tell(self, request: _Request, sight: _Sight, **more: Any) -> None:
        program, arch, where = request
        asked, sight.told = sight.asked - sight.told, sight.asked
        row = {"of": self._number(program), "arch": str(arch), "by": format_site(where), "asked": asked}
        self._write({**row, **more})

    def _number(self, program: Program) -> int:
        """What this process's file calls `program`."""
        number = self._numbers.get(program)
        if number is None:
            number = len(self._numbers)
            self._write({"number": number, "program": _fields(program)})
            self._numbers[program] = number
        return number

    def _first(self, *what: str) -> bool:
        if what in self._once:
            return False
        self._once.add(what)
        return True

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._spool is None:
            self._spool = _Spool(spool_of(self._manifest))
            _before_end(self.close)
        self._spool.write(row)


def _before_end(action: Callable[[], None]) -> None:
    """See to it that a child of multiprocessing, which ends without `atexit`, ends with `action`.

    A parent has it done, too: once it has waited for its children.
    """
    if util := sys.modules.get("multiprocessing.util"):
        util.Finalize(None, action, exitpriority=-1)


class _Spool:
    """A file that this process alone appends to, a JSON object a line, locked until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._file = _made_in(directory, lambda: self._open(directory))

    def _open(self, directory: Path) -> Descriptor:
        name = f"{directory}/{os.getpid()}-{os.urandom(6).hex()}"
        file = opened(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        fcntl.flock(file, fcntl.LOCK_EX)
        # Only now does it count: what has this ending and no lock is of a process that has ended.
        os.rename(name, name + _ENDING)
        return file

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line; `OSError` when it could not be written whole."""
        line = json.dumps(row).encode() + b"\n"
        if os.write(self._file, line) < len(line):  # one write: it is all there or the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # at once, even where a forked child has a copy still
        self.leave()

    def leave(self) -> None:
        """Close this process's copy."""
        self._file.close()


# Merging


def spool_of(manifest: Path) -> Path:
    """The directory beside `manifest` where what is not merged yet is kept."""
    return manifest.with_name(f"{manifest.name}.spool")


def known(manifest: Path) -> Manifest:
    """The manifest so far: an empty one where there is none.

    Raises `InputError` when anything in it cannot be read: writing it again would lose that.
    """
    if not manifest.exists():
        return Manifest()
    found = Manifest.read(manifest)
    if found.unreadable:
        title, error = found.unreadable[0]
        hint = "put it back, or take its [[program]] out of the manifest"
        raise InputError(f"{manifest}: {title}: {error}", hint=hint)
    return found


def merge(manifest: Path, *others: Manifest, fresh: bool = False) -> int:
    """Take what ended processes recorded, and `others`, into `manifest`; how many still record.

    With `fresh` it becomes `others` alone, whatever it was. Raises `InputError` for a manifest that
    cannot be read or written: then it stays as it is, and so does what was recorded.
    """
    spool = spool_of(manifest)
    if not (others or fresh or spool.is_dir()):
        return 0
    with _merging(spool, sys._getframe()):
        files = sorted(spool.glob(f"*{_ENDING}"))
        ended = [file for file in files if _has_ended(file)]
        if fresh:
            Manifest().merged(*others).write(manifest, fresh=True)
        elif ended or others:
            with _telling(spool if ended else None):
                known(manifest).merged(*map(_read, ended), *others).write(manifest)
        for file in ended:
            file.unlink()
    return len(files) - len(ended)


@contextmanager
def _telling(spool: Path | None) -> Iterator[None]:
    """Add to an error where the recording is that could not be merged."""
    try:
        yield
    except InputError as error:
        if spool is None:
            raise
        raise InputError(
            f"{error}; what was recorded is kept in {spool}, and merged once that is mended",
            hint=error.hint,
        ) from None


@contextmanager
def _merging(spool: Path, owner: FrameType) -> Iterator[None]:
    """Be the only one to merge in the function of `owner`; an empty spool is removed after that."""
    lock = FileLock(spool / "lock", owner=owner, trust=True)  # root merges what others recorded
    try:
        if not _made_in(spool, lambda: lock.acquire(_WAIT)):
            raise TimeoutError(f"another process has held {lock.path} for {_WAIT:.0f} seconds")
        yield
    finally:
        lock.release()
        with suppress(OSError):  # others are using it
            spool.rmdir()


def _has_ended(file: Path) -> bool:
    """Whether the process that wrote `file` is gone, or has left the file behind."""
    with hold(file, 0, trust=True) as ended:
        return ended


def _made_in(directory: Path, make: Callable[[], T]) -> T:
    """What `make` makes in `directory`, which any merge may remove while it is empty."""
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        with suppress(FileNotFoundError):
            return make()
    return make()  # it is not that: say what it is


def _read(file: Path) -> Manifest:
    """What one process recorded; a line that was torn when it died counts for nothing."""
    programs: dict[int, Program] = {}
    items: list[ManifestProgram] = []
    graphs: list[GraphKeys] = []
    for row in _rows(file):
        try:
            if "graph" in row:
                graphs.append(GraphKeys(row["graph"], (row["key"],)))
            elif "of" in row:
                items.append(_item(programs[row["of"]], row))
            else:
                programs[row["number"]] = _program(row["program"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{file} was not recorded by this preheat: {error!r}",
                hint="merge it with the one that wrote it, or remove it",
            ) from error
    return Manifest(tuple(items), tuple(graphs))


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
        asked=row.get("asked", 0),
        callers=(row["by"],) if row.get("by", "?") != "?" else (),
    )


def _fields(program: Program) -> dict[str, Any]:
    return {f.name: getattr(program, f.name) for f in fields(program)}


def _program(row: Mapping[str, Any]) -> Program:
    """The program that `_fields` took apart."""
    lists = {name: tuple(row[name]) for name in ("options", "include", "names")}
    pairs = {name: tuple(map(tuple, row.get(name, ()))) for name in ("headers", "spellings")}
    return Program(**{**row, **lists, **pairs})
