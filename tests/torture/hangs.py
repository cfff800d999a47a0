"""A guard for tests of code that must not hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.processes import TIMEOUT_SECONDS


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Interrupt a call that waits for a pipe, and fail."""

    def interrupt(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
