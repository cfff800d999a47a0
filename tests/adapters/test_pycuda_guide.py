"""The page for those who come from PyCUDA: the program before the change, on a GPU with PyCUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stories import blocks
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "guides" / "coming-from" / "pycuda.md"


@pytest.mark.gpu
def test_the_program_of_pycuda_prints_the_same_as_the_one_of_preheat(tmp_path: Path) -> None:
    pytest.importorskip("pycuda", reason="PyCUDA is not installed")
    (before,) = (block.text for block in blocks(PAGE) if block.title == "before.py")
    words = [sys.executable, "-c", before]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (console,) = (block.text for block in blocks(PAGE) if block.text.startswith("$ python after.py"))
    assert console.endswith(ran.stdout)
