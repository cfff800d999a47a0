"""CUDA kernels as people write them, each beside the reference that says what must come out."""
