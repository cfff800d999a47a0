"""`preheat record`: the command runs unchanged, and the manifest lists what the command used."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.ahead.recorder import spool_directory
from preheat.model.program import Program
from preheat.store.bundle import write
from tests.ahead.test_recorder import PRELUDE, asked, cache
from tests.command import Cli, run_command
from tests.processes import SOURCE, read_line, start_process, start_python, wait_for, wait_for_exit

__all__ = ["cache"]  # the fixture


@pytest.fixture
def cli(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: Mapping[str, str],
) -> Cli:
    """Runs `preheat record` in the test's directory."""
    for name, value in {**cache, "NO_COLOR": "1", "PYTHONPATH": str(SOURCE)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(PRELUDE + "for n in sys.argv[1:]: ask(n)\nprint('out')\n")

    return lambda *args: run_command(capfd, ["record", *args])


APP = (sys.executable, "app.py")


def python(code: str) -> tuple[str, str, str]:
    return (sys.executable, "-c", code)


# The manifest


def test_a_run_is_recorded_and_a_second_one_added(cli: Cli, tmp_path: Path) -> None:
    first, second = cli("--", *APP, "1", "2"), cli("--", *APP, "2", "3")
    assert first == (0, "out\n", "recorded 2 programs (2 new), for sm_90 → kernels.toml\n")
    assert second == (0, "out\n", "recorded 2 programs (1 new), for sm_90 → kernels.toml\n")
    assert asked(tmp_path / "kernels.toml") == {"k1.cu": 1, "k2.cu": 2, "k3.cu": 1}


def test_fresh_replaces_the_manifest_and_what_was_left_over(cli: Cli, tmp_path: Path) -> None:
    cli("--", *APP, "1")
    spool_directory(tmp_path / "kernels.toml").mkdir()
    (spool_directory(tmp_path / "kernels.toml") / "old.jsonl").write_text("{}\n")
    ran = cli("--fresh", "--", *APP, "2")
    assert ran.err == "recorded 1 program (1 new), for sm_90 → kernels.toml\n"
    assert asked(tmp_path / "kernels.toml") == {"k2.cu": 1}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"app.py", "home", "kernels.toml", "kernels.sources"}


