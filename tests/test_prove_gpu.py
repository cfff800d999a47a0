"""The parts of a proof on a GPU: their results, and which of them are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import prove_gpu
from tests.prove_gpu import PARTS, ROOT, Part, main, missing

KNOWN = {"commit": "abc", "date": "today", "gpu": "NVIDIA H200", "driver": "13.0"}


def know() -> dict[str, str]:
    return dict(KNOWN)


def result(place: Path, name: str) -> dict[str, object]:
    """Return the written result of a part."""
    found: dict[str, object] = json.loads((place / f"{name}.json").read_text())
    return found


def test_a_part_says_what_it_was_made_with_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print(open('OUT/given').read()); sys.exit(int(sys.argv[1]))"
    parts = {"good": Part(("-c", code, "0")), "bad": Part(("-c", code, "3"))}
    monkeypatch.setattr(prove_gpu, "PARTS", parts)
    (tmp_path / "given").write_text("what it prints")
    assert main([str(tmp_path), "--part", "good"], know) == 0
    assert main([str(tmp_path), "--part", "good", "--part", "bad"], know) == 1
    assert (tmp_path / "good.log").read_text() == "what it prints\n"
    assert result(tmp_path, "good").items() >= {**KNOWN, "outcome": "succeeded"}.items()
    assert result(tmp_path, "bad")["outcome"] == "exit status 3"
    assert "bad: exit status 3" in capsys.readouterr().out


def test_parts_are_repeated_that_failed_or_ran_with_another_commit(tmp_path: Path) -> None:
    outcomes = {
        "done": ("abc", "succeeded"),
        "old": ("ab", "succeeded"),
        "bad": ("abc", "exit status 1"),
    }
    for name, (commit, outcome) in outcomes.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": commit, "outcome": outcome}))
    assert missing(tmp_path, ["done", "old", "bad", "new"], "abc") == ["old", "bad", "new"]


def test_the_statuses_of_both_drivers_are_compared_once_they_are_there(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--part", "statuses"], know) == 1
    for which, status in (("gpu", 1), ("cpu", 0)):
        calls = {"test_a": {"cuMemFree": [status]}}
        (tmp_path / f"statuses-{which}-calls.json").write_text(json.dumps(calls))
    assert main([str(tmp_path), "--part", "statuses"], know) == 1
    assert result(tmp_path, "statuses")["outcome"] == "1 differences"
    expected = "test_a: cuMemFree: GPU [1], CPU driver [0]\n"
    assert (tmp_path / "statuses.log").read_text() == expected


def test_what_the_parts_run_exists() -> None:
    named = {word for part in PARTS.values() for word in part.arguments}
    files = [word for word in named if word.startswith(("tests/", "benchmarks/"))]
    assert [file for file in files if not (ROOT / file).exists()] == []
