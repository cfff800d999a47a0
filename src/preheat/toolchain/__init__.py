"""Compile source to machine code, without a GPU."""
