"""Textures: fetches with the address modes and filters of the CUDA programming guide.

The weights of a filter have 8 bits, as in the guide. They are applied in float64, and rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator.memory import Violation
from preheat.emulator.texels import Texels

if TYPE_CHECKING:
    from preheat.emulator.group import Group

__all__ = ["ADDRESS_MODES", "Texture", "fetch"]

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

#: What a coordinate outside the texture stands for, in the order of the numbers that CUDA has for it.
ADDRESS_MODES = ("wrap", "clamp", "mirror", "border")

_FARTHEST = float(1 << 40)  # Coordinates further away, which no texture has, are moved to here.
_WEIGHT = 256  # One, as a weight of a filter.


@dataclass(frozen=True)
class Texture:
    """What a texture object describes.

    Attributes:
        levels: The texels of each mipmap level.
        modes: The address mode of each axis.
        linear: True if the texels around a point are interpolated.
        normalized: True if coordinates from 0 to 1 cover the whole texture.
        as_integers: True if numbers of 8 and 16 bits are not scaled to floats of at most 1.
        border: The numbers of texels outside, in the address mode "border".
        linear_levels: True if two mipmap levels are interpolated.
        bias: What is added to each mipmap level, which is then limited to `level_range`.
    """

    levels: tuple[Texels, ...]
    modes: tuple[str, str, str] = ("clamp", "clamp", "clamp")
    linear: bool = False
    normalized: bool = False
    as_integers: bool = False
    border: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    linear_levels: bool = False
    bias: float = 0.0
    level_range: tuple[float, float] = (0.0, 0.0)

    @property
    def dtype(self) -> DType:
        """The type of the numbers that fetches return."""
        stored = self.levels[0].dtype
        if stored.kind == "f" or (stored.itemsize < 4 and not self.as_integers):
            return np.dtype(np.float32)
        return np.dtype(f"{stored.kind}4")

    def sample(self, level: Array, layer: Array | None, coordinates: Sequence[Array]) -> Array:
        """Return four numbers for each point, whose coordinates are in the order x, y, z."""
        last = len(self.levels) - 1
        if not last:
            return self._sample_level(self.levels[0], layer, coordinates)
        lowest, highest = self.level_range
        level = np.nan_to_num(level.astype(np.float64), nan=0.0) + self.bias
        level = np.clip(level, max(lowest, 0), min(highest, last))
        if not self.linear_levels or self.dtype.kind != "f":
            return self._sample_levels(np.floor(level + 0.5), layer, coordinates)
        below, weight = _split(level)
        parts = [
            self._sample_levels(np.minimum(below + more, last), layer, coordinates) for more in (0, 1)
        ]
        share = weight[:, None]
        mixed: Array = parts[0] * (1 - share) + parts[1] * share
        return mixed.astype(self.dtype)

    def _sample_levels(self, levels: Array, layer: Array | None, coordinates: Sequence[Array]) -> Array:
        """Return the numbers of points, each in a mipmap level of its own."""
        found = np.zeros((len(levels), 4), self.dtype)
        for number in np.unique(levels):
            chosen = levels == number
            there = [axis[chosen] for axis in coordinates]
            inside = None if layer is None else layer[chosen]
            found[chosen] = self._sample_level(self.levels[int(number)], inside, there)
        return found

    def _sample_level(self, texels: Texels, layer: Array | None, coordinates: Sequence[Array]) -> Array:
        """Return the numbers of points in one mipmap level."""
        whole = coordinates[0].dtype.kind != "f"  # Whole coordinates count texels.
        points = [
            self._texel_coordinate(axis, count)
            for axis, count in zip(coordinates, texels.extents, strict=False)
        ]
        if whole or not self.linear or self.dtype.kind != "f":
            return self._read(texels, layer, [np.floor(axis) for axis in points], scaled=not whole)
        corners = [_split(axis - 0.5) for axis in points]
        total = np.zeros((len(points[0]), 4))
        for corner in itertools.product((0, 1), repeat=len(points)):
            at = [low + step for step, (low, _) in zip(corner, corners, strict=True)]
            shares = [w if step else 1 - w for step, (_, w) in zip(corner, corners, strict=True)]
            total += self._read(texels, layer, at) * np.prod(shares, axis=0)[:, None]
        return total.astype(self.dtype)

    def _texel_coordinate(self, axis: Array, count: int) -> Array:
        """Return a coordinate in texels."""
        scale = count if self.normalized and axis.dtype.kind == "f" else 1
        points = axis.astype(np.float64) * scale
        return np.clip(np.nan_to_num(points, nan=0.0), -_FARTHEST, _FARTHEST)

    def _read(
        self, texels: Texels, layer: Array | None, at: Sequence[Array], *, scaled: bool = True
    ) -> Array:
        """Return the numbers of texels at whole coordinates, as fetches return them."""
        places = [np.zeros(len(at[0]), np.int64) for _ in range(3)]
        outside = np.zeros(len(at[0]), np.bool_)
        for axis, (values, count) in enumerate(zip(at, texels.extents, strict=False)):
            places[axis], beyond = self._place(values, count, self.modes[axis], scaled=scaled)
            outside |= beyond
        if layer is not None:
            places[2] = np.clip(layer.astype(np.int64), 0, texels.extents[2] - 1)
        x, y, z = places
        found = np.zeros((len(x), 4), self.dtype)
        found[:, : texels.channels] = self._returned(texels.numbers()[z, y, x])
        found[outside] = np.array(self.border).astype(self.dtype)
        return found

    def _place(self, at: Array, count: int, mode: str, *, scaled: bool) -> tuple[Array, Array]:
        """Return the places of texels along an axis, and which of them are outside in a border."""
        places = at.astype(np.int64)
        if self.normalized and scaled and mode == "wrap":
            places = places % count
        elif self.normalized and scaled and mode == "mirror":
            places = places % (2 * count)
            places = np.minimum(places, 2 * count - 1 - places)
        beyond = (places < 0) | (places >= count)
        return np.clip(places, 0, count - 1), beyond & (mode == "border")

    def _returned(self, stored: Array) -> Array:
        """Return numbers of texels as fetches return them."""
        if stored.dtype.kind == "f" or self.dtype.kind != "f":
            return stored.astype(self.dtype)
        return np.maximum(stored / np.float64(np.iinfo(stored.dtype).max), -1).astype(self.dtype)


def _split(at: Array) -> tuple[Array, Array]:
    """Return the whole numbers below, and the weights of those above."""
    low = np.floor(at)
    return low, np.rint((at - low) * _WEIGHT) / _WEIGHT


def fetch(
    group: Group,
    site: int,
    dtype: DType,
    layered: bool,
    handle: Any,
    level: Any,
    *coordinates: Any,
) -> list[Any]:
    """Return the four numbers of each thread as `dtype`. With `layered`, the layer comes first."""
    given = (handle, level, *coordinates)
    handles, levels, *axes = np.broadcast_arrays(*map(np.atleast_1d, given))
    layers = axes.pop(0) if layered else None
    found = np.zeros((len(handles), 4), dtype)
    for number in np.unique(handles):
        chosen = handles == number
        texture = group.wave.program.textures.get(int(number))
        if not isinstance(texture, Texture):
            message = f"{int(number):#x} is not the handle of a texture object"
            raise Violation(message, site, int(np.argmax(chosen)))
        for texels in texture.levels:
            texels.require(group, site, write=False)
        layer = None if layers is None else layers[chosen]
        numbers = texture.sample(levels[chosen], layer, [axis[chosen] for axis in axes])
        found[chosen] = numbers.view(dtype)
    columns = [np.ascontiguousarray(column) for column in found.T]
    return [column[0] for column in columns] if len(handles) == 1 else columns
