"""The recording of the requests to a builder, where the settings ask for one."""

from __future__ import annotations

from preheat.model.config import Config
from preheat.model.events import Events
from preheat.process.locks import no_fork

__all__ = ["record_requests"]


def record_requests(config: Config, events: Events) -> None:
    """Write the requests to a builder with these events to the recording that the settings name."""
    if config.record is not None:
        with no_fork:
            from preheat.ahead.recorder import Recorder  # Most processes record nothing.

        Recorder.attach(events, config.record)
