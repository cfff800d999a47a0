"""A recording lists the compiles that no adapter covers, and commands that use it repeat them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.ahead.manifest import Manifest, Unrecorded
from preheat.audit.events import Event, EventLog
from preheat.audit.unrecorded import find_unrecorded
from preheat.errors import InputError
from preheat.tools.cli import record as record_command
from tests.audit.conftest import PREHEAT, Audited, Cli, Standins
from tests.audit.test_modules import NVRTC

Script = Callable[[str], list[str]]

APP = 4_100_010  # No process of this machine has the id.
START = 'import subprocess\nsubprocess.run(["nvcc", "a.cu"])\n'
SAID = "not recorded: what app.py compiled with nvcc (app.py:2)\n"
HINT = "\nhint: preheat has no adapter for what app.py compiles with nvcc:\n"


def unrecorded() -> tuple[Unrecorded, ...]:
    """Return the rows of the manifest that a test has recorded."""
    return Manifest.read("kernels.toml").unrecorded


def test_a_recording_lists_a_compiler_with_its_line(cli: Cli, script: Script) -> None:
    done = cli("record", "--", *script(START + PREHEAT))
    assert done.code == 0
    assert "recorded 1 program (1 new)" in done.err
    assert SAID in done.err
    assert HINT in done.err
    (row,) = unrecorded()
    assert (row.library, row.compiler, row.callers) == ("app.py", "nvcc", ("app.py:2",))
    assert row.seconds > 0


@pytest.fixture
def recorded(cli: Cli, script: Script) -> list[str]:
    """An application that starts a compiler and needs one kernel of preheat, recorded and baked."""
    words = script(START + PREHEAT)
    assert cli("record", "--", *words).code == 0
    done = cli("bake", "kernels.toml")
    assert done.code == 0, done.err
    return words


CHECK = ("check", "kernels.toml", "--bundle", "kernels.heat")


def test_a_check_repeats_it_and_does_not_claim_everything(cli: Cli, recorded: list[str]) -> None:
    done = cli(*CHECK)
    assert done.code == 0  # The files may have been built ahead of time.
    assert "1 program, 1 architecture: all that was recorded is in kernels.heat\n" in done.err
    assert SAID in done.err
    (row,) = json.loads(cli(*CHECK, "--json").out)["unrecorded"]
    assert (row["library"], row["compiler"], row["callers"]) == ("app.py", "nvcc", ["app.py:2"])
    assert cli("check", "kernels.toml", "--arch", "sm_80", "--bundle", "kernels.heat").code == 1
    assert recorded


def test_a_run_with_the_manifest_repeats_it_before_the_command_starts(
    cli: Cli, recorded: list[str]
) -> None:
    options = ("--bundle", "kernels.heat", "--sealed", "--manifest", "kernels.toml")
    done = cli("run", *options, "--", *recorded)
    assert SAID in done.err
    assert done.err.index(SAID) < done.err.index("this process is sealed: starting the compiler")
    assert done.code == 1


def test_a_recording_of_kernels_alone_is_everything(cli: Cli, script: Script) -> None:
    done = cli("record", "--", *script(PREHEAT))
    assert "not recorded" not in done.err
    assert unrecorded() == ()
    assert cli("bake", "kernels.toml").code == 0
    assert "everything is in kernels.heat\n" in cli(*CHECK).err


def test_without_any_kernel_the_manifest_has_the_compiler(cli: Cli, script: Script) -> None:
    done = cli("record", "--", *script(START))
    assert done.err.startswith(f"nothing was recorded\n{SAID}")
    assert "neither preheat.device()" not in done.err
    (row,) = unrecorded()
    assert row.compiler == "nvcc"
    done = cli("check", "kernels.toml")
    assert done.code == 2
    assert "hint: the recorded run compiled only what no adapter covers: see [[unrecorded]]" in done.err


def test_recordings_are_joined_and_a_fresh_one_forgets(cli: Cli, script: Script) -> None:
    cli("record", "--", *script(START))
    cli("record", "--", *script(START.replace("\nsub", "\n\n\nsub") + PREHEAT))
    (row,) = unrecorded()
    assert row.callers == ("app.py:2", "app.py:4")
    assert "(app.py:2, app.py:4)" in cli("record", "--merge", "kernels.toml").err
    done = cli("record", "--fresh", "--json", "--", *script(PREHEAT))
    assert json.loads(done.out)["unrecorded"] == []
    assert unrecorded() == ()


ENTRY = """\
import subprocess
import preheat
def make():
    subprocess.run(["nvcc", "a.cu"])
    return {"a.cubin": b"code"}
