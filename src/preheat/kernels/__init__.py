"""Kernels that come with preheat: for each family one `.cu` and one `.py` that launches it."""
