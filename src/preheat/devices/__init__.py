"""One device: the interface in `base`, the GPU in `cuda`, and what is the same on every device."""
