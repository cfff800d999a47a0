"""What runs on any device: sessions, memory and its order, operands, kernels and launches."""
