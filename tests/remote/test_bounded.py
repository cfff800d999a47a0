"""Calls that end in time although the engine inside hangs."""

from __future__ import annotations

import threading

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


def test_other_errors_of_an_engine_pass_through() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    engine = BoundedEngine(MemoryEngine(before=fail), timeout=60)
    with pytest.raises(ZeroDivisionError):
        engine.read(NAME)
