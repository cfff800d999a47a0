"""Other libraries inside a capture: their work goes to the captured stream, their memory is kept."""

from __future__ import annotations

from contextlib import ExitStack

from preheat.device import base
from preheat.device.libraries import LIBRARIES, Library, StreamHandle, Torch
from preheat.graph.shared_pool import SharedPool

__all__ = ["ForeignLibraries"]


class ForeignLibraries:
    """Directs torch and CuPy to the captured stream during a capture.

    Each library allocates from its own memory pool meanwhile, or from a `shared` one. Memory that
    was allocated inside is not handed out again as long as the pool is kept, except to captures that
    share it. CuPy can allocate only in a relaxed capture.
    """

    def __init__(
        self, device: base.Device, stream: base.Stream, shared: SharedPool | None = None
    ) -> None:
        self.pools: dict[Library, object] = {}
        self.shared = shared
        self._redirected: set[Library] = set()
        self._device = device.dlpack
        self._handle = stream.handle
        self._stack = ExitStack()

    @property
    def names(self) -> set[str]:
        """Return the names of the libraries that were directed to the captured stream."""
        return {library.name for library in self._redirected}

    def enter(self) -> None:
        """Direct every loaded library of this device to the captured stream."""
        place, index = self._device
        for library in LIBRARIES.values():
            if library.can_redirect and library.device_type == place and library.is_initialized():
                self._redirected.add(library)
                if self.shared is not None:
                    self.shared.redirect(library, self._stack, index)
                else:
                    pool = library.redirect(self._stack, StreamHandle(self._handle), index)
                    self.pools[library] = pool

    def leave(self) -> None:
        """Let the libraries work in their own streams again."""
        self._stack.close()

    def take_pools(self) -> tuple[object, ...]:
        """Return the pools. From here on the caller keeps them."""
        pools = tuple(self.pools.values()) if self.shared is None else (self.shared,)
        self.pools = {}
        return pools

    def return_pools(self) -> None:
        """Return unused pools to their libraries, for the next capture."""
        for library, pool in self.pools.items():
            if isinstance(library, Torch):
                library.keep_unused_pool(pool, self._device[1])
        self.pools = {}
