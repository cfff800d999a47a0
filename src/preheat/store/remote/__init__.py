"""Caches that many machines share, on servers that keep objects by name."""