def test_fresh_replaces_what_cannot_be_read(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kernels.toml").write_text("version = [")
    assert cli("--fresh", "--", *APP, "1").code == 0
    assert asked(tmp_path / "kernels.toml") == {"k1.cu": 1}


def test_fresh_replaces_no_file_that_is_not_a_manifest(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "kernels.heat", {}, {})
    for name in ("app.py", "kernels.heat"):
        before = (tmp_path / name).read_bytes()
        ran = cli("--fresh", "-o", name, "--", *APP, "1")
        assert (ran.code, ran.out) == (1, "")
        assert f"{tmp_path / name} is not a manifest, and --fresh does not replace it" in ran.err
        assert (tmp_path / name).read_bytes() == before


def test_fresh_leaves_the_old_manifest_when_nothing_was_recorded(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kernels.toml").write_text("version = 1\n# mine\n")
    ran = cli("--fresh", "--", *python("raise SystemExit(4)"))
    assert ran.code == 4
    assert "nothing was recorded" in ran.err
    assert (tmp_path / "kernels.toml").read_text() == "version = 1\n# mine\n"


def test_the_summary_as_json(cli: Cli) -> None:
    ran = cli("-o", "other.toml", "--json", "--", *python(f"{PRELUDE}ask(1)"))
    made: dict[str, Any] = json.loads(ran.out)
    (program,) = made["programs"]
    assert made["manifest"] == "other.toml"
    assert (program["label"], program["arch"], program["new"]) == ("k1.cu", ["sm_90"], True)
    assert (made["graphs"], made["still_recording"], ran.err) == ([], 0, "")


def test_with_json_what_the_command_prints_does_not_mix_with_it(cli: Cli) -> None:
    ran = cli("--json", "--", *python("print('out'); raise SystemExit(3)"))
    assert (ran.code, ran.err) == (3, "out\n")
    assert json.loads(ran.out)["exit_status"] == 3


def test_nothing_recorded_by_a_command_that_failed_is_due_to_that(cli: Cli) -> None:
    ran = cli("--", *python("raise SystemExit(3)"))
    assert ran == (3, "", "nothing was recorded: the command ended with exit status 3\n")


def test_nothing_recorded_comes_with_what_that_may_be_due_to(cli: Cli, tmp_path: Path) -> None:
    ran = cli("--", *python("pass"))
    assert ran.code == 0
    assert ran.err.startswith("nothing was recorded\n\nhint: the command used neither")
    assert not (tmp_path / "kernels.toml").exists()


def test_manifests_are_merged(cli: Cli, tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = tuple(ManifestProgram(Program.of(text), requests=1) for text in ("both", name))
        (tmp_path / name).mkdir()
        Manifest(rows).write(tmp_path / name / "kernels.toml")
    twice = ("--merge", "b/kernels.toml") * 2
    ran = cli("-o", "all.toml", "--merge", "a/kernels.toml", *twice)
    assert ran == (0, "", "recorded 3 programs (3 new) → all.toml\n")
    ran = cli("-o", "all.toml", "--fresh", "--merge", "a/kernels.toml", *twice)
    assert ran == (0, "", "recorded 3 programs (3 new) → all.toml\n")
    rows = Manifest.read(tmp_path / "all.toml").programs
    assert {row.program.source: row.requests for row in rows} == {"a": 1, "b": 1, "both": 2}


def test_a_manifest_to_merge_must_be_there(cli: Cli) -> None:
    ran = cli("-o", "all.toml", "--merge", "nowhere.toml")
    assert (ran.code, ran.err) == (2, "error: the manifest to merge does not exist: nowhere.toml\n")


def test_a_manifest_that_cannot_be_read_stops_it_before_the_command_runs(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "kernels.toml").write_text("version = 1\n[[program\n")
    ran = cli("--", *APP, "1")
    assert (ran.code, ran.out) == (1, "")
    assert "kernels.toml:2: not TOML" in ran.err


def test_a_manifest_broken_keeps_the_recording_until_it_is_corrected(cli: Cli, tmp_path: Path) -> None:
    spoil = f"{PRELUDE}ask(1)\nopen('kernels.toml', 'w').write('version = [')"
    ran = cli("--", *python(spoil))
    assert (ran.code, ran.out) == (1, "")
    assert f"kept in {tmp_path / 'kernels.toml.spool'}" in ran.err
    (tmp_path / "kernels.toml").write_text("version = 1\n")
    assert cli() == (0, "", "recorded 1 program (1 new), for sm_90 → kernels.toml\n")
    assert asked(tmp_path / "kernels.toml") == {"k1.cu": 1}


def test_a_place_that_is_not_there_stops_it_before_the_command_runs(cli: Cli, tmp_path: Path) -> None:
    ran = cli("-o", "no/such/kernels.toml", "--", *APP, "1")
    assert (ran.code, ran.out) == (1, "")
    place = tmp_path / "no" / "such"
    assert f"cannot write {place / 'kernels.toml'}: {place} is not a directory" in ran.err


def test_what_killed_processes_saw_is_merged_after_the_command(cli: Cli, tmp_path: Path) -> None:
    ran = cli("--", *python(f"{PRELUDE}ask(1), ask(2)\nos.kill(os.getpid(), 9)"))
    assert ran.code == 128 + signal.SIGKILL
    assert asked(tmp_path / "kernels.toml") == {"k1.cu": 1, "k2.cu": 1}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_process_that_keeps_running_is_reported(cli: Cli, tmp_path: Path, fresh: bool) -> None:
    os.mkfifo(tmp_path / "end")
    live = "ask(2), os.write(w, b'.'), open('end').read(), sys.exit()"
    fork = f"r, w = os.pipe()\nif os.fork() == 0: {live}\nos.read(r, 1)"
    ran = cli(*["--fresh"] * fresh, "--", *python(f"{PRELUDE}ask(1)\n{fork}"))
    assert ran.err.splitlines() == [
        "recorded 1 program (1 new), for sm_90 → kernels.toml",
        "processes still running: 1; their programs are not in kernels.toml"
        if fresh
        else "processes still recording: 1; they add to kernels.toml when they end",
    ]
    (tmp_path / "end").write_text("")
    wait_for(lambda: not spool_directory(tmp_path / "kernels.toml").exists())  # until it has ended
    assert asked(tmp_path / "kernels.toml") == ({"k1.cu": 1} if fresh else {"k1.cu": 1, "k2.cu": 1})


# The command


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 15)", 143)],
)
def test_the_exit_status_is_that_of_the_recorded_command(cli: Cli, code: str, status: int) -> None:
    assert cli("--", *python(code)).code == status


def test_what_follows_the_command_is_the_commands(cli: Cli) -> None:
    show = python("import sys; print(sys.argv[1:])")
    for dashes in ([], ["--"]):
        ran = cli(*dashes, *show, "--json", "-o", "x", "--", "--fresh", "--help")
        assert ran.out == "['--json', '-o', 'x', '--', '--fresh', '--help']\n"


def test_the_command_gets_the_manifests_whole_path(cli: Cli, tmp_path: Path) -> None:
    ran = cli("-o", "k.toml", "--", *python("import os; print(os.environ['PREHEAT_RECORD'])"))
    assert ran.out == f"{tmp_path / 'k.toml'}\n"


PYTHON_FILE = "it is a Python file, not a command\n\nhint: name the interpreter: python "


@pytest.mark.parametrize(
    ("word", "status", "reported"),
    [
        ("no-such-command", 127, "No such file or directory"),
        ("./data", 126, "Permission denied"),
        ("app.py", 127, f"{PYTHON_FILE}app.py x"),
        ("./app.py", 126, f"{PYTHON_FILE}./app.py x"),
        ("no-such.py", 127, "No such file or directory"),
    ],
)
def test_a_command_that_cannot_run_is_one_clear_line_and_nothing_written(
    cli: Cli, tmp_path: Path, word: str, status: int, reported: str
) -> None:
    (tmp_path / "data").touch()
    before = sorted(tmp_path.rglob("*"))
    for more in ([], ["--fresh"]):
        ran = cli(*more, "--", word, "x")
        assert ran == (status, "", f"error: cannot run {word}: {reported}\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_no_command_asks_for_input(cli: Cli) -> None:
    ran = cli()
    assert ran.code == 2
    assert "no COMMAND to run" in ran.err
    assert "preheat record --help" in ran.err


def test_the_help_has_examples(cli: Cli) -> None:
    ran = cli("--help")
    assert ran.code == 0
    assert "preheat record -- python serve.py" in ran.out


#: Waits for a signal. A pause could begin just after it came, and would last for ever.
ASLEEP = "while True: time.sleep(0.1)"
RECORD = "import sys; from preheat.tools.cli import main; main(['record', '--', *sys.argv[1:]])"
COUNT = f"""
import signal, sys, time
seen = []
def end(number, _):
    seen.append(int(number))
    print(seen, flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
print("ready", flush=True)
{ASLEEP}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("here")
def test_signals_reach_the_command_and_it_decides_when_to_end(cache: Mapping[str, str]) -> None:
    process = start_python(RECORD, *python(COUNT), env=cache)
    assert read_line(process) == "ready"
    process.send_signal(signal.SIGTERM)
    out, err = wait_for_exit(process)
    assert (process.returncode, out) == (7, "[15]\n"), err
    assert "nothing was recorded" in err


# The command runs and has its handlers; whoever started it is not told yet when the signal comes.
EARLY = """
import os, signal, subprocess, time

class Late(subprocess.Popen):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        while not os.path.exists("ready"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Late
"""


@pytest.mark.usefixtures("here")
def test_a_signal_that_comes_before_the_command_is_known_reaches_it_too(
    cache: Mapping[str, str],
) -> None:
    count = COUNT.replace('print("ready", flush=True)', 'open("ready", "w").close()')
    process = start_python(EARLY + RECORD, *python(count), env=cache)
    out, err = wait_for_exit(process)
    assert (process.returncode, out) == (7, "[15]\n"), err


@pytest.mark.usefixtures("here")
def test_an_interrupted_program_that_found_everything_stored_ends_as_interrupted(
    cache: Mapping[str, str],
) -> None:
    for _ in range(2):  # The second one compiles nothing.
        process = start_python(RECORD, *python(f"{PRELUDE}ask(1)\nraise KeyboardInterrupt"), env=cache)
        _, err = wait_for_exit(process)
        assert process.returncode == 130, err


@pytest.mark.usefixtures("here")
def test_an_interrupt_without_a_terminal_ends_the_command_and_keeps_the_recording(
    cache: Mapping[str, str], tmp_path: Path
) -> None:
    process = start_python(
        RECORD,
        *python(f"{PRELUDE}ask(1)\nimport time\nprint('ready', flush=True)\n{ASLEEP}"),
        env=cache,
    )
    assert read_line(process) == "ready"
    process.send_signal(signal.SIGINT)
    _, err = wait_for_exit(process)
    assert process.returncode == 130, err
    assert "KeyboardInterrupt" in err
    assert asked(tmp_path / "kernels.toml") == {"k1.cu": 1}


@pytest.mark.usefixtures("here")
def test_control_c_at_a_terminal_reaches_the_command_once(cache: Mapping[str, str]) -> None:
    ours, theirs = pty.openpty()
    own = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    run = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [*python(own + run), "-c", RECORD, *python(COUNT)]
    process = start_process(command, env=cache, stdin=theirs)
    os.close(theirs)
    assert read_line(process) == "ready"
    os.write(ours, b"\x03")
    assert read_line(process) == "[2]"
    process.send_signal(signal.SIGTERM)
    out, err = wait_for_exit(process)
    os.close(ours)
    assert (process.returncode, out) == (7, "[2, 15]\n"), err
