"""Counters for monitoring systems: Prometheus text, a small server for it, and OpenTelemetry."""

from preheat.telemetry.otel import install

__all__ = ["install"]
