"""The record of a run of tests on a GPU, as `make test-gpu` writes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITE = """
import pytest

class TestOf:
    def test_that_passes(self): pass

def test_that_passes(): pass
def test_that_fails(): assert False
def test_that_is_skipped(): pytest.skip("no GPU")
@pytest.fixture
def broken(): raise OSError
def test_without_its_fixture(broken): pass
"""


def test_outcomes_are_counted_by_file_with_the_commit(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_launches.py").write_text(SUITE)
    (tmp_path / "test_other.py").write_text("def test_that_passes(): pass\n")
    ran = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--junit-xml=out.xml", "--rootdir=."]
    assert subprocess.run(ran, cwd=tmp_path, capture_output=True).returncode == 1
    script = ROOT / "benchmarks" / "gpu_tests.py"
    command = [
        sys.executable,
        str(script),
        str(tmp_path / "out.xml"),
        "--json",
        str(tmp_path / "out.json"),
    ]
    subprocess.run(command, capture_output=True, check=True)
    record = json.loads((tmp_path / "out.json").read_text())
    table = record["tables"]["Tests on a GPU"]
    assert table["head"] == ["", "passed", "failed", "skipped"]
    assert table["rows"] == [["test_launches", 2, 2, 1], ["test_other", 1, 0, 0]]
    assert record["machine"]["commit"]
