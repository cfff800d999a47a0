"""Attacks on the cache, each as a test: quick ones run always, `make torture` runs all of them for long."""
