"""The profile of replays, and the debugging options that slow replays down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import preheat
from preheat.emulator.device import EmulatorDevice
from preheat.errors import ConfigError, InputError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.graph.profile import DEFAULT_OPTIONS, Profile, ReplayOptions
from preheat.model.config import Config
from tests.devices.support import KERNELS
from tests.faulty import FaultyDevice

Rows = list[dict[str, Any]]
Open = Callable[[ReplayOptions], Gpu]


class Clock:
    """A clock that advances by one microsecond at each reading and counts its readings."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.reads * 1e-6


def counting(gpu: Gpu, name: str = "counting") -> Graph:
    """Return a graph of one launch that counts in a device variable."""
    count = gpu.kernel(KERNELS, "count")
    with gpu.capture(name=name) as graph:
        count[1, 1]()
    return graph


@pytest.fixture
def seam() -> FaultyDevice:
    return FaultyDevice(EmulatorDevice())


@pytest.fixture
def open_with(shared_builder: Any, seam: FaultyDevice) -> Iterator[Open]:
    """Opens a counted device whose graphs have the given options."""
    opened: list[Gpu] = []

    def open_one(options: ReplayOptions) -> Gpu:
        opened.append(Gpu(seam, shared_builder, replay_options=options))
        return opened[-1]

    yield open_one
    for gpu in opened:
        gpu.close()


