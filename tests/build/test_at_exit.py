"""The end of a process: all builders are closed within one time limit."""

from __future__ import annotations

import time

import pytest

from preheat.build import at_exit


class Slow:
    """A builder that uses all the time that it gets."""

    def __init__(self, error: Exception | None = None) -> None:
        self.waited: list[float] = []
        self.error = error

    def close(self, seconds: float) -> None:
        self.waited.append(seconds)
        time.sleep(min(0.02, seconds))
        if self.error is not None:
            raise self.error


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    """Return builders that the end of a process closes in this order."""
    builders = [Slow(), Slow(ValueError("first")), Slow(OSError("second")), Slow()]
    monkeypatch.setattr(at_exit, "_builders", dict.fromkeys(builders, ()))
    monkeypatch.setattr(at_exit, "_stores", set())
    monkeypatch.setattr(at_exit, "CLOSE_SECONDS", 0.05)
    return builders


def test_all_builders_share_the_time_and_an_error_does_not_keep_the_rest_open(
    opened: list[Slow],
) -> None:
    with pytest.raises(ValueError, match="first"):
        at_exit._close_all()
    waited = [seconds for each in opened for seconds in each.waited]
    assert len(waited) == 4
    assert waited == sorted(waited, reverse=True)
    assert waited[0] <= 0.05
    assert waited[-1] == 0


def test_a_store_is_closed_once_by_its_builder_or_alone_when_the_builder_is_gone(
    opened: list[Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    owned, left = Slow(), Slow()
    monkeypatch.setattr(at_exit, "_builders", {opened[0]: [owned]})
    monkeypatch.setattr(at_exit, "_stores", {owned, left})
    at_exit._close_all()
    assert [len(each.waited) for each in (opened[0], owned, left)] == [1, 0, 1]
