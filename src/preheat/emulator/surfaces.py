"""Surfaces: loads and stores of bytes at coordinates. The x coordinate counts bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.emulator.memory import Violation
from preheat.emulator.texels import Texels

if TYPE_CHECKING:
    from preheat.emulator.group import Group

__all__ = ["Surface", "load_surface", "store_surface"]

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]


class Surface(NamedTuple):
    """What a surface object describes."""

    texels: Texels


class _Access(NamedTuple):
    """What one instruction does: where it is, and how it treats coordinates outside."""

    group: Group
    site: int
    outside: str  # "trap", "clamp" or "zero"
    layered: bool
    size: int
    write: bool

    def places(self, texels: Texels, axes: list[Array]) -> tuple[Array, Array]:
        """Return where the bytes of each thread begin, and which threads are inside."""
        limits = (texels.row - self.size, texels.extents[1] - 1, texels.extents[2] - 1)
        inside = np.ones(len(axes[0]), np.bool_)
        total = np.zeros(len(axes[0]), np.int64)
        for axis, limit, stride in zip(axes, limits, (1, texels.pitch, texels.layer), strict=False):
            at = axis.astype(np.int64)
            inside &= (at >= 0) & (at <= limit)
            total += np.clip(at, 0, limit) * stride
        if self.outside == "trap" and not inside.all():
            self._raise_outside(texels, axes, int(np.argmin(inside)))
        if (misaligned := axes[0] % self.size != 0).any():
            position = int(np.argmax(misaligned))
            where = (
                f"{self._what()} at {int(axes[0][position])}, which is not a multiple of {self.size}"
            )
            raise Violation(f"{where}: a row of a surface counts bytes", self.site, position)
        return total, inside | (self.outside == "clamp")

    def axes(self, coordinates: list[Array]) -> list[Array]:
        """Return x, y and z. A layer's number comes first among the coordinates."""
        if not self.layered:
            return coordinates
        layer, x, *more = coordinates
        return [x, *(more or [np.zeros_like(x)]), layer]

    def _what(self) -> str:
        return f"{'writes' if self.write else 'reads'} {self.size} bytes"

    def _raise_outside(self, texels: Texels, axes: list[Array], position: int) -> None:
        at = ", ".join(str(int(axis[position])) for axis in axes)
        width, height, depth = texels.extents
        raise Violation(
            f"{self._what()} at ({at}) of a surface of {width} x {height} x {depth} elements of "
            f"{texels.texel} bytes, outside it; the first coordinate counts bytes",
            self.site,
            position,
        )

    def surface(self, number: int, position: int) -> Texels:
        """Return the texels of a surface object."""
        found = self.group.wave.program.textures.get(number)
        if not isinstance(found, Surface):
            message = f"{number:#x} is not the handle of a surface object"
            raise Violation(message, self.site, position)
        found.texels.require(self.group, self.site, write=self.write)
        return found.texels


def load_surface(
    group: Group,
    site: int,
    dtype: DType,
    count: int,
    outside: str,
    layered: bool,
    handle: Any,
    *coordinates: Any,
) -> list[Any]:
    """Return `count` elements of each thread. Those outside are 0, unless they are clamped."""
    access = _Access(group, site, outside, layered, dtype.itemsize * count, write=False)
    handles, *given = np.broadcast_arrays(*map(np.atleast_1d, (handle, *coordinates)))
    axes = access.axes(given)
    found = np.zeros((len(handles), access.size), np.uint8)
    for number in np.unique(handles):
        chosen = handles == number
        texels = access.surface(int(number), int(np.argmax(chosen)))
        starts, inside = access.places(texels, [axis[chosen] for axis in axes])
        values = texels.bytes()[starts[:, None] + np.arange(access.size)]
        values[~inside] = 0
        found[chosen] = values
    columns = [np.ascontiguousarray(column) for column in found.view(dtype).T]
    return [column[0] for column in columns] if len(handles) == 1 else columns


def store_surface(
    group: Group,
    site: int,
    dtype: DType,
    outside: str,
    layered: bool,
    axes_count: int,
    handle: Any,
    *given: Any,
) -> None:
    """Write elements of each thread, of which the coordinates are given first.

    Those outside are not written, unless they are clamped. The last thread wins.
    """
    access = _Access(
        group, site, outside, layered, dtype.itemsize * (len(given) - axes_count), write=True
    )
    handles, *columns = np.broadcast_arrays(*map(np.atleast_1d, (handle, *given)))
    axes = access.axes(columns[:axes_count])
    values = np.stack([column.astype(dtype) for column in columns[axes_count:]], axis=1)
    stored = values.view(np.uint8).reshape(len(handles), access.size)
    for number in np.unique(handles):
        chosen = handles == number
        texels = access.surface(int(number), int(np.argmax(chosen)))
        starts, inside = access.places(texels, [axis[chosen] for axis in axes])
        where = starts[inside][:, None] + np.arange(access.size)
        texels.bytes()[where] = stored[chosen][inside]
    group.wave.writes += 1
