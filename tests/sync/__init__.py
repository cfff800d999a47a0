"""Tests of `preheat.sync`."""
