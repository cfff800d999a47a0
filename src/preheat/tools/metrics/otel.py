"""Counters and compiles for OpenTelemetry, by the providers that the program has configured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from preheat._version import __version__
from preheat.errors import PreheatError
from preheat.model.events import Events, process_counters
from preheat.process.locks import Lock, no_fork
from preheat.tools.metrics.metrics import METRICS, Metric, measured

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["install", "report"]

_lock = Lock()
_installed = False
_reported = False  # whether this process has said that it cannot install


def install(
    *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
) -> None:
    """Report the counters of this process and a span for each compile to OpenTelemetry.

    Without arguments, the global providers are used, which the program may also set later. The counters
    include those of builders that are open already. A second call does nothing.
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


def report(events: Events) -> None:
    """Do what `install` does. If the package is missing, the process emits one `fault` event."""
    global _reported
    try:
        install()
    except PreheatError as error:
        with _lock:
            first, _reported = not _reported, True
        if first:
            why = f"{error}: {error.hint}"
            events.fault("otel", "report to OpenTelemetry", PreheatError(why))


def _observe(metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    with no_fork:
        from opentelemetry.metrics import Observation

    def observations(_: CallbackOptions) -> Iterable[Observation]:
        samples = measured(process_counters.stats())[metric]
        return [Observation(sample.value, dict(sample.labels)) for sample in samples]

    return observations


def _span_sink(tracer: Tracer) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a sink that makes a span of each compile, which has just ended."""
    with no_fork:
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
