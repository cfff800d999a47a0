"""Cancelling: a compile of another thread ends, with its compiler process, and others go on."""

from __future__ import annotations

import threading
import time

import pytest

from preheat.process.threads import Cancellation, Cancelled, current_cancellation


def test_only_threads_inside_can_be_cancelled() -> None:
    cancellation = Cancellation()
    assert current_cancellation() is None
    with cancellation:
        assert current_cancellation() is cancellation
        seen: list[object] = []
        other = threading.Thread(target=lambda: seen.append(current_cancellation()))
        other.start()
        other.join()
    assert seen == [None]
    assert current_cancellation() is None


def test_check_raises_once_it_is_cancelled() -> None:
    cancellation = Cancellation()
    cancellation.check()
    cancellation.cancel()
    cancellation.cancel()
    with pytest.raises(Cancelled):
        cancellation.check()
    assert not issubclass(Cancelled, Exception)


def test_a_sleep_ends_when_it_is_cancelled() -> None:
    cancellation = Cancellation()
    threading.Timer(0.05, cancellation.cancel).start()
    started = time.monotonic()
    cancellation.sleep(3600)
    assert time.monotonic() - started < 3600
