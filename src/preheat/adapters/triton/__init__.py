"""The adapter for Triton: compiled kernels, host code and tuning results on the store of preheat."""
