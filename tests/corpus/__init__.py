"""CUDA kernels as users write them, each with a reference for its results."""
