"""Recordings: the manifest holds every request of all processes, however the processes ended."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from preheat.ahead import recorder as recording
from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram
from preheat.ahead.recorder import Recorder, merge_into, read_existing, spool_directory
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact, Provenance
from preheat.model.events import Events
from preheat.model.program import Program
from tests import processes
from tests.conftest import Recorder as Sink
from tests.processes import (
    SOURCE,
    TIMEOUT_SECONDS,
    expect_success,
    kill,
    read_line,
    start_python,
    wait_for,
    wait_for_exit,
    write_line,
)
from tests.store.support import NOBODY, needs_root

SM_90 = Arch.parse("sm_90")

PRELUDE = """\
import os, sys, preheat

def ask(n, arch="sm_90"):
    text = f'extern "C" __global__ void k{n}(float* x) {{ x[0] = {n}; }}'
    return preheat.compile(text, arch, label=f"k{n}.cu")

def wait():
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings for applications: what one test compiled the next one finds."""
    root = tmp_path_factory.mktemp("recorded")
    return {"PREHEAT_CACHE_DIR": str(root / "cache"), "PREHEAT_LOCK_DIR": str(root / "locks")}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return tmp_path / "kernels.toml"


Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path, manifest: Path, cache: Mapping[str, str]) -> Launch:
    """Starts applications, each a file and a process of its own, recording into one manifest."""
    numbers = itertools.count()

    def launch(text: str, *args: str) -> subprocess.Popen[str]:
        home = tmp_path / f"app-{next(numbers)}"
        home.mkdir()
        file = home / "app.py"
        file.write_text(PRELUDE + text)
        env = {**cache, "PREHEAT_RECORD": str(manifest)}
        return processes.start_process([sys.executable, str(file), *args], env=env, cwd=tmp_path)

    return launch


def asked(manifest: Path) -> dict[str, int]:
    return {row.program.label: row.requests for row in Manifest.read(manifest).programs}


def line_of(text: str) -> int:
    """Return the number of the line with `text` in an application."""
    return PRELUDE.count("\n", 0, PRELUDE.index(text)) + 1


# One run


def test_a_run_is_written_down_with_who_asked_for_what_and_how_often(
    launch: Launch, manifest: Path
) -> None:
    said = expect_success(
        launch(
            "for _ in range(3): made = ask(1)\n"
            "also = ask(1, 'sm_100')\n"
            "print(max(each.provenance.seconds for each in (made, also)))\n"
            "text = '#include <a.h>\\ntemplate<typename T> __global__ void t(T* x) { *x = A; }'\n"
            "preheat.compile(text, 'sm_90', label='t.cu', options=['-use_fast_math'],\n"
            "                headers={'a.h': '#define A 1'}, names=['t<float>'])\n"
        )
    )
    one, two = Manifest.read(manifest).programs
    assert (one.program.label, one.requests) == ("k1.cu", 4)
    assert one.archs == (SM_90, Arch.parse("sm_100"))
    (caller,) = one.callers
    assert Path(caller).name == f"app.py:{line_of('return preheat.compile')}"
    assert float(said) > 0
    assert one.seconds == pytest.approx(float(said), abs=0.001)
    assert (two.program.options, two.program.names) == (("-use_fast_math",), ("t<float>",))
    assert two.program.headers == (("a.h", "#define A 1"),)
    assert not spool_directory(manifest).exists()


def test_kernels_resolved_and_graph_keys_captured_are_written_down(
    launch: Launch, manifest: Path
) -> None:
    process = launch(
        """
gpu = preheat.device("emulator")
k = gpu.kernel('extern "C" __global__ void k(float* x) { x[0] += 1; }', "k")
x = gpu.zeros(1)
class Odd: pass
odd = Odd()
for graphs in (gpu.graphs(name="decode"), gpu.graphs()):
    for key in ((1, "prefill"), 32, odd):
        for _ in range(2):
            graphs.run(key, lambda: k[1, 1](x))
