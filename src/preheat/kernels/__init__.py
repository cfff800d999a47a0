"""Kernels shipped with preheat. Each family has a `.cu` file and a `.py` file that launches it."""
