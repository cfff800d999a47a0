"""Memory of the host as arguments of kernels, which no GPU accepts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from preheat.emulator.memory import Buffer, Memory

if TYPE_CHECKING:
    from preheat.emulator.device import EmulatorDevice

__all__ = ["HostMemory"]


class HostMemory:
    """Decides which memory of the host kernels may use, and lets them use it during a launch.

    With `host_arrays`, they may use all of it. Otherwise they may use memory of the emulator alone,
    which a tensor has if its library has imported an array.
    """

    def __init__(self, device: EmulatorDevice, memory: Memory) -> None:
        self._device = device
        self._memory = memory

    def accepts(self, address: int, size: int) -> bool:
        """Return True if these bytes may be an argument of a kernel."""
        with self._device.lock:
            own = self._memory.covers(address, address + size, write=False)
        return own or self._device.host_arrays

    @contextmanager
    def register(self, address: int, size: int, writable: bool) -> Iterator[None]:
        """Let kernels use these bytes inside a `with` statement."""
        buffer = self.lend(address, size, writable=writable)
        try:
            yield
        finally:
            self.take_back(buffer)

    def lend(self, address: int, size: int, *, writable: bool = True) -> Buffer:
        """Let kernels use these bytes until `take_back`."""
        with self._device.lock:
            return self._memory.add(address, size, writable=writable)

    def take_back(self, buffer: Buffer) -> None:
        """End what `lend` began, after all queued work, which may use the memory."""
        device = self._device
        with device.lock:
            if device.scheduler is not None:
                device.scheduler.run_all()
            self._memory.remove(buffer)
