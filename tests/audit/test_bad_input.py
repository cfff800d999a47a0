"""Commands that fail or get away from the audit: their own status, and what was not seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audit.conftest import Cli, Standins
from tests.audit.modules import cubin
from tests.audit.test_modules import LOAD

Script = Callable[[str], list[str]]


@pytest.mark.parametrize("command", ["audit", "run"])
def test_a_command_that_does_not_exist(cli: Cli, command: str) -> None:
    done = cli(command, "--", "no-such-command")
    assert (done.code, done.out) == (127, "")
    assert "cannot run no-such-command: No such file or directory" in done.err
    assert cli(command).code == 2  # There is no command at all.


@pytest.mark.parametrize("command", [["audit"], ["run", "--sealed"], ["run", "--verdict", "v.json"]])
def test_the_status_is_that_of_the_command(cli: Cli, script: Script, command: list[str]) -> None:
    assert cli(*command, "--", *script("import sys; sys.exit(17)")).code == 17


def test_the_status_where_ended_children_are_ignored(cli: Cli) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert cli("audit", "--", "sh", "-c", "exit 7").code == 7
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("command", "stream", "status", "expected"),
    [
        ("audit", "2>/dev/full", 7, 7),
        ("audit", "2>/dev/full", 0, 1),
        ("audit --json", ">/dev/full", 7, 7),
        ("run --sealed --verdict v.json", "2>/dev/full", 0, 0),  # The verdict is in its file.
    ],
)
def test_the_status_where_the_output_cannot_be_written(
    tmp_path: Path, command: str, stream: str, status: int, expected: int
) -> None:
    line = f"{sys.executable} -m preheat {command} -- sh -c 'exit {status}' {stream}"
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path).returncode == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_command_that_dies_by_a_signal(cli: Cli, script: Script, number: signal.Signals) -> None:
    """What happened before is in the report."""
    code = (
        f"import os, subprocess\nsubprocess.run(['nvcc', 'a.cu'])\nos.kill(os.getpid(), {int(number)})"
    )
    done = cli("audit", "--json", "--", *script(code))
    assert done.code == 128 + number
    assert done.report["exit_status"] == 128 + number
    assert len(done.compilers) == 1


def test_a_command_that_leaves_a_daemon(
    cli: Cli, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.audit.session._LAST_PROCESSES", 0.2)
    code = (
        "import os, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "for number in range(3): os.close(number)\n"
        f"open({str(tmp_path / 'new')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\n"
        "os.execlp('sleep', 'sleep', '100')\n"
    )
    started = script(code)
    waited = (
        f"import os, subprocess, sys, time\nsubprocess.run({started!r})\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.01)\n"
        f"pid = open({str(tmp_path / 'pid')!r}).read()\n"
        "while b'sleep' not in open(f'/proc/{pid}/cmdline', 'rb').read(): time.sleep(0.01)\n"
    )
    done = cli("audit", "--json", "--", sys.executable, "-c", waited)
    pid = int((tmp_path / "pid").read_text())
    try:
        assert done.code == 0
        (unseen,) = done.report["unseen"]
        assert unseen == f"sleep (process {pid}) was still running when the report was written"
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_command_that_closes_all_descriptors(cli: Cli, script: Script) -> None:
    """Events are still written, with lines, and no descriptor of the program is touched."""
    code = LOAD + (
        "import os, subprocess\n"
        "os.closerange(3, 4096)\n"
        "mine = [os.open('/dev/zero', os.O_RDONLY) for _ in range(900)]\n"
        f"load({cubin()!r})\n"
        "subprocess.run(['nvcc', 'a.cu'])\n"
        "assert all(os.path.samestat(os.fstat(f), os.stat('/dev/zero')) for f in mine)\n"
    )
    done = cli("audit", "--json", "--", *script(code))
    assert done.code == 0, done.err
    assert len(done.compilers) == 1
    assert len(done.report["modules"]) == 1


def test_a_program_that_sets_its_own_preload_is_said_to_be_unseen(cli: Cli, script: Script) -> None:
    code = (
        "import os, subprocess\n"
        "env = {k: v for k, v in os.environ.items() if k != 'LD_PRELOAD'}\n"
        "subprocess.run(['tool'], env=env)\n"
        "subprocess.run(['nvcc', 'a.cu'], env={**env, 'LD_PRELOAD': ''})\n"
        "subprocess.run(['tool'], env={'PATH': os.environ['PATH']})\n"
    )
    done = cli("audit", "--json", "--", *script(code))
    assert done.report["unseen"] == [
        "activity of tool: it was started without the LD_PRELOAD of the audit (2 times)",
        "activity of nvcc: it was started without the LD_PRELOAD of the audit",
    ]
    (row,) = done.compilers  # Its start was seen by its parent, and so was its end.
    assert row["seconds"] is not None


def test_a_preload_of_the_user_is_kept(
    cli: Cli, script: Script, standins: Standins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(standins.libraries / "libcupti.so.13"))
    code = "print('libcupti' in open('/proc/self/maps').read())"
    done = cli("audit", "--", *script(code))
    assert (done.code, done.out) == (0, "True\n")


def test_another_injection_library_is_kept_and_said(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/profiler.so")
    code = LOAD + f"import os\nload({cubin()!r})\nprint(os.environ['CUDA_INJECTION64_PATH'])"
    done = cli("audit", "--report", "r.json", "--", *script(code))
    assert done.out == "/opt/profiler.so\n"
    report = json.loads((tmp_path / "r.json").read_text())
    said = "modules loaded by the CUDA runtime: CUDA_INJECTION64_PATH is /opt/profiler.so"
    assert report["unseen"] == [said]
    assert len(report["modules"]) == 1
    assert said in done.err


def test_a_program_that_sets_its_own_injection_library_is_said(cli: Cli, script: Script) -> None:
    code = "import os\nos.environ['CUDA_INJECTION64_PATH'] = '/opt/p.so'\n" + LOAD
    done = cli("audit", "--json", "--", *script(code + f"load({cubin()!r})"))
    why = "modules: the program has another CUDA_INJECTION64_PATH than the audit"
    assert done.report["unseen"] == [why]
    assert len(done.report["modules"]) == 1  # It was seen by the preload library.


@pytest.mark.parametrize("version", ["7", "0"])
def test_an_old_cupti_is_said(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("STANDIN_CUPTI", version)
    done = cli("audit", "--json", "--", *script(LOAD + f"load({cubin()!r})"))
    why = f"modules: CUPTI is too old: its API has version {version}"
    assert done.report["unseen"] == [why]


def test_a_report_that_cannot_be_written_is_said_before_the_command(cli: Cli, script: Script) -> None:
    words = script("open('started', 'w')")
    done = cli("audit", "--report", "absent/r.json", "--", *words)
    assert done.code == 2
    assert "cannot write absent/r.json" in done.err
    assert cli("run", "--verdict", "absent/v.json", "--", *words).code == 2
    assert not Path("started").exists()


def test_with_json_what_the_command_prints_goes_to_stderr(cli: Cli, script: Script) -> None:
    done = cli("audit", "--json", "--", *script("print('mine')"))
    assert done.report["exit_status"] == 0
    assert done.err == "mine\n"


def test_the_environment_of_the_command_stays_usable(cli: Cli, script: Script) -> None:
    """An audit inside an audit, a Python without preheat, and a path with a space."""
    inner = [sys.executable, "-m", "preheat", "audit", "--", *script("print('inner')")]
    done = cli("audit", "--", *inner)
    assert (done.code, done.out) == (0, "inner\n")
    assert cli("audit", "--keep", "a b", "--", *script("pass")).code == 0
    assert list(Path("a b").glob("*.jsonl"))


@pytest.mark.parametrize("command", ["audit", "run"])
def test_a_script_without_an_interpreter_line_runs_in_the_shell(
    cli: Cli, tmp_path: Path, command: str
) -> None:
    """Every shell starts such a file in this way, and so do `env` and `timeout`."""
    path = tmp_path / "script"
    path.write_text('echo "$1"\nexit 3\n')
    path.chmod(0o755)
    done = cli(command, "--", "./script", "a word")
    assert (done.code, done.out) == (3, "a word\n")
    path.write_bytes(b"\x7fELF\0 nothing of the kind")
    assert cli(command, "--", "./script").code == 126


def test_only_the_owner_can_read_a_report_and_a_verdict(cli: Cli) -> None:
    """They hold the arguments of the command, which may be secret."""
    assert cli("audit", "--report", "r.json", "--", "true", "--token=1").code == 0
    assert cli("run", "--verdict", "v.json", "--", "true", "--token=1").code == 0
    assert [os.stat(name).st_mode & 0o777 for name in ("r.json", "v.json")] == [0o600, 0o600]
