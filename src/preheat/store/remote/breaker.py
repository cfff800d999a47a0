"""A breaker: requests to a server that does not answer stop for a while."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from preheat.process.locks import Lock

__all__ = ["Breaker"]

_MAX_FAULTS = 3  # failed requests, one after another, that open it
_FIRST_PAUSE = 1.0  # seconds
_LONGEST_PAUSE = 60.0


class Breaker:
    """Decides whether a request is made. Safe from any thread, and after a fork.

    It is closed at first. It opens after three faults without a success between them, and when such
    faults have taken `patience` seconds in all. While it is open no request is made. After a pause,
    which grows from one second to a minute, it permits one trial: a success closes it, and a fault
    begins a longer pause.
    """

    def __init__(
        self,
        *,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.closed = True
        self.reason = ""  # of the last fault
        self._patience = patience
        self._clock = clock
        self._chance = chance
        self._lock = Lock()
        self._faults = 0
        self._lost = 0.0  # seconds that the faults since the last success have taken
        self._pause = 0.0
        self._trial_at = 0.0
        self._closed_at = float("-inf")

    def claim_trial(self) -> bool:
        """Return True to one caller when it is open and the pause is over.

        The caller makes one request. A caller that never does so delays the next trial by one pause.
        """
        with self._lock:
            now = self._clock()
            if self.closed or now < self._trial_at:
                return False
            self._trial_at = now + self._pause
            return True

    def succeeded(self, *, trial: bool = False) -> bool:
        """Count a success, and return whether it closed the breaker, as only that of a trial does."""
        if not trial:
            self._faults = 0
            self._lost = 0.0
            return False
        with self._lock:
            was_open = not self.closed
            self.closed = True
            self._faults = 0
            self._lost = 0.0
            self._closed_at = self._clock()
            return was_open

    def failed(self, seconds: float, *, trial: bool = False, reason: str = "") -> bool:
        """Count a fault that took `seconds`, and return whether it opened the breaker.

        Requests that began before it opened may fail later: of those, only the first counts.
        """
        with self._lock:
            self.reason = reason
            if not self.closed:
                if trial:
                    self._begin_pause()
                return False
            self._faults += 1
            self._lost += seconds
            if self._faults < _MAX_FAULTS and self._lost < self._patience:
                return False
            self.closed = False
            if self._clock() - self._closed_at > self._pause:  # It worked for a while.
                self._pause = 0.0
            self._begin_pause()
            return True

    def _begin_pause(self) -> None:
        """Begin a pause. It varies by a quarter, so that many processes do not try at one time."""
        self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._trial_at = self._clock() + self._pause * (0.75 + self._chance() / 2)
