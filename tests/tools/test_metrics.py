"""The table of metrics, and its text: every counter has a metric, and Prometheus reads the text."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.model.events import EVENTS, Events, Stats, merge, process_counters
from preheat.tools.metrics.metrics import (
    METRICS,
    OTHER,
    Family,
    Sample,
    counter_families,
    exposition,
    measured,
)
from tests.command import Cli, command_line
from tests.conftest import SAXPY

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
#: A value for every field that is counted.
FIELDS: dict[str, Any] = {
    "tier": "disk",
    "bytes": 3,
    "seconds": 0.25,
    "seconds_saved": 0.5,
    "reason": "absent: nothing",
    "where": "disk",
    "what": "started",
    "files": 2,
    "verb": "read",
    "failed": True,
    "sent": 5,
    "received": 7,
    "outcome": "released",
    "requests": 4,
}
#: Counters that are the sum of others with labels.
SUMS = {"faults", "untrusted", "dropped"}


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    return command_line(capsys, monkeypatch, tmp_path, tmp_path / "cache")


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples that Prometheus finds in `text`, by name and labels."""
    assert text.endswith("\n")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def counted() -> Events:
    events = Events()
    for name in EVENTS:
        events.emit(name, **FIELDS)
    return events


def test_every_event_is_counted_by_a_metric() -> None:
    assert OTHER not in measured(counted().stats())


def test_every_metric_counts_an_event() -> None:
    zero = [m.name for m, rows in measured(counted().stats()).items() if not sum(r.value for r in rows)]
    assert zero == []


def test_names_follow_the_rules_of_prometheus() -> None:
    names = [metric.prometheus for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"preheat(_[a-z]+)+_total", metric.prometheus)
        assert ("seconds" in metric.counter) == metric.prometheus.endswith("_seconds_total")
        assert ("bytes" in metric.counter) == metric.prometheus.endswith("_bytes_total")


def test_prometheus_reads_the_counters_as_they_are() -> None:
    stats = counted().stats()
    found = parsed(exposition(counter_families(stats)))
    assert found["preheat_hits_total", (("tier", "disk"),)] == 1
    assert found["preheat_misses_total", (("reason", "absent"),)] == 1
    assert found["preheat_requests_total", (("tier", "disk"), ("verb", "read"))] == 1
    assert found["preheat_compiling_seconds_total", ()] == 0.25
    assert found["preheat_faults_total", (("where", "disk"),)] == 1  # and no sum beside its parts
    assert sum(found.values()) == pytest.approx(sum(v for k, v in stats.items() if k not in SUMS))


def test_counters_without_an_event_are_zero() -> None:
    found = parsed(exposition(counter_families({})))
    assert set(found) == {(metric.prometheus, ()) for metric in METRICS if not metric.labels}
    assert set(found.values()) == {0}


def test_the_name_of_a_tier_may_have_dots() -> None:
    found = parsed(exposition(counter_families({"hits.remote.2": 3, "requests.remote.2.read": 4})))
    assert found["preheat_hits_total", (("tier", "remote.2"),)] == 3
    assert found["preheat_requests_total", (("tier", "remote.2"), ("verb", "read"))] == 4


def test_counters_of_another_release_are_kept() -> None:
    found = parsed(exposition(counter_families({"teleports.disk": 3})))
    assert found["preheat_other_total", (("counter", "teleports.disk"),)] == 3


def test_a_counter_with_too_few_labels_is_kept() -> None:
    found = parsed(exposition(counter_families({"requests.x": 3})))
    assert found["preheat_other_total", (("counter", "requests.x"),)] == 3


@given(st.text(), st.text(st.characters(codec="utf-8")), st.floats(0, 1e18))
def test_any_label_and_any_help_survive(label: str, help: str, value: float) -> None:
    family = Family("preheat_test_total", "counter", help, (Sample(value, (("label", label),)),))
    (read,) = parser.text_string_to_metric_families(exposition([family]))
    (sample,) = read.samples
    assert sample.labels == {"label": label.encode(errors="replace").decode()}
    assert sample.value == value
    assert read.documentation.split() == help.split()


