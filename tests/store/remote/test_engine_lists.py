"""Lists of objects that never end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from preheat.store.remote import engine as engines
from tests.store.remote.faults import fault
from tests.store.remote.memory_engine import MemoryEngine


class Endless(MemoryEngine):
    """A server whose list has pages of `size` new names for ever."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.closed_list = False

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        try:
            for number in itertools.count():
                yield [f"{prefix}{number}-{each}" for each in range(self.size)]
        finally:
            self.closed_list = True


@pytest.mark.parametrize(
    ("size", "reason"), [(1000, "more than 2,000 objects"), (0, "more than 500 pages")]
)
def test_a_list_that_never_ends_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, size: int, reason: str
) -> None:
    monkeypatch.setattr(engines, "MAX_NAMES", 2000)
    monkeypatch.setattr(engines, "_MAX_PAGES", 500)
    engine = Endless(size)
    assert reason in str(fault(lambda: list(engine.names())))
    assert engine.closed_list


def test_a_list_as_long_as_permitted_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MAX_NAMES", 3)
    engine = MemoryEngine()
    engine.objects = dict.fromkeys(("v1/a", "v1/b", "v1/c"), b"")
    assert list(engine.names()) == ["v1/a", "v1/b", "v1/c"]
