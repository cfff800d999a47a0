"""Requests of other libraries are recorded as those of preheat are, however the process ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.ahead.manifest import Manifest
from preheat.ahead.recorder import Recorder, merge_into, spool_directory
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.artifact import Provenance
from preheat.model.events import Events
from preheat.model.foreign import ForeignEntry
from preheat.process.callsite import CallSite
from tests.adapters.fake import write_library
from tests.conftest import Recorder as Sink
from tests.processes import (
    SOURCE,
    expect_success,
    kill,
    read_line,
    run_in_fork,
    start_process,
    wait_for,
)

SM_90 = Arch(9, 0)
ROW = {
    "function": "kernels:add",
    "root": "/srv/app",
    "env": {"B": "2", "A": "1"},
    "recorded": {"line": 12, "build": "b"},
}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return tmp_path / "kernels.toml"


@pytest.fixture
def record(manifest: Path, events: Events) -> Iterator[Recorder]:
    """Return a recorder without a builder; the test gives it events."""
    recorder = Recorder(manifest, events)
    yield recorder
    recorder.close()


def this_line() -> CallSite:
    frame = sys._getframe(1)
    return frame.f_code, frame.f_lasti


NOWHERE: CallSite = (None, 0)


def used(
    record: Recorder,
    key: str = "KEY",
    row: dict[str, Any] | None = ROW,
    site: CallSite = NOWHERE,
    **more: Any,
) -> None:
    """Report that an entry was used."""
    fields = {"label": "kernels:add", "arch": SM_90, "provenance": Provenance(0.25), **more}
    entry = ForeignEntry("triton", key, {"f": b""}, **fields)
    record.on_event("foreign_request", {"entry": entry, "row": row, "site": site})


def test_a_request_is_written_with_what_makes_it_again(record: Recorder, manifest: Path) -> None:
    site = this_line()
    used(record, variant="typed", site=site)
    record.close()
    (item,) = Manifest.read(manifest).foreign
    assert (item.kind, item.name, item.root) == ("triton", "kernels:add", "/srv/app")
    assert item.request == '{"env":{"A":"1","B":"2"},"function":"kernels:add"}'
    assert item.recorded == '{"build":"b","line":12}'
    assert item.row == {**ROW, "root": "/srv/app"}
    assert item.entries == ("KEY typed",)
    assert (item.archs, item.requests, item.seconds) == ((SM_90,), 1, 0.25)
    (caller,) = item.callers
    assert caller.startswith("tests/ahead/test_recorder_foreign.py:")


def test_an_entry_without_a_description_is_listed_by_its_key(record: Recorder, manifest: Path) -> None:
    used(record, row=None)
    used(record, "HOST", row=None, label="host code", arch=None)
    record.close()
    kept, host = sorted(Manifest.read(manifest).foreign, key=lambda item: item.name, reverse=True)
    assert (kept.request, kept.recorded, kept.root, kept.archs) == ("", "", "", (SM_90,))
    assert (host.name, host.archs, host.entries, host.callers) == ("host code", (), ("HOST",), ())


@pytest.mark.parametrize("times", [1, 2, 3, 5, 8, 100])
def test_requests_are_counted(record: Recorder, manifest: Path, times: int) -> None:
    for _ in range(times):
        used(record)
    record.close()
    (item,) = Manifest.read(manifest).foreign
    assert item.requests == times


def test_counts_are_written_when_they_double(record: Recorder, manifest: Path) -> None:
    for _ in range(100):
        used(record)
    (spool,) = spool_directory(manifest).glob("*.jsonl")
    rows = [json.loads(line)["foreign"]["requests"] for line in spool.read_text().splitlines()]
    assert rows == [1, 1, 2, 4, 8, 16, 32]


def test_lines_keys_and_variants_are_counted_apart(record: Recorder, manifest: Path) -> None:
    first, second = this_line(), this_line()
    for site in (first, second, second):
        used(record, site=site)
    used(record, variant="other")
    used(record, "KEY2", row={**ROW, "function": "kernels:mul"}, label="kernels:mul")
    record.close()
    add, mul = Manifest.read(manifest).foreign
    assert (add.requests, add.entries) == (4, ("KEY", "KEY other"))
    assert len(add.callers) == 1  # one line of this file
    assert mul.requests == 1


def test_runs_add_up(manifest: Path, events: Events) -> None:
    for line in (1, 1, 2):
        recorder = Recorder(manifest, events)
        used(recorder, f"KEY{line}", row={**ROW, "recorded": {"line": line}})
        recorder.close()
    (item,) = Manifest.read(manifest).foreign
    assert (item.requests, item.entries) == (3, ("KEY2",))
    assert item.row["recorded"] == {"line": 2}


def test_a_forked_child_records_into_a_file_of_its_own(record: Recorder, manifest: Path) -> None:
    used(record)

    def child() -> None:
        record.after_fork()
        used(record)
        used(record)
        record.close()

    run_in_fork(child)
    record.close()
    (item,) = Manifest.read(manifest).foreign
    assert item.requests == 3


def test_a_row_that_is_not_json_is_a_fault_and_the_application_goes_on(
    record: Recorder, manifest: Path, recorder: Sink
) -> None:
    recorder.forgive = True
    used(record, row={**ROW, "function": object()})
    used(record)
    record.close()
    (fault,) = recorder.named("fault")
    assert (fault["where"], fault["verb"]) == ("record", "write")
    assert not manifest.exists()


def test_a_spool_of_another_release_is_kept(manifest: Path) -> None:
    spool = spool_directory(manifest)
    spool.mkdir()
    (spool / "1-old.jsonl").write_text('{"foreign": {"kind": "triton", "colour": "red"}}\n')
    with pytest.raises(InputError, match="was recorded by another release of preheat"):
        merge_into(manifest)
    assert (spool / "1-old.jsonl").exists()
    assert not manifest.exists()


APP = """\
import os, sys
import preheat, fakelib
for _ in range(3): fakelib.compile("add")
fakelib.compile("local", portable=False)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_process_that_is_killed_leaves_its_requests(tmp_path: Path, manifest: Path) -> None:
    library = write_library(tmp_path / "library")
    (tmp_path / "app.py").write_text(APP)
    env = {
        "PYTHONPATH": os.pathsep.join([str(library), str(SOURCE)]),
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_ADAPTERS": "fakelib",
        "PREHEAT_RECORD": str(manifest),
    }
    running = [start_process([sys.executable, "app.py"], env=env, cwd=tmp_path) for _ in range(2)]
    for process in running:
        assert read_line(process) == "ready"
    kill(running[0])
    assert wait_for(lambda: merge_into(manifest) == 1 and manifest.exists())
    add, local = Manifest.read(manifest).foreign
    assert (add.name, add.requests, add.callers) == ("add", 2, ("app.py:3",))
    assert (local.name, local.requests, local.request) == ("local", 1, "")
    expect_success(running[1])
    add, local = Manifest.read(manifest).foreign
    assert (add.requests, local.requests) == (5, 2)
