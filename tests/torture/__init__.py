"""Attacks on the cache. Short ones are part of every test run; `make torture` runs all of them."""
