"""The adapter for Numba-CUDA, whose top package is `numba` outside of this one."""
