"""Programs that the audit does not see: the report and the verdict say so, however they got away."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.audit.conftest import COMPILER, Cli, Standins

Script = Callable[[str], list[str]]

GCC = "import subprocess\nsubprocess.run(['nvcc', 'a.cu'])\n"
DROPPED = "it was started without the LD_PRELOAD of the audit"
STATIC = "it is statically linked, so the audit library was not loaded"
LIBM = next((str(p) for p in Path("/lib").glob("*/libm.so.6")), "/lib64/libm.so.6")


def judged(cli: Cli, *words: str) -> dict[str, Any]:
    """Run a command sealed, and return the verdict."""
    done = cli("run", "--sealed", "--verdict", "v.json", "--", *words)
    verdict: dict[str, Any] = json.loads(Path("v.json").read_text())
    assert verdict["accounted"] is (done.code == 0)
    return verdict


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A statically linked program: `-c COMMAND` runs a command, `-x PATH` executes a program."""
    place = tmp_path_factory.mktemp("static")
    code = (
        "#include <stdlib.h>\n#include <unistd.h>\n"
        "int main(int n, char** a) {\n"
        "    if (n == 3 && a[1][1] == 'x') return execv(a[2], a + 2);\n"
        "    return n == 3 && system(a[2]) != 0;\n"
        "}\n"
    )
    (place / "p.c").write_text(code)
    made = place / "program"
    words = [str(COMPILER), "-static", "-o", str(made), str(place / "p.c")]
    if COMPILER is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("static programs cannot be built")
    return made


@pytest.mark.parametrize(
    "command",
    [
        "env -u LD_PRELOAD {python} app.py",
        f"sh -c 'LD_PRELOAD={LIBM} {{python}} app.py; true'",
        "env -i PATH=$PATH {python} app.py",
        "{python} drop.py",
        "{python} system.py",
    ],
)
def test_a_python_without_the_preload_is_out_of_sight(cli: Cli, script: Script, command: str) -> None:
    """It loads the library at its start, so lines are known. Its calls do not reach the library."""
    script(GCC)
    drop = "import os, subprocess, sys\nenv = dict(os.environ); env.pop('LD_PRELOAD')\n"
    Path("drop.py").write_text(f"{drop}subprocess.run([sys.executable, 'app.py'], env=env)\n")
    system = "import os, sys\ndel os.environ['LD_PRELOAD']\nos.system(sys.executable + ' app.py')\n"
    Path("system.py").write_text(system)
    verdict = judged(cli, "sh", "-c", command.format(python=sys.executable))
    assert verdict["accounted"] is False
    unseen = verdict["unseen"][-1]
    assert unseen.startswith("activity of ")
    assert unseen.endswith(DROPPED)


def test_a_static_program_that_replaces_a_shell(cli: Cli, static: Path) -> None:
    assert judged(cli, "sh", "-c", f"exec {static}")["unseen"] == [f"activity of program: {STATIC}"]


def test_a_static_command_whose_children_are_seen(cli: Cli, static: Path) -> None:
    said = "activity of program: the audit library was not loaded"
    assert judged(cli, str(static), "-c", "true")["unseen"] == [said]


@pytest.mark.parametrize("command", ["{static} -x {true}", "sh -c 'exec {static} -x {true}'"])
def test_a_static_program_that_executes_another_one(cli: Cli, static: Path, command: str) -> None:
    """The second program reports itself in the process of the first one."""
    words = shlex.split(command.format(static=static, true=shutil.which("true")))
    assert judged(cli, *words)["unseen"] == [f"activity of program: {STATIC}"]


def test_a_static_program_that_execveat_starts(cli: Cli, static: Path, standins: Standins) -> None:
    verdict = judged(cli, str(standins.loader), "execveat", str(static))
    assert verdict["unseen"] == [f"activity of program: {STATIC}"]


def test_a_static_program_in_another_directory(cli: Cli, static: Path, standins: Standins) -> None:
    """Its path names nothing in the directory of the process that starts it."""
    verdict = judged(cli, str(standins.loader), "change", str(static.parent), f"./{static.name}")
    assert verdict["unseen"] == ["activity of program: the audit library was not loaded"]


@pytest.mark.skipif(shutil.which("gcc") != "/usr/bin/gcc", reason="gcc is in another place")
def test_a_compiler_that_is_found_without_a_path(cli: Cli, standins: Standins) -> None:
    """The C library searches /bin and /usr/bin."""
    cli("run", "--sealed", "--verdict", "v.json", "--", str(standins.loader), "unset", "gcc")
    (refused,) = json.loads(Path("v.json").read_text())["refused"]
    assert refused["what"] == "start a compiler"


def test_processes_with_one_id_in_two_namespaces(cli: Cli, static: Path) -> None:
    """Each is the first process of its namespace, and /proc has those of the outer one."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-pf", "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be made")
    verdict = judged(cli, "sh", "-c", f"unshare -pf {static}; unshare -pf ls")
    assert verdict["unseen"] == [f"activity of program: {STATIC}"]
    spawn = "import os; os.waitpid(os.posix_spawnp('ls', ['ls'], os.environ), 0)"
    assert judged(cli, "unshare", "-pf", sys.executable, "-c", spawn)["accounted"] is True


@pytest.mark.parametrize("scarce", ["memory", "space"])
def test_a_process_that_cannot_write_its_events(
    cli: Cli, static: Path, standins: Standins, scarce: str
) -> None:
    """It runs as it does without the audit, and the verdict says that events are missing."""
    unseen = judged(cli, str(standins.loader), scarce, str(static))["unseen"]
    assert unseen[0].startswith("some events: a process could not write them")
    verdict = json.loads(Path("v.json").read_text())
    assert verdict["exit_status"] == 0


def test_a_fork_that_runs_on_is_said(
    cli: Cli, tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has executed no program, so that it has not reported itself."""
    monkeypatch.setattr("preheat.audit.session._LAST_PROCESSES", 0.2)
    code = (
        "import os, time\n"
        f"if pid := os.fork(): open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)); os._exit(0)\n"
        "for number in range(3): os.close(number)\n"
        "time.sleep(100)\n"
    )
    (unseen,) = judged(cli, *script(code))["unseen"]
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    assert unseen.endswith(f"(process {pid}) was still running when the report was written")