def test_without_a_profile_no_clock_is_read(open_with: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = counting(open_with(DEFAULT_OPTIONS))
    clock = Clock()
    for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"):
        monkeypatch.setattr(f"time.{name}", clock)
    for _ in range(130):
        graph.replay()
    assert (graph.num_replays, clock.reads) == (130, 0)


def test_the_first_replay_and_every_64th_after_it_are_sampled(open_with: Open) -> None:
    rows: Rows = []
    clock = Clock()
    graph = counting(open_with(ReplayOptions(Profile(lambda row: rows.append(dict(row)), clock=clock))))
    for _ in range(130):
        graph.replay()
    assert [row["count"] for row in rows] == [1, 65, 129]
    assert clock.reads == 3 * 3  # start, upload, launch: none between samples


def test_a_row_names_its_graph_and_adds_up(open_with: Open) -> None:
    rows: Rows = []
    profile = Profile(lambda row: rows.append(dict(row)), every=1, clock=Clock())
    counting(open_with(ReplayOptions(profile)), "decode").replay()
    (row,) = rows
    assert row == {"key": "decode", "count": 1, "upload_us": 1.0, "launch_us": 1.0, "total_us": 2.0}


def test_each_graph_is_counted_for_itself(open_with: Open) -> None:
    rows: Rows = []
    gpu = open_with(ReplayOptions(Profile(lambda row: rows.append(dict(row)), every=2, clock=Clock())))
    graphs = [counting(gpu, name) for name in "ab"]
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    assert [(row["key"], row["count"]) for row in rows] == [("a", 1), ("b", 1), ("a", 3), ("b", 3)]


@pytest.mark.parametrize("sync", [False, True])
def test_sync_waits_after_every_replay_and_adds_a_column(
    sync: bool, open_with: Open, seam: FaultyDevice
) -> None:
    rows: Rows = []
    profile = Profile(lambda row: rows.append(dict(row)), every=1, clock=Clock())
    graph = counting(open_with(ReplayOptions(profile, sync=sync)))
    before = seam.calls["stream.synchronize"]
    for _ in range(5):
        graph.replay()
    assert seam.calls["stream.synchronize"] - before == (5 if sync else 0)
    assert [("sync_us" in row) for row in rows] == [sync] * 5


def test_switched_on_by_hand_it_writes_json_lines_to_a_file(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "profile.jsonl"
    before = counting(device, "before")
    device.profile(file, every=2)
    graph = counting(device, "after")
    for _ in range(5):
        graph.replay()
        before.replay()  # captured before: not sampled
    device.synchronize()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    seen = [(row["event"], row["key"], row["count"]) for row in rows]
    assert seen == [("replay", "after", 1), ("replay", "after", 3), ("replay", "after", 5)]
    for row in rows:
        assert np.isclose(row["upload_us"] + row["launch_us"], row["total_us"], atol=0.01)


def test_switched_on_by_hand_without_a_file_it_writes_to_standard_error(
    device: Gpu, capsys: pytest.CaptureFixture[str]
) -> None:
    device.profile(every=1)
    counting(device, "loud").replay()
    device.synchronize()
    assert json.loads(capsys.readouterr().err)["key"] == "loud"


def test_a_profile_writes_to_several_sinks(
    device: Gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.jsonl"
    rows = list[Any]()
    device.profile(file, rows.append, None, every=2)
    graph = counting(device, "seen")
    for _ in range(3):
        graph.replay()
    device.synchronize()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    shown = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [row["count"] for row in rows] == [1, 3]
    assert rows == shown == [{key: row[key] for key in rows[0]} for row in written]


def test_a_sink_that_fails_stops_neither_the_replay_nor_the_other_sinks(
    device: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    before = list[Any]()
    after = list[Any]()
    calls = list[int]()

    def broken(row: Any) -> None:
        calls.append(row["count"])
        row.clear()
        raise ConnectionError("the collector is gone")

    device.profile(before.append, broken, after.append, every=1)
    graph = counting(device)
    for _ in range(3):
        graph.replay()
    assert graph.num_replays == 3
    assert before == after
    assert [row["count"] for row in before] == [1, 2, 3]
    assert calls == [1]  # it is left alone from then on, and reported once
    assert [record.getMessage() for record in caplog.records] == [
        "sampled replays are no longer given to test_a_sink_that_fails_stops_neither_the_replay_nor_"
        "the_other_sinks.<locals>.broken: ConnectionError: the collector is gone"
    ]


def test_an_interrupt_inside_a_sink_propagates(device: Gpu) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    device.profile(interrupted, every=1)
    graph = counting(device)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            graph.replay()
    assert graph.num_replays == 2


def test_a_value_that_is_no_sink_of_a_profile_is_refused(device: Gpu) -> None:
    wrong: Any = 7
    with pytest.raises(InputError, match="7 is neither a file nor a callable that takes rows"):
        device.profile("profile.jsonl", wrong)


def test_a_profile_of_every_0th_replay_is_refused(device: Gpu) -> None:
    with pytest.raises(InputError, match="every must be an integer of 1 or more, not 0"):
        device.profile(every=0)


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_the_environment_switches_everything_on(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PROFILE", "SYNC"):
        monkeypatch.setenv(f"PREHEAT_GRAPH_{name}", word)
    with preheat.device("emulator:5") as gpu:
        counting(gpu, "seen").replay()
    row = json.loads(capsys.readouterr().err)
    assert row["key"] == "seen"
    assert {"upload_us", "launch_us", "sync_us", "total_us"} < row.keys()


@pytest.mark.parametrize("name", ["PROFILE", "SYNC"])
def test_each_variable_switches_its_own_option_alone(name: str) -> None:
    options = ("PROFILE", "SYNC")
    settings = {f"PREHEAT_GRAPH_{each}": "1" if each == name else "0" for each in options}
    for env in ({}, settings):
        config = Config.from_env(env)
        on = [config.graph_profile, config.graph_sync]
        assert on == [bool(env) and each == name for each in options]


def test_a_profile_goes_to_the_file_of_the_events_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "events.jsonl"
    monkeypatch.setenv("PREHEAT_GRAPH_PROFILE", "1")
    monkeypatch.setenv("PREHEAT_EVENTS", str(file))
    with preheat.device("emulator:7", cache_dir=tmp_path / "cache") as gpu:
        graph = counting(gpu, "seen")
        for _ in range(65):
            graph.replay()
    events = map(json.loads, file.read_text().splitlines())
    rows = [row for row in events if row["event"] == "replay"]
    assert [(row["key"], row["count"]) for row in rows] == [("seen", 1), ("seen", 65)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["PROFILE", "SYNC"])
def test_the_environment_speaks_one_grammar(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PREHEAT_GRAPH_{name}", "perhaps")
    with pytest.raises(ConfigError, match=f"PREHEAT_GRAPH_{name}='perhaps' is not a switch"):
        preheat.device("emulator:6")
