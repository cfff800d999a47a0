"""Counters and compiles for OpenTelemetry, by the providers that the program has configured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from preheat._version import __version__
from preheat.errors import PreheatError
from preheat.locks import Lock, no_fork
from preheat.process_counters import process_counters
from preheat.telemetry.metrics import METRICS, Metric, measured

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["install"]

_lock = Lock()
_installed = False


def install(
    *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
) -> None:
    """Report the counters of this process and a span for each compile to OpenTelemetry.

    The providers are the global ones unless they are given; these may also be set later. Builders that
    are open already count as well. A second call does nothing.
    """
    global _installed
    with no_fork:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            raise PreheatError(
                "OpenTelemetry is not installed", hint="pip install 'preheat[otel]'"
            ) from None

    with _lock:
        if _installed:
            return
        _installed = True
    meter = metrics.get_meter("preheat", __version__, meter_provider)
    for metric in METRICS:
        meter.create_observable_counter(
            metric.name, [_observe(metric)], unit=metric.unit or "1", description=metric.help
        )
    tracer = trace.get_tracer("preheat", __version__, tracer_provider)
    process_counters.subscribe(_span_sink(tracer), "compile", "reject")


def _observe(metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    def observations(_: CallbackOptions) -> Iterable[Observation]:
        samples = measured(process_counters.stats())[metric]
        return [Observation(sample.value, dict(sample.labels)) for sample in samples]

    return observations


def _span_sink(tracer: Tracer) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a sink that makes a span of each compile, which has just ended."""
    from opentelemetry.trace import StatusCode

    def sink(name: str, fields: Mapping[str, Any]) -> None:
        end = time.time_ns()
        span = tracer.start_span(
            "preheat compile",
            start_time=end - int(fields["seconds"] * 1e9),
            attributes={
                "preheat.program": fields["program"],
                "preheat.arch": fields["arch"],
                "preheat.key": fields["key"],
            },
        )
        if name == "reject":
            span.set_status(StatusCode.ERROR, "the compiler rejected the program")
        span.end(end)

    return sink
