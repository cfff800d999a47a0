"""The heap of kernels: memory that they allocate with `malloc` and `new`."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from preheat.emulator.memory import FREED, POISON, Buffer, Memory, align_up

__all__ = ["Heap"]

_LIMIT = 8 << 20  # Bytes, the default limit of a GPU.
_ALIGN = 16


class Heap:
    """Buffers that live until a kernel frees them or the device is reset."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: dict[int, tuple[Buffer, np.ndarray[Any, Any]]] = {}
        self._used = 0

    def allocate(self, size: int) -> int:
        """Return the address of `size` new bytes, or 0 if the heap is full."""
        if not 0 < align_up(size, _ALIGN) <= _LIMIT - self._used:
            return 0
        array = np.full(size + _ALIGN, POISON, np.uint8)
        address = align_up(array.ctypes.data, _ALIGN)
        self._buffers[address] = self._memory.add(address, size), array
        self._used += align_up(size, _ALIGN)
        return address

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned, or raise `KeyError` for another address."""
        buffer, _ = self._buffers.pop(address)
        size = buffer.end - buffer.start
        ctypes.memset(address, FREED, size)
        self._memory.free(buffer)
        self._used -= align_up(size, _ALIGN)
