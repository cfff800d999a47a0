"""Attacks on the cache, each as a test. The quick ones run always; `make torture` runs all for long."""
