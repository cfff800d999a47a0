"""Build tools are no compilers: they run sealed, and what they start is seen or refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audit.conftest import Audited, Cli, Standins

Script = Callable[[str], list[str]]
Audit = Callable[[list[str]], Audited]

RULES = """\
rule compile
  command = nvcc $in && cp $in $out
build extension.so: compile extension.cu
"""
#: A library that asks ninja at each start, as the extensions of torch do.
LOAD = """\
import subprocess, sys
subprocess.run(["ninja", "--version"], check=True, stdout=subprocess.DEVNULL)
done = subprocess.run(["ninja"], stdout=subprocess.PIPE, text=True)
sys.exit(f"the build failed: {done.stdout}" if done.returncode else 0)
"""
STARTED = "app.py:3"


@pytest.fixture
def extension(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command of an application that builds an extension with ninja."""
    found = Path(sys.executable).with_name("ninja")
    ninja = str(found) if found.is_file() else shutil.which("ninja")
    if ninja is None:
        pytest.skip("ninja is not installed")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ninja").symlink_to(ninja)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "build.ninja").write_text(RULES)
    (tmp_path / "extension.cu").write_text("source")
    return script(LOAD)


def verdict() -> dict[str, object]:
    found: dict[str, object] = json.loads(Path("verdict.json").read_text())
    return found


SEALED = ("run", "--sealed", "--verdict", "verdict.json", "--")


def test_ninja_with_nothing_to_build_runs_sealed(cli: Cli, extension: list[str]) -> None:
    assert cli("run", "--", *extension).code == 0
    done = cli(*SEALED, *extension)
    assert (done.code, verdict()["accounted"]) == (0, True), done.err
    assert "nothing was compiled" in done.err


def test_what_ninja_starts_is_refused_at_the_line_that_started_ninja(
    cli: Cli, extension: list[str], tmp_path: Path
) -> None:
    for options in ([], ["--verdict", "verdict.json"]):
        done = cli("run", "--sealed", *options, "--", *extension)
        assert done.code == 1
        assert "the build failed" in done.err
        (said,) = [line for line in done.err.splitlines() if "tried to" in line]
        assert said.startswith(f"error: the run is sealed: {STARTED} tried to start a compiler: ")
        assert said.endswith("/nvcc")
        assert not (tmp_path / "extension.so").exists()
    assert verdict()["accounted"] is False


def test_a_compiler_below_ninja_has_the_line_that_started_ninja(
    audit: Audit, extension: list[str]
) -> None:
    cold, warm = audit(extension), audit(extension)
    (row,) = cold.compilers
    assert (row["argv"][0], row["line"], row["library"]) == ("nvcc", STARTED, "app.py")
    (library,) = cold.report["libraries"]
    assert (library["library"], library["compiles"]) == ("app.py", 1)
    assert (warm.compilers, warm.probes, warm.report["clean"]) == ([], [], True)


def test_a_ninja_that_is_a_script_in_python_is_ninja(
    audit: Audit, extension: list[str], tmp_path: Path
) -> None:
    """Some packages of ninja put such a script on PATH."""
    ninja = tmp_path / "tools" / "ninja"
    target = str(ninja.readlink())
    ninja.unlink()
    ninja.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        f"sys.exit(subprocess.call([{target!r}, *sys.argv[1:]]))\n"
    )
    ninja.chmod(0o755)
    (row,) = audit(extension).compilers
    assert (row["argv"][0], row["line"]) == ("nvcc", STARTED)


@pytest.mark.parametrize("tool", ["make", "ccache"])
def test_a_compiler_below_another_build_tool_has_the_line_that_started_the_tool(
    audit: Audit, script: Script, standins: Standins, tmp_path: Path, tool: str
) -> None:
    """Under ccache, a library runs the same compilers."""
    (tmp_path / tool).symlink_to(standins.loader)
    (row,) = audit(
        script(f"import subprocess\nsubprocess.run(['./{tool}', 'popen', 'nvcc a.cu'])")
    ).compilers
    assert (row["argv"][0], row["line"], row["library"]) == ("nvcc", "app.py:2", "app.py")


def test_a_compiler_that_ccache_becomes_is_a_compiler(
    audit: Audit, script: Script, tmp_path: Path
) -> None:
    """ccache executes the compiler in its own process where it cannot cache a call."""
    (tmp_path / "ccache").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "ccache").chmod(0o755)
    done = audit(script("import subprocess\nsubprocess.run(['./ccache', 'nvcc', 'a.cu'])"))
    (row,) = done.compilers
    assert (row["argv"], row["line"]) == (["nvcc", "a.cu"], "app.py:2")


def test_a_client_of_a_compile_server_is_a_compiler(cli: Cli, script: Script) -> None:
    """Its server may be older than the run, or on another machine, so that nobody sees it compile."""
    asks = [["sccache", "--show-stats"], ["sccache", "nvcc", "--version"]]
    asking = script(f"import subprocess\nfor words in {asks}: subprocess.run(words, check=True)")
    done = cli(*SEALED, *asking)
    assert (done.code, verdict()["accounted"]) == (0, True), done.err
    compiling = script(
        "import subprocess\nsubprocess.run(['sccache', 'nvcc', '-c', 'a.cu'], check=True)"
    )
    done = cli(*SEALED, *compiling)
    assert (done.code, verdict()["accounted"]) == (1, False)
    assert "app.py:2 tried to start a compiler: " in done.err
