"""Helpers for tests that run code in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tests.processes import TIMEOUT_SECONDS

T = TypeVar("T")


def run_in_thread(do: Callable[[], T]) -> T:
    """Call `do` in another thread; return what it returns, or raise what it raises."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(do())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive(), "the other thread hangs"
    if raised:
        raise raised[0]
    return returned[0]
