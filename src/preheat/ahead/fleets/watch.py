"""Reports that a fleet has no workers. Its engine would wait for one without a limit or a message."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, runtime_checkable

from preheat.errors import ToolchainError
from preheat.model.events import Events

__all__ = ["Fleet", "FleetWatch"]

_INTERVAL = 60.0  # seconds between two questions: workers may take that long to start


@runtime_checkable
class Fleet(Protocol):
    """An executor that knows its workers."""

    def slots(self) -> int:
        """Return how many jobs the workers can run at the same time. Raises `OSError`."""


class FleetWatch:
    """Called periodically during a bake; emits one `fault` event when the fleet has no workers.

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
            why = ToolchainError("the cluster has no workers; the bake continues when one starts")
            self._events.fault(self._name, "start a job", why)
