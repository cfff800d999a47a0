"""Named events, their counters, and the sinks that receive them.

Each step of a build is an event with a name and fields. Events are counted and passed to sinks, which
may write them to a file or a log. A fault of a cache tier is an event, not an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.process import fork
from preheat.process.files import open_fd
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock

if TYPE_CHECKING:
    import ctypes
else:
    ctypes = LazyModule("ctypes")  # Only an audit needs it.

__all__ = [
    "EVENTS",
    "OBJECT_EVENTS",
    "Events",
    "JsonLines",
    "ProcessCounters",
    "Stats",
    "audit_sink",
    "log_events",
    "logged_events",
    "merge",
    "process_counters",
    "warn",
]

#: Every event by name: its meaning, and its fields in brackets.
EVENTS: Mapping[str, str] = {
    "hit": "an artifact was found [tier, key, program, arch, bytes, seconds_saved]",
    "miss": "no tier had a usable artifact [key, program, arch, reason]",
    "compile": "the toolchain made an artifact [key, program, arch, seconds, bytes]",
    "reject": "the compiler rejected a program [key, program, arch, seconds]",
    "recall": "a remembered rejection was raised again without compiling [key, program, count]",
    "uncached": "an artifact was made and not stored [program, arch, reason]",
    "sealed": "a sealed process would have to compile or measure [mode, program, arch, caller, reason]",
    "stale": "a sealed process uses code of other header files [program, arch, caller, header, reason]",
    "headers": "a sealed process does not refuse code of other header files; reported once [policy]",
    "put": "a tier stored an artifact or a list of header states [tier, key, bytes]",
    "fault": "a tier or file could not be used [where, verb, error]",
    "damaged": "an entry failed its check and counts as absent [tier, key, reason]",
    "untrusted": "no trusted key signed an entry of a remote: it counts as absent [tier, key, reason]",
    "dropped": "an entry was not written to a remote [tier, key, reason]",
    "remote": "a request to a remote ended [tier, verb, seconds, failed, sent, received]",
    "recovered": "requests to a remote resume after a pause, which a fault had caused [tier, verb]",
    "evict": "entries were removed to stay within the limits [files, bytes]",
    "refused": "a directory, a file of the cache, a bundle or a remote is not used [path, reason]",
    "wait": "another thread, process or host compiled or loaded the program [key, seconds, outcome]",
    "lease": "a lease among hosts was requested, lost or released [key, outcome, requests]",
    "resolve": "a kernel of a loaded program was first used [key, program, entry]",
    "load": "a program was loaded on a device [device, program, key, seconds]",
    "lost": "a device can no longer be used, because of a fault on it [device, reason]",
    "graph": "a key was captured, evicted or put into quarantine [what, device, name, key, reason]",
    "replay": "a replay of a graph was sampled [key, count, upload_us, launch_us, sync_us, total_us]",
    "slow_path": "a shipped kernel takes a slower path; reported once [device, op, reason]",
    "blas": "matrix products use cuBLAS or the shipped kernels [device, uses, reason]",
    "worker": "a compiler process was started or ended [what, reason]",
    "weak": "a sealed process uses a kernel that assumes too little [program, caller, key, variant]",
}

#: Events with Python objects as fields. They are not counted, and only sinks that name them get them.
OBJECT_EVENTS: Mapping[str, str] = {
    "request": "a builder returned an artifact; `arch` is the requested one [program, arch, artifact]",
    "foreign_request": "another library found or made an entry; `row` describes it [entry, row, site]",
}

Stats = dict[str, float]  # counter name -> value
Sink = Callable[[str, Mapping[str, Any]], None]


def _counters(name: str, fields: Mapping[str, Any]) -> Stats:
    """Return what one event adds to the counters."""
    match name:
        case "hit":
            return {
                f"hits.{fields['tier']}": 1,
                "bytes_read": fields["bytes"],
                "seconds_saved": fields["seconds_saved"],
            }
        case "miss":
            return {f"misses.{fields['reason'].split(':')[0]}": 1}
        case "compile":
            return {"compiles": 1, "seconds_compiling": fields["seconds"]}
        case "reject":
            return {"rejections": 1, "seconds_rejecting": fields["seconds"]}
        case "put":
            return {f"puts.{fields['tier']}": 1, f"bytes_written.{fields['tier']}": fields["bytes"]}
        case "evict":
            return {"evicted_files": fields["files"], "evicted_bytes": fields["bytes"]}
        case "wait":
            return {"waits": 1, "seconds_waiting": fields["seconds"]}
        case "lease":
            return {f"leases.{fields['outcome']}": 1, "lease_requests": fields["requests"]}
        case "fault":
            return {"faults": 1, f"faults.{fields['where']}": 1}
        case "untrusted" | "dropped":
            return {name: 1, f"{name}.{fields['tier']}": 1}
        case "remote":
            return _request_counters(fields)
        case "worker":
            return {f"workers.{fields['what']}": 1}
        case _:
            return {name: 1}


def _request_counters(fields: Mapping[str, Any]) -> Stats:
    tier = fields["tier"]
    counted = {f"requests.{tier}.{fields['verb']}": 1, f"seconds_of_requests.{tier}": fields["seconds"]}
    sizes = {
        f"failed_requests.{tier}": int(fields["failed"]),
        f"bytes_sent.{tier}": fields["sent"],
        f"bytes_received.{tier}": fields["received"],
    }
    return counted | {counter: amount for counter, amount in sizes.items() if amount}


_COUNT_AT = 256  # events that wait to be counted, at most


class ProcessCounters:
    """The sum of the counters of all `Events` of this process. It never decreases.

    It also has sinks, which get the events of all `Events`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stats: Stats = {}
        # Events that are not counted yet, each with the counters of the `Events` that emitted it.
        # Appending is one atomic step, which needs no lock.
        self.uncounted: deque[tuple[Stats, str, Mapping[str, Any]]] = deque()
        self.sinks: dict[str, list[Sink]] = {}  # by the name of the event
        fork.register(self)

    def stats(self, part: Stats | None = None) -> Stats:
        """Count what is not counted yet, and return a copy of all counters, or of those in `part`."""
        with self._lock:
            while True:
                try:
                    stats, name, fields = self.uncounted.popleft()
                except IndexError:  # A signal handler may have emptied it in the meantime.
                    return dict(self._stats if part is None else part)
                for counter, amount in _counters(name, fields).items():
                    for each in (stats, self._stats):
                        each[counter] = each.get(counter, 0) + amount

    def subscribe(self, sink: Sink, *names: str) -> None:
        """Pass the events called `names` of all `Events`, present and future, to `sink`."""
        for name in names:
            self.sinks.setdefault(name, []).append(sink)

    def after_fork(self) -> None:
        """Count from zero in a forked child."""
        self.stats()
        self._stats = {}