preheat.obtain_entry("mine", "a.cu", make)
"""


def test_what_makes_an_entry_of_the_program_is_recorded(cli: Cli, script: Script) -> None:
    done = cli("record", "--json", "--", *script(ENTRY))
    found = json.loads(done.out)
    assert [row["kind"] for row in found["foreign"]] == ["mine"], done.err
    assert found["unrecorded"] == []
    later = "subprocess.run(['nvcc', 'b.cu'])\n"
    found = json.loads(cli("record", "--json", "--", *script(ENTRY + later)).out)
    assert [row["callers"] for row in found["unrecorded"]] == [["app.py:7"]]


def test_a_compile_inside_the_process_is_listed(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    done = cli("record", "--", *script(NVRTC))
    assert "not recorded: what app.py compiled with NVRTC (app.py:3)\n" in done.err


def test_a_library_that_may_compile_inside_itself_is_listed(
    cli: Cli, script: Script, standins: Standins, tmp_path: Path
) -> None:
    shutil.copy(standins.libraries / "libcupti.so.13", tmp_path / "libHalide.so")
    done = cli("record", "--", *script("import ctypes\nctypes.CDLL('./libHalide.so')"))
    assert "not recorded: what Halide may have compiled, which is not seen\n" in done.err
    assert unrecorded() == (Unrecorded("Halide"),)


def test_a_program_that_nobody_sees_is_listed(cli: Cli, script: Script) -> None:
    """It may have compiled kernels of preheat, which are in no recording either."""
    code = "import subprocess\nsubprocess.run(['/usr/bin/env', '-i', '/bin/sh', '-c', ':'], env={})\n"
    done = cli("record", "--", *script(code + PREHEAT))
    assert done.code == 0
    assert "not recorded: what env may have compiled, which is not seen\n" in done.err
    assert "env" in [row.library for row in unrecorded()]


def test_without_the_audit_library_a_recording_says_what_it_did_not_look_for(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record_command, "LIBRARY", tmp_path / "absent.so")
    done = cli("record", "--", *script(START + PREHEAT))
    assert done.code == 0
    assert "compilers that no adapter covers were not looked for: there is no audit library" in done.err
    done = cli("record", "--json", "--", *script(START + PREHEAT))
    assert json.loads(done.out)["unrecorded"] is None


def test_a_recording_inside_an_audit_is_reported_by_both(cli: Cli, script: Script) -> None:
    done: Audited = cli("audit", "--json", "--", *_preheat("record", "--", *script(START)))
    assert SAID in done.err
    assert [row["argv"] for row in done.compilers] == [["nvcc", "a.cu"]]


def _preheat(*words: str) -> list[str]:
    from sys import executable

    return [executable, "-m", "preheat", *words]


def test_a_compiler_that_runs_beside_a_compile_of_preheat_is_listed() -> None:
    """Only an entry of an adapter or of the program itself can have the results of a compiler."""

    def found(program: str, library: str) -> list[str]:
        site = f'  File "/venv/lib/python3.12/site-packages/{library}/a.py", line 1 in f'
        rows = [("miss", 1.0), ("compile", 5.0)]
        events = [
            Event("preheat", at, APP, {"row": {"event": name, "key": "k", "program": program}})
            for name, at in rows
        ]
        fields = {"parent": APP, "path": "/x/gcc", "argv": ["gcc"], "role": "compiler", "site": site}
        events += [
            Event("exec", 2.0, APP + 1, fields),
            Event("process", 2.0, APP + 1, {**fields, "preloaded": 1}),
            Event("exit", 3.0, APP + 1, {}),
        ]
        log = EventLog(tuple(sorted(events, key=lambda each: each.time)))
        return [row.library for row in find_unrecorded(log)]

    assert found("k.cu", "torch") == ["torch"]
    assert found("triton add", "torch") == ["torch"]
    assert found("triton add", "triton") == []
    assert found("mine a.cu", "torch") == []


# The manifest

ROW = 'version = 1\n[[unrecorded]]\nlibrary = "torch"\ncompiler = "c++"\nby = ["a.py:1"]\n'


def read(text: str) -> Manifest:
    path = Path("read.toml")
    path.write_text(text)
    return Manifest.read(path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('library = "torch"\n', "", "4: unrecorded 1: an [[unrecorded]] needs a library"),
        ('"c++"', "3", "4: torch: compiler must be text, not 3"),
        ('["a.py:1"]', '"a.py:1"', "5: torch: by must be a list of texts"),
        ("by =", "line =", "5: torch: unknown key 'line'"),
        ("[[unrecorded]]", "[unrecorded]", "unrecorded must be written as [[unrecorded]]"),
    ],
)
def test_a_row_is_checked(
    old: str, new: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(ROW).unrecorded == (Unrecorded("torch", "c++", callers=("a.py:1",)),)
    with pytest.raises(InputError) as error:
        read(ROW.replace(old, new))
    assert why.partition(": ")[2] in str(error.value)


def test_comments_stay_and_control_characters_are_escaped(cli: Cli, script: Script) -> None:
    Path("kernels.toml").write_text("# mine\n" + ROW.replace("c++", "c\\u001b[31m++"))
    done = cli("record", "--", *script(START))
    assert done.code == 0
    assert "# mine\n" in Path("kernels.toml").read_text()
    assert [row.compiler for row in unrecorded()] == ["nvcc", "c\x1b[31m++"]
    done = cli("record", "--merge", "kernels.toml")
    assert "\x1b" not in done.err
    assert "not recorded: what torch compiled with c\\x1b[31m++ (a.py:1)\n" in done.err
