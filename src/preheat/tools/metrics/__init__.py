"""Counters for monitoring systems: Prometheus text, a small server for it, and OpenTelemetry."""

from preheat.tools.metrics.otel import install

__all__ = ["install"]
