"""Compilers that a command starts are seen, however they are started, and questions are told apart."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.audit.conftest import Audited, Standins

Audit = Callable[[Sequence[str]], Audited]
Script = Callable[[str], list[str]]

FROM_PYTHON = {
    "subprocess": 'import subprocess\nsubprocess.run(["nvcc", "a.cu"])',
    "a shell": 'import subprocess\nsubprocess.run("nvcc a.cu", shell=True)',
    "a shell of a shell": 'import subprocess\nsubprocess.run("sh -c \'nvcc a.cu; true\'", shell=True)',
    "os.system": 'import os\nos.system("nvcc a.cu")',
    "os.popen": 'import os\nos.popen("nvcc a.cu").read()',
    "posix_spawn": (
        'import os\nos.waitpid(os.posix_spawnp("nvcc", ["nvcc", "a.cu"], os.environ), 0)'
    ),
    "a fork": (
        'import os\n(os.fork() or os.execlp("nvcc", "nvcc", "a.cu")) and os.wait()'
    ),
    "a thread": (
        "import subprocess, threading\n"
        'thread = threading.Thread(target=lambda: subprocess.run(["nvcc", "a.cu"]))\n'
        "thread.start(); thread.join()"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", FROM_PYTHON)
def test_a_compiler_started_from_python_has_the_line(audit: Audit, script: Script, how: str) -> None:
    done = audit(script(FROM_PYTHON[how]))
    (row,) = done.compilers
    assert row["argv"] == ["nvcc", "a.cu"]
    assert row["library"] == "app.py"
    assert row["line"] in ("app.py:2", "app.py:3")
    assert row["seconds"] is not None
    assert row["seconds"] >= 0
    assert done.probes == []
    (library,) = done.report["libraries"]
    assert (library["library"], library["compiles"]) == ("app.py", 1)


def test_a_compiler_started_by_a_child_of_a_child_is_seen(audit: Audit, script: Script) -> None:
    inner = "import subprocess; subprocess.run(['ptxas', 'a.ptx'])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    done = audit(script(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {outer!r}])"))
    (row,) = done.compilers
    assert row["argv"] == ["ptxas", "a.ptx"]
    assert row["line"] == "<string>:1"  # of the innermost program
    assert done.report["processes"] == 4


@pytest.mark.parametrize("way", ["popen", "spawn"])
def test_a_compiler_started_from_c_is_seen(audit: Audit, standins: Standins, way: str) -> None:
    words = ["popen", "nvcc a.cu"] if way == "popen" else ["spawn", "nvcc", "a.cu"]
    done = audit([str(standins.loader), *words])
    (row,) = done.compilers
    assert row["argv"] == ["nvcc", "a.cu"]
    assert (row["library"], row["line"]) == ("loader", "loader")
    assert done.report["exit_status"] == 0


PROBES = [
    *(["nvcc", word] for word in ("--version", "-V", "--help", "--list-gpu-arch", "-v")),
    *(["x86_64-linux-gnu-gcc", word] for word in ("-dumpversion", "--print-search-dirs", "-###", "-v")),
    *(["ld", word] for word in ("--version", "-V", "-v")),
    *(["rustc", word] for word in ("--version", "-vV")),
    ["llc", "--version"],
    ["x86_64-linux-gnu-gcc", "-Q", "-march=native", "--help=target"],
    ["x86_64-linux-gnu-gcc", "-Wl,--version"],
]
COMPILES = [
    ["x86_64-linux-gnu-gcc", "-v", "a.c"],
    ["x86_64-linux-gnu-gcc", "-Xlinker", "--version", "a.c"],
    ["x86_64-linux-gnu-gcc", "-Wl,-t", "a.c"],
    ["x86_64-linux-gnu-gcc", "--help=target", "-c", "a.c"],
    ["x86_64-linux-gnu-gcc", "-MD", "-MF", "--version", "-c", "a.c"],
    ["ld", "-V", "-r", "-o", "out.o", "f.o"],
    ["rustc", "--crate-type", "rlib", "a.rs"],
    ["llc", "-march=nvptx64", "a.ll"],
    ["ld", "-shared", "-h", "libx.so", "f.o"],
    ["ld", "-t", "-o", "out", "-lc"],
]


def test_questions_are_told_apart(audit: Audit, script: Script) -> None:
    code = f"import subprocess\nfor words in {PROBES}: subprocess.run(words)"
    done = audit(script(code))
    assert [row["argv"] for row in done.probes] == PROBES
    assert done.compilers == []
    assert done.report["clean"] is True
    assert done.report["libraries"] == []


def test_an_option_of_another_tool_is_no_question(audit: Audit, script: Script) -> None:
    done = audit(script(f"import subprocess\nfor words in {COMPILES}: subprocess.run(words)"))
    assert [row["argv"] for row in done.compilers] == COMPILES
    assert done.probes == []


def test_compilers_are_known_by_targets_and_versions(audit: Audit, script: Script) -> None:
    names = ["g++-13", "x86_64-linux-gnu-gcc", "ld", "tool", "run-as", "no-such-compiler"]
    code = (
        "import subprocess\n"
        f"for name in {names}:\n"
        "    try: subprocess.run([name, 'x'])\n"
        "    except FileNotFoundError: pass\n"
    )
    done = audit(script(code))
    assert [row["argv"][0] for row in done.compilers] == names[:3]


def test_a_compiler_that_starts_compilers_is_one_compile(audit: Audit) -> None:
    done = audit(["gcc", "-c", "-x", "c", "/dev/null", "-o", "/dev/null"])
    (row,) = done.compilers
    inner = [row for row in done.report["compilers"] if row["started_by_compiler"]]
    assert row["argv"][0] == "gcc"
    # Some systems call the assembler by the name of the target: x86_64-linux-gnu-as.
    assert {re.split("[/-]", each["argv"][0])[-1] for each in inner} >= {"cc1", "as"}
    assert len(done.report["compiles"]) == 1
    assert 0 < row["seconds"] <= done.report["seconds"]


def test_a_compiler_that_calls_a_shell_is_one_compile(
    audit: Audit, standins: Standins, tmp_path: Path
) -> None:
    """nvcc starts its parts by `system`."""
    (tmp_path / "nvcc").symlink_to(standins.loader)
    done = audit([str(tmp_path / "nvcc"), "popen", "ptxas a.ptx; true"])
    (row,) = done.compilers
    assert row["argv"][0] == str(tmp_path / "nvcc")
    inner = [row["argv"] for row in done.report["compilers"] if row["started_by_compiler"]]
    assert inner == [["ptxas", "a.ptx"]]


def test_the_time_of_a_compiler_begins_when_it_is_executed(audit: Audit, script: Script) -> None:
    """What the process did before is not a part of it, and neither is what it started before."""
    code = (
        "import os, subprocess, time\n"
        "subprocess.run(['ptxas', 'a.ptx'])\n"
        "time.sleep(0.4)\n"
        "os.execlp('nvcc', 'nvcc', 'a.cu')\n"
    )
    first, second = sorted(audit(script(code)).compilers, key=lambda row: row["argv"], reverse=True)
    assert (first["argv"], second["argv"]) == (["ptxas", "a.ptx"], ["nvcc", "a.cu"])
    assert second["seconds"] < 0.4


def test_a_python_without_site_packages_is_seen_without_lines(audit: Audit, script: Script) -> None:
    _, path = script('import subprocess\nsubprocess.run(["nvcc", "a.cu"])')
    done = audit([sys.executable, "-I", "-S", path])
    (row,) = done.compilers
    assert row["library"].startswith("python")


def test_other_searches_after_a_library_still_work(audit: Audit, standins: Standins) -> None:
    """`dlsym(RTLD_NEXT)` depends on the library that calls it."""
    assert audit([str(standins.loader), "next"]).report["exit_status"] == 0


WAITS = {
    "wait": "os.wait()",
    "wait3": "os.wait3(0)",
    "wait4": "os.wait4(child, 0)",
    "waitid": "[os.waitid(os.P_PID, child, os.WEXITED | more) for more in (os.WNOWAIT, 0)]",
}


@pytest.mark.parametrize("how", WAITS)
def test_the_end_of_a_killed_compiler_is_seen(
    audit: Audit, script: Script, tmp_path: Path, how: str
) -> None:
    (tmp_path / "ptxas").symlink_to(shutil.which("sleep") or "/bin/sleep")
    code = (
        "import os\n"
        "child = os.posix_spawn('./ptxas', ['ptxas', '100'], os.environ)\n"
        "os.kill(child, 9)\n"
        f"{WAITS[how]}\n"
    )
    (row,) = audit(script(code)).compilers
    assert row["seconds"] is not None
    assert row["status"] == 128 + 9


def test_the_end_of_a_compiler_that_skips_handlers_is_seen(
    audit: Audit, standins: Standins, tmp_path: Path
) -> None:
    """Nobody waits for it: its own report is the only one."""
    (tmp_path / "nvcc").symlink_to(standins.loader)
    code = "import os, time\nos.posix_spawn('./nvcc', ['nvcc', 'end'], os.environ)\n"
    (row,) = audit([sys.executable, "-c", f"{code}time.sleep(0.5)"]).compilers
    assert row["seconds"] is not None
