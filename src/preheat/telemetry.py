"""Counters for OpenTelemetry. The code is in `tools/metrics`."""

from preheat.tools.metrics.otel import install

__all__ = ["install"]