"""
    )
    _, err = wait_for_exit(process)
    assert process.returncode == 0, err
    made = Manifest.read(manifest)
    assert [row.entries for row in made.programs] == [("k",)]
    assert made.graphs == (GraphKeys("decode", ("(1, 'prefill')", "32")),)
    assert err.count("is not a Python literal and is not recorded") == 1
    assert "graph 'decode'" in err


def test_a_program_of_a_file_is_recorded_by_its_path(
    launch: Launch, manifest: Path, tmp_path: Path
) -> None:
    (tmp_path / "k1.cu").write_text('extern "C" __global__ void k1(float* x) { x[0] = 1; }')
    expect_success(
        launch("preheat.default_builder().build(preheat.Program.from_file('k1.cu'), 'sm_90')\n")
    )
    (row,) = Manifest.read(manifest).programs
    assert row.program.path == str(tmp_path / "k1.cu")
    assert not manifest.with_suffix(".sources").exists()


def test_builders_that_the_program_opens_are_recorded(launch: Launch, manifest: Path) -> None:
    """Each request is counted once, and the process has one spool file."""
    said = expect_success(
        launch(
            "events = preheat.Events()\n"
            "opened = [preheat.Builder.open(events=events) for _ in range(3)]\n"
            "ask(1)\n"
            "for builder in (*opened, preheat.Builder.open()):\n"
            "    text = 'extern \"C\" __global__ void own(float* x) { *x = 7; }'\n"
            "    builder.build(preheat.Program.of(text, label='own.cu'), 'sm_90')\n"
            "print(len([name for name in os.listdir('kernels.toml.spool') if 'jsonl' in name]))\n"
        )
    )
    assert asked(manifest) == {"k1.cu": 1, "own.cu": 4}
    assert said == "1\n"


def test_the_builder_whose_request_cannot_be_recorded_gets_the_fault(
    launch: Launch, manifest: Path
) -> None:
    """The one that was opened first may have events that nobody reads."""
    spool_directory(manifest).write_text("in the way")
    process = launch("preheat.Builder.open(events=preheat.Events())\nask(1)\n")
    _, err = wait_for_exit(process)
    assert process.returncode == 0, err
    (warning,) = err.splitlines()
    assert warning.startswith("record: cannot write: NotADirectoryError: ")


def test_without_the_setting_nothing_of_it_is_even_loaded(
    cache: Mapping[str, str], tmp_path: Path
) -> None:
    code = PRELUDE + "ask(1)\nprint('preheat.ahead.recorder' in sys.modules)"
    assert expect_success(start_python(code, env={**cache, "HOME": str(tmp_path)})).strip() == "False"


# Several runs and processes


def test_two_runs_add_up(launch: Launch, manifest: Path) -> None:
    for numbers in ("1 2", "2 3"):
        expect_success(launch("for n in sys.argv[1].split(): ask(n)\n", numbers))
    assert asked(manifest) == {"k1.cu": 1, "k2.cu": 2, "k3.cu": 1}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_are_recorded(launch: Launch, manifest: Path, method: str) -> None:
    expect_success(
        launch(
            "import multiprocessing\n"
            "if __name__ == '__main__':\n"
            "    ask(1)\n"
            "    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:\n"
            "        pool.map(ask, [1, 2, 2], chunksize=1)\n"
            "        pool.close()\n"
            "        pool.join()\n",
            method,
        )
    )
    assert asked(manifest) == {"k1.cu": 2, "k2.cu": 2}
    assert not spool_directory(manifest).exists()


def test_what_a_child_asked_for_is_merged_by_its_parent_that_asked_for_nothing_after_it(
    launch: Launch, manifest: Path
) -> None:
    expect_success(
        launch(
            "preheat.default_builder()\n"
            "import multiprocessing\n"
            "child = multiprocessing.get_context('fork').Process(target=ask, args=(2,))\n"
            "child.start()\n"
            "ask(1)\n"
        )
    )
    assert asked(manifest) == {"k1.cu": 1, "k2.cu": 1}


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_forked_child_records_for_itself_however_it_ends(
    launch: Launch, manifest: Path, end: str
) -> None:
    expect_success(
        launch(
            "ask(1)\n"
            "if (child := os.fork()) == 0:\n"
            "    ask(1), ask(2)\n"
            f"    {end}\n"
            "os.waitpid(child, 0)\n"
            "ask(3)\n"
        )
    )
    assert asked(manifest) == {"k1.cu": 2, "k2.cu": 1, "k3.cu": 1}
    assert not spool_directory(manifest).exists()


def test_a_child_that_keeps_running_keeps_nothing_of_its_parents(
    launch: Launch, manifest: Path
) -> None:
    process = launch(
        "ask(1)\n"
        "if os.fork() == 0:\n"
        "    os.close(1)\n"
        "    sys.stdin.readline()\n"
        "    ask(2)\n"
        "    os._exit(0)\n"
    )
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert asked(manifest) == {"k1.cu": 1}
    write_line(process, "go")
    wait_for_exit(process)  # returns at the end of the child: it has the pipe of its errors, too
    wait_for(lambda: merge_into(manifest) == 0)  # until its file is closed as well
    assert asked(manifest) == {"k1.cu": 1, "k2.cu": 1}


def test_a_killed_process_loses_nothing_it_had_seen(launch: Launch, manifest: Path) -> None:
    process = launch("for _ in range(100): ask(1)\nask(2)\nwait()\n")
    assert read_line(process) == "ready"
    assert merge_into(manifest) == 1  # It still records, so its file is not merged.
    assert not manifest.exists()
    kill(process)
    assert process.returncode == -signal.SIGKILL
    assert merge_into(manifest) == 0
    counts = asked(manifest)
    assert 50 <= counts.pop("k1.cu") <= 100
    assert counts == {"k2.cu": 1}
    assert not spool_directory(manifest).exists()


def test_the_next_run_merges_what_a_killed_one_left(launch: Launch, manifest: Path) -> None:
    killed = launch("ask(1)\nwait()\n")
    assert read_line(killed) == "ready"
    kill(killed)
    expect_success(launch("ask(2)\n"))
    assert asked(manifest) == {"k1.cu": 1, "k2.cu": 1}


def test_applications_that_run_and_end_at_once_lose_nothing(launch: Launch, manifest: Path) -> None:
    running = [launch("ask(1)\nask(sys.argv[1])\nwait()\n", str(n)) for n in (2, 3, 2)]
    for process in running:
        assert read_line(process) == "ready"
    for process in running:
        write_line(process)
    for process in running:
        expect_success(process)
    assert asked(manifest) == {"k1.cu": 3, "k2.cu": 2, "k3.cu": 1}


CHURN = """
import sys
from pathlib import Path
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.ahead.recorder import Recorder
from tests.ahead.test_recorder import requested

