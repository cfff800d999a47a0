"""Devices: the interface in `base`, the GPU in `cuda`, the emulator in `emulator`."""