def test_the_command_agrees_with_stats(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    for _ in range(2):
        assert cli("compile", "saxpy.cu", "--arch", "sm_90").code == 0
    key = cli("cache", "ls", "--json").json()[0]["key"]
    assert cli("cache", "pin", key).code == 0
    stats = cli("cache", "stats", "--json").json()
    found = parsed(cli("cache", "metrics").out)
    for counter, value in stats["counters"].items():
        first, _, rest = counter.partition(".")
        (metric,) = (m for m in METRICS if m.counter in (counter, first))
        assert found[metric.prometheus, metric.labelled(rest) if rest else ()] == value
    assert found["preheat_compiles_total", ()] == 1
    assert found["preheat_hits_total", (("tier", "disk"),)] == 1
    assert found["preheat_cache_entries", (("kind", "cuda"),)] == stats["entries"] == 1
    assert found["preheat_cache_bytes", ()] == stats["bytes"]
    assert found["preheat_cache_files", ()] == stats["files"]
    assert found["preheat_cache_limit_bytes", ()] == stats["limits"]["bytes"]
    assert found["preheat_cache_limit_files", ()] == stats["limits"]["files"]
    assert found["preheat_cache_pinned", ()] == 1


def test_the_command_works_on_an_empty_cache(cli: Cli) -> None:
    found = parsed(cli("cache", "metrics").out)
    assert found["preheat_cache_files", ()] == found["preheat_compiles_total", ()] == 0


def test_the_page_lists_every_metric() -> None:
    rows = re.findall(
        r"^\| `(preheat_\w+)` \| `(preheat[\w.]+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M
    )
    expected = [
        (m.prometheus, m.name, " ".join(f"`{label}`" for label in m.labels), m.help)
        for m in (*METRICS, OTHER)
    ]
    assert rows == expected


# The whole process


def since(before: Stats) -> Stats:
    """Return what the process has counted since `before`."""
    now = process_counters.stats()
    changes = {name: amount - before.get(name, 0) for name, amount in now.items()}
    return {name: amount for name, amount in changes.items() if amount}


def test_the_counters_of_a_process_never_decrease() -> None:
    before = process_counters.stats()
    kept, gone = Events(), Events()
    for events in (kept, gone, gone):
        events.emit("load")
    assert since(before) == {"load": 3}
    del gone, events
    gc.collect()
    assert since(before) == merge(kept.stats(), {"load": 2})


def test_every_event_is_counted_once_whoever_reads_the_counters() -> None:
    before = process_counters.stats()
    one, other = Events(), Events()
    for _ in range(300):  # more than may wait to be counted
        one.emit("load")
        other.emit("weak")
    assert one.stats() == one.stats() == {"load": 300}
    assert since(before) == {"load": 300, "weak": 300}
    assert other.stats() == {"weak": 300}
    one.forget()
    assert one.stats() == {}
    assert since(before) == {"load": 300, "weak": 300}


def test_a_subscriber_gets_the_events_of_builders_before_and_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_counters, "sinks", {})
    before = Events()
    assert not before.has_sink("compile")
    seen: list[str] = []
    process_counters.subscribe(lambda _, fields: seen.append(fields["program"]), "compile")
    after = Events()
    assert before.has_sink("compile")
    for events, program in ((before, "a"), (after, "b")):
        events.emit("compile", program=program, seconds=0)
        events.emit("load")
    assert seen == ["a", "b"]


def test_a_forked_child_counts_from_zero() -> None:
    before = process_counters.stats()
    Events().emit("load")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, repr(process_counters.stats()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"{}"
    os.close(read)
    os.close(write)
    assert since(before) == {"load": 1}