#: The counters of this process.
process_counters = ProcessCounters()
_uncounted = process_counters.uncounted


class Events:
    """Counts events and passes them to sinks. It is safe from any thread.

    The page Events of the reference describes every event.

    Examples:
        >>> events = preheat.Events()
        >>> events.subscribe(lambda name, fields: print(name, fields["program"]), "miss", "compile")
        >>> builder = preheat.Builder.open(cache_dir="observed", events=events)
        >>> artifact = builder.build(preheat.Program.of(SAXPY, label="saxpy.cu"), "sm_90")
        miss saxpy.cu
        compile saxpy.cu
        >>> events.stats()["compiles"]
        1
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks: dict[str, list[Sink]] = {}  # by the name of the event
        self._stats: Stats = {}
        for sink in sinks:
            self.subscribe(sink)

    def subscribe(self, sink: Sink, *names: str) -> None:
        """Pass events to `sink` from now on.

        Args:
            sink: A function of the name of an event and its fields.
            names: The names of events. The default is all of `EVENTS`.

        Examples:
            >>> seen = []
            >>> events = preheat.Events()
            >>> events.subscribe(lambda name, fields: seen.append(fields["reason"]), "uncached")
            >>> events.emit("uncached", program="a.cu", arch="sm_90", reason="it reads the clock")
            >>> seen
            ['it reads the clock']
        """
        for name in names or EVENTS:
            self._sinks.setdefault(name, []).append(sink)

    def unsubscribe(self, sink: Sink) -> None:
        """Pass no more events to `sink`.

        Examples:
            >>> seen = []
            >>> def sink(name, fields):
            ...     seen.append(name)
            >>> events = preheat.Events(sink)
            >>> events.unsubscribe(sink)
        """
        self._sinks = {name: [s for s in sinks if s != sink] for name, sinks in self._sinks.items()}

    def has_sink(self, name: str) -> bool:
        """Return True if a sink gets the events called `name`. Otherwise they are only counted.

        Examples:
            >>> preheat.Events().has_sink("hit")
            False
        """
        return bool(self._sinks.get(name) or process_counters.sinks.get(name))

    def emit(self, name: str, /, **fields: Any) -> None:
        """Count the event `name`, which is one of `EVENTS`, and pass it to its sinks.

        Args:
            name: The name of the event.
            fields: The fields of the event.

        Raises:
            KeyError: No event has this name.

        Examples:
            >>> events = preheat.Events()
            >>> events.emit("put", tier="disk", key="6fd5", bytes=4096)
            >>> events.stats()
            {'puts.disk': 1, 'bytes_written.disk': 4096}
        """
        if name in EVENTS:
            _uncounted.append((self._stats, name, fields))
            if len(_uncounted) >= _COUNT_AT:
                process_counters.stats()
        elif name not in OBJECT_EVENTS:
            raise KeyError(f"no event is called {name!r}")
        for sink in self._sinks.get(name, ()):
            sink(name, fields)
        for sink in process_counters.sinks.get(name, ()):
            sink(name, fields)

    def fault(self, where: str, verb: str, error: BaseException) -> None:
        """Emit a `fault` event: a tier or file cannot be used, and the caller continues without it.

        Args:
            where: The tier or file.
            verb: The operation that failed.
            error: Its error.

        Examples:
            >>> events = preheat.Events()
            >>> events.fault("disk", "write", OSError("the disk is full"))
            >>> events.stats()["faults"]
            1
        """
        self.emit("fault", where=where, verb=verb, error=f"{type(error).__name__}: {error}")

    def stats(self) -> Stats:
        """Return a copy of the counters.

        Examples:
            >>> preheat.Events().stats()
            {}
        """
        return process_counters.stats(self._stats)

    def forget(self) -> None:
        """Set all counters to zero, as a forked child must."""
        self._stats = {}  # Events of the parent that are not counted yet go to the old counters.


def merge(*stats: Mapping[str, float]) -> Stats:
    """Return the sum of several sets of counters."""
    total: Stats = {}
    for one in stats:
        for counter, amount in one.items():
            total[counter] = total.get(counter, 0) + amount
    return total


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY


class JsonLines:
    """A sink that appends each event to a file as one line of JSON.

    An event that cannot be written is lost, and the later ones are written if they can be. The first
    loss is reported in the log. A write to a pipe does not block: events are lost when there is no
    reader, or when the reader is too slow.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lost = False

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        line = json.dumps({"time": round(self._clock(), 6), "event": name, **fields}, default=str)
        try:
            with open_fd(self._path, _APPEND, 0o666) as file:
                # One write in append mode, so that lines of several processes do not mix.
                os.write(file, line.encode() + b"\n")
        except BlockingIOError:
            self._lose(f"events are lost: the reader of {self._path} is too slow")
        except OSError as fault:
            self._lose(f"events are not written to {self._path}: {fault}")

    def _lose(self, message: str) -> None:
        if not self._lost:
            self._lost = True
            warn(message)


