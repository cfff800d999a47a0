"""Named events, the counters made from them, and where they go.

Everything that happens to a kernel on its way is one event with a name and fields. Events are
counted; sinks may also write them down. A fault of a cache tier is an event and nothing more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from preheat.files import opened
from preheat.locks import Lock

__all__ = ["EVENTS", "Events", "JsonLines", "Stats", "log_events", "merge", "warn"]

#: Every event there is: name, and what it says. The fields follow in brackets.
EVENTS: Mapping[str, str] = {
    "hit": "an artifact was found [tier, key, program, arch, bytes, seconds_saved]",
    "miss": "no tier had a usable artifact [key, program, arch, reason]",
    "compile": "the toolchain made an artifact [key, program, arch, seconds, bytes]",
    "reject": "the compiler rejected a program [key, program, arch, seconds]",
    "recall": "a remembered rejection was raised again without compiling [key, program, count]",
    "uncached": "an artifact was made and not stored [program, arch, reason]",
    "sealed": "a sealed process would have to compile [mode, program, arch, caller, reason]",
    "put": "a tier took an artifact [tier, key, bytes]",
    "fault": "a tier or file could not be used [where, verb, error]",
    "damaged": "an entry failed its check and counts as absent [tier, key, reason]",
    "evict": "entries were removed to stay within the limits [files, bytes]",
    "refused": "a directory or file of the cache or its locks was passed over [path, reason]",
    "wait": "another thread or process was compiling the same program [key, seconds, outcome]",
    "resolve": "a kernel of a loaded program was first asked for [key, program, entry]",
    "load": "a program was loaded on a device [device, program, key, seconds]",
    "lost": "a device can no longer be used, because of a fault on it [device, reason]",
    "graph": "a key was captured, evicted or put into quarantine [what, device, name, key, reason]",
    "replay": "a replay of a graph was sampled [key, count, upload_us, launch_us, sync_us, total_us]",
    "slow_path": "a shipped kernel takes a slower path; reported once [device, op, reason]",
    "blas": "products of matrices go to cuBLAS or to the shipped kernels [device, uses, reason]",
    "worker": "a compiler process was started or ended [what, reason]",
}

Stats = dict[str, float]  # counter name -> value; adding two of them adds the counters
Sink = Callable[[str, Mapping[str, Any]], None]


def _counters(name: str, fields: Mapping[str, Any]) -> Stats:
    """What one event adds to the counters."""
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
        case "fault":
            return {"faults": 1, f"faults.{fields['where']}": 1}
        case "worker":
            return {f"workers.{fields['what']}": 1}
        case _:
            return {name: 1}


class Events:
    """Counts events and hands them to sinks. Safe from any thread."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = list(sinks)
        self._lock = Lock()
        self._stats: Stats = {}

    def emit(self, name: str, /, **fields: Any) -> None:
        """Count the event `name` and pass it on. `name` is one of `EVENTS`."""
        if name not in EVENTS:
            raise KeyError(f"no event is called {name!r}")
        with self._lock:
            for counter, amount in _counters(name, fields).items():
                self._stats[counter] = self._stats.get(counter, 0) + amount
        for sink in self.sinks:
            sink(name, fields)

    def fault(self, where: str, verb: str, error: BaseException) -> None:
        """A tier or file could not be used; say so and go on."""
        self.emit("fault", where=where, verb=verb, error=f"{type(error).__name__}: {error}")

    def stats(self) -> Stats:
        """A copy of the counters."""
        with self._lock:
            return dict(self._stats)

    def forget(self) -> None:
        """Start counting from nothing, as a forked child must."""
        self._stats = {}


def merge(*stats: Mapping[str, float]) -> Stats:
    """The sum of several sets of counters."""
    total: Stats = {}
    for one in stats:
        for counter, amount in one.items():
            total[counter] = total.get(counter, 0) + amount
    return total


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY


class JsonLines:
    """A sink that appends each event to a file as one JSON object a line.

    A file that cannot be written is reported once to the log and then left alone. A pipe is not waited
    for: without a reader it cannot be written, and what its reader is too slow for is lost.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock, self._broken, self._lost = path, clock, False, False

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        if self._broken:
            return
        line = json.dumps({"time": round(self._clock(), 6), "event": name, **fields}, default=str)
        try:
            with opened(self._path, _APPEND, 0o666) as file:
                # One write in append mode: lines of several processes do not mix.
                os.write(file, line.encode() + b"\n")
        except BlockingIOError:
            if not self._lost:
                self._lost = True
                warn(f"events are lost: the reader of {self._path} is too slow")
        except OSError as fault:
            self._broken = True
            warn(f"events are not written to {self._path}: {fault}")


_INFO, _DEBUG = 20, 10  # as `logging` numbers them

#: What the log says about events that are no trouble.
_LOG_MESSAGES: Mapping[str, tuple[int, str]] = {
    "compile": (_INFO, "{program} was compiled for {arch} in {seconds:.3f} s"),
    "reject": (_INFO, "{program} was rejected by the compiler for {arch} after {seconds:.3f} s"),
    "uncached": (_INFO, "{program} for {arch} was not stored: {reason}"),
    "load": (_INFO, "{program} was loaded on {device} in {seconds:.4f} s"),
    "lost": (_INFO, "{device} can no longer be used: {reason}"),
    "hit": (_DEBUG, "{program} for {arch} was found in the {tier} tier"),
    "miss": (_DEBUG, "{program} for {arch} was not found: {reason}"),
}


def log_events() -> Sink:
    """A sink that logs to the `preheat` logger.

    Each kind of trouble is a warning once, and INFO from then on. Compiles and loads are INFO, hits and
    misses DEBUG.
    """
    seen: set[tuple[str, str]] = set()

    def sink(name: str, fields: Mapping[str, Any]) -> None:
        if name in _LOG_MESSAGES:
            level, text = _LOG_MESSAGES[name]
            if (logger := _logger()) is not None and logger.isEnabledFor(level):
                logger.log(level, "%s", text.format_map(fields))
            return
        if (trouble := _trouble(name, fields)) is None:
            return
        what, where, told = trouble
        if (what, where) not in seen:
            seen.add((what, where))
            warn(told)
        elif (logger := _logger()) is not None:
            logger.info("%s", told)

    return sink


def _trouble(name: str, fields: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The kind of trouble that an event tells of, where it is, and the sentence for the log."""
    match name:
        case "fault":
            what, where = f"cannot {fields['verb']}", str(fields["where"])
            return what, where, f"{where}: {what}: {fields['error']}"
        case "refused":
            where = str(fields["path"])
            return "refused", where, f"{where} is not used: {fields['reason']}"
        case "sealed" if fields["mode"] != "error":  # that one the caller hears of
            where = f"{fields['program']} for {fields['arch']}"
            told = f"{fields['caller']}: {where} is compiled, though sealed: {fields['reason']}"
            return "sealed", where, told
        case "damaged":
            where = str(fields["tier"])
            told = f"{where}: entry {fields['key'][:12]} is damaged ({fields['reason']})"
            return "damaged", where, told
    return None


def _logger() -> Any:
    """The `preheat` logger; None in a process that has not imported `logging`.

    Such a process has not configured it either. Importing it here would cost milliseconds, and a child
    forked meanwhile could never import it.
    """
    get = getattr(sys.modules.get("logging"), "getLogger", None)
    return None if get is None else get("preheat")


def warn(text: str) -> None:
    """Log a warning on the `preheat` logger, or write it where `logging` would, were it imported."""
    if (logger := _logger()) is not None:
        logger.warning("%s", text)
    elif sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
