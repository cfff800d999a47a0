"""Other libraries inside a capture: their work goes to the captured stream, their memory stays."""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from typing import Any

from preheat.devices import base
from preheat.devices.base import ON_GPU
from preheat.runtime.operands import introduce

__all__ = ["Captured", "Guests"]


class Guests:
    """The libraries that work on this GPU, sent to one stream for a while.

    torch allocates from a pool of its own meanwhile; who keeps `pool` keeps what was allocated
    there from being handed out again. CuPy is sent to the stream; it cannot allocate inside a capture.
    """

    def __init__(self, device: base.Device, stream: base.Stream) -> None:
        self.libraries: set[str] = set()
        self.pool: object = None
        self._place, self._handle, self._stack = device.dlpack, stream.handle, ExitStack()

    def enter(self) -> None:
        """Send them there."""
        place, index = self._place
        cupy: Any = sys.modules.get("cupy")
        torch: Any = sys.modules.get("torch")
        if place == ON_GPU and cupy is not None:
            self._introduce("cupy")
            self._stack.enter_context(cupy.cuda.Device(index))
            self._stack.enter_context(_cupy_stream(cupy, self._handle, index))
        if place == ON_GPU and torch is not None and torch.cuda.is_initialized():
            self._introduce("torch")
            self.pool = _spare.pop() if _spare else torch.cuda.MemPool()
            there = torch.cuda.ExternalStream(self._handle, device=index)
            self._stack.enter_context(torch.cuda.stream(there))
            self._stack.enter_context(torch.cuda.use_mem_pool(self.pool))

    def _introduce(self, name: str) -> None:
        introduce(name)
        self.libraries.add(name)

    def leave(self) -> None:
        """Let them work where they did before."""
        self._stack.close()

    def claim(self) -> object:
        """The pool, for whoever keeps it from now on."""
        pool, self.pool = self.pool, None
        return pool

    def spare(self) -> None:
        """Keep the pool, in which nothing was allocated, for the next: torch waits when one ends."""
        if self.pool is not None:
            _spare.append(self.claim())


_spare: list[object] = []
atexit.register(_spare.clear)  # while torch can still end them


def _cupy_stream(cupy: Any, handle: int, index: int) -> Any:
    """A stream as CuPy takes it: by protocol since 14.0, by number before."""
    take = getattr(cupy.cuda.Stream, "from_external", None)
    return cupy.cuda.ExternalStream(handle, index) if take is None else take(Captured(handle))


class Captured:
    """The stream under capture as other libraries know it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)