def audit_sink(env: Mapping[str, str]) -> Sink | None:
    """Return a sink that reports each event to the audit that `env` describes; None without an audit.

    The audit library of the process writes the events, because it can do so where this process cannot
    open a file any more. It also counts those that it cannot write.
    """
    path = env.get("PREHEAT_AUDIT_LIBRARY")
    if not path or "PREHEAT_AUDIT_ONLY" in env:
        return None
    try:
        append = ctypes.CDLL(path).preheat_audit_append
    except (OSError, AttributeError) as fault:  # The audit has ended, and its library is gone.
        warn(f"events are not reported to the audit: {fault}")
        return None

    def sink(name: str, fields: Mapping[str, Any]) -> None:
        row = {"time": round(time.time(), 6), "event": name, **fields}
        event = {"event": "preheat", "time": round(time.monotonic(), 6), "pid": os.getpid(), "row": row}
        line = f"\n{json.dumps(event, default=str)}\n".encode()
        append(line, ctypes.c_size_t(len(line)))

    return sink


_INFO = 20  # the levels of `logging`
_DEBUG = 10

#: The level and the message of events that are not problems, or whose error the caller gets.
_LOG_MESSAGES: Mapping[str, tuple[int, str]] = {
    "compile": (_INFO, "{program} was compiled for {arch} in {seconds:.3f} s"),
    "reject": (_INFO, "{program} was rejected by the compiler for {arch} after {seconds:.3f} s"),
    "uncached": (_INFO, "{program} for {arch} was not stored: {reason}"),
    "load": (_INFO, "{program} was loaded on {device} in {seconds:.4f} s"),
    "lost": (_INFO, "{device} can no longer be used: {reason}"),
    "recovered": (_INFO, "{tier}: requests to {verb} are made again"),
    "hit": (_DEBUG, "{program} for {arch} was found in the {tier} tier"),
    "miss": (_DEBUG, "{program} for {arch} was not found: {reason}"),
}


