"""Devices: the seam in `base`, the GPU in `cuda`, the emulator in `emulator`."""
