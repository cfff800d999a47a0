"""Fixtures of the tests of commands: the command line, on a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import Cli, command_line


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the cache directory of the test. A module may replace it by one for all its tests."""
    return tmp_path / "cache"


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> Cli:
    """Runs the command line in the test's directory."""
    return command_line(capsys, monkeypatch, tmp_path, cache)
