"""Tests of `preheat.store.copy`."""
