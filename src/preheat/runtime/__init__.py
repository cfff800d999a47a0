"""What runs on any device: memory with a life, operands of every library, kernels and launches."""
