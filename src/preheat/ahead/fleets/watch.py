"""Reports that a fleet has no worker. Its engine would wait for one without limit, and say nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, runtime_checkable

from preheat.errors import ToolchainError
from preheat.events import Events

__all__ = ["Fleet", "FleetWatch"]

_INTERVAL = 60.0  # seconds between two questions: workers may take that long to start


@runtime_checkable
class Fleet(Protocol):
    """An executor that knows its workers."""

    def slots(self) -> int:
        """Return how many jobs the workers can run at the same time. Raises `OSError`."""


class FleetWatch:
    """Called again and again during a bake, it emits one `fault` event if there is no worker.

    The first question comes after a minute. Executors that are not a `Fleet` are not asked.
    """

    def __init__(
        self, name: str, events: Events, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._events = events
        self._clock = clock
        self._due = clock() + _INTERVAL
        self._reported = False

    def __call__(self, executor: Executor) -> None:
        """Ask the executor, if that is due."""
        if self._reported or not isinstance(executor, Fleet) or self._clock() < self._due:
            return
        self._due = self._clock() + _INTERVAL
        try:
            slots = executor.slots()
        except OSError:  # The engine reports a lost connection by the jobs.
            return
        if not slots:
            self._reported = True
            why = ToolchainError("it has no worker; the bake waits until one starts")
            self._events.fault(self._name, "start a job", why)