@pytest.mark.parametrize("command", ["{loader} init", "env -u CUDA_INJECTION64_PATH {loader} init"])
def test_a_process_in_which_the_driver_did_not_start_cupti(
    cli: Cli, standins: Standins, command: str
) -> None:
    """It has loaded nothing by a call that is wrapped. Its CUDA runtime may have loaded anything."""
    verdict = judged(cli, "sh", "-c", command.format(loader=standins.loader) + "; true")
    why = "modules: the program has another CUDA_INJECTION64_PATH than the audit"
    assert verdict["unseen"] == ([why] if command.startswith("env") else [])


def test_the_mark_of_a_probe_is_not_inherited(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preheat that was started by a question to a compiler is sealed all the same."""
    monkeypatch.setenv("PREHEAT_AUDIT_PROBE", "1")
    done = cli("run", "--sealed", "--verdict", "v.json", "--", "gcc", "-c", "a.c")
    assert done.code == 126


def test_a_script_with_a_static_interpreter(cli: Cli, static: Path, tmp_path: Path) -> None:
    """The file that is executed is a text, so only the missing report of the program tells."""
    path = tmp_path / "tool.script"
    path.write_text(f"#!{static}\n")
    path.chmod(0o755)
    said = "activity of tool.script: the audit library was not loaded"
    assert judged(cli, "sh", "-c", f"{path}; true")["unseen"] == [said]


def test_an_exec_that_fails_changes_nothing(cli: Cli, script: Script, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nothing of the kind")
    broken.chmod(0o755)
    code = (
        f"import os, subprocess\npath = {str(broken)!r}\n"
        "for call in (lambda: os.execv(path, ['x']), lambda: subprocess.run([path])):\n"
        "    try: call()\n"
        "    except OSError as error: print(error.errno)\n"
    )
    done = cli("run", "--sealed", "--verdict", "v.json", "--", *script(code))
    assert (done.code, done.out.split()) == (0, ["8", "8"])


def test_the_programs_of_a_shell_are_seen(cli: Cli) -> None:
    assert judged(cli, "sh", "-c", "true; ls; (ls; exec ls); exec env ls")["accounted"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_a_process_that_changes_its_user_is_seen(cli: Cli, script: Script) -> None:
    code = (
        "import os\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: os.posix_spawnp('nvcc', ['nvcc', 'a.cu'], os.environ)\n"
        "except PermissionError as error: print(error.errno)\n"
    )
    verdict = judged(cli, *script(code))
    (refused,) = verdict["refused"]
    assert (refused["what"], refused["line"]) == ("start a compiler", "app.py:3")
    assert verdict["unseen"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
@pytest.mark.parametrize("closing", [False, True])
def test_a_program_of_another_user_is_out_of_sight(cli: Cli, script: Script, closing: bool) -> None:
    """It cannot write to the directory. With `closing`, the child that executes it cannot, either."""
    code = (
        "import os, subprocess\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"subprocess.run(['/bin/sh', '-c', 'true'], close_fds={closing})\n"
    )
    said = "some events: a process could not write them"
    said = said if closing else "activity of sh: it cannot write to the directory of the audit"
    assert judged(cli, *script(code))["unseen"] == [said]


def test_an_audit_inside_a_sealed_run_is_sealed_and_said(cli: Cli, script: Script) -> None:
    words = [sys.executable, "-m", "preheat", "run", "--verdict", "inner.json", "--", *script(GCC)]
    done = cli("run", "--sealed", "--verdict", "v.json", "--", *words)
    assert "PermissionError" in done.err
    assert json.loads(Path("inner.json").read_text())["refused"] != []
    assert json.loads(Path("v.json").read_text())["accounted"] is False


def test_a_program_that_removes_its_seal_is_said(cli: Cli, script: Script) -> None:
    code = (
        "import os, subprocess\n"
        "subprocess.run(['sh', '-c', 'nvcc a.cu'], env={**os.environ, 'PREHEAT_AUDIT_SEAL': 'off'})\n"
    )
    verdict = judged(cli, *script(code))
    assert any("ran without the seal of the command" in each for each in verdict["unseen"])


def test_a_directory_that_has_events_is_refused(cli: Cli, script: Script) -> None:
    words = ("audit", "--keep", "kept", "--", *script("print('ran')"))
    assert cli(*words).code == 0
    again = cli(*words)
    assert (again.code, again.out) == (2, "")
    assert "kept is not empty" in again.err


def test_a_library_without_a_preload_says_so_for_its_child(cli: Cli, standins: Standins) -> None:
    code = f"env -u LD_PRELOAD {standins.loader} next; true"
    assert judged(cli, "sh", "-c", code)["unseen"] == [f"activity of loader: {DROPPED}"]
