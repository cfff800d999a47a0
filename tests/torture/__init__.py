"""Attacks on the cache. The quick ones run with every test run, `make torture` runs all at length."""
