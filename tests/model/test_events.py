"""Events: counted by name, written as JSON lines, logged once."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from preheat.build.builder import Builder
from preheat.model.config import Config
from preheat.model.events import EVENTS, Events, JsonLines, logged_events, merge
from preheat.model.program import Program
from tests.conftest import SAXPY


def test_an_event_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError, match="hitt"):
        Events().emit("hitt")


def test_a_sink_gets_the_events_that_it_names() -> None:
    events = Events()
    seen: list[str] = []
    events.subscribe(lambda name, _: seen.append(name), "evict")
    events.subscribe(sink := lambda name, _: seen.append(f"every {name}"))
    events.emit("evict", files=1, bytes=1)
    events.emit("lost", device="cuda:0", reason="a fault")
    events.unsubscribe(sink)
    events.emit("lost", device="cuda:0", reason="a fault")
    assert seen == ["evict", "every evict", "every lost"]


def test_whether_an_event_has_a_sink_is_known_before_its_fields_are() -> None:
    events = logged_events()
    assert events.has_sink("damaged")
    assert not events.has_sink("resolve")  # The log has no message for it.
    events.subscribe(sink := lambda *_: None)
    assert events.has_sink("resolve")
    events.unsubscribe(sink)
    assert not events.has_sink("resolve")
    events.emit("resolve")
    assert events.stats() == {"resolve": 1}


def test_an_event_with_objects_reaches_only_a_sink_that_names_it_and_is_not_counted() -> None:
    every: list[str] = []
    events = Events(lambda name, _: every.append(name))
    requests: list[object] = []
    events.subscribe(lambda _, fields: requests.append(fields["artifact"]), "request")
    made = object()
    events.emit("request", program=None, arch=None, artifact=made)
    assert (requests, every, events.stats()) == ([made], [], {})


def test_hits_are_counted_by_tier_with_the_time_they_saved() -> None:
    events = Events()
    for tier in ("disk", "memory", "memory"):
        events.emit("hit", tier=tier, key="k", bytes=10, seconds_saved=0.5)
    assert events.stats() == {
        "hits.disk": 1,
        "hits.memory": 2,
        "bytes_read": 30,
        "seconds_saved": 1.5,
    }


def test_misses_are_counted_by_the_first_word_of_their_reason() -> None:
    events = Events()
    for reason in ("headers: a.h changed", "headers: b.h changed", "absent: nothing"):
        events.emit("miss", key="k", program="p", arch="a", reason=reason)
    assert events.stats() == {"misses.headers": 2, "misses.absent": 1}


def test_the_time_of_rejected_programs_is_not_that_of_compiled_ones() -> None:
    events = Events()
    events.emit("compile", key="k", program="p", arch="a", seconds=2.0, bytes=10)
    events.emit("reject", key="k", program="p", arch="a", seconds=0.5)
    assert events.stats() == {
        "compiles": 1,
        "seconds_compiling": 2.0,
        "rejections": 1,
        "seconds_rejecting": 0.5,
    }


def test_merging_counters_adds_them() -> None:
    assert merge({"a": 1}, {"a": 2, "b": 0.5}, {}) == {"a": 3, "b": 0.5}


def test_json_lines_are_one_object_each(tmp_path: Path) -> None:
    events = Events(JsonLines(tmp_path / "e.jsonl", clock=lambda: 12.0))
    events.emit("evict", files=2, bytes=10)
    events.fault("disk", "write", OSError(28, "No space left on device"))
    first, second = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert first == {"time": 12.0, "event": "evict", "files": 2, "bytes": 10}
    assert second["error"] == "OSError: [Errno 28] No space left on device"


def test_an_unwritable_event_file_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events(JsonLines(tmp_path / "no" / "such" / "place"))
    with caplog.at_level(logging.WARNING, "preheat"):
        events.emit("evict", files=1, bytes=1)
        events.emit("evict", files=1, bytes=1)
    assert len(caplog.records) == 1
    assert events.stats()["evicted_files"] == 2


def test_an_event_that_cannot_be_written_does_not_hide_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events(JsonLines(tmp_path / "place" / "e.jsonl"))
    with caplog.at_level(logging.WARNING, "preheat"):
        events.emit("evict", files=1, bytes=1)
    (tmp_path / "place").mkdir()
    events.emit("evict", files=2, bytes=1)
    (line,) = (tmp_path / "place" / "e.jsonl").read_text().splitlines()
    assert json.loads(line)["files"] == 2


def test_the_same_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    events = logged_events()
    with caplog.at_level(logging.WARNING, "preheat"):
        for _ in range(3):
            events.fault("disk", "write", OSError("full"))
        events.emit("refused", path="/x", reason="it is not yours")
        events.emit("damaged", tier="disk", key="ab" * 32, reason="too short")
        events.emit("evict", files=1, bytes=1)
    assert [r.message for r in caplog.records] == [
        "disk: cannot write: OSError: full",
        "/x is not used: it is not yours",
        "disk: entry abababababab is damaged (too short)",
    ]


def test_known_problems_are_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    events = logged_events()
    with caplog.at_level(logging.INFO, "preheat"):
        for _ in range(3):
            events.fault("disk", "write", OSError("full"))
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO", "INFO"]


def test_a_compile_a_load_a_loss_and_hits_are_logged_at_their_levels(
    caplog: pytest.LogCaptureFixture, config: Config
) -> None:
    builder = Builder.open(config)
    program = Program.of(SAXPY, label="saxpy.cu")
    with caplog.at_level(logging.DEBUG, "preheat"):
        builder.build(program, "sm_90")
        builder.build(program, "sm_90")
        builder.events.emit("load", device="cuda:0", program="saxpy.cu", key="k", seconds=0.0123)
        builder.events.emit("lost", device="cuda:0", reason="an illegal address was accessed")
    builder.close()
    seen = [(r.levelname, re.sub(r"in [\d.]+ s", "in … s", r.message)) for r in caplog.records]
    assert seen == [
        ("DEBUG", "saxpy.cu for sm_90 was not found: absent: nothing is stored under this key"),
        ("INFO", "saxpy.cu was compiled for sm_90 in … s"),
        ("DEBUG", "saxpy.cu for sm_90 was found in the memory tier"),
        ("INFO", "saxpy.cu was loaded on cuda:0 in … s"),
        ("INFO", "cuda:0 can no longer be used: an illegal address was accessed"),
    ]


def test_a_rejected_program_is_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    events = logged_events()
    with caplog.at_level(logging.INFO, "preheat"):
        events.emit("reject", key="k", program="k.cu", arch="sm_90", seconds=0.5)
        events.emit("uncached", program="k.cu", arch="sm_90", reason="it uses __TIME__")
        events.emit("hit", tier="disk", key="k", program="k.cu", arch="sm_90", bytes=1, seconds_saved=1)
    assert [r.message for r in caplog.records] == [
        "k.cu was rejected by the compiler for sm_90 after 0.500 s",
        "k.cu for sm_90 was not stored: it uses __TIME__",
    ]


def test_every_event_says_what_it_means() -> None:
    assert all(EVENTS.values())
