"""Grids of texels in memory, which textures and surfaces give to kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.emulator.addresses import host_view
from preheat.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.emulator.group import Group

__all__ = ["Texels"]

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]


class Texels(NamedTuple):
    """A grid of texels, each of which has one to four numbers.

    Attributes:
        dtype: The type of a number.
        extents: The width, the height, and the depth or the number of layers, each at least 1.
        pitch: The bytes from one row to the next one.
        layer: The bytes from one layer to the next one.
    """

    address: int
    dtype: DType
    channels: int
    extents: tuple[int, int, int]
    pitch: int
    layer: int

    @property
    def texel(self) -> int:
        """The bytes of a texel."""
        return self.dtype.itemsize * self.channels

    @property
    def row(self) -> int:
        """The bytes of a row."""
        return self.extents[0] * self.texel

    @property
    def span(self) -> int:
        """The bytes from the first texel to the end of the last one."""
        _, height, depth = self.extents
        return (depth - 1) * self.layer + (height - 1) * self.pitch + self.row

    def numbers(self) -> Array:
        """Return the numbers by layer, row, column and channel. Changes of it change the texels."""
        width, height, depth = self.extents
        strides = (self.layer, self.pitch, self.texel, self.dtype.itemsize)
        return host_view(self.dtype, self.address, (depth, height, width, self.channels), strides)

    def bytes(self) -> Array:
        """Return all bytes of the span. Changes of it change the texels."""
        return host_view(np.dtype(np.uint8), self.address, (self.span,))

    def require(self, group: Group, site: int, *, write: bool) -> None:
        """Raise `Violation` if the memory of the texels is not valid."""
        memory = group.wave.memory
        if not memory.covers(self.address, self.address + self.span, write=write):
            message = memory.describe(self.address, self.span, write=write)
            raise Violation(message, site, address=self.address)
