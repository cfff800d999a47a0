"""Tests of `preheat.telemetry`."""
