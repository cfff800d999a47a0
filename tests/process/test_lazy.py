"""What is made when it is first used."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from preheat.process.lazy import LazyModule, lazy
from tests.processes import expect_success, start_python

SLOW = """
import time
open("started", "w").close()
time.sleep(0.5)
value = 7
"""

FORK_DURING_THE_IMPORT = """
import os, sys, threading, time
from preheat.process.lazy import LazyModule

os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
slow = LazyModule("slow")
reader = threading.Thread(target=lambda: slow.value)
reader.start()
while not os.path.exists("started"):
    time.sleep(0.001)
child = os.fork()
if child == 0:
    os._exit(slow.value)
reader.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Squares:
    computed = 0

    @lazy
    def table(self) -> list[int]:
        type(self).computed += 1
        return [number * number for number in range(4)]


def test_an_attribute_is_computed_at_the_first_access() -> None:
    squares = Squares()
    assert Squares.computed == 0
    assert squares.table is squares.table
    assert (squares.table, Squares.computed) == ([0, 1, 4, 9], 1)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that nothing has imported."""
    (tmp_path / "made_for_a_test.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_for_a_test", raising=False)
    return "made_for_a_test"


def test_a_module_is_imported_when_an_attribute_is_read(module: str) -> None:
    late = LazyModule(module)
    assert module not in sys.modules
    assert late.value == 3
    assert module in sys.modules


def test_an_absent_module_and_an_absent_attribute_are_the_usual_errors(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        LazyModule("no_such_module").value  # noqa: B018
    with pytest.raises(AttributeError, match="absent"):
        LazyModule(module).absent  # noqa: B018


def test_threads_that_read_at_once_get_the_same_module(module: str) -> None:
    late = LazyModule(module)
    values: list[int] = []
    threads = [threading.Thread(target=lambda: values.append(late.value)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [3] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_fork_waits_for_an_import(tmp_path: Path) -> None:
    """Without the wait, the child finds a module that is half imported."""
    (tmp_path / "slow.py").write_text(SLOW)
    assert expect_success(start_python(FORK_DURING_THE_IMPORT, str(tmp_path))) == "7\n"
