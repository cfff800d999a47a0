"""The adapter for Numba-CUDA. In its modules, `import numba` imports the library."""
