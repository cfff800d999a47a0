"""Other libraries inside a capture: their work goes to the captured stream, their memory stays."""

from __future__ import annotations

from contextlib import ExitStack

from preheat.devices import base
from preheat.runtime.libraries import LIBRARIES, Library, StreamHandle, Torch

__all__ = ["Guests"]


class Guests:
    """The libraries on this device, whose work goes to the captured stream during a capture.

    They allocate from pools of their own meanwhile. Whoever keeps a pool keeps what was allocated there
    from being handed out again. CuPy can allocate in a relaxed capture alone.
    """

    def __init__(self, device: base.Device, stream: base.Stream) -> None:
        self.pools: dict[Library, object] = {}
        self._device, self._handle, self._stack = device.dlpack, stream.handle, ExitStack()

    @property
    def libraries(self) -> set[str]:
        """Return the names of the libraries whose work goes to the captured stream."""
        return {library.name for library in self.pools}

    def enter(self) -> None:
        """Send them there."""
        place, index = self._device
        for library in LIBRARIES.values():
            if library.directed and library.device_type == place and library.ready():
                pool = library.enter(self._stack, StreamHandle(self._handle), index)
                self.pools[library] = pool

    def leave(self) -> None:
        """Let them work where they did before."""
        self._stack.close()

    def claim(self) -> tuple[object, ...]:
        """Return the pools, for whoever keeps them from now on."""
        pools, self.pools = self.pools, {}
        return tuple(pools.values())

    def spare(self) -> None:
        """Keep pools in which nothing was allocated for the next capture."""
        for library, pool in self.pools.items():
            if isinstance(library, Torch):
                library.reuse(pool, self._device[1])
        self.pools = {}
