"""The counters of this process for monitoring systems, where the settings ask for them."""

from __future__ import annotations

from preheat.model.config import Address, Config
from preheat.model.events import Events
from preheat.process.locks import Lock, no_fork

__all__ = ["disable_server", "expose_counters", "serve"]

_lock = Lock()
# Whether this process, or one that it was forked from, has a server or must not have one.
_served_or_disabled = False


def expose_counters(config: Config, events: Events) -> None:
    """Offer the counters of this process to the monitoring systems that the settings name."""
    if config.metrics is not None:
        serve(config.metrics, events)
    if config.otel:
        with no_fork:
            from preheat.tools.metrics.otel import report

        report(events)


def disable_server() -> None:
    """Disable the server in this process.

    The command line of preheat calls this. A program that it starts may listen.
    """
    global _served_or_disabled
    _served_or_disabled = True


def serve(address: Address, events: Events) -> None:
    """Serve the counters of this process on `address`, once, for as long as the process.

    An address that cannot be used is a `fault` event. Children that are forked later do not listen.
    """
    global _served_or_disabled
    with _lock:
        if _served_or_disabled:
            return
        _served_or_disabled = True
    with no_fork:
        from preheat.tools.metrics.server import MetricsServer
    try:
        MetricsServer(address)  # `atexit` keeps it.
    except (OSError, ValueError, RuntimeError) as fault:  # ValueError: the host name is invalid.
        events.fault("metrics", f"listen on {address}", fault)
