"""The counters of this process for monitoring systems, where the settings ask for them."""

from __future__ import annotations

from preheat.config import Config
from preheat.events import Events
from preheat.locks import no_fork

__all__ = ["expose_counters"]


def expose_counters(config: Config, events: Events) -> None:
    """Offer the counters of this process to the monitoring systems that the settings name."""
    if config.metrics is not None:
        with no_fork:
            from preheat.telemetry.server import serve

        serve(config.metrics, events)
    if config.otel:
        with no_fork:
            from preheat.telemetry.otel import report

        report(events)
