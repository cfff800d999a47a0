"""The adapter for CuPy: what it compiles is in the caches and bundles of preheat."""
