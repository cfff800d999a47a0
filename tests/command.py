"""Run the command line inside the process of the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from preheat.cli import main

__all__ = ["Cli", "Ran", "command_line"]


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

    def run(*args: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(args))
        out, err = capsys.readouterr()
        return Ran(ended.value.code if isinstance(ended.value.code, int) else 1, out, err)

    return run
