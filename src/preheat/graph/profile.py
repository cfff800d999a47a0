"""Sampled timings of replays on the host, and switches for debugging replays."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from preheat.errors import InputError
from preheat.model.config import Config
from preheat.model.events import Events, JsonLines, warn

__all__ = [
    "DEFAULT_OPTIONS", "EVERY", "Profile", "ReplayOptions", "ReplaySample", "RowSink", "row_sink",
    "to_stderr",
]  # fmt: skip

EVERY = 64  # replays from one sample to the next
RowSink = Callable[[Mapping[str, Any]], None]


class ReplayOptions(NamedTuple):
    """What replays do in addition, for measurements and debugging: nothing by default."""

    profile: Profile | None = None
    sync: bool = False  # wait after every replay, so that an error names the graph that caused it

    @classmethod
    def of(cls, config: Config, events: Events) -> ReplayOptions:
        """Return the settings of the environment; a profile goes where events go."""
        write = to_stderr if config.events is None else lambda row: events.emit("replay", **row)
        profile = Profile(write) if config.graph_profile else None
        return cls(profile, config.graph_sync)


class Profile:
    """Writes one row for each sampled replay: the first of every graph, then every `every`th.

    A row has the graph's name as `key`, the `count` of its replays so far, and microseconds:
    `upload_us`, `launch_us`, `total_us` and, where replays are waited for, `sync_us`. Between samples
    no clock is read. Each sink gets a copy of the row. A sink that raises is reported once to the log
    and gets no more rows; the replay and the other sinks are not affected.
    """

    def __init__(
        self,
        *sinks: RowSink,
        every: int = EVERY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if type(every) is not int or every < 1:
            raise InputError(f"every must be an integer of 1 or more, not {every!r}")
        self._sinks = sinks
        self.every = every
        self._clock = clock

    def sample(self, key: str | None, replays: int) -> ReplaySample | None:
        """Return the measurement of a replay after `replays` others, or None if it is not sampled."""
        sampled = replays % self.every == 0
        return ReplaySample(key, replays + 1, self._clock, self._write) if sampled else None

    def _write(self, row: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            try:
                sink(dict(row))
            except Exception as error:
                self._sinks = tuple(each for each in self._sinks if each is not sink)
                name = getattr(sink, "__qualname__", type(sink).__name__)
                warn(f"sampled replays are no longer given to {name}: {type(error).__name__}: {error}")


class ReplaySample:
    """The measurement of one replay: the microseconds of each stage."""

    def __init__(
        self,
        key: str | None,
        count: int,
        clock: Callable[[], float],
        write: RowSink,
    ) -> None:
        self._row: dict[str, Any] = {"key": key, "count": count}
        self._clock = clock
        self._write = write
        self._start = self._last = clock()

    def lap(self, stage: str) -> None:
        """Note that `stage` ends here."""
        now = self._clock()
        self._row[f"{stage}_us"] = round((now - self._last) * 1e6, 3)
        self._last = now

    def write(self) -> None:
        """Write the row, with the total time until the end of the last stage."""
        self._write({**self._row, "total_us": round((self._last - self._start) * 1e6, 3)})


def to_stderr(row: Mapping[str, Any]) -> None:
    """Write a row to the standard error as one JSON object."""
    if sys.stderr is not None:  # It is None under pythonw.
        sys.stderr.write(json.dumps(row) + "\n")


DEFAULT_OPTIONS = ReplayOptions()


def row_sink(given: Any) -> RowSink:
    """Return a function that writes rows of a profile to a sink."""
    if given is None:
        return to_stderr
    if callable(given):
        sink: RowSink = given
        return sink
    if not isinstance(given, str | os.PathLike):
        hint = 'gpu.profile("replays.jsonl", rows.append)'
        raise InputError(f"{given!r} is neither a file nor a callable that takes rows", hint=hint)
    return partial(JsonLines(Path(given)), "replay")
