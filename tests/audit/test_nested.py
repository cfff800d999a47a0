"""Commands of preheat in one another: `audit`, `run` and `record`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.audit.library import LIBRARY
from tests.adapters.fake import write_library
from tests.audit.conftest import PREHEAT, Cli
from tests.audit.test_seal import PYTHON_STARTS
from tests.processes import SOURCE

Script = Callable[[str], list[str]]
INNER = (sys.executable, "-m", "preheat")
ADAPTERS = "import fakelib\nprint(len(fakelib.adapters))"


def origins(report: dict[str, Any]) -> list[str]:
    return [row["origin"] for row in report["modules"]]


@pytest.mark.parametrize("seal", [[], ["--sealed"], ["--sealed", "--verdict", "verdict.json"]])
def test_an_audit_sees_the_modules_of_a_run_and_their_bundle(
    cli: Cli, baked: list[str], seal: list[str]
) -> None:
    run = [*INNER, "run", "--bundle", "kernels.heat", *seal, "--", *baked]
    done = cli("audit", "--json", "--", *run)
    assert done.code == 0, done.err
    assert done.report["clean"] is True
    assert origins(done.report) == ["bundle"]
    assert done.report["unseen"] == []
    assert (done.report["cupti"], done.report["resident_modules"]) == (True, 1)
    if "--verdict" in seal:
        assert json.loads(Path("verdict.json").read_text())["accounted"] is True


def test_an_audit_sees_what_a_sealed_run_refuses(cli: Cli, script: Script) -> None:
    done = cli("audit", "--json", "--", *INNER, "run", "--sealed", "--", *script(PYTHON_STARTS))
    assert done.code == 0
    (refusal,) = done.report["refused"]
    assert (refusal["what"], refusal["line"]) == ("start a compiler", "app.py:3")
    assert "error: the run is sealed: app.py:3 tried to start a compiler: " in done.err


def test_an_audit_inside_of_a_sealed_run_stays_sealed(cli: Cli, script: Script) -> None:
    done = cli("run", "--sealed", "--", *INNER, "audit", "--", *script(PYTHON_STARTS))
    assert "Operation not permitted: 'nvcc'" in done.out
    assert "A sealed process refused to start a compiler: " in done.err
    assert "error: the run is sealed: app.py:3 tried to start a compiler: " in done.err


@pytest.fixture
def library(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with an adapter, for the processes of the command."""
    del cli  # It sets the path first.
    place = write_library(tmp_path / "library")
    monkeypatch.setenv("PYTHONPATH", f"{place}:{SOURCE}")
    monkeypatch.delenv("PREHEAT_ADAPTERS", raising=False)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (["audit"], [], "0"),
        (["audit"], ["run"], "1"),
        (["audit"], ["run", "--sealed"], "1"),
        (["audit"], ["record", "-o", "made.toml"], "1"),
        (["record", "-o", "made.toml"], ["audit"], "1"),
        (["run", "--sealed"], ["audit"], "1"),
        (["audit"], ["audit"], "0"),
    ],
)
def test_the_inner_command_decides_on_adapters(
    cli: Cli, script: Script, outer: list[str], inner: list[str], expected: str
) -> None:
    between = [*INNER, *inner, "--"] if inner else []
    done = cli(*outer, "--", *between, *script(ADAPTERS))
    assert (done.code, done.out) == (0, f"{expected}\n"), done.err


@pytest.mark.usefixtures("library")
def test_adapters_that_the_user_has_chosen_stay_inside_of_an_audit(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_ADAPTERS", "off")
    assert cli("audit", "--", *INNER, "run", "--", *script(ADAPTERS)).out == "0\n"


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(["audit"], ["record", "-o", "made.toml"]), (["record", "-o", "made.toml"], ["audit"])],
)
def test_a_recording_and_an_audit_work_in_any_order(
    cli: Cli, script: Script, outer: list[str], inner: list[str]
) -> None:
    done = cli(*outer, "--", *INNER, *inner, "--", *script(PREHEAT))
    assert done.code == 0, done.err
    assert 'label = "k.cu"' in Path("made.toml").read_text()
    assert "k.cu" in done.err  # the audit reports the compile


def test_an_inner_audit_may_have_another_copy_of_the_library(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The inner preheat loads its own copy in a process that the outer one audits."""
    copy = tmp_path / LIBRARY.name
    shutil.copy(LIBRARY, copy)
    monkeypatch.setattr("preheat.audit.library.LIBRARY", copy)
    done = cli("audit", "--json", "--", *INNER, "audit", "--", "true")
    assert (done.code, done.report["unseen"]) == (0, [])
