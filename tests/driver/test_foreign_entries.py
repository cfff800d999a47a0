"""Entries of other libraries that were made on the CPU driver reach no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY, driver_environment
from tests.processes import TIMEOUT_SECONDS, import_path

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

#: A program whose library compiles by NVRTC, which puts PTX into the cubin on the CPU driver.
OBTAIN = """
import pickle
import preheat
from cuda.core import Program, ProgramOptions

def compiled():
    source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }'
    program = Program(source, "c++", ProgramOptions(arch="sm_90"))
    return {"kernel": pickle.dumps(bytes(program.compile("cubin").code))}

try:
    preheat.obtain_entry("mylib", "k", compiled)
    preheat.obtain_entry("mylib", "table", lambda: {"table": b"no code"})
except preheat.SealedError as error:
    print(error, error.hint)
"""
REASON = "cpu driver: it was compiled on the CPU driver, and this process uses another driver"
NAMES = ("hit", "miss", "compile", "sealed")


class Place:
    """A directory with a cache, and processes that use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, *, driver: bool, **more: str) -> tuple[str, list[tuple[str, str]]]:
        """Run the program, and return what it prints, and the names and reasons of its events."""
        events = self._directory / "events.jsonl"
        events.unlink(missing_ok=True)
        env = {**os.environ, "PYTHONPATH": import_path(), "PREHEAT_EVENTS": str(events), **more}
        done = subprocess.run(
            [sys.executable, "-c", OBTAIN],
            env={
                **(driver_environment(env, beside_gpu=1) if driver else env),
                "PREHEAT_CACHE_DIR": str(self._directory / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in events.read_text().splitlines()]
        named = [(row["event"], row.get("reason", "")) for row in rows]
        return done.stdout, [each for each in named if each[0] in NAMES]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    _, events = made.run(driver=True)
    assert [name for name, _ in events] == ["miss", "compile"] * 2
    return made


def test_an_entry_of_the_cpu_driver_is_found_on_it(place: Place) -> None:
    _, events = place.run(driver=True, PREHEAT_SEALED="1")
    assert [name for name, _ in events] == ["hit", "hit"]


def test_without_the_cpu_driver_it_is_made_again_and_what_is_no_code_is_found(place: Place) -> None:
    _, events = place.run(driver=False)
    assert [name for name, _ in events] == ["miss", "compile", "hit"]
    assert events[0][1] == REASON
    for driver in (False, True):  # Code for a GPU is not refused on the CPU driver.
        _, events = place.run(driver=driver)
        assert [name for name, _ in events] == ["hit", "hit"]


def test_a_sealed_process_says_why_it_refuses(place: Place) -> None:
    printed, events = place.run(driver=False, PREHEAT_SEALED="1")
    assert REASON.removeprefix("cpu driver: ") in printed
    assert "bake the bundle without the CPU driver" in printed
    assert ("sealed", REASON) in events