def logged_events() -> Events:
    """Return events whose problems, compiles, loads and lookups go to the log; see `log_events`."""
    events = Events()
    events.subscribe(log_events(), *_LOG_MESSAGES, *_PROBLEMS)
    return events


def log_events() -> Sink:
    """Return a sink that logs to the `preheat` logger.

    Each kind of problem is logged as a warning once, and as INFO from then on. Compiles and loads are
    logged as INFO, hits and misses as DEBUG.
    """
    seen: set[tuple[str, str]] = set()

    def sink(name: str, fields: Mapping[str, Any]) -> None:
        if name in _LOG_MESSAGES:
            level, text = _LOG_MESSAGES[name]
            if "logging" not in sys.modules:  # Tested here, because hits of lookups are frequent.
                return
            if (logger := _logger()) is not None and logger.isEnabledFor(level):
                logger.log(level, "%s", text.format_map(fields))
            return
        if (problem := _problem(name, fields)) is None:
            return
        what, where, message = problem
        if (what, where) not in seen:
            seen.add((what, where))
            warn(message)
        elif (logger := _logger()) is not None:
            logger.info("%s", message)

    return sink


#: The events that `_problem` has a message for.
_PROBLEMS = ("fault", "refused", "sealed", "stale", "damaged", "untrusted")


def _problem(name: str, fields: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the kind of problem of an event, its place, and the message for the log."""
    match name:
        case "fault":
            what = f"cannot {fields['verb']}"
            where = str(fields["where"])
            return what, where, f"{where}: {what}: {fields['error']}"
        case "refused":
            where = str(fields["path"])
            return "refused", where, f"{where} is not used: {fields['reason']}"
        case "sealed" if fields["mode"] != "error":  # The caller gets an error in that mode.
            where = f"{fields['program']} for {fields['arch']}"
            done = "measured" if fields["reason"].startswith("unmeasured:") else "compiled"
            what = f"{where} is {done} although this process is sealed"
            return "sealed", where, f"{fields['caller']}: {what}: {fields['reason']}"
        case "stale":
            where = f"{fields['program']} for {fields['arch']}"
            what = f"{where} is used as it was baked"
            return "stale", str(fields["header"]), f"{fields['caller']}: {what}, but {fields['reason']}"
        case "untrusted":
            where = str(fields["tier"])
            message = f"{where}: entry {fields['key'][:12]} is not used: {fields['reason']}"
            return "untrusted", where, message
        case "damaged":
            where = str(fields["tier"])
            message = f"{where}: entry {fields['key'][:12]} is damaged ({fields['reason']})"
            return "damaged", where, message
    return None


def _logger() -> Any:
    """Return the `preheat` logger, or None in a process that has not imported `logging`.

    Such a process has not configured logging either. An import here would take milliseconds, and a
    child that is forked during the import could not import the module itself.
    """
    get = getattr(sys.modules.get("logging"), "getLogger", None)
    return None if get is None else get("preheat")


def warn(text: str) -> None:
    """Log a warning, or write it to stderr as `logging` would, if that is not imported."""
    if (logger := _logger()) is not None:
        logger.warning("%s", text)
    elif sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