def fail(name, fields):
    raise SystemExit(str(fields))

recorder = Recorder(Path(sys.argv[1]), Events(fail))
for n in range(20):
    recorder.on_event("request", requested(Program.of(f"text {n % 3}")))
    recorder.close()
"""


def test_files_and_the_directory_that_come_and_go_are_never_lost_between_two(manifest: Path) -> None:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(SOURCE), root])
    running = [start_python(CHURN, str(manifest), env={"PYTHONPATH": path}) for _ in range(4)]
    for process in running:
        expect_success(process)
    assert sum(row.requests for row in Manifest.read(manifest).programs) == 80
    assert not spool_directory(manifest).exists()


# What goes wrong


def artifact(seconds: float = 0.5) -> Artifact:
    made = Artifact("0" * 64, "k.cu", SM_90, "nvrtc", (), (), b"", b"")
    return Artifact(**{**vars(made), "provenance": Provenance(seconds=seconds)})


def requested(program: Program) -> dict[str, Any]:
    """The fields of a `request` event."""
    return {"program": program, "arch": SM_90, "artifact": artifact()}


@pytest.fixture
def record(manifest: Path, events: Events) -> Iterator[Recorder]:
    """Return a recorder without a builder; the test gives it events."""
    recorder = Recorder(manifest, events)
    yield recorder
    recorder.close()


def see(record: Recorder, text: str = "text", times: int = 1) -> Program:
    program = Program.of(text)
    for _ in range(times):
        record.on_event("request", requested(program))
    return program


def spools(manifest: Path) -> list[Path]:
    return sorted(spool_directory(manifest).glob("*.jsonl"))


def test_unmerged_recordings_are_readable_only_by_the_user(record: Recorder, manifest: Path) -> None:
    see(record)
    (file,) = spools(manifest)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_count_is_written_when_it_has_doubled_and_at_exit(record: Recorder, manifest: Path) -> None:
    see(record, times=100)
    (file,) = spools(manifest)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(row.get("requests", 0) for row in rows) == 64
    assert len(rows) == 8  # the program, then 1, 2, 4, ... 64
    record.close()
    assert [row.requests for row in Manifest.read(manifest).programs] == [100]


def test_a_line_torn_by_death_costs_only_itself(record: Recorder, manifest: Path) -> None:
    see(record)
    record.on_event("graph", {"what": "captured", "name": "g", "key": "1"})
    (file,) = spools(manifest)
    whole = file.read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 3  # the program, that it was asked for, the graph
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        made = recording._read_spool(file)
        assert len(made.programs) == (cut >= ends[1])
        assert len(made.graphs) == (cut >= ends[2])


def test_a_file_that_is_no_recording_is_kept_and_named(record: Recorder, manifest: Path) -> None:
    see(record)
    (file,) = spools(manifest)
    alien = file.with_name("alien.jsonl")
    alien.write_text('{"of": 7, "arch": "sm_90"}\n')
    with pytest.raises(InputError, match=r"alien\.jsonl was recorded by another release"):
        merge_into(manifest)
    assert alien.exists()
    alien.unlink()


BROKEN = {
    "not TOML": ("version = 1\n[[program\n", r"kernels.toml:2: not TOML"),
    "a file is gone": (
        'version = 1\n[[program]]\nfile = "gone.cu"\n',
        r"gone.cu: cannot read .*gone.cu",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_manifest_that_cannot_be_read_stays_unchanged_and_the_recording_is_kept(
    launch: Launch, manifest: Path, case: str
) -> None:
    text, message = BROKEN[case]
    manifest.write_text(text)
    process = launch("ask(1)\n")
    _, err = wait_for_exit(process)
    assert process.returncode == 0, err
    assert manifest.read_text() == text
    (warning,) = err.splitlines()
    assert f"the recording is kept in {spool_directory(manifest)}" in warning
    with pytest.raises(InputError, match=message):
        merge_into(manifest)
    manifest.write_text("version = 1\n")
    merge_into(manifest)
    assert asked(manifest) == {"k1.cu": 1}


def test_a_directory_that_is_not_there_is_one_warning_and_is_not_made(
    launch: Launch, manifest: Path
) -> None:
    process = launch(f"os.environ['PREHEAT_RECORD'] = '{manifest}/kernels.toml'\nask(1), ask(2)\n")
    _, err = wait_for_exit(process)
    assert process.returncode == 0, err
    (warning,) = err.splitlines()
    assert warning.startswith("record: cannot write: FileNotFoundError: ")
    assert not manifest.exists()


@pytest.mark.parametrize(
    ("obstacle", "error"),
    [
        (lambda path: path.write_text("in the way"), "NotADirectoryError"),
        (lambda path: path.symlink_to("nowhere"), "FileNotFoundError"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_warning_and_no_harm(
    launch: Launch, manifest: Path, obstacle: Callable[[Path], object], error: str
) -> None:
    obstacle(spool_directory(manifest))
    process = launch("ask(1), ask(2)\nprint('done')\n")
    out, err = wait_for_exit(process)
    assert (process.returncode, out) == (0, "done\n"), err
    (warning,) = err.splitlines()
    assert warning.startswith(f"record: cannot write: {error}: ")
    assert not manifest.exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_one_warning_and_no_harm(launch: Launch, tmp_path: Path) -> None:
    process = launch("wait()\nask(1), ask(2)\n")
    assert read_line(process) == "ready"
    tmp_path.chmod(0o500)
    try:
        _, err = wait_for_exit(process, "\n")
    finally:
        tmp_path.chmod(0o700)
    assert process.returncode == 0, err
    assert len(err.splitlines()) == 1


def test_a_full_disk_ends_the_recording_with_one_fault(
    record: Recorder, recorder: Sink, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.forgive = True
    kept = see(record, "first")
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
        see(record, "second")
    see(record, "third")
    record.close()
    assert [fault["where"] for fault in recorder.named("fault")] == ["record"]
    assert "No space left" in recorder.named("fault")[0]["error"]
    record.after_fork()  # Close the file, as the end of the process does.
    merge_into(manifest)
    assert [row.program for row in Manifest.read(manifest).programs] == [kept]


def test_a_failure_of_the_recorder_is_a_fault_event_and_no_error_of_the_application(
    record: Recorder, recorder: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.forgive = True

    def fail(*_: object) -> None:
        raise RecursionError("deep")

    monkeypatch.setattr(recording, "_fields", fail)
    see(record, times=3)
    assert [fault["error"] for fault in recorder.named("fault")] == ["RecursionError: deep"]


def test_a_merge_that_dies_before_it_cleans_up_does_no_harm(
    record: Recorder, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = see(record)
    record.on_event("graph", {"what": "captured", "name": "g", "key": "1"})
    with monkeypatch.context() as dying:
        dying.setattr(Path, "unlink", _die)
        with pytest.raises(KeyboardInterrupt):
            record.close()
    merge_into(manifest)
    made = Manifest.read(manifest)
    assert [(row.program, row.archs) for row in made.programs] == [(program, (SM_90,))]
    assert made.graphs == (GraphKeys("g", ("1",)),)
    assert not spool_directory(manifest).exists()


def _die(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@needs_root
def test_root_merges_what_another_user_recorded(record: Recorder, manifest: Path) -> None:
    program = see(record)
    (file,) = spools(manifest)
    theirs = file.with_name("theirs.jsonl")
    theirs.write_bytes(file.read_bytes())
    lock = file.with_name("lock")  # left by a merger that was killed
    lock.touch()
    for path in (theirs, lock):
        os.chown(path, NOBODY, 0)
    assert merge_into(manifest) == 1  # `record` goes on
    assert [wanted.program for wanted in read_existing(manifest).programs] == [program]


def test_a_merger_that_does_not_end_is_waited_for_a_while_only(
    record: Recorder, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(record)
    monkeypatch.setattr(recording, "_WAIT", 0.01)
    with (
        recording._merge_lock(spool_directory(manifest), sys._getframe()),
        pytest.raises(TimeoutError, match="lock for 0 seconds"),
    ):
        merge_into(manifest)
    record.close()
    assert len(Manifest.read(manifest).programs) == 1


# Merging manifests


def test_other_manifests_are_merged_with_what_is_there(manifest: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Manifest((ManifestProgram(Program.of(f"text {name}"), requests=1),)).write(
            tmp_path / f"{name}.toml"
        )
    Manifest((ManifestProgram(Program.of("text a"), requests=2),)).write(manifest)
    merge_into(manifest, read_existing(tmp_path / "a.toml"), read_existing(tmp_path / "b.toml"))
    assert [row.requests for row in read_existing(manifest).programs] == [3, 1]
    merge_into(manifest, read_existing(tmp_path / "b.toml"), fresh=True)
    assert [row.program.source for row in read_existing(manifest).programs] == ["text b"]


def test_programs_that_came_to_the_same_code_have_the_same_entries(
    record: Recorder, manifest: Path
) -> None:
    """Two include lists may lead to equal headers."""
    for name in "ab":
        program = Program.of('#include "cfg.h"', include=[f"/{name}"])
        record.on_event("request", requested(program))
        record.on_event("resolve", {"key": artifact().digest, "entry": "k"})
    record.close()
    rows = Manifest.read(manifest).programs
    assert [(row.program.include, row.entries) for row in rows] == [
        (("/a",), ("k",)),
        (("/b",), ("k",)),
    ]


def test_one_directory_asked_for_in_two_ways_is_recorded_in_both(
    record: Recorder, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(manifest.parent)
    for directory in ("inc", os.path.abspath("inc")):
        record.on_event("request", requested(Program.of('#include "cfg.h"', include=[directory])))
    record.close()
    rows = Manifest.read(manifest).programs
    assert [row.program.include for row in rows] == [(str(manifest.parent / "inc"),)] * 2
    assert len({row.program.include_spellings for row in rows}) == 2


def test_a_recording_without_spellings_is_merged(record: Recorder, manifest: Path) -> None:
    program = Program.of('#include "cfg.h"', include=["/opt/include"])
    record.on_event("request", requested(program))
    (file,) = spools(manifest)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    del rows[0]["program"]["spellings"]
    record.after_fork()
    old = file.with_name("old.jsonl")
    old.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file.unlink()
    record.close()
    (wanted,) = Manifest.read(manifest).programs
    assert wanted.program == program


def test_an_entry_of_a_program_nobody_recorded_is_not(
    record: Recorder, manifest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="preheat"):
        record.on_event("resolve", {"key": "f" * 64, "program": "other.cu", "entry": "k"})
        record.on_event("graph", {"what": "captured", "name": None, "key": "1"})
        record.on_event("graph", {"what": "evicted", "name": "g", "key": "1"})
        record.close()
    assert not manifest.exists()
    assert caplog.records == []
