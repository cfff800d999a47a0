"""Calls that end in time although the engine inside hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from preheat.cache.remote.bounded import BoundedEngine
from tests.processes import TIMEOUT_SECONDS, wait_for
from tests.remote.faults import NAME, fault
from tests.remote.memory_engine import MemoryEngine


def test_calls_that_never_end_are_left_behind_and_limited() -> None:
    blocked = threading.Event()

    def block(*_: object) -> None:
        blocked.wait(TIMEOUT_SECONDS)

    inner = MemoryEngine(before=block)
    engine = BoundedEngine(inner, timeout=0.01)
    for _ in range(8):
        assert "not answer in time" in str(fault(lambda: engine.read(NAME)))
    assert "8 earlier calls" in str(fault(lambda: engine.read(NAME)))
    assert inner.calls["read"] == 8
    blocked.set()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "preheat-remote-call"])
    assert BoundedEngine(inner, timeout=TIMEOUT_SECONDS).read(NAME) is None


def test_any_other_error_of_an_engine_is_a_fault_of_the_server() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    engine = BoundedEngine(MemoryEngine(before=fail), timeout=60)
    error = fault(lambda: engine.read(NAME))
    assert "ZeroDivisionError: division by zero" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_an_exit_is_not_a_fault_of_the_server() -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        BoundedEngine(MemoryEngine(before=leave), timeout=60).read(NAME)


def test_each_group_of_names_has_a_time_limit_of_its_own() -> None:
    asked: list[list[str]] = []

    class Slow(MemoryEngine):
        def rounds(self, names: Iterable[str]) -> Iterator[list[str]]:
            return ([name] for name in names)

        def existing(self, names: Iterable[str]) -> set[str]:
            asked.append(list(names))
            return super().existing(asked[-1])

    inner = Slow()
    inner.write("b", b"")
    assert BoundedEngine(inner, timeout=60).existing(["a", "b", "c"]) == {"b"}
    assert asked == [["a"], ["b"], ["c"]]
