"""Run the command line inside the process of the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from preheat.tools.cli import main

__all__ = ["Cli", "Ran", "command_line", "run_command"]


class Ran(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ran]


def command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path, cache: Path
) -> Cli:
    """Runs commands in `place` on a cache of their own."""
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(cache))
    monkeypatch.setenv("PREHEAT_LOCK_DIR", str(cache.parent / "locks"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(place)

    return lambda *args: run_command(capsys, args)


def run_command(capture: pytest.CaptureFixture[str], args: Sequence[str]) -> Ran:
    """Run one command, and return its exit status and what it wrote."""
    capture.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*args])
    out, err = capture.readouterr()
    return Ran(ended.value.code if isinstance(ended.value.code, int) else 1, out, err)
