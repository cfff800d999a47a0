"""Variables whose names are almost right: one warning for each in a process, with the name meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.build.builder import Builder
from preheat.model import misspelled
from preheat.model.config import VARIABLES, Config

NAMES = [variable.name for variable in VARIABLES]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misspelled, "_warned", set())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PREHEAT_BUNDLES", "PREHEAT_BUNDLE"),
        ("PREHEAT_BUNDEL", "PREHEAT_BUNDLE"),
        ("PREHEAT_UBNDLE", "PREHEAT_BUNDLE"),
        ("PREHEAT_EALED", "PREHEAT_SEALED"),
        ("PREHEAT_SEALE", "PREHEAT_SEALED"),
        ("PREHEAT_DEVIVE", "PREHEAT_DEVICE"),
        ("PREHEAT__DEVICE", "PREHEAT_DEVICE"),
        ("PREHEAT_CACHEDIR", "PREHEAT_CACHE_DIR"),
        ("PREHEAT_DEVCIES", None),
        ("PREHEAT_DRIVE", None),
        ("PREHEAT_BNUDEL", None),
        ("PREHEAT_PORT", None),
        ("PREHEAT_", None),
    ],
)
def test_one_edit_is_a_misspelling_and_two_are_another_name(name: str, meant: str | None) -> None:
    assert misspelled.meant(name, NAMES) == meant


def test_no_name_of_preheat_is_a_misspelling_of_another() -> None:
    set_by_commands = ["PREHEAT_AUDIT", "PREHEAT_AUDIT_ONLY", "PREHEAT_SEALED_BY"]
    for name in (*NAMES, *set_by_commands):
        assert misspelled.meant(name, NAMES) is None


def test_a_process_that_opens_builders_warns_of_each_name_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("PREHEAT_SEALD", "PREHEAT_BUNDLE_", "PREHEAT_OF_ANOTHER_PROGRAM", "PREHEAT_CACHE"):
        monkeypatch.setenv(name, "1")
    config = Config(cache_dirs=(tmp_path / "cache",), lock_dir=tmp_path / "locks")
    for _ in range(2):
        Builder.open(config).close()
    assert caplog.messages == [
        "the environment variable PREHEAT_BUNDLE_ is unknown and has no effect: "
        "did you mean PREHEAT_BUNDLE?",
        "the environment variable PREHEAT_SEALD is unknown and has no effect: "
        "did you mean PREHEAT_SEALED?",
    ]


def test_a_misspelled_name_of_the_adapters_is_a_warning_of_the_import() -> None:
    """Nothing else would notice it: this variable is read by the import alone."""
    code = "import preheat, sys; assert 'preheat.model.config' not in sys.modules"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PREHEAT_ADAPTER": "triton", "PREHEAT_SEALD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == (
        "the environment variable PREHEAT_ADAPTER is unknown and has no effect: "
        "did you mean PREHEAT_ADAPTERS?\n"
    )
