"""Graphs: work captured once, owned, and replayed."""
